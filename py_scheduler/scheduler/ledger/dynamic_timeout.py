"""How long an attempt may take, judged by how long finished training sub-tasks took. Pure: settings and history go in,
seconds come out.
"""

from __future__ import annotations

import math

import msgspec


class DynamicTimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How attempts are timed out whose tasks ask for it. If sub-tasks took 20 s on the
    mean, a ratio of 3 leaves the next attempt 60 s.
    """

    ratio: float = 3.0
    """An attempt may take this many times the mean running time of a finished sub-task."""
    warmup_min_steps: int = 1
    """Training steps that must have been completed before; until then the task's own timeout holds."""


class TrainingHistory(msgspec.Struct, gc=False):
    """What training came to so far; evals do not count. Changed by `Ledger.apply` alone."""

    finished_subtasks: int = 0
    """Those that ended by themselves, well or not."""
    finished_tasks: int = 0
    """As with sub-tasks."""
    running_seconds: float = 0.0
    """Of all attempts at the finished sub-tasks."""
    completed_steps: int = 0
    """Submissions that were collected whole."""


def dynamic_timeout(
    settings: DynamicTimeoutSettings | None, history: TrainingHistory, cap_seconds: float | None
) -> float | None:
    """Seconds for an attempt, never above the cap. None: no limit. settings None: switched off."""
    if settings is None or not history.finished_subtasks or history.completed_steps < settings.warmup_min_steps:
        return cap_seconds
    mean_seconds = history.running_seconds / history.finished_subtasks
    return min(math.inf if cap_seconds is None else cap_seconds, settings.ratio * mean_seconds)
