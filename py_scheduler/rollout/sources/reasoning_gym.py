"""Problems of reasoning-gym as the rows of a data set: row n is always the same problem. Made where they are run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.training.problems import MAX_SEED, METADATA_KEY, numbered_problem
from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_SIZE = 100_000


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dataset: str
    config: dict[str, Any] = {}
    size: int = DEFAULT_SIZE


def reasoning_gym_rows(options: Mapping[str, Any], seed: int, name: str) -> ReasoningGymRows:
    """options: `dataset`, its `config`, and `size`, the problems of an epoch. Raises InvalidArgumentError."""
    field = f"data set {name!r}, options"
    try:
        said = msgspec.convert(options, _Options)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(str(error), field) from error
    if said.size < 1:
        raise InvalidArgumentError(f"is {said.size}, must be at least 1", f"{field}.size")
    if not 0 <= seed <= MAX_SEED - said.size:
        raise InvalidArgumentError(f"is {seed}, must be from 0 to {MAX_SEED} less the size", f"data set {name!r}, seed")
    return ReasoningGymRows(said.dataset, said.config, seed, said.size)


class ReasoningGymRows:
    """`size` problems of one data set. A row names its problem; question and answer are made by the handler."""

    prompt_key = ""

    def __init__(self, dataset: str, config: Mapping[str, Any], seed: int, size: int) -> None:
        self._dataset = dataset
        self._config = dict(config)
        self._seed = seed
        self._size = size

    def __len__(self) -> int:
        return self._size

    @property
    def blocks(self) -> Sequence[range]:
        return [range(self._size)]

    @property
    def fingerprint(self) -> str:
        config = msgspec.json.encode(self._config, order="sorted").decode()
        return f"{self._size} problems of {self._dataset} {config} from seed {self._seed}"

    def row(self, row_no: int) -> Mapping[str, Any]:
        problem = numbered_problem(self._dataset, self._config, self._seed, row_no)
        return {METADATA_KEY: msgspec.to_builtins(problem)}

    def where(self, row_no: int) -> str:
        return f"{self._dataset}, problem {row_no}"
