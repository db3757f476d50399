"""The Scheduler of seed 2 when runners die, hang, or cannot be started: capacity comes back, and no task is lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from py_scheduler.interfaces.trinity import Experience, RunnerWrapper, Scheduler, engine
from py_scheduler.interfaces.trinity.runners.workflow_runner import Status
from tests.support.fake_clock import FakeClock
from tests.support.runners.mortal_runners import MortalRunner, MortalScheduler
from tests.support.runners.trinity_workflows import Gate, ToldSync, read, started, told
from tests.support.waiting import eventually


class OddNumber:
    """As numpy's scalars."""

    def item(self) -> float:
        return 0.5


@pytest.fixture(autouse=True)
def _a_fresh_start() -> None:
    MortalRunner.forget()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Of the schedulers that a test makes."""
    made = FakeClock()
    monkeypatch.setattr(engine, "LoopClock", lambda: made)
    return made


async def test_a_task_whose_runner_dies_is_retried_elsewhere_and_the_next_is_not_lost() -> None:
    gate = Gate()
    async with started(MortalScheduler) as scheduler:
        scheduler.schedule([told(gate), told()], 0)
        await gate.arrived.wait()
        (busy,) = [state.runner_id for state in scheduler.busy_runners.values() if state.task.task.task_id == 0]
        scheduler.runners[busy].die("worker exit 1")  # type: ignore[attr-defined]
        await eventually(lambda: gate.visits == 2)
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
        await eventually(lambda: "failed 0" in MortalRunner.log)
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
        await eventually(lambda: scheduler.idle_runners == {0, 1})


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
        await eventually(lambda: late.passed)
        second.open()
        (status,), payloads = await scheduler.get_payload_results(0, timeout=30)
        assert status.ok
        assert [made.reward for made in read(payloads)] == [2.0]
        await eventually(lambda: scheduler.idle_runners == {0, 1})


async def test_a_blocking_sleep_costs_its_task_a_try_and_its_runner_comes_back(clock: FakeClock) -> None:
    wake, plays = threading.Event(), []

    def block(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) == 1:
            wake.wait(60)

    async with started(runner_per_model=1, max_timeout=0.1, max_retry_times=1) as scheduler:
        before = scheduler.runners[0].runner
        scheduler.schedule([told(block, workflow=ToldSync)], 0)
        await eventually(lambda: len(plays) == 1)
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
        await eventually(lambda: len(plays) == 40)
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


async def test_a_thread_that_outlives_a_failed_try_keeps_its_runner_from_the_next() -> None:
    wake, plays = threading.Event(), []

    def play(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) == 1:
            wake.wait(60)
        elif len(plays) == 2:
            raise ValueError("while the other run is at work")

    async with started(runner_per_model=1, concurrent_mode="multi-threading", max_retry_times=1) as scheduler:
        before = scheduler.runners[0].runner
        scheduler.schedule([told(play, 2, workflow=ToldSync)], 0)
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert (status.ok, len(plays)) == (True, 4)
        assert before.unfit_because == "1 threads of an earlier task are still at work"
        assert scheduler.runners[0].runner is not before
        wake.set()
