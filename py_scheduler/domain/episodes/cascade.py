"""Which sampling and stopping settings an episode gets, field by field, most specific level first.

Levels: the data set (`metadata["_dataset_cfg"]`), the task, the EvaluatorSpec, the server. Source: seed 1, section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATASET_CONFIG_KEY = "_dataset_cfg"


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a data set says about all of its samples."""

    name: str = ""
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingCriteria = StoppingCriteria()


NO_DATASET_CONFIG = DatasetConfig()
_SILENT = (SamplingParams(), StoppingCriteria())


def dataset_config(metadata: Mapping[str, Any]) -> DatasetConfig:
    """Reads `metadata["_dataset_cfg"]`. Raises InvalidArgumentError that names the data set and the key."""
    raw = metadata.get(DATASET_CONFIG_KEY)
    if raw is None:
        return NO_DATASET_CONFIG
    try:
        return msgspec.convert(raw, DatasetConfig)
    except msgspec.ValidationError as error:
        name = raw.get("name", "") if isinstance(raw, dict) else ""
        raise InvalidArgumentError(f"data set {name!r}: {error}", f"metadata.{DATASET_CONFIG_KEY}") from error


def resolve_sampling(levels: Sequence[SamplingParams]) -> SamplingParams:
    """The first level that says something wins, for each field by itself."""
    return SamplingParams(**_first_said(levels, SamplingParams.__struct_fields__))


def resolve_stopping(levels: Sequence[StoppingCriteria]) -> StoppingCriteria:
    """The first level that says something wins, for each field by itself."""
    return StoppingCriteria(**_first_said(levels, StoppingCriteria.__struct_fields__))


def _first_said(levels: Sequence[msgspec.Struct], fields: Sequence[str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for level in reversed(levels):
        if level in _SILENT:
            continue  # Most levels are.
        values = zip(fields, msgspec.structs.astuple(level), strict=True)
        said |= {field: value for field, value in values if value is not None}
    return said
