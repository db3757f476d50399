"""Tasks, workflows and experiences for those who have no Trinity; the names are Trinity's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.task import BatchId
from py_scheduler.domain.values.plain import plain_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class EID(msgspec.Struct):
    """Where an experience comes from. run: of the task's `repeat_times`, from 0."""

    batch: BatchId = ""
    task: BatchId = ""
    run: int = 0
    step: int = 0


class Experience(msgspec.Struct):
    """What a run leaves for training. Token ids, log-probs and what is in `info` are the workflow's own business.

    metrics: by name; a name may end in how it is to be put together (`domain.values.metrics`).
    """

    eid: EID = msgspec.field(default_factory=EID)
    tokens: list[int] = []
    prompt_length: int = 1
    logprobs: list[float] = []
    reward: float | None = None
    info: dict[str, Any] = {}
    metrics: dict[str, float] = {}

    @classmethod
    def serialize_many(cls, experiences: Iterable[Experience]) -> bytes:
        """Arrays of numpy and torch become lists. Raises TypeError, ValueError for what could not be read again."""
        payload = msgspec.msgpack.encode(list(experiences), enc_hook=plain_value)
        cls.deserialize_many(payload)
        return payload

    @classmethod
    def deserialize_many(cls, payload: bytes) -> list[Experience]:
        """Raises msgspec.DecodeError."""
        return msgspec.msgpack.decode(payload, type=list[cls])  # type: ignore[valid-type]


@dataclass
class RolloutArgs:
    """n: how many runs the workflow is asked for; the scheduler sets it."""

    n: int = 1


@dataclass
class Task:
    """One prompt, the workflow that runs it, and how often. batch_id and task_id are set by the scheduler."""

    workflow: type[Workflow]
    repeat_times: int | None = 1
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    raw_task: Any = None
    is_eval: bool = False
    batch_id: BatchId = ""
    task_id: BatchId = ""


class Workflow:
    """Subclass it and override `run` or, with `is_async`, `run_async`; each returns experiences, one at least.

    can_repeat: one call makes all runs of a sub-task, after `set_repeat_times`; each sets its experiences' run ids.
    can_reset: one instance may run several tasks, after `reset`. state: what to show of it in the runners' table.
    """

    can_reset = False
    can_repeat = False
    is_async = False

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Sequence[Any] = ()) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models
        self.state: dict[str, Any] = {}

    def reset(self, task: Task) -> None:
        """Gets ready for another task."""
        raise NotImplementedError

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """How many runs the next call is to make; their ids count from `run_id_base`."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Plays in a thread of its own."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Plays in the event loop."""
        raise NotImplementedError
