"""The drop-in for Trinity-RFT: its own Config, Task, Workflow and Status, and its WorkflowRunner actors."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import ray
from trinity.common.experience import Experience
from trinity.explorer.workflow_runner import Status

from py_scheduler.errors import RunnerStartError
from py_scheduler.integrations.trinity import RunnerWrapper, Scheduler, TaskWrapper
from tests.support.waiting import eventually
from tests.trinity.dummies import AsyncWorkflow, RepeatableWorkflow, SyncWorkflow, new_config, new_task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trinity.common.workflows import Workflow

    from py_scheduler.interfaces.trinity import RunnerWrapper as OwnRunnerWrapper

pytestmark = pytest.mark.asyncio(loop_scope="session")


def read(payloads: list[bytes]) -> list[Any]:
    return [experience for payload in payloads for experience in Experience.deserialize_many(payload)]


@pytest.mark.parametrize("workflow", [SyncWorkflow, AsyncWorkflow, RepeatableWorkflow])
async def test_every_kind_of_workflow_runs_on_trinitys_own_runners(
    scheduler: Scheduler, workflow: type[Workflow]
) -> None:
    scheduler.schedule([new_task(workflow, 5, score=0.25), new_task(workflow, 1)], 0)
    statuses, payloads = await scheduler.get_payload_results(0)
    assert all(type(status) is Status and status.ok for status in statuses)
    assert sorted(status.total_runs for status in statuses) == [1, 5]
    made = read(payloads)
    assert len(payloads) == 4
    assert sorted((each.eid.batch, each.eid.task, each.eid.run) for each in made) == [
        *((0, 0, run) for run in range(5)),
        (0, 1, 0),
    ]
    assert {each.info["model_version"] for each in made} == {7}
    (metrics,) = next(status for status in statuses if status.total_runs == 5).metrics
    assert metrics["score"] == 0.25
    assert metrics["time/task_execution"] > metrics["time/run_execution"] > 0


async def test_an_eval_gives_metrics_and_no_experiences(scheduler: Scheduler) -> None:
    scheduler.schedule([new_task(RepeatableWorkflow, 4, is_eval=True, score=0.5)], "1/eval")
    (status,), payloads = await scheduler.get_payload_results("1/eval")
    (metrics,) = status.metrics
    assert payloads == []
    assert {key for key in metrics if key.startswith("score")} == {
        "score/mean@4",
        "score/std@4",
        "score/best@2",
        "score/worst@2",
        "score/best@4",
        "score/worst@4",
    }


async def test_two_calls_for_one_batch_and_its_id_used_again_at_once(scheduler: Scheduler) -> None:
    for _ in range(2):
        scheduler.schedule([new_task(), new_task()], 2)
        scheduler.schedule([new_task(), new_task(), new_task()], 2)
        statuses, payloads = await scheduler.get_payload_results(2)
        assert len(statuses) == 5
        assert sorted(each.eid.task for each in read(payloads)) == [0, 1, 2, 3, 4]


async def test_a_raising_workflow_is_tried_again_and_leaves_its_traceback(scheduler: Scheduler, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    scheduler.schedule([new_task(SyncWorkflow, 1, always="raise", name="x", trace=str(trace))], 3)
    (status,) = await scheduler.get_statuses(3)
    assert (status.completed_runs, status.total_runs) == (0, 1)
    assert "ValueError: x raised as told" in status.message
    assert len(trace.read_text().splitlines()) == 2


@pytest.mark.parametrize("how", ["exit", "die"])
async def test_a_worker_that_is_lost_costs_a_try_and_no_task(scheduler: Scheduler, tmp_path: Path, how: str) -> None:
    victim = new_task(SyncWorkflow, 2, first=how, until=str(tmp_path / "once"))
    scheduler.schedule([victim, *(new_task(AsyncWorkflow, 2) for _ in range(7))], 4)
    statuses, payloads = await scheduler.get_payload_results(4, timeout=60)
    assert [status.ok for status in statuses] == [True] * 8
    assert sorted((each.eid.task, each.eid.run) for each in read(payloads)) == [
        (task, run) for task in range(8) for run in range(2)
    ]
    await _all_idle(scheduler)


async def test_the_states_of_runners(scheduler: Scheduler) -> None:
    scheduler.schedule([new_task(AsyncWorkflow, 8)], 5)
    await scheduler.get_statuses(5)
    await scheduler.update_states()
    assert set(scheduler.get_key_state("model_version")) == {0, 1, 2, 3}
    assert any(value and value.startswith("5/0/") for value in scheduler.get_key_state("workflow_id").values())
    assert scheduler.runner_num == len(scheduler.runners) == 4
    assert scheduler.default_timeout == 60


async def test_run_with_retry_of_one_runner(scheduler: Scheduler) -> None:
    task = new_task(AsyncWorkflow, 3)
    task.batch_id, task.task_id = 6, 9
    status, payload, runner_id, seconds = await scheduler.runners[2].run_with_retry(
        TaskWrapper(task, 6), 3, 4, 30.0, collect_partial_runs=False
    )
    assert (status.ok, runner_id) == (True, 2)
    assert seconds > 0
    assert [(each.eid.task, each.eid.run) for each in read([payload])] == [(9, 4), (9, 5), (9, 6)]


async def test_what_is_not_done_at_a_timeout_is_stopped_and_its_runners_are_replaced(scheduler: Scheduler) -> None:
    scheduler.schedule([new_task(AsyncWorkflow, 1, seconds=600.0), new_task(AsyncWorkflow, 1)], 7)
    await _until(lambda: len(scheduler.completed_tasks.get(7, {})) == 1 and len(scheduler.busy_runners) == 1)
    (busy,) = scheduler.busy_runners
    before = scheduler.runners[busy].runner
    began_at = time.monotonic()
    (status,) = await scheduler.get_statuses(7, timeout=0.1)
    assert status.ok
    assert time.monotonic() - began_at < 5
    (stopped,) = scheduler.stopped_without_result(7)
    assert "timeout_seconds (0.1) passed" in stopped.message
    await _all_idle(scheduler)
    assert scheduler.runners[busy].runner is not before


async def test_the_rollout_coordinator_runs_on_it(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one import of it that is replaced; the experience pipeline behind it is stood in for."""
    from trinity.explorer import rollout_coordinator  # noqa: PLC0415

    class Pipeline:
        def __init__(self) -> None:
            self.experiences: list[Any] = []

        async def process_serialized_chunks(self, payloads: list[bytes]) -> dict[str, float]:
            self.experiences += read(payloads)
            return {"pipeline/experiences": float(len(self.experiences))}

        async def close(self) -> None: ...

    monkeypatch.setattr(rollout_coordinator, "Scheduler", lambda config: scheduler)
    coordinator = rollout_coordinator.RolloutCoordinator(scheduler.config)
    coordinator.experience_pipeline = Pipeline()
    await coordinator.prepare()
    assert coordinator.scheduler is scheduler

    await coordinator.submit_batch(batch_id=8, tasks=[new_task(score=1.0) for _ in range(4)], batch_type="train")
    await coordinator.submit_batch(
        batch_id="8/gsm", tasks=[new_task(AsyncWorkflow, 2, is_eval=True)], batch_type="eval"
    )
    train = await coordinator.finalize_train_batch(8, timeout=60)
    measured = await coordinator.finalize_eval_batch("8/gsm", timeout=60)
    assert train["finished_task_count"] == 4
    assert (train["metrics"]["rollout/score/mean"], train["metrics"]["pipeline/experiences"]) == (1.0, 4.0)
    assert measured["metrics"]["eval/gsm/score/mean@2"] == 1.0
    assert measured["finished_task_count"] == 1

    late = new_task(AsyncWorkflow, 1, seconds=600.0)
    await coordinator.submit_batch(batch_id=9, tasks=[new_task(), new_task(), late], batch_type="train", min_wait_num=2)
    monkeypatch.setattr(scheduler._local.engine.results, "_wait_after_min_seconds", 0.0)
    over = await coordinator.finalize_train_batch(9, timeout=60)
    assert over["finished_task_count"] == 2
    assert not scheduler.has_step(9)

    await coordinator.submit_batch(batch_id=10, tasks=[late], batch_type="train")
    await coordinator.abort_batch(10, reason="no longer wanted")
    assert not scheduler.has_step(10)
    await _all_idle(scheduler)


