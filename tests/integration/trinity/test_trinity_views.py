"""What the Scheduler of seed 2 measures and shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from py_scheduler.interfaces.trinity import (
    DynamicTimeoutConfig,
    Experience,
    ModelConfig,
)
from tests.support.runners.trinity_workflows import Gate, started, told
from tests.support.waiting import eventually


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
        await eventually(lambda: scheduler.total_completed_tasks == 2)
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


class Numbered:
    """A model that is only its engine's number."""

    def __init__(self, engine_id: int) -> None:
        self.engine_id = engine_id


async def test_each_runner_uses_the_engine_of_each_model_that_its_number_gives() -> None:
    gate = Gate()
    used: dict[int, list[int]] = {}

    async def look(workflow: Any) -> None:
        models = [workflow.model, *workflow.auxiliary_models]
        (runner_id,) = [number for number, state in scheduler.busy_runners.items() if state.task.task == workflow.task]
        used[runner_id] = [model.engine_id for model in models]
        await gate(workflow)

    models = [ModelConfig(engine_num=number, open_model=Numbered) for number in (2, 3, 1)]
    async with started(runner_per_model=3, rollout_model=models[0], auxiliary_models=models[1:]) as scheduler:
        assert scheduler.runner_num == 6
        scheduler.schedule([told(look) for _ in range(6)], 0)
        await eventually(lambda: len(used) == 6)
        gate.open()
        await scheduler.get_statuses(0)
    assert used == {number: [number % 2, number % 3, 0] for number in range(6)}


async def test_each_runner_is_listed_once() -> None:
    """One pool of runners serves an evaluator for all and one for each runner by itself."""
    async with started(runner_per_model=2) as scheduler:
        engine = scheduler._local.engine
        assert len(engine.specs) == 3
        assert [view.runner_id for view in engine.runner_views()] == ["0", "1"]
