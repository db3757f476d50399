"""The Scheduler of seed 2 over the real engine, with its own runners: batches in, results out."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.interfaces.trinity import (
    DynamicTimeoutConfig,
    Experience,
    OverRolloutConfig,
    RunnerWrapper,
    Scheduler,
    TaskWrapper,
    sort_batch_id,
)
from py_scheduler.interfaces.trinity import scheduler as trinity_scheduler
from tests.support.trinity_workflows import Gate, ToldRepeatable, new_config, read, started, told, until


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
        await until(lambda: gate.visits == 1 and len(scheduler.busy_runners) == 1)
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
        await until(lambda: gate.visits == 1 and len(scheduler.busy_runners) == 1)
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


async def test_discarded_results_are_gone() -> None:
    async with started() as scheduler:
        scheduler.schedule([told(), told()], 0)
        await until(lambda: len(scheduler.completed_tasks.get(0, {})) == 2)
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
        await until(lambda: len(scheduler.completed_tasks.get(0, {})) == 3)
        engine, gate = scheduler._local.engine, Gate()
        acknowledge = engine.ack_results

        async def acknowledge_late(namespace: str, request_id: str) -> None:
            if not gate.visits:
                await gate(None)
            await acknowledge(namespace, request_id)

        engine.ack_results = acknowledge_late  # type: ignore[method-assign]
        first = asyncio.ensure_future(scheduler.get_statuses(0))
        await gate.arrived.wait()
        said = getattr(scheduler, meanwhile)(0)
        if said is not None:
            assert await said == []
        gate.open()
        assert [status.ok for status in await first] == [True] * 3
        assert not scheduler.has_step(0)


async def test_metrics_of_training_and_of_evals() -> None:
    scores = iter([0.0, 1.0, 1.0, 0.0] * 2)

    async def score(_workflow: object) -> list[Experience]:
        return [Experience(metrics={"score": next(scores), "calls:sum": 2.0})]

    async with started(runner_per_model=1) as scheduler:
        scheduler.schedule([told(score, 4)], 0)
        scheduler.schedule([told(score, 4, is_eval=True)], "0/eval")
        (train,) = await scheduler.get_statuses(0)
        (measured,), payloads = await scheduler.get_payload_results("0/eval")
        assert scheduler.total_completed_tasks == 1
    (metrics,) = train.metrics
    assert (metrics["score"], metrics["calls:sum"]) == (0.5, 8.0)
    assert metrics["time/task_execution"] >= metrics["time/run_execution"] > 0
    (metrics,) = measured.metrics
    assert payloads == []
    assert (metrics["score/mean@4"], metrics["score/std@4"]) == (0.5, 0.5)
    assert metrics["score/best@2"] == pytest.approx(0.75)
    assert metrics["score/worst@4"] == pytest.approx(1 / 16)


async def test_the_dynamic_timeout_comes_from_finished_training_steps_alone() -> None:
    dynamic = DynamicTimeoutConfig(enable=True, warmup_min_steps=1, ratio=2.0)
    async with started(dynamic_timeout=dynamic, max_timeout=10.0, max_retry_times=1) as scheduler:
        assert scheduler.default_timeout == 20.0
        scheduler.schedule([told(is_eval=True)], "0/eval")
        await scheduler.get_statuses("0/eval")
        assert scheduler.dynamic_timeout() == 20.0
        scheduler.schedule([told(), told()], 0)
        await until(lambda: scheduler.total_completed_tasks == 2)
        assert scheduler.dynamic_timeout() == 20.0
        await scheduler.get_statuses(0)
        mean = scheduler.total_running_time / scheduler.total_completed_sub_tasks
        assert scheduler.dynamic_timeout() == pytest.approx(2 * mean)
        assert scheduler.dynamic_timeout(1e-9) == 1e-9


async def test_views_show_what_is_pending_and_what_runs() -> None:
    gate = Gate()
    async with started(max_repeat_times_per_runner=2, runner_per_model=1) as scheduler:
        assert scheduler.runner_num == 1
        assert scheduler.idle_runners == {0}
        scheduler.schedule([told(gate, 5)], 0)
        await gate.arrived.wait()
        assert scheduler.idle_runners == set()
        (state,) = scheduler.busy_runners.values()
        assert (state.runner_id, state.task.task.task_id) == (0, 0)
        assert scheduler.running_tasks == {0: [state]}
        (pending,) = scheduler.pending_tasks.values()
        assert [(repeats, base) for _, repeats, base in reversed(pending)] == [(2, 2), (1, 4)]
        wrapper = state.task
        assert (wrapper.sub_task_num, wrapper.finished_sub_task_num, wrapper.total_runs) == (3, 0, 5)
        gate.open()
        await scheduler.get_statuses(0)
        assert (wrapper.finished_sub_task_num, wrapper.completed_runs, wrapper.emitted) == (3, 5, True)
        assert (scheduler.pending_tasks, scheduler.running_tasks, scheduler.busy_runners) == ({}, {}, {})
        assert (scheduler.total_completed_sub_tasks, scheduler.total_completed_tasks) == (3, 1)


async def test_states_and_their_table(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as scheduler:
        assert scheduler.get_all_state() == {}
        assert scheduler.get_runner_state(99) == {}
        scheduler.schedule([told(), told()], 5)
        await scheduler.get_statuses(5)
        await scheduler.update_states()
        assert set(scheduler.get_key_state("workflow_id")) == {0, 1}
        shown = [value for value in scheduler.get_key_state("workflow_id").values() if value]
        assert set(shown) <= {"5/0/0", "5/1/0"}
        assert shown
        assert scheduler.get_runner_state(0)["running_time"] >= 0.0
        caplog.set_level(logging.INFO)
        caplog.clear()
        scheduler.print_all_state()
        head, rule, *rows = [record.getMessage() for record in caplog.records]
        assert head.startswith("runner_id | begin_time")
        assert [row.split(" | ")[0].strip() for row in rows] == ["0", "1"]
        assert {line.find("|") for line in (head, *rows)} == {rule.find("+")}


async def test_run_with_retry_plays_on_that_runner_and_no_other() -> None:
    gate, tries = Gate(), []

    async def fail_once(workflow: Any) -> None:
        tries.append(workflow)
        if len(tries) == 1:
            raise ValueError("once")

    async with started(max_retry_times=1) as scheduler:
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        (busy,) = scheduler.busy_runners
        other = 1 - busy
        wrapper = TaskWrapper(replace(told(fail_once, 2), batch_id=7, task_id=3), 7, total_runs=2)
        status, payload, runner_id, seconds = await scheduler.runners[other].run_with_retry(wrapper, 2, 4, 30.0, False)
        assert (status.ok, runner_id) == (True, other)
        assert status.metrics[-1] == {"time/task_execution": seconds}
        assert [(made.eid.batch, made.eid.task, made.eid.run) for made in read([payload])] == [(7, 3, 4), (7, 3, 5)]
        waiting = asyncio.ensure_future(scheduler.runners[busy].run_with_retry(wrapper, 1, 0, 30.0, False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        assert (await waiting)[2] == busy
        assert len(await scheduler.get_statuses(0)) == 1
        assert scheduler.total_completed_steps == 1


async def test_run_with_retry_of_a_runner_without_a_scheduler() -> None:
    config = new_config(max_retry_times=0)
    runner = RunnerWrapper(4, 0, [], config)
    await runner.prepare()
    wrapper = TaskWrapper(replace(told(repeats=2), batch_id="x", task_id=0), "x")
    status, payload, runner_id, _ = await runner.run_with_retry(wrapper, 2, 0, 5.0, False)
    assert (status.ok, runner_id, len(read([payload]))) == (True, 4, 2)


async def test_each_runner_is_listed_once() -> None:
    """One pool of runners serves an evaluator for all and one for each runner by itself."""
    async with started(runner_per_model=2) as scheduler:
        engine = scheduler._local.engine
        assert len(engine.specs) == 3
        assert [view.runner_id for view in engine.runner_views()] == ["0", "1"]


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
    monkeypatch.setattr(trinity_scheduler, "_KEPT_STOPS", 2)
    gate = Gate()
    async with started() as scheduler:
        for batch_id in range(4):
            scheduler.schedule([told()], batch_id)
            assert len(await scheduler.get_statuses(batch_id)) == 1
        for batch_id in range(4, 8):
            scheduler.schedule([told(gate)], batch_id)
            await scheduler.abort_batch(batch_id)
        assert scheduler._task_nos == {}
        assert [len(scheduler.stopped_without_result(batch_id)) for batch_id in range(4, 8)] == [0, 0, 1, 1]
        assert scheduler._local.wrappers == {}


async def test_run_with_retry_needs_a_scheduler_that_runs() -> None:
    async with started() as scheduler:
        runner = scheduler.runners[0]
    with pytest.raises(FailedPreconditionError, match="not running"):
        await runner.run_with_retry(TaskWrapper(told(), 0), 1, 0, 1.0, False)


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
