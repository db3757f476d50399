"""The Scheduler of seed 2 when runners die, hang, or cannot be started: capacity comes back, and no task is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from py_scheduler.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RunnerLostError,
    RunnerStartError,
)
from py_scheduler.interfaces.trinity import Experience, RunnerWrapper, Scheduler, TaskWrapper, local_engine
from py_scheduler.interfaces.trinity.workflow_runner import Status
from py_scheduler.scheduler.admission import Admission
from tests.support.fake_clock import FakeClock, settle
from tests.support.trinity_workflows import Gate, ToldSync, new_config, read, started, told, until


class OddNumber:
    """As numpy's scalars."""

    def item(self) -> float:
        return 0.5


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Of the schedulers that a test makes."""
    made = FakeClock()
    monkeypatch.setattr(local_engine, "LoopClock", lambda: made)
    return made


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


async def test_a_workflow_that_ignores_its_stop_is_left_behind_and_reports_too_late(clock: FakeClock) -> None:
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
        await late.arrived.wait()
        while not second.arrived.is_set():
            await clock.advance(0.01)
        late.open()
        await until(lambda: late.passed)
        second.open()
        (status,), payloads = await scheduler.get_payload_results(0, timeout=30)
        assert status.ok
        assert [made.reward for made in read(payloads)] == [2.0]
        await until(lambda: scheduler.idle_runners == {0, 1})


async def test_a_blocking_sleep_costs_its_task_a_try_and_its_runner_comes_back(clock: FakeClock) -> None:
    wake, plays = threading.Event(), []

    def block(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) == 1:
            wake.wait(60)

    async with started(runner_per_model=1, max_timeout=0.1, max_retry_times=1) as scheduler:
        before = scheduler.runners[0].runner
        scheduler.schedule([told(block, workflow=ToldSync)], 0)
        await until(lambda: len(plays) == 1)
        await clock.advance(0.2)
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.ok
        assert len(plays) == 2
        assert scheduler.runners[0].runner is not before
        scheduler.schedule([told()], 1)
        assert len(await scheduler.get_statuses(1, timeout=30)) == 1
        wake.set()


async def test_workflows_that_block_leave_room_for_others(clock: FakeClock) -> None:
    """However many threads are left behind: more than a loop's own pool has."""
    wake, plays = threading.Event(), []

    def block(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) <= 40:
            wake.wait(60)

    async with started(runner_per_model=40, max_timeout=0.5, max_retry_times=1) as scheduler:
        scheduler.schedule([told(block, workflow=ToldSync) for _ in range(40)], 0)
        await until(lambda: len(plays) == 40)
        await clock.advance(1.0)
        statuses = await scheduler.get_statuses(0, timeout=60)
        assert [status.ok for status in statuses] == [True] * 40
        wake.set()


async def test_a_runner_that_cannot_be_asked_is_not_known_to_be_alive() -> None:
    class Speechless(MortalRunner):
        is_speechless = False

        async def confirm_alive(self) -> None:
            if self.is_speechless:
                self.is_speechless = False
                raise OSError("no descriptors left")
            await super().confirm_alive()

    class Asking(Scheduler):
        runner_class = Speechless

    async with started(Asking, runner_per_model=1, max_retry_times=0) as scheduler:
        scheduler.runners[0].is_speechless = True  # type: ignore[attr-defined]
        scheduler.schedule([told(), told()], 0)
        assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True, True]
    assert MortalRunner.log.count("prepared 0") == 2


@pytest.mark.parametrize(
    ("said", "is_ok"),
    [
        ((Status(1, 1, [{"a": OddNumber(), "b": None, "c": "x", 3: 1.0, "\ud800": 2.0, "d": 10**400}]), b"p"), True),  # type: ignore[dict-item]
        ((Status(0, 1, [], "lone \ud800"), b""), False),
        ((Status(5, 1, [{}] * 5), bytearray(b"p")), False),
        ((Status(1, 1, None), b""), False),  # type: ignore[arg-type]
        ((Status(1, 1, []), None), False),
        ((None, b""), False),
        (None, False),
    ],
)
@pytest.mark.parametrize("is_eval", [True, False])
async def test_whatever_a_runner_returns_its_attempt_ends_and_the_runner_goes_on(
    said: Any, is_ok: bool, is_eval: bool
) -> None:
    class OddRunner(RunnerWrapper):
        async def run_task(self, *_: object) -> Any:
            return said

    class Odd(Scheduler):
        runner_class = OddRunner

    names = {f"{name}{end}" for name in ("a", "3", "?") for end in (("/mean@1", "/std@1") if is_eval else ("",))}
    async with started(Odd, runner_per_model=1, max_retry_times=0) as scheduler:
        for batch_id in range(2):
            scheduler.schedule([told(is_eval=is_eval)], batch_id)
            (status,) = await scheduler.get_statuses(batch_id, timeout=30)
            assert status.ok is is_ok
            assert set(status.metrics[0]) - {"time/task_execution"} == (names if is_ok else set())


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


@pytest.mark.parametrize("batch_id", [1.5, None, -1, "", "line\nbreak", (1,)])
async def test_what_would_be_refused_is_refused_before_the_start_too(batch_id: Any) -> None:
    scheduler = MortalScheduler(new_config())
    with pytest.raises(InvalidArgumentError, match="batch_id"):
        scheduler.schedule([told()], batch_id)
    scheduler.schedule([told()], 0)
    await scheduler.start()
    with pytest.raises(InvalidArgumentError, match="batch_id"):
        scheduler.schedule([told()], batch_id)
    assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True]
    await scheduler.close()


