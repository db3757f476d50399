"""Our own WorkflowRunner: how it plays the runs of a sub-task, and what it says of them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.interfaces.trinity import Experience, ModelConfig, Status, WorkflowRunner
from tests.support.runners.trinity_workflows import Told, ToldRepeatable, ToldSync, new_config, read, told
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from py_scheduler.interfaces.trinity import Workflow

MODES = ["sequential", "asynchronous", "multi-threading"]


class Model:
    model_version = 3


async def new_runner(**explorer: Any) -> WorkflowRunner:
    runner = WorkflowRunner(new_config(rollout_model=ModelConfig(open_model=lambda _: Model()), **explorer), 0)
    await runner.prepare()
    return runner


async def failing_on_second(workflow: Workflow) -> None:
    seen = workflow.task.workflow_args["seen"]
    seen.append(workflow)
    if len(seen) == 2:
        raise ValueError("the second fails")


@pytest.mark.parametrize("mode", MODES)
async def test_each_run_has_its_id_and_says_where_it_comes_from(mode: str) -> None:
    runner = await new_runner(concurrent_mode=mode)
    task = told(repeats=3)
    task.batch_id, task.task_id = "4/eval", 7
    status, payload = await runner.run_task(task, "4/eval", 3, run_id_base=6)
    assert status.ok
    assert [metrics["score"] for metrics in status.metrics] == [1.0] * 3
    assert all(metrics["time/run_execution"] >= 0 for metrics in status.metrics)
    experiences = read([payload])
    assert [(made.eid.batch, made.eid.task, made.eid.run) for made in experiences] == [
        ("4/eval", 7, run) for run in (6, 7, 8)
    ]
    assert [made.info for made in experiences] == [{"model_version": 3, "model_version_drift": 0}] * 3


@pytest.mark.parametrize("mode", MODES)
async def test_without_partial_collection_the_first_failure_ends_the_sub_task(mode: str) -> None:
    runner = await new_runner(concurrent_mode=mode)
    seen: list[Any] = []
    status, payload = await runner.run_task(told(failing_on_second, seen=seen), "0", 4)
    assert not status.ok
    assert status.total_runs == 4
    assert "the second fails" in (status.message or "")
    assert payload == b""
    if mode == "sequential":
        assert len(seen) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_with_partial_collection_every_run_is_tried_and_successes_are_kept(mode: str) -> None:
    runner = await new_runner(concurrent_mode=mode)
    seen: list[Any] = []
    status, payload = await runner.run_task(told(failing_on_second, seen=seen), "0", 4, collect_partial_runs=True)
    assert (status.completed_runs, status.total_runs, len(seen)) == (3, 4, 4)
    assert (status.message or "").startswith("3/4 runs completed successfully. First error: Traceback")
    assert len({made.eid.run for made in read([payload])}) == 3


async def test_the_first_failure_cancels_runs_beside_it() -> None:
    runner = await new_runner(concurrent_mode="asynchronous")
    ends: list[str] = []

    async def play(workflow: Workflow) -> None:
        if not ends:
            ends.append("raised")
            raise ValueError("at once")
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    status, _ = await runner.run_task(told(play), "0", 3)
    assert status.completed_runs == 0
    assert ends in (["raised"], ["raised", "cancelled", "cancelled"])


async def test_a_repeatable_workflow_is_called_once_for_all_its_runs() -> None:
    runner = await new_runner()
    status, payload = await runner.run_task(told(workflow=ToldRepeatable), "0", 3, run_id_base=5)
    assert status.ok
    assert [metrics["score"] for metrics in status.metrics] == [5.0, 6.0, 7.0]
    assert [made.eid.run for made in read([payload])] == [5, 6, 7]


async def test_a_repeatable_workflow_gives_all_or_nothing() -> None:
    runner = await new_runner()

    async def too_few(workflow: Any) -> list[Experience]:
        return [Experience()]

    status, payload = await runner.run_task(told(too_few, workflow=ToldRepeatable), "0", 2, collect_partial_runs=True)
    assert (status.completed_runs, payload) == (0, b"")
    assert "made no experience of run 1" in (status.message or "")


async def test_an_eval_returns_no_experiences() -> None:
    runner = await new_runner()
    status, payload = await runner.run_task(told(is_eval=True), "0/eval", 2)
    assert (status.ok, payload) == (True, b"")


async def test_a_workflow_that_returns_nothing_or_exits_fails_its_run() -> None:
    runner = await new_runner()

    async def nothing(_workflow: object) -> list[Experience]:
        return []

    def leave(_workflow: object) -> None:
        raise SystemExit(1)

    status, _ = await runner.run_task(told(nothing), "0", 1)
    assert "returned no experience" in (status.message or "")
    status, _ = await runner.run_task(told(leave, workflow=ToldSync), "0", 1)
    assert "SystemExit: 1" in (status.message or "")
    assert (await runner.run_task(told(), "0", 1))[0].ok


async def test_a_workflow_that_cannot_be_made_fails_its_task() -> None:
    class Broken(Told):
        def __init__(self, **_: object) -> None:
            raise ValueError("cannot be made")

    status, _ = await (await new_runner()).run_task(told(workflow=Broken), "0", 2)
    assert (status.completed_runs, status.total_runs) == (0, 2)
    assert "cannot be made" in (status.message or "")


async def test_sync_workflows_leave_the_loop_alone() -> None:
    runner = await new_runner()
    main, go = threading.get_ident(), threading.Event()
    threads: list[int] = []

    def wait(_workflow: object) -> None:
        threads.append(threading.get_ident())
        assert go.wait(10)

    call = asyncio.ensure_future(runner.run_task(told(wait, workflow=ToldSync), "0", 1))
    await eventually(lambda: bool(threads))
    go.set()
    assert (await call)[0].ok
    assert threads != [main]


async def test_threads_that_outlive_a_stop_are_counted() -> None:
    runner = await new_runner()
    go, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(_workflow: object) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(10)

    call = asyncio.ensure_future(runner.run_task(told(wait, workflow=ToldSync), "0", 1))
    await began.wait()
    assert runner.threads_at_work == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert runner.threads_at_work == 1
    go.set()


async def test_the_state_shows_what_is_played_and_what_the_workflow_adds() -> None:
    runner = await new_runner()
    states: list[dict[str, Any]] = []

    async def look(workflow: Workflow) -> None:
        workflow.state["stage"] = "thinking"
        states.append(await runner.get_runner_state())

    task = told(look)
    task.task_id = 2
    await runner.run_task(task, "9", 1, run_id_base=4)
    (state,) = states
    assert (state["workflow_id"], state["model_version"], state["stage"]) == ("9/2/4", 3, "thinking")
    assert state["terminate_time"] is None
    assert (await runner.get_runner_state())["terminate_time"] >= state["begin_time"]


async def test_a_resettable_workflow_is_used_again() -> None:
    runner = await new_runner()
    seen: set[int] = set()

    async def note(workflow: object) -> list[Experience]:
        seen.add(id(workflow))
        return [Experience()]

    for _ in range(3):
        await runner.run_task(told(note, workflow=ToldRepeatable), "0", 1)
    assert len(seen) == 1


def test_a_status_is_ok_when_both_counts_agree() -> None:
    assert Status(2, 2, []).ok
    assert not Status(1, 2, []).ok
