"""The answer to "why is this task still waiting?"."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from py_scheduler.domain.leases import NodeShortageView
from py_scheduler.domain.task import BatchId


class TaskPhase(StrEnum):
    """Where a task stands: the state of its foremost attempt, that its samples are there and are scored as a group,
    or that it had its TaskDone.
    """

    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    SCORING = "scoring"
    DONE = "done"


class EntryAhead(msgspec.Struct, frozen=True, kw_only=True):
    """What is served before. tokens: what it needs at once. A lease of another scheduler has no tasks."""

    tokens: int
    waiting_seconds: float
    bypassed: int
    namespace: str = ""
    batch_id: BatchId | None = None
    tasks: int = 0


class TaskWait(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with attempts of the task that waits for room.

    bypassed: how often something later took room that it could have used; that may happen max_bypass times.
    wanted_tokens: needed at once; free_tokens, max_tokens: of the pool now and when empty, 0 without a pool.
    nodes: the freest first; ahead: in the order of service. Of both only the first, how many there are stands beside.
    """

    evaluator_id: str
    tasks: int
    attempts: int
    reason: str
    waiting_seconds: float
    bypassed: int
    max_bypass: int
    wanted_tokens: int
    free_tokens: int = 0
    max_tokens: int = 0
    nodes: tuple[NodeShortageView, ...] = ()
    nodes_in_all: int = 0
    ahead: tuple[EntryAhead, ...] = ()
    ahead_in_all: int = 0


class TaskExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """How a task stands, and each wait of its attempts: several when some of them are tried again."""

    task_id: str
    submission_id: str
    batch_id: BatchId
    phase: TaskPhase
    queued_attempts: int = 0
    leased_attempts: int = 0
    running_attempts: int = 0
    waits: tuple[TaskWait, ...] = ()
