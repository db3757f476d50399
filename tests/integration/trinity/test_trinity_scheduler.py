"""The Scheduler of seed 2 over the real engine, with its own runners: batches in, results out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from py_scheduler.errors import InvalidArgumentError
from py_scheduler.interfaces.trinity import (
    Experience,
    OverRolloutConfig,
    Scheduler,
    sort_batch_id,
)
from tests.support.runners.trinity_workflows import Gate, ToldRepeatable, new_config, read, started, told


async def test_results_come_in_the_order_of_completion_with_a_chunk_for_each_sub_task() -> None:
    gate = Gate()
    async with started(max_repeat_times_per_runner=2) as scheduler:
        scheduler.schedule([told(gate, 1), told(repeats=5)], 0)
        await gate.arrived.wait()
        statuses, payloads = await scheduler.get_payload_results(0, timeout=0.0, clear_timeout_tasks=False)
        while not statuses:
            statuses, payloads = await scheduler.get_payload_results(0, timeout=0.0, clear_timeout_tasks=False)
        gate.open()
        assert [(status.completed_runs, status.total_runs, status.ok) for status in statuses] == [(5, 5, True)]
        assert [[(made.eid.task, made.eid.run) for made in read([payload])] for payload in payloads] == [
            [(1, 0), (1, 1)],
            [(1, 2), (1, 3)],
            [(1, 4)],
        ]
        (status,) = await scheduler.get_statuses(0)
        assert status.ok
        assert await scheduler.get_payload_results(0) == ([], [])


async def test_two_calls_for_one_batch_give_every_task_an_id_of_its_own() -> None:
    async with started() as scheduler:
        scheduler.schedule([told(), told()], 3)
        scheduler.schedule([told(), told(), told()], 3)
        statuses, payloads = await scheduler.get_payload_results(3)
        assert len(statuses) == 5
        assert sorted(made.eid.task for made in read(payloads)) == [0, 1, 2, 3, 4]


async def test_a_drained_batch_id_can_be_used_again_at_once() -> None:
    async with started() as scheduler:
        for _ in range(3):
            scheduler.schedule([told(), told()], 1)
            statuses, payloads = await scheduler.get_payload_results(1, timeout=30)
            assert len(statuses) == 2
            assert sorted(made.eid.task for made in read(payloads)) == [0, 1]
            assert not scheduler.has_step(1)
        assert scheduler.total_completed_steps == 3


async def test_tasks_may_be_scheduled_before_the_start_in_any_order_of_batches() -> None:
    seen: list[str] = []

    async def note(workflow: Any) -> None:
        seen.append(f"{workflow.task.batch_id}:{workflow.task.task_id}")

    scheduler = Scheduler(new_config(runner_per_model=1))
    for batch_id in (2, "x", "1/b", 1, "1/a"):
        scheduler.schedule([told(note), told(note)], batch_id)
    assert scheduler.has_step("x")
    assert list(scheduler.pending_tasks) == [1, "1/b", "1/a", 2, "x"]
    await scheduler.start()
    for batch_id in (1, 2, "x", "1/b", "1/a"):
        assert len(await scheduler.get_statuses(batch_id)) == 2
    await scheduler.close()
    assert seen == ["1:0", "1:1", "1/b:0", "1/b:1", "1/a:0", "1/a:1", "2:0", "2:1", "x:0", "x:1"]


def test_the_priority_of_batch_ids() -> None:
    batch_ids: list[int | str] = ["y", 2, "10/eval", "1/eval", 1, "x"]
    assert sorted(batch_ids, key=sort_batch_id) == [1, "1/eval", 2, "10/eval", "y", "x"]


@pytest.mark.parametrize("repeats", [None, 0, -1])
async def test_a_task_without_repeats_is_refused_before_anything_changes(repeats: int | None) -> None:
    async with started() as scheduler:
        with pytest.raises(InvalidArgumentError, match=r"tasks\[1\].repeat_times"):
            scheduler.schedule([told(), told(repeats=repeats)], 0)
        assert not scheduler.has_step(0)
        assert await scheduler.get_statuses(0) == []
        scheduler.schedule([], 0)
        assert not scheduler.has_step(0)


async def test_a_workflow_sees_its_sub_tasks_repeats_and_first_run_id() -> None:
    seen: list[tuple[int, int, int]] = []

    async def note(workflow: Any) -> list[Experience]:
        seen.append((workflow.task.rollout_args.n, workflow.repeats, workflow.base))
        made = [Experience() for _ in range(workflow.repeats)]
        for run, experience in enumerate(made, workflow.base):
            experience.eid.run = run
        return made

    async with started(max_repeat_times_per_runner=3, runner_per_model=1) as scheduler:
        task = told(note, 8, workflow=ToldRepeatable)
        scheduler.schedule([task], 0)
        _, payloads = await scheduler.get_payload_results(0)
    assert seen == [(3, 3, 0), (3, 3, 3), (2, 2, 6)]
    assert [made.eid.run for made in read(payloads)] == list(range(8))
    assert task.rollout_args.n == 1, "the caller's own task is left as it was"


async def test_a_failing_sub_task_has_its_retries_and_leaves_a_reason() -> None:
    tries = 0

    async def fail(_workflow: object) -> None:
        nonlocal tries
        tries += 1
        raise ValueError("it never works")

    async with started(max_retry_times=2) as scheduler:
        scheduler.schedule([told(fail, 2)], 0)
        (status,), payloads = await scheduler.get_payload_results(0)
    assert tries == 3
    assert (status.completed_runs, status.total_runs, payloads) == (0, 2, [])
    assert status.message.startswith("0/2 runs completed successfully.")
    assert "it never works" in status.message
    assert list(status.metrics[0]) == ["time/task_execution"]


async def test_runs_of_a_failed_try_are_never_mixed_with_the_next() -> None:
    runs = 0

    async def fail_second(_workflow: object) -> list[Experience]:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise ValueError("once")
        return [Experience(reward=float(runs))]

    async with started() as scheduler:
        scheduler.schedule([told(fail_second, 2)], 0)
        (status,), payloads = await scheduler.get_payload_results(0)
    assert status.ok
    assert [(made.eid.run, made.reward) for made in read(payloads)] == [(0, 3.0), (1, 4.0)]


async def test_partial_collection_keeps_what_succeeded_and_does_not_retry() -> None:
    runs = 0

    async def fail_second(_workflow: object) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise ValueError("once")

    async with started(over_rollout=OverRolloutConfig(return_partial_tasks=True)) as scheduler:
        scheduler.schedule([told(fail_second, 4)], 0)
        (status,), payloads = await scheduler.get_payload_results(0)
    assert (runs, status.completed_runs, status.total_runs) == (4, 3, 4)
    assert "once" in status.message
    assert [made.eid.run for made in read(payloads)] == [0, 2, 3]


@pytest.mark.slow
async def test_a_thousand_tasks_are_played_in_order_each_run_once_and_no_runner_idles_while_work_waits() -> None:
    """4 runners, 1 000 tasks of 8 repeats split by 2. How near to the ideal time: `benches/trinity_overhead.py`.

    A run ends when runs are under way on all four: a runner that got none while work waits would hold up the rest.
    """
    begun: list[Any] = []
    all_at_work = asyncio.Barrier(4)
    # Stack traces for every step would be most of the test.
    asyncio.get_running_loop().set_debug(False)

    async def meet(workflow: Any) -> None:
        begun.append(workflow.task.task_id)
        await all_at_work.wait()

    async with started(runner_per_model=4, max_repeat_times_per_runner=2) as scheduler:
        scheduler.schedule([told(meet, 8) for _ in range(1_000)], 0)
        statuses, payloads = await scheduler.get_payload_results(0)
    assert len(statuses) == 1_000
    assert all(status.ok for status in statuses)
    runs = [(made.eid.task, made.eid.run) for made in read(payloads)]
    assert len(runs) == 8_000
    assert set(runs) == {(task, run) for task in range(1_000) for run in range(8)}
    firsts = list(dict.fromkeys(begun))
    assert firsts == sorted(firsts), "tasks begin in the order of their arrival"
