"""What `tests/integration/runners/test_faults_both_ways.py` does to processes, done to actors of a real Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.runners.test_faults_both_ways import (
    test_a_blocking_sleep_is_ended_by_the_timeout_of_a_collect,
    test_a_blocking_sleep_that_ignores_its_stop_times_out_and_its_runner_is_replaced,
    test_a_drained_id_is_used_again_at_once_while_runners_die,
    test_a_restart_that_fails_twice_is_tried_again_until_the_runner_is_there,
    test_a_runner_killed_in_mid_task_costs_a_try_and_the_batch_ends_on_time,
    test_exit_in_a_workflow_fails_its_task_alone,
    test_what_a_timed_out_attempt_reports_late_changes_nothing,
    test_who_waits_hears_that_all_runners_died_and_that_none_can_be_started,
)
from tests.support.runners.runner_faults import Run, configuration
from tests.support.trainers.pulling import pulling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


__all__ = [  # The same tests, on another `run`.
    "test_a_blocking_sleep_is_ended_by_the_timeout_of_a_collect",
    "test_a_blocking_sleep_that_ignores_its_stop_times_out_and_its_runner_is_replaced",
    "test_a_drained_id_is_used_again_at_once_while_runners_die",
    "test_a_restart_that_fails_twice_is_tried_again_until_the_runner_is_there",
    "test_a_runner_killed_in_mid_task_costs_a_try_and_the_batch_ends_on_time",
    "test_exit_in_a_workflow_fails_its_task_alone",
    "test_what_a_timed_out_attempt_reports_late_changes_nothing",
    "test_who_waits_hears_that_all_runners_died_and_that_none_can_be_started",
]


@pytest.fixture
async def run(cluster: object, tmp_path: Path) -> AsyncIterator[Run]:
    async with pulling("in-process", configuration(tmp_path, "ray", ("node-a", "node-b"))) as trainer:
        yield Run(trainer, tmp_path, "ray")
