"""The engine's limits and graces, as the `[scheduler]` table of the configuration sets them."""

from __future__ import annotations

from typing import Literal

import msgspec

from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings
from py_scheduler.scheduler.ledger.staleness import StalenessSettings


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """max_running_samples: resident workers at most, whatever the pool could hold.
    max_running_generations: by role, how many generations are at its engine at once; others wait here, in order.
    Roles that are not named have no limit.
    staleness: by namespace, how far its training may run ahead of the weights; a namespace that is not named may as far
    as it likes. Evals always may.
    max_queued_tasks, max_queued_samples: open tasks and their samples at most; submits beyond are refused for now.
    max_bypass: how often later batches may be admitted past a blocked one.
    eval_weight: how much evals get of the room when training waits too, which counts 1. 0: only what training leaves;
    "by_batch_id": no sharing, evals stand in the order of their batch ids like everything else.
    max_wait_seconds: what has waited this long goes first, whatever its batch id; None: nothing is promoted.
    stop_grace_seconds: how long a stopped handler may take before its worker is given up.
    retry_backoff_seconds, max_retry_backoff_seconds: how long an attempt waits after one whose worker was lost, or
    whose connection or sandbox failed: about the first, twice as long each further time, at most the second. 0: not.
    dynamic_timeout: for tasks that ask for it; None: switched off.
    wait_after_min_seconds: how long a collect waits for more than the least that it asked for, unless it says.
    max_kept_bytes: results that wait to be collected or acknowledged; tasks to be collected are refused beyond.
    retained_events, retained_bytes: what the journal keeps at most for watchers that come back.
    retained_submissions: finished submissions whose request ids and counts are remembered.
    has_fixed_nodes: whether the pool has all nodes that it will ever have, so that what they cannot hold is refused at
    once; without it that waits, and says why.
    workdir_root: where the folders of episodes are made and removed; None: where the system keeps temporary files.
    max_pending_leases: outside claims that wait for room at most; more are refused for now.
    retained_leases: ended outside claims, and releases of theirs, whose request ids are remembered.
    """

    max_running_samples: int = 4096
    max_running_generations: dict[str, int] = {}
    staleness: dict[str, StalenessSettings] = {}
    max_queued_tasks: int = 1_000_000
    max_queued_samples: int = 2_000_000
    max_bypass: int = 64
    eval_weight: float | Literal["by_batch_id"] = 1.0
    max_wait_seconds: float | None = None
    stop_grace_seconds: float = 5.0
    retry_backoff_seconds: float = 0.1
    max_retry_backoff_seconds: float = 10.0
    dynamic_timeout: DynamicTimeoutSettings | None = None
    wait_after_min_seconds: float = 30.0
    max_kept_bytes: int = 8 << 30
    retained_events: int = 1_000_000
    retained_bytes: int = 1 << 30
    retained_submissions: int = 10_000
    has_fixed_nodes: bool = True
    workdir_root: str | None = None
    max_pending_leases: int = 1_000
    retained_leases: int = 10_000
