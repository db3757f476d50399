"""The engine's limits and graces, as the `[scheduler]` table of the configuration sets them."""

from __future__ import annotations

from typing import Literal

import msgspec

from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings
from py_scheduler.scheduler.ledger.staleness import StalenessSettings


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's. Times are in seconds."""

    max_running_samples: int = 4096
    """Samples that run at once at most, whatever the pool could hold."""
    max_running_generations: dict[str, int] = {}
    """By role, how many generations are at its backend at once; others wait here, in order. A role that is not named
    has no limit.
    """
    staleness: dict[str, StalenessSettings] = {}
    """By namespace, how far its training may run ahead of the weights. A namespace that is not named may run ahead as
    far as it likes, and evals always may.
    """
    max_queued_tasks: int = 1_000_000
    """Open tasks at most; a submit that would make them more is refused for now."""
    max_queued_samples: int = 2_000_000
    """Planned samples of open tasks at most, as with `max_queued_tasks`."""
    max_waiting_submit_bytes: int = 256 << 20
    """Of submits that have arrived and were not taken in yet, because they are large or stand behind such as are. One
    namespace has half of it. Further ones are refused for now; one that finds no other is not, whatever its size.
    """
    max_bypass: int = 64
    """How often batches behind a batch may be admitted before it, with room that it could have used. After that they
    wait with it.
    """
    eval_weight: float | Literal["by_batch_id"] = 1.0
    """What evals weigh where training, which weighs 1, waits for the same room. At 1 each gets half, at 3 evals get
    three quarters, at 0 only what training leaves. "by_batch_id": nothing is shared, and evals stand in the order of
    their batch ids like everything else.
    """
    max_wait_seconds: float | None = None
    """What has waited this long goes first, whatever its batch id. None: nothing is promoted."""
    stop_grace_seconds: float = 5.0
    """How long a stopped handler may take to come back before its runner is killed, or its worker given up."""
    retry_backoff_seconds: float = 0.1
    """How long the next attempt waits after one whose worker was lost, or whose connection or sandbox failed. It
    doubles with each further failure of the same sub-task: at most 0.1, 0.2, 0.4 s, and at least half of that. 0: it
    does not wait.
    """
    max_retry_backoff_seconds: float = 10.0
    """The longest that such a wait becomes."""
    dynamic_timeout: DynamicTimeoutSettings | None = None
    """For tasks that ask for it; None: they have the timeout that they name."""
    wait_after_min_seconds: float = 30.0
    """How long a collect that has its `min_num` waits for more, unless it says so itself."""
    max_kept_bytes: int = 8 << 30
    """Of results that wait to be collected or acknowledged. While they take more, tasks to be collected are refused."""
    max_uncommitted_bytes: int = 256 << 20
    """Of events that the journal's disk has not taken yet. While they take more, submits are refused for now and
    nothing begins, until half of that is on disk; what runs goes on.
    """
    retained_events: int = 1_000_000
    """What the journal keeps at most for watchers that come back."""
    retained_bytes: int = 1 << 30
    """As `retained_events`, in bytes; the stricter one holds."""
    retained_submissions: int = 10_000
    """Finished submissions whose request ids and counts are remembered."""
    has_fixed_nodes: bool = True
    """Whether no node is ever added to the pool. Then what its nodes cannot hold is refused at once; a batch that was
    accepted on more nodes wants no more than is left; and what no node can hold ends FAILED. Where nodes come and go
    all of these wait, and say for what.
    """
    workdir_root: str | None = None
    """Where the folders of episodes are made and removed. None: where the system keeps temporary files."""
    max_pending_leases: int = 1_000
    """Leases for schedulers outside that wait for room; more are refused for now."""
    retained_leases: int = 10_000
    """Ended leases, and releases of theirs, whose request ids are remembered."""
