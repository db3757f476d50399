"""Start, stop and close of the Scheduler of seed 2: all or nothing, again and again, whatever dies meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.errors import (
    ResourceExhaustedError,
    RunnerStartError,
)
from py_scheduler.interfaces.trinity import Scheduler
from py_scheduler.scheduler.queue.admission import Admission
from tests.support.fake_clock import settle
from tests.support.runners.mortal_runners import MortalRunner, MortalScheduler
from tests.support.runners.trinity_workflows import Gate, new_config, started, told
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _a_fresh_start() -> None:
    MortalRunner.forget()


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


async def test_a_start_that_cannot_hand_its_tasks_in_leaves_no_runner_and_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = MortalScheduler(new_config())
    scheduler.schedule([told()], 0)
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> None:
            raise ResourceExhaustedError("there are too many")

        patched.setattr(scheduler._local.engine, "accept", refuse)
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


async def test_a_stop_in_mid_start_waits_for_it_and_ends_what_it_made() -> None:
    scheduler = MortalScheduler(new_config())
    scheduler.schedule([told()], 0)
    starting = asyncio.ensure_future(scheduler.start())
    await eventually(lambda: MortalRunner.preparing > 0)
    await scheduler.stop()
    assert starting.done()
    assert (scheduler.running, scheduler.runners) == (False, {})
    starting = asyncio.ensure_future(scheduler.start())
    await eventually(lambda: MortalRunner.preparing > 0)
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
        await eventually(lambda: scheduler.runners == {})
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
    await eventually(lambda: not scheduler._local.engine.is_running)
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


async def test_a_start_that_is_given_up_leaves_nothing_behind() -> None:
    """Whichever turn it is in, also while the engine is on its way."""
    was_given_up = []
    for turns in range(100):
        MortalRunner.forget()
        before = asyncio.all_tasks()
        scheduler = MortalScheduler(new_config())
        starting = asyncio.ensure_future(scheduler.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        was_given_up.append(starting.cancelled())
        await scheduler.close()
        assert asyncio.all_tasks() == before, f"given up after {turns} turns"
        prepared = {line.split()[1] for line in MortalRunner.log if line.startswith("prepared")}
        assert prepared <= {line.split()[1] for line in MortalRunner.log if line.startswith("kill")}
        if not was_given_up[-1]:
            break
    assert True in was_given_up
    assert not was_given_up[-1]


async def test_a_stop_that_is_given_up_ends_its_runners_at_once() -> None:
    gate = Gate()
    async with started(MortalScheduler) as scheduler:
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        stopping = asyncio.ensure_future(scheduler.stop())
        await eventually(lambda: scheduler.runners == {})
        stopping.cancel()
        await asyncio.wait([stopping])
        assert {line for line in MortalRunner.log if line.startswith("kill")} == {"kill 0", "kill 1"}
        gate.open()
        await scheduler.start()
        (status,) = await scheduler.get_statuses(0, timeout=30)
        assert status.ok


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
