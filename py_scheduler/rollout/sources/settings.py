"""What the configuration says of a data set."""

from __future__ import annotations

from typing import Any

import msgspec

from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.rollout.sources.state import OnEnd

KINDS = ("jsonl", "parquet", "reasoning_gym", "python")
FILE_KINDS = ("jsonl", "parquet")


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set of a training loop or an eval."""

    name: str
    kind: str = "jsonl"
    """One of "jsonl", "parquet", "reasoning_gym" and "python"."""
    path: str = ""
    """Of the file; a relative one counts from the folder of the configuration."""
    factory: str = ""
    """Of kind "python": "module:function". Called as function(epoch, **options) for each epoch's rows or Tasks."""
    task_type: str
    repeat_times: int = 1
    """Samples of each task."""
    prompt_key: str | None = None
    """The key of the prompt (text) in a row. None: "prompt", or with reasoning_gym none."""
    metadata_keys: tuple[str, ...] | None = None
    """Which keys of a row become the task's metadata. None: all but the prompt's."""
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingCriteria = StoppingCriteria()
    shuffle: bool = False
    """Each epoch has an order of its own. A Parquet file is shuffled by row groups, and within them."""
    seed: int = 0
    """Of the order, and of the problems of reasoning_gym."""
    on_end: OnEnd = "restart"
    """At its end: with "restart" a new epoch begins, with "stop" there are fewer tasks than were asked for."""
    limit: int | None = None
    """Only the first rows count, so many of them."""
    weight: float = 1.0
    """Its share beside the others: of two data sets with weights 3 and 1, the first gives three tasks of four."""
    options: dict[str, Any] = {}
    """Of reasoning_gym (dataset, config, size), or the factory's own."""
