"""The results of the Scheduler of seed 2: waited for, handed out once, stopped, forgotten."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from py_scheduler.interfaces.trinity import (
    OverRolloutConfig,
    results,
)
from tests.support.runners.trinity_workflows import Gate, read, started, told
from tests.support.waiting import eventually


async def test_enough_tasks_and_a_wait_end_a_collect_without_restarting_runners() -> None:
    gate = Gate()
    async with started(over_rollout=OverRolloutConfig(wait_after_min=0.0)) as scheduler:
        scheduler.schedule([told(), told(), told(gate)], 0)
        await gate.arrived.wait()
        runners = {runner_id: wrapper.runner for runner_id, wrapper in scheduler.runners.items()}
        statuses = await scheduler.get_statuses(0, min_num=2)
        assert [status.ok for status in statuses] == [True, True]
        (stopped,) = scheduler.stopped_without_result(0)
        assert (stopped.completed_runs, stopped.total_runs) == (0, 1)
        assert stopped.message.startswith("0/1 runs completed successfully. enough tasks were done")
        assert {runner_id: wrapper.runner for runner_id, wrapper in scheduler.runners.items()} == runners
        assert not scheduler.has_step(0)
        assert scheduler.total_completed_steps == 0
        scheduler.schedule([told(), told()], 1)
        assert len(await scheduler.get_statuses(1)) == 2


async def test_a_timeout_stops_what_is_left_and_restarts_its_runner() -> None:
    gate = Gate()
    async with started() as scheduler:
        scheduler.schedule([told(), told(gate)], 0)
        await eventually(lambda: gate.visits == 1 and len(scheduler.busy_runners) == 1)
        (busy,) = scheduler.busy_runners
        before = scheduler.runners[busy].runner
        statuses = await scheduler.get_statuses(0, timeout=0.0)
        assert [status.ok for status in statuses] == [True]
        assert scheduler.runners[busy].runner is not before
        scheduler.schedule([told() for _ in range(4)], 0)
        assert len(await scheduler.get_statuses(0)) == 4


async def test_without_clearing_the_rest_runs_on_and_a_later_call_gets_it() -> None:
    gate = Gate()
    async with started() as scheduler:
        scheduler.schedule([told(gate)], 0)
        assert await scheduler.get_statuses(0, timeout=0.0, clear_timeout_tasks=False) == []
        assert scheduler.stopped_without_result(0) == []
        gate.open()
        (status,) = await scheduler.get_statuses(0)
        assert status.ok
        assert gate.visits == 1


async def test_min_num_above_what_was_scheduled_is_clamped(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as scheduler:
        scheduler.schedule([told()], 0)
        assert len(await scheduler.get_statuses(0, min_num=9)) == 1
        assert "min_num is 9" in caplog.text
        assert await scheduler.get_statuses("unknown", min_num=1) == []
        scheduler.schedule([told()], 1)
        assert len(await scheduler.get_statuses(1, timeout=float("inf"))) == 1


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_stopped_task_with_completed_runs_is_emitted_if_that_is_wanted(is_kept: bool) -> None:
    gate, plays = Gate(), []

    async def second_waits(workflow: Any) -> None:
        plays.append(workflow)
        if len(plays) == 2:
            await gate(workflow)

    async with started(max_repeat_times_per_runner=1, runner_per_model=1) as scheduler:
        scheduler.schedule([told(second_waits, 3)], 0)
        await gate.arrived.wait()
        statuses, payloads = await scheduler.get_payload_results(0, timeout=0.0, return_partial_tasks=is_kept)
        if is_kept:
            assert [(status.completed_runs, status.total_runs) for status in statuses] == [(1, 3)]
            assert statuses[0].message == "1/3 runs completed successfully. timeout_seconds (0) passed"
            assert len(read(payloads)) == 1
            assert scheduler.stopped_without_result(0) == []
        else:
            assert (statuses, payloads) == ([], [])
            assert [status.completed_runs for status in scheduler.stopped_without_result(0)] == [1]


async def test_an_aborted_batch_keeps_its_results_and_an_unknown_one_is_nothing() -> None:
    gate = Gate()
    async with started() as scheduler:
        await scheduler.abort_batch("unknown")
        scheduler.schedule([told(), told(gate)], 0)
        await eventually(lambda: gate.visits == 1 and len(scheduler.busy_runners) == 1)
        await scheduler.abort_batch(0, restart_runners=False)
        assert scheduler.busy_runners == {}
        assert scheduler.has_step(0)
        ((status,), payloads) = await scheduler.drain_batch_payload_results(0)
        assert status.ok
        assert len(payloads) == 1
        assert not scheduler.has_step(0)
        (stopped,) = scheduler.stopped_without_result(0)
        assert "batch 0 was aborted" in stopped.message
        scheduler.discard_completed_results(0)
        assert scheduler.stopped_without_result(0) == []


async def test_what_is_drained_while_an_abort_waits_is_not_told_to_have_left_no_result() -> None:
    gate, stubborn, runs = Gate(), Gate(), itertools.count()

    async def all_but_the_first_hang(workflow: object) -> None:
        if next(runs):
            await gate(workflow)

    async def ignores_a_stop(workflow: object) -> None:
        try:
            await gate(workflow)
        except asyncio.CancelledError:
            await stubborn(workflow)

    async with started(max_repeat_times_per_runner=1) as scheduler:
        scheduler.schedule([told(all_but_the_first_hang, 2), told(ignores_a_stop)], 0)
        await eventually(lambda: gate.visits == 2)
        aborting = asyncio.ensure_future(scheduler.abort_batch(0, return_partial_tasks=True, restart_runners=False))
        await eventually(lambda: bool(scheduler.completed_tasks))
        (status,), _ = await scheduler.drain_batch_payload_results(0)
        assert (status.completed_runs, status.total_runs) == (1, 2)
        stubborn.open()
        await aborting
        assert [left.total_runs for left in scheduler.stopped_without_result(0)] == [1]


async def test_discarded_results_are_gone() -> None:
    async with started() as scheduler:
        scheduler.schedule([told(), told()], 0)
        await eventually(lambda: len(scheduler.completed_tasks.get(0, {})) == 2)
        assert {result.task_id for result in scheduler.completed_tasks[0].values()} == {0, 1}
        scheduler.discard_completed_results(0)
        assert not scheduler.has_step(0)
        assert await scheduler.get_payload_results(0) == ([], [])


async def test_collects_at_the_same_time_hand_each_result_out_once() -> None:
    async with started() as scheduler:
        for batch_id in range(5):
            scheduler.schedule([told() for _ in range(6)], batch_id)
            some, others, drained = await asyncio.gather(
                scheduler.get_statuses(batch_id, min_num=2),
                scheduler.get_statuses(batch_id, clear_timeout_tasks=False),
                scheduler.drain_batch_payload_results(batch_id),
            )
            assert len(some) + len(others) + len(drained[0]) == 6
            assert not scheduler.has_step(batch_id)


@pytest.mark.parametrize("meanwhile", ["get_statuses", "discard_completed_results"])
async def test_what_is_on_its_way_to_one_caller_is_lost_by_no_other(meanwhile: str) -> None:
    async with started() as scheduler:
        scheduler.schedule([told() for _ in range(3)], 0)
        await eventually(lambda: len(scheduler.completed_tasks.get(0, {})) == 3)
        results, gate = scheduler._local.engine.results, Gate()
        acknowledge = results.acknowledge

        async def acknowledge_late(namespace: str, request_id: str) -> None:
            if not gate.visits:
                await gate(None)
            await acknowledge(namespace, request_id)

        results.acknowledge = acknowledge_late  # type: ignore[method-assign]
        first = asyncio.ensure_future(scheduler.get_statuses(0))
        await gate.arrived.wait()
        said = getattr(scheduler, meanwhile)(0)
        if said is not None:
            assert await said == []
        gate.open()
        assert [status.ok for status in await first] == [True] * 3
        assert not scheduler.has_step(0)


class WalkedOver(dict[str, Any]):
    """Counts who goes through all of it."""

    walks = 0

    def values(self) -> Any:
        type(self).walks += 1
        return super().values()


async def test_an_abort_does_not_go_through_all_tasks_for_each_of_them() -> None:
    gate = Gate()
    async with started() as scheduler:
        scheduler.schedule([told(gate) for _ in range(50)], 0)
        await gate.arrived.wait()
        record = scheduler._local.record_of(0)
        assert record is not None
        record.open_tasks = WalkedOver(record.open_tasks)
        await scheduler.abort_batch(0)
        assert 0 < WalkedOver.walks < 10
        assert len(scheduler.stopped_without_result(0)) == 50


async def test_batches_that_are_over_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_KEPT_STOPS", 2)
    gate = Gate()
    async with started() as scheduler:
        for batch_id in range(4):
            scheduler.schedule([told()], batch_id)
            assert len(await scheduler.get_statuses(batch_id)) == 1
        for batch_id in range(4, 8):
            scheduler.schedule([told(gate)], batch_id)
            await scheduler.abort_batch(batch_id)
        assert scheduler._local._task_nos == {}
        assert [len(scheduler.stopped_without_result(batch_id)) for batch_id in range(4, 8)] == [0, 0, 1, 1]
        assert scheduler._local.wrappers == {}
