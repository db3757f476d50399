"""How a task names a problem of reasoning-gym: the data source writes the name, the handler makes the problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from py_scheduler.domain.task import Task

METADATA_KEY = "reasoning_gym"
PROBLEMS_PER_SEED = 1_000
MAX_SEED = 2**32 - 1


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names one problem; it is `task.metadata["reasoning_gym"]`.

    In most data sets problem `index` of a seed is problem 0 of seed + index.
    """

    dataset: Annotated[str, msgspec.Meta(max_length=64)]
    config: dict[str, Any] = {}
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] = 0
    index: Annotated[int, msgspec.Meta(ge=0, lt=PROBLEMS_PER_SEED)] = 0


def read_problem(task: Task) -> Problem:
    """Raises InvalidArgumentError when the task names no problem."""
    field = f"metadata.{METADATA_KEY}"
    if METADATA_KEY not in task.metadata:
        raise InvalidArgumentError("is missing: make tasks with reasoning_gym_tasks", field)
    try:
        return msgspec.convert(task.metadata[METADATA_KEY], Problem)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(str(error), field) from error


def numbered_problem(dataset: str, config: dict[str, Any], seed: int, number: int) -> Problem:
    """Problem `number` (from 0, without an end) of a data set from `seed` on."""
    chunk, index = divmod(number, PROBLEMS_PER_SEED)
    return Problem(dataset=dataset, config=config, seed=seed + chunk * PROBLEMS_PER_SEED, index=index)
