"""What a trainer sees that pulls its results: in-process, and from a server in another process over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.task import BatchId, RetryPolicy, Task, TaskConfig
from tests.support.trainers.pulling import WAYS, Pulling, pulling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Four runners of one slot each; a task takes one of them and plays its sub-tasks there one after the other.
CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
"10.0.0.1" = { gpus = [], cpu = 1, memory_gb = 1 }
"10.0.0.2" = { gpus = [], cpu = 1, memory_gb = 1 }
"10.0.0.3" = { gpus = [], cpu = 1, memory_gb = 1 }
"10.0.0.4" = { gpus = [], cpu = 1, memory_gb = 1 }
[scheduler]
eval_weight = "by_batch_id"
retry_backoff_seconds = 0.0
wait_after_min_seconds = 0.05
[[evaluator]]
evaluator_id = "workflow"
handler = "tests.support.agents.collected_handlers:Prompted"
resource = { cpu = 1, concurrency = 1 }
run_resource = { cpu = 1 }
eval_resource = { cpu = 1 }
"""


@pytest.fixture(params=WAYS)
async def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pulling]:
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG)
    async with pulling(request.param, config) as way:
        yield way


def task(prompt: str = "solve", repeat_times: int = 1, size: int | None = None, **config: Any) -> Task:
    return Task(
        config=TaskConfig(task_type="workflow", repeat_times=repeat_times, max_samples_per_subtask=size, **config),
        prompt=prompt,
    )


async def test_two_schedules_give_five_results_and_the_drained_id_is_used_again_at_once(trainer: Pulling) -> None:
    first = await trainer.schedule([task(), task()], 7)
    second = await trainer.schedule([task(), task(), task()], 7)
    reply = await trainer.collect(7)
    assert {result.task_id for result in reply.results} == {*first, *second}
    assert len({*first, *second}) == 5
    assert not await trainer.has_step(7)
    again = await trainer.schedule([task()], 7)
    assert await trainer.has_step(7)
    assert [result.task_id for result in (await trainer.collect(7)).results] == list(again)


async def test_a_subtask_is_tried_again_as_a_whole_and_its_metrics_are_those_of_the_last_attempt(
    trainer: Pulling,
) -> None:
    await trainer.schedule([task("fail first", 4, retry=RetryPolicy(max_retries=1))], 1)
    (result,) = (await trainer.collect(1)).results
    assert (result.succeeded_samples, result.planned_samples, result.message) == (4, 4, "")
    assert [(sample.sample_no, sample.attempt_no) for sample in result.samples] == [(n, 2) for n in range(4)]
    assert (result.metrics["reward"], result.metrics["runs:sum"]) == (1.5, 4.0)
    assert result.metrics["time/task_execution"] >= result.metrics["time/run_execution"] > 0


async def test_an_eval_has_metrics_of_its_own(trainer: Pulling) -> None:
    await trainer.schedule([task("solve", 4, is_eval=True)], "1/math")
    (result,) = (await trainer.collect("1/math")).results
    assert result.is_eval
    assert result.metrics["reward/mean@4"] == 1.5
    assert result.metrics["reward/best@4"] > result.metrics["reward/best@2"] > result.metrics["reward/worst@2"]


async def test_partial_collection_keeps_the_runs_that_succeeded(trainer: Pulling) -> None:
    await trainer.schedule([task("fail first", 4, keeps_partial=True, retry=RetryPolicy(max_retries=3))], 1)
    (result,) = (await trainer.collect(1)).results
    assert (result.succeeded_samples, result.planned_samples) == (1, 4)
    assert result.message.startswith("1/4 runs completed successfully. RuntimeError: fail first, as it was told")


async def test_a_timeout_names_what_did_not_finish_and_gives_the_runners_back(trainer: Pulling) -> None:
    hanging = await trainer.schedule([task("hang"), task(), task("hang")], 1)
    reply = await trainer.collect(1, timeout_seconds=0.5)
    assert reply.is_timed_out
    assert [result.task_id for result in reply.results] == [hanging[1]]
    assert [unfinished.task_id for unfinished in reply.unfinished] == [hanging[0], hanging[2]]
    assert all(unfinished.is_stopped and "timeout_seconds" in unfinished.reason for unfinished in reply.unfinished)
    assert not await trainer.has_step(1)
    await trainer.schedule([task() for _ in range(8)], 2)
    assert len((await trainer.collect(2, timeout_seconds=10)).results) == 8


async def test_enough_and_a_little_more_is_waited_for(trainer: Pulling) -> None:
    await trainer.schedule([task(), task("hang"), task()], 1)
    reply = await trainer.collect(1, min_num=2, timeout_seconds=30)
    assert (len(reply.results), reply.is_timed_out, len(reply.unfinished)) == (2, False, 1)


