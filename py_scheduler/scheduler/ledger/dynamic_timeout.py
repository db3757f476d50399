"""How long an attempt may take, by how long finished training sub-tasks took. Pure: settings and history in, seconds
out.
"""

from __future__ import annotations

import math

import msgspec


class DynamicTimeoutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ratio: of the mean running time. warmup_min_steps: training steps that must have been completed before."""

    ratio: float = 3.0
    warmup_min_steps: int = 1


class TrainingHistory(msgspec.Struct, gc=False):
    """What training came to so far; evals do not count. Changed by `Ledger.apply` alone.

    finished_subtasks, finished_tasks: those that ended by themselves, well or not. running_seconds: of all attempts at
    those sub-tasks. completed_steps: submissions that were collected whole.
    """

    finished_subtasks: int = 0
    finished_tasks: int = 0
    running_seconds: float = 0.0
    completed_steps: int = 0


def dynamic_timeout(
    settings: DynamicTimeoutSettings | None, history: TrainingHistory, cap_seconds: float | None
) -> float | None:
    """Seconds for an attempt, never above the cap. None: no limit. settings None: switched off."""
    if settings is None or not history.finished_subtasks or history.completed_steps < settings.warmup_min_steps:
        return cap_seconds
    mean_seconds = history.running_seconds / history.finished_subtasks
    return min(math.inf if cap_seconds is None else cap_seconds, settings.ratio * mean_seconds)