async def test_a_start_that_cannot_hand_its_tasks_in_leaves_no_runner_and_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = MortalScheduler(new_config())
    scheduler.schedule([told()], 0)
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> None:
            raise ResourceExhaustedError("there are too many")

        patched.setattr(scheduler._local, "submit", refuse)
        with pytest.raises(ResourceExhaustedError):
            await scheduler.start()
    assert (scheduler.running, scheduler.runners, scheduler.has_step(0)) == (False, {}, True)
    assert sorted(line for line in MortalRunner.log if line.startswith("kill")) == ["kill 0", "kill 1"]
    await scheduler.start()
    assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True]
    await scheduler.close()


async def test_a_collect_before_the_start_ends_at_its_timeout_and_lets_go_of_what_it_waited_for() -> None:
    scheduler = MortalScheduler(new_config())
    scheduler.schedule([told(), told()], 0)
    assert await scheduler.get_statuses(0, timeout=0.01, clear_timeout_tasks=False) == []
    assert scheduler.has_step(0)
    assert await scheduler.get_statuses(0, timeout=0.01) == []
    assert not scheduler.has_step(0)
    stopped = scheduler.stopped_without_result(0)
    assert [status.total_runs for status in stopped] == [1, 1]
    assert "before the scheduler was started" in stopped[0].message


async def test_a_call_from_another_thread_is_refused_before_anything_changes() -> None:
    async with started() as scheduler:
        refused = await asyncio.gather(
            *[asyncio.to_thread(scheduler.schedule, [told()], number) for number in range(8)], return_exceptions=True
        )
        assert {type(error) for error in refused} == {FailedPreconditionError}
        assert not any(scheduler.has_step(number) for number in range(8))
        scheduler.schedule([told()], 0)
        assert len(await scheduler.get_statuses(0, timeout=30)) == 1


async def test_a_stop_in_mid_start_waits_for_it_and_ends_what_it_made() -> None:
    scheduler = MortalScheduler(new_config())
    scheduler.schedule([told()], 0)
    starting = asyncio.ensure_future(scheduler.start())
    await until(lambda: MortalRunner.preparing > 0)
    await scheduler.stop()
    assert starting.done()
    assert (scheduler.running, scheduler.runners) == (False, {})
    starting = asyncio.ensure_future(scheduler.start())
    await until(lambda: MortalRunner.preparing > 0)
    starting.cancel()
    await asyncio.wait([starting])
    assert (scheduler.running, scheduler.runners) == (False, {})
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


async def test_a_fault_of_the_engine_cancels_nobody_who_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = asyncio.Event()

    async def run(_: Admission) -> None:
        await crash.wait()
        raise OSError("a fault of the scheduler itself")

    monkeypatch.setattr(Admission, "run", run)
    scheduler = MortalScheduler(new_config())
    await scheduler.start()
    crash.set()
    await until(lambda: not scheduler._local.engine.is_running)
    with pytest.raises(ExceptionGroup) as ended:
        await scheduler.close()
    assert ended.group_contains(OSError, match="a fault of the scheduler itself")


async def test_what_dies_while_all_are_dismissed_is_not_replaced() -> None:
    """Runner 0 is being replaced and takes its time to give that up; runner 1 dies meanwhile."""
    restarting, let_go = asyncio.Event(), asyncio.Event()

    class Slow(MortalRunner):
        async def restart_runner(self) -> None:
            restarting.set()
            try:
                await asyncio.Event().wait()
            finally:
                await let_go.wait()

    class SlowScheduler(MortalScheduler):
        runner_class = Slow

    async with started(SlowScheduler) as scheduler:
        pool, runners = scheduler._local.runners, dict(scheduler.runners)
        pool.replace(runners[0], "it died")
        await restarting.wait()
        stopping = asyncio.ensure_future(scheduler.stop())
        await settle()
        pool.replace(runners[1], "it died too")
        let_go.set()
        await stopping
        assert (scheduler.runners, pool._replacing) == ({}, {})
        assert {"kill 0", "kill 1"} <= set(MortalRunner.log)


async def test_a_preparation_that_ignores_its_dismissal_leaves_no_runner_behind() -> None:
    restarting = asyncio.Event()

    class Deaf(MortalRunner):
        async def restart_runner(self) -> None:
            restarting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.log.append("restarted all the same")

    class DeafScheduler(MortalScheduler):
        runner_class = Deaf

    async with started(DeafScheduler) as scheduler:
        scheduler._local.runners.replace(scheduler.runners[0], "it died")
        await restarting.wait()
        await scheduler.stop()
        assert scheduler.runners == {}
        assert scheduler.idle_runners == set()
        assert MortalRunner.log[MortalRunner.log.index("restarted all the same") :].count("kill 0") >= 1


async def test_a_report_that_is_under_way_has_ended_when_stop_returns() -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    class Reporting(MortalRunner):
        async def update_state(self) -> None:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.set()

    class ReportingScheduler(MortalScheduler):
        runner_class = Reporting

    async with started(ReportingScheduler, runner_per_model=1, runner_state_report_interval=60) as scheduler:
        await asked.wait()
        await scheduler.stop()
        assert ended.is_set()


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
