"""The names and arguments that users of Trinity's scheduler know, and what stands behind its table and its metrics."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from py_scheduler.interfaces import trinity
from py_scheduler.interfaces.trinity.runners.pool import _metrics_of_runs
from py_scheduler.interfaces.trinity.views import state_table

COLLECT = "self batch_id min_num timeout clear_timeout_tasks return_partial_tasks"
ARGUMENTS = {
    "TaskWrapper": "task batch_id sub_task_num finished_sub_task_num completed_runs total_runs metrics"
    " experience_payloads first_error emitted",
    "CompletedTaskResult": "batch_id task_id status experience_payloads",
    "RunningTaskState": "task runner_id restart_runner_on_cancel",
    "RunnerWrapper": "runner_id rollout_model_id auxiliary_model_ids config",
    "RunnerWrapper.update_state": "self",
    "RunnerWrapper.prepare": "self",
    "RunnerWrapper.run_with_retry": "self task repeat_times run_id_base timeout collect_partial_runs",
    "RunnerWrapper.restart_runner": "self",
    "sort_batch_id": "batch_id",
    "Scheduler": "config",
    "Scheduler.task_done_callback": "self async_task",
    "Scheduler.discard_completed_results": "self batch_id",
    "Scheduler.start": "self",
    "Scheduler.stop": "self",
    "Scheduler.schedule": "self tasks batch_id",
    "Scheduler.dynamic_timeout": "self timeout",
    "Scheduler.drain_batch_payload_results": "self batch_id",
    "Scheduler.get_payload_results": COLLECT,
    "Scheduler.get_statuses": COLLECT,
    "Scheduler.abort_batch": "self batch_id return_partial_tasks restart_runners",
    "Scheduler.has_step": "self batch_id",
    "Scheduler.get_key_state": "self key",
    "Scheduler.get_runner_state": "self runner_id",
    "Scheduler.get_all_state": "self",
    "Scheduler.print_all_state": "self",
}
ASYNC = {
    *("RunnerWrapper.update_state", "RunnerWrapper.prepare", "RunnerWrapper.run_with_retry"),
    *("RunnerWrapper.restart_runner", "Scheduler.start", "Scheduler.stop", "Scheduler.drain_batch_payload_results"),
    *("Scheduler.get_payload_results", "Scheduler.get_statuses", "Scheduler.abort_batch"),
}
DEFAULTS = {"min_num": None, "timeout": None, "clear_timeout_tasks": True, "return_partial_tasks": False}


def _named(name: str) -> Any:
    found: Any = trinity
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_has_its_arguments_and_is_awaited_where_it_was(name: str) -> None:
    found = _named(name)
    assert list(inspect.signature(found).parameters) == ARGUMENTS[name].split()
    assert inspect.iscoroutinefunction(found) == (name in ASYNC)


@pytest.mark.parametrize("name", ["Scheduler.get_payload_results", "Scheduler.get_statuses"])
def test_a_collect_has_the_defaults_that_it_had(name: str) -> None:
    parameters = inspect.signature(_named(name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS} == DEFAULTS
    assert inspect.signature(_named("Scheduler.abort_batch")).parameters["restart_runners"].default is True


def test_a_table_is_aligned_and_shows_what_is_missing() -> None:
    lines = list(state_table({0: {"workflow_id": "1/2/3"}, 11: {"stage": "thinking", "workflow_id": None}}))
    assert lines == [
        "runner_id | stage    | workflow_id",
        "----------+----------+------------",
        "0         | -        | 1/2/3",
        "11        | thinking | None",
    ]
    assert list(state_table({})) == ["runner_id", "---------"]


def test_what_experiences_measured_is_shared_out_over_their_runs() -> None:
    measured = [{"score": 0.0, "calls:sum": 1.0}, {"score": 1.0, "calls:sum": 2.0}, {"score": 0.5}, {"score": 0.5}]
    assert _metrics_of_runs(measured, 4) == measured
    assert _metrics_of_runs(measured, 2) == [{"score": 0.5, "calls:sum": 3.0}, {"score": 0.5}]
    assert _metrics_of_runs(measured[:1], 2) == [{}, {"score": 0.0, "calls:sum": 1.0}]
    assert _metrics_of_runs(measured, 0) == []
    assert _metrics_of_runs([], 2) == [{}, {}]