@pytest.mark.parametrize("mode", ["sequential", "asynchronous", "multi-threading"])
async def test_concurrent_modes(cluster: None, mode: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    scheduler = Scheduler(new_config(engines=1, runner_per_model=1, concurrent_mode=mode))
    scheduler.runner_num = 1
    await scheduler.start()
    try:
        workflow = AsyncWorkflow if mode == "asynchronous" else SyncWorkflow
        scheduler.schedule([new_task(workflow, 4, name="run", trace=str(trace), seconds=0.05)], 0)
        (status,), payloads = await scheduler.get_payload_results(0, timeout=60)
    finally:
        await scheduler.close()
    assert status.ok
    assert sorted(each.eid.run for each in read(payloads)) == [0, 1, 2, 3]
    threads = {line.split()[2] for line in trace.read_text().splitlines()}
    assert (len(threads) > 1) == (mode == "multi-threading")


class _Failing(RunnerWrapper):
    """Fails as many preparations as `failures` says."""

    failures = 0
    made: ClassVar[list[RunnerWrapper]] = []

    async def prepare(self) -> None:
        self.made.append(self)
        if type(self).failures:
            type(self).failures -= 1
            raise RuntimeError("no room for an actor")
        await super().prepare()


class _Impatient(Scheduler):
    runner_class = _Failing
    stop_grace_seconds = 0.5


async def test_a_blocking_sleep_and_restarts_that_fail_twice_give_their_runner_back(
    cluster: None, tmp_path: Path
) -> None:
    scheduler = _Impatient(new_config(engines=1, runner_per_model=1, max_timeout=1, max_retry_times=1))
    scheduler.runner_num = 1
    await scheduler.start()
    try:
        _Failing.failures = 2
        before = scheduler.runners[0].runner
        scheduler.schedule([new_task(SyncWorkflow, 1, first="block", until=str(tmp_path / "once"))], 0)
        scheduler.schedule([new_task(AsyncWorkflow, 2)], 1)
        (status,) = await scheduler.get_statuses(0, timeout=90)
        (following,) = await scheduler.get_statuses(1, timeout=60)
        assert (status.ok, following.ok) == (True, True)
        assert _Failing.failures == 0
        assert scheduler.runners[0].runner is not before
        assert scheduler.idle_runners == {0}
    finally:
        await scheduler.close()


async def test_an_idle_actor_that_died_takes_no_task_with_it(cluster: None) -> None:
    scheduler = Scheduler(new_config(engines=1, runner_per_model=1, max_retry_times=0))
    await scheduler.start()
    try:
        scheduler.schedule([new_task()], 0)
        assert [status.ok for status in await scheduler.get_statuses(0, timeout=60)] == [True]
        runner: Any = scheduler.runners[0].runner
        ray.kill(runner.actor)
        # By then what it said last is no sign of life any more.
        await asyncio.sleep(0.2)
        scheduler.schedule([new_task()], 1)
        assert [status.ok for status in await scheduler.get_statuses(1, timeout=120)] == [True]
        assert scheduler.runners[0].runner is not runner
    finally:
        await scheduler.close()


class _Spared(RunnerWrapper):
    """Its actors outlive their kill, as one would that the kill did not reach."""

    spared: ClassVar[list[Any]] = []

    def kill(self) -> None:
        self.spared.append(self.runner.actor)


class _Sparing(Scheduler):
    runner_class = _Spared
    stop_grace_seconds = 0.2


async def test_a_report_of_the_first_try_after_the_second_began_changes_nothing(cluster: None, tmp_path: Path) -> None:
    """The first try blocks its actor until the second has begun in another one, and then reports a score of 0."""
    second, trace = tmp_path / "second", tmp_path / "trace"
    told: dict[str, Any] = {"until": str(tmp_path / "once"), "second": str(second), "trace": str(trace)}
    scheduler = _Sparing(new_config(engines=1, runner_per_model=1, max_timeout=2, max_retry_times=1))
    await scheduler.start()
    try:
        first: Any = scheduler.runners[0].runner
        scheduler.schedule([new_task(SyncWorkflow, 1, first="come late", seconds=0.5, **told)], 0)
        (status,), payloads = await scheduler.get_payload_results(0, timeout=120)
        # The blocked actor answers again, so what it had to report has been reported.
        await first.actor.is_alive.remote()
        assert len({line.split()[1] for line in trace.read_text().splitlines()}) == 2
        assert (status.ok, status.metrics[0]["score"]) == (True, 1.0)
        assert [each.metrics["score"] for each in read(payloads)] == [1.0]
        for tasks in (2, 1):  # Its id can be used again at once, and nothing of before turns up.
            scheduler.schedule([new_task() for _ in range(tasks)], 0)
            statuses, payloads = await scheduler.get_payload_results(0, timeout=60)
            assert [status.ok for status in statuses] == [True] * tasks
            assert [each.eid.task for each in read(payloads)] == list(range(tasks))
    finally:
        await scheduler.close()
        for actor in _Spared.spared:
            ray.kill(actor)


async def test_a_start_that_fails_leaves_no_actor(cluster: None) -> None:
    scheduler = _Impatient(new_config(engines=1, runner_per_model=1, runner_prepare_max_retries=0))
    _Failing.failures = 9
    _Failing.made.clear()
    with pytest.raises(RunnerStartError, match="no room for an actor"):
        await scheduler.start()
    _Failing.failures = 0
    assert _Failing.made
    for runner in _Failing.made:
        with pytest.raises(ray.exceptions.RayActorError):
            await runner.runner.actor.is_alive.remote()


async def test_a_thousand_tasks_each_run_once(scheduler: Scheduler, tmp_path: Path) -> None:
    """4 runners, 1 000 tasks of 8 repeats split by 2, each run asleep for 20 ms.

    How long it took is printed (goal: at most 1.2 times the ideal), as it says as much of the machine. Ideal is what
    the same actors take for such sub-tasks one after the other, with nobody in between: how busy the
    machine is, and what Ray and Trinity cost, is in both.
    """
    trace = tmp_path / "trace"
    told: dict[str, Any] = {"seconds": 0.02, "trace": str(tmp_path / "other")}
    before = await _seconds_of_a_sub_task(scheduler, told)
    began_at = time.monotonic()
    told["trace"] = str(trace)
    scheduler.schedule([new_task(AsyncWorkflow, 8, name=str(number), **told) for number in range(1_000)], 11)
    statuses, payloads = await scheduler.get_payload_results(11, timeout=600)
    took = time.monotonic() - began_at
    assert len(statuses) == 1_000
    assert all(status.ok for status in statuses)
    made = [(each.eid.task, each.eid.run) for each in read(payloads)]
    assert len(made) == 8_000
    assert set(made) == {(task, run) for task in range(1_000) for run in range(8)}
    begun = list(dict.fromkeys(int(line.split()[0]) for line in trace.read_text().splitlines()))
    assert max(abs(place - number) for place, number in enumerate(begun)) < scheduler.runner_num
    ideal = (
        4_000 / 4 * (before + await _seconds_of_a_sub_task(scheduler, {**told, "trace": str(tmp_path / "other")})) / 2
    )
    print(f"{took:.1f} s: {took / ideal:.3f} times the ideal, {took / 40.0:.3f} times what the runs sleep")


async def _seconds_of_a_sub_task(scheduler: Scheduler, told: dict[str, Any]) -> float:
    count = 50

    async def drive(runner: OwnRunnerWrapper) -> None:
        for _ in range(count):
            task = TaskWrapper(new_task(AsyncWorkflow, 2, **told), 0)
            status, _ = await runner.run_task(task, 2, 0, collect_partial_runs=False)
            assert status.ok

    began_at = time.monotonic()
    await asyncio.gather(*[drive(runner) for runner in scheduler.runners.values()])
    return (time.monotonic() - began_at) / count


async def _all_idle(scheduler: Scheduler) -> None:
    await _until(lambda: len(scheduler.idle_runners) == scheduler.runner_num)


async def _until(is_true: Callable[[], bool]) -> None:
    """What happens in actors tells nobody here when."""
    await eventually(is_true, pause_seconds=0.05, within_seconds=120.0)