async def test_after_an_abort_what_was_completed_stays_drainable(trainer: Pulling) -> None:
    await trainer.schedule([task("fail")], 1)
    reply = await trainer.collect(1, clear_unfinished=False)
    assert [result.ok for result in reply.results] == [False]
    await trainer.schedule([task(), task("hang")], 1)
    assert (await trainer.collect(1, max_num=1, clear_unfinished=False)).results[0].ok
    await trainer.abort_batch(1, return_partial_tasks=False)
    assert (await trainer.drain(1)).results == ()
    assert not await trainer.has_step(1)


async def test_the_same_request_id_gives_the_same_set_again(trainer: Pulling) -> None:
    await trainer.schedule([task("solve", 2), task("fail")], 1)
    first = await trainer.collect(1, request_id="r", acknowledge=False)
    assert len(first.results) == 2
    assert await trainer.collect(1, request_id="r", acknowledge=True) == first
    assert (await trainer.collect(1, request_id="r")).results == ()


async def test_without_payloads_only_statuses_travel_and_the_results_are_gone_all_the_same(trainer: Pulling) -> None:
    await trainer.schedule([task("solve", 2)], 1)
    (result,) = (await trainer.collect(1, with_payloads=False)).results
    assert (result.succeeded_samples, result.samples, result.payloads) == (2, (), ())
    assert not await trainer.has_step(1)


async def test_discarded_results_are_gone(trainer: Pulling) -> None:
    await trainer.schedule([task()], 1)
    reply = await trainer.collect(1, request_id="r", acknowledge=False)
    assert len(reply.results) == 1
    await trainer.schedule([task(), task("hang")], 2)
    await trainer.collect(2, max_num=1, clear_unfinished=False, request_id="s", acknowledge=False)
    await trainer.discard(2)
    assert (await trainer.collect(2, timeout_seconds=0.1, request_id="s")).results == ()
    assert await trainer.collect(1, request_id="r") == reply


async def test_batches_of_equal_rank_are_served_in_the_order_in_which_they_came(trainer: Pulling) -> None:
    await trainer.schedule([task("hang") for _ in range(4)], 0)
    await trainer.starts(4)
    calls = [(batch_id, await trainer.schedule([task(), task()], batch_id)) for batch_id in ("1/b", "1/a", "1/b", 1)]
    await trainer.abort_batch(0, return_partial_tasks=False)
    for batch_id in (1, "1/a", "1/b"):
        await trainer.collect(batch_id, timeout_seconds=30)
    starts = [start.task_id for start in await trainer.starts(12)][4:]
    assert starts == [task_id for number in (3, 0, 2, 1) for task_id in calls[number][1]]


@pytest.mark.slow
async def test_a_thousand_tasks_take_little_longer_than_their_runs(trainer: Pulling) -> None:
    """4 runners, 1 000 tasks of 8 runs split by 2: at most 1.2 times the runs by themselves."""
    asyncio.get_running_loop().set_debug(False)
    began_at = time.monotonic()
    await trainer.schedule([task("nap", 8, 2) for _ in range(1_000)], 1)
    results = (await trainer.collect(1, timeout_seconds=100)).results
    seconds = time.monotonic() - began_at
    assert [result.succeeded_samples for result in results] == [8] * 1_000
    assert len({result.task_id for result in results}) == 1_000
    # What a nap really takes, the machine and what else it does included.
    ideal = sum([sample.timings.run_seconds for result in results for sample in result.samples]) / 4
    print(f"{seconds:.2f} s, {seconds / ideal:.3f} times the ideal")
    assert seconds < 1.2 * ideal


async def test_a_thousand_tasks_of_eight_runs_give_each_run_once_in_the_order_of_batch_then_arrival(
    trainer: Pulling,
) -> None:
    """1 000 tasks in three batches, sub-tasks of two, on four runners, submitted behind what holds all of these."""
    await trainer.schedule([task("hang") for _ in range(4)], 0)
    await trainer.starts(4)
    counts: dict[BatchId, int] = {2: 300, "1/math": 200, 1: 500}
    ids = {
        batch_id: await trainer.schedule(
            [task("solve", 8, 2, is_eval=batch_id == "1/math") for _ in range(count)], batch_id
        )
        for batch_id, count in counts.items()
    }
    await trainer.abort_batch(0, return_partial_tasks=False)
    collected = {batch_id: (await trainer.collect(batch_id)).results for batch_id in counts}
    runs = Counter(
        (sample.task_id, sample.sample_no)
        for results in collected.values()
        for result in results
        for sample in result.samples
    )
    assert len(runs) == 8_000
    assert set(runs.values()) == {1}
    assert {task_id for task_id, _ in runs} == {task_id for batch in ids.values() for task_id in batch}
    starts = [start.task_id for start in await trainer.starts(4_004) if start.subtask_no == 0][4:]
    assert starts == [*ids[1], *ids["1/math"], *ids[2]]
