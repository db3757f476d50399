"""The Scheduler of seed 2 when runners die, hang, or cannot be started: capacity comes back, and no task is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from py_scheduler.errors import RunnerLostError, RunnerStartError
from py_scheduler.interfaces.trinity import Experience, RunnerWrapper, Scheduler, TaskWrapper
from tests.support.trinity_workflows import Gate, ToldSync, new_config, read, started, told, until


class MortalRunner(RunnerWrapper):
    """Dies when it is told to. `failures`: how many of its next preparations fail. `log`: of all of them."""

    failures: ClassVar[int] = 0
    log: ClassVar[list[str]] = []
    preparing: ClassVar[int] = 0
    most_preparing: ClassVar[int] = 0

    def _create_runner(self) -> Any:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return super()._create_runner()

    def die(self, how: str = "killed") -> None:
        if not self.death.done():
            self.death.set_result(how)

    def kill(self) -> None:
        self.log.append(f"kill {self.runner_id}")
        self.die()

    async def prepare(self) -> None:
        cls = type(self)
        cls.preparing += 1
        cls.most_preparing = max(cls.most_preparing, cls.preparing)
        await asyncio.sleep(0)
        cls.preparing -= 1
        if cls.failures:
            cls.failures -= 1
            self.log.append(f"failed {self.runner_id}")
            raise OSError("no room for a runner")
        self.log.append(f"prepared {self.runner_id}")
        await super().prepare()

    async def confirm_alive(self) -> None:
        if self.death.done():
            raise RunnerLostError(self.death.result())

    async def run_task(self, task: TaskWrapper, repeat_times: int, run_id_base: int, collect_partial_runs: bool) -> Any:
        work = asyncio.ensure_future(super().run_task(task, repeat_times, run_id_base, collect_partial_runs))
        try:
            either: list[asyncio.Future[Any]] = [work, self.death]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
        if self.death.done():
            raise RunnerLostError(self.death.result())
        return work.result()


class MortalScheduler(Scheduler):
    runner_class = MortalRunner
    stop_grace_seconds = 0.05


@pytest.fixture(autouse=True)
def _a_fresh_start() -> None:
    MortalRunner.failures = MortalRunner.preparing = MortalRunner.most_preparing = 0
    MortalRunner.log.clear()


async def test_a_task_whose_runner_dies_is_retried_elsewhere_and_the_next_is_not_lost() -> None:
    gate = Gate()
    async with started(MortalScheduler) as scheduler:
        scheduler.schedule([told(gate), told()], 0)
        await gate.arrived.wait()
        (busy,) = [state.runner_id for state in scheduler.busy_runners.values() if state.task.task.task_id == 0]
        scheduler.runners[busy].die("worker exit 1")  # type: ignore[attr-defined]
        await until(lambda: gate.visits == 2)
        scheduler.schedule([told(), told()], 0)
        gate.open()
        statuses, payloads = await scheduler.get_payload_results(0, timeout=30)
    assert [status.ok for status in statuses] == [True] * 4
    assert sorted(made.eid.task for made in read(payloads)) == [0, 1, 2, 3]
    assert gate.visits == 2


async def test_a_runner_that_died_at_nothing_takes_no_task_with_it() -> None:
    plays = 0

    async def count(_workflow: object) -> None:
        nonlocal plays
        plays += 1

    async with started(MortalScheduler, max_retry_times=0) as scheduler:
        for runner in scheduler.runners.values():
            runner.die()  # type: ignore[attr-defined]
        scheduler.schedule([told(count) for _ in range(4)], 0)
        statuses = await scheduler.get_statuses(0, timeout=30)
        assert [status.ok for status in statuses] == [True] * 4
        assert scheduler.idle_runners == {0, 1}
    assert plays == 4


async def test_a_restart_that_fails_twice_is_tried_again_until_the_runner_is_there() -> None:
    async with started(MortalScheduler, runner_per_model=1) as scheduler:
        MortalRunner.failures = 2
        scheduler.runners[0].die()  # type: ignore[attr-defined]
        scheduler.schedule([told()], 0)
        await until(lambda: "failed 0" in MortalRunner.log)
        assert scheduler.idle_runners == set()
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.ok
        assert [line for line in MortalRunner.log if line != "kill 0"] == [
            "prepared 0",
            "failed 0",
            "failed 0",
            "prepared 0",
        ]
        assert scheduler.idle_runners == {0}


async def test_a_task_that_kills_every_runner_ends_with_the_reason() -> None:
    async with started(MortalScheduler, max_retry_times=2) as scheduler:

        async def die(workflow: Any) -> None:
            (state,) = scheduler.busy_runners.values()
            scheduler.runners[state.runner_id].die("exit status 139")  # type: ignore[attr-defined]
            await asyncio.Event().wait()

        scheduler.schedule([told(die)], 0)
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.completed_runs == 0
        assert "exit status 139" in status.message
        await until(lambda: scheduler.idle_runners == {0, 1})


async def test_a_workflow_that_ignores_its_stop_is_left_behind_and_reports_too_late() -> None:
    """Attempt 1 ignores its timeout, and comes back with a result after attempt 2 began: that changes nothing."""
    late, second = Gate(), Gate()
    plays = 0

    async def stubborn(workflow: Any) -> list[Experience]:
        nonlocal plays
        plays += 1
        number = plays
        while number == 1 and not late.passed:
            try:
                await late(workflow)
            except asyncio.CancelledError:
                continue
        if number == 2:
            await second(workflow)
        return [Experience(reward=float(number))]

    class Impatient(Scheduler):
        stop_grace_seconds = 0.02

    async with started(Impatient, max_timeout=0.05, max_retry_times=1) as scheduler:
        scheduler.schedule([told(stubborn)], 0)
        await second.arrived.wait()
        late.open()
        await until(lambda: late.passed)
        second.open()
        (status,), payloads = await scheduler.get_payload_results(0, timeout=30)
        assert status.ok
        assert [made.reward for made in read(payloads)] == [2.0]
        await until(lambda: scheduler.idle_runners == {0, 1})


async def test_a_blocking_sleep_costs_its_task_a_try_and_its_runner_comes_back() -> None:
    wake, plays = threading.Event(), []

    def block(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) == 1:
            wake.wait(60)

    async with started(runner_per_model=1, max_timeout=0.1, max_retry_times=1) as scheduler:
        before = scheduler.runners[0].runner
        scheduler.schedule([told(block, workflow=ToldSync)], 0)
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.ok
        assert len(plays) == 2
        assert scheduler.runners[0].runner is not before
        scheduler.schedule([told()], 1)
        assert len(await scheduler.get_statuses(1, timeout=30)) == 1
        wake.set()


async def test_exit_in_a_workflow_fails_the_task_alone() -> None:
    async def leave(_workflow: object) -> None:
        raise SystemExit(1)

    async with started(max_retry_times=0, runner_per_model=1) as scheduler:
        scheduler.schedule([told(leave), told()], 0)
        statuses = await scheduler.get_statuses(0, timeout=30)
        assert [status.ok for status in statuses] == [False, True]
        assert "SystemExit: 1" in statuses[0].message


async def test_a_start_that_fails_leaves_nothing_and_can_be_repeated() -> None:
    scheduler = MortalScheduler(new_config(runner_per_model=3, runner_prepare_max_retries=1))
    scheduler.schedule([told()], 0)
    MortalRunner.failures = 99
    with pytest.raises(RunnerStartError, match="no room for a runner"):
        await scheduler.start()
    assert (scheduler.running, scheduler.runners) == (False, {})
    assert {line for line in MortalRunner.log if line.startswith("kill")} == {"kill 0", "kill 1", "kill 2"}
    MortalRunner.failures = 2
    await scheduler.start()
    assert len(await scheduler.get_statuses(0, timeout=30)) == 1
    await scheduler.close()


async def test_runners_are_prepared_a_few_at_a_time_and_once() -> None:
    scheduler = MortalScheduler(new_config(runner_per_model=6, runner_prepare_concurrency=2))
    await asyncio.gather(scheduler.start(), scheduler.start())
    await scheduler.start()
    assert MortalRunner.most_preparing == 2
    assert sorted(MortalRunner.log) == sorted(f"prepared {number}" for number in range(6))
    await scheduler.close()


async def test_stop_lets_running_sub_tasks_end_and_start_goes_on_with_the_rest() -> None:
    gate = Gate()
    async with started(MortalScheduler, runner_per_model=1) as scheduler:
        scheduler.schedule([told(gate), told(), told()], 0)
        await gate.arrived.wait()
        stopping = asyncio.ensure_future(scheduler.stop())
        await until(lambda: scheduler.runners == {})
        gate.open()
        await stopping
        await scheduler.stop()
        assert not scheduler.running
        assert len(scheduler.completed_tasks[0]) == 1
        assert sum(map(len, scheduler.pending_tasks.values())) == 2
        scheduler.schedule([told()], 0)
        assert scheduler.has_step(0)
        await scheduler.start()
        assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True] * 4
    assert gate.visits == 1


async def test_stop_has_a_deadline_and_what_it_cut_off_is_tried_again() -> None:
    gate = Gate()
    async with started(MortalScheduler, runner_per_model=1) as scheduler:
        scheduler.stop_deadline_seconds = 0.01
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        await scheduler.stop()
        assert scheduler.busy_runners == {}
        gate.open()
        await scheduler.start()
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.ok
    assert gate.visits == 2


async def test_a_loop_may_end_without_a_close(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        async def main() -> None:
            scheduler = Scheduler(new_config())
            await scheduler.start()
            scheduler.schedule([told()], 0)
            await scheduler.get_statuses(0)
            await scheduler.stop()

        asyncio.run(main())

    await asyncio.to_thread(run)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
