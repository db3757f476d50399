"""What is told of one iteration or one eval: `train_{id}.summary.json`, `{id}.summary.json`.

Invariant: an older or newer reader finds what both know: every field has a default, unknown ones are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.rollout.files.paths import open_regular

if TYPE_CHECKING:
    from pathlib import Path

DETAILS_FOLDER = "eval_details"
SUMMARY_SUFFIX = ".summary.json"
PLACEMENT_SUFFIX = ".placement.jsonl"
_MAX_BYTES = 64 << 20
Kind = Literal["train", "eval"]


class ToldContext(msgspec.Struct, frozen=True, kw_only=True):
    """The IterationContext, as far as a reader knows it."""

    beta: float = 0.0
    t_max: int = 0


class RewardStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model results alone. std: of the population."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    max: float = 0.0


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Sample·seconds: waiting for admission, generating, in run beside that (tools), in eval."""

    wait_seconds: float = 0.0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    verify_seconds: float = 0.0


class DatasetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One data set's samples, or all of them.

    outcomes: samples by outcome class. accuracy: solved model results, of all; None without any. pass_at_k: by k, as
    text. tokens: token ids by source ("environment", "student", "teacher").
    """

    groups: int = 0
    samples: int = 0
    model_results: int = 0
    outcomes: dict[str, int] = {}
    accuracy: float | None = None
    pass_at_k: dict[str, float] = {}
    reward: RewardStats = RewardStats()
    time: TimeSplit = TimeSplit()
    tokens: dict[str, int] = {}

    @property
    def teacher_share(self) -> float | None:
        """The teacher's part of the generated tokens; None when none was generated."""
        generated = sum(count for source, count in self.tokens.items() if source != "environment")
        return self.tokens.get("teacher", 0) / generated if generated else None


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on a node. held_seconds: sample·seconds; gpu_seconds: the same by GPU id, as text."""

    samples: int = 0
    held_seconds: float = 0.0
    gpu_seconds: dict[str, float] = {}


class SlowSample(msgspec.Struct, frozen=True, kw_only=True):
    """One of the samples that held their room longest (in run and eval)."""

    task_id: str = ""
    sample_no: int = 0
    dataset: str = ""
    outcome: str = ""
    node_ip: str = ""
    held_seconds: float = 0.0
    generate_seconds: float = 0.0
    turns: int = 0


class IterationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration, or one eval.

    context: what its episodes were told; None when nothing. reuse: the ReuseAction that its samples came by.
    nodes: by address. filters: in their order. metrics: `eval/{name}/accuracy` and the like. dummies: samples of
    which nothing can be learnt, so that a dummy takes their place.
    """

    kind: Kind = "train"
    rollout_id: int = 0
    context: ToldContext | None = None
    reuse: str = ""
    started_unix_seconds: float = 0.0
    ended_unix_seconds: float = 0.0
    total: DatasetSummary = DatasetSummary()
    datasets: dict[str, DatasetSummary] = {}
    nodes: dict[str, NodeUse] = {}
    slowest: tuple[SlowSample, ...] = ()
    filters: tuple[FilterReport, ...] = ()
    metrics: dict[str, float] = {}
    dummies: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def elapsed_seconds(self) -> float:
        return max(0.0, self.ended_unix_seconds - self.started_unix_seconds)


def file_stem(kind: Kind, rollout_id: int) -> str:
    """What the names of its files begin with."""
    return f"train_{rollout_id}" if kind == "train" else str(rollout_id)


def read_summary(path: Path) -> IterationSummary:
    """Raises FailedPreconditionError when it is none."""
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=IterationSummary)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise FailedPreconditionError(f"{path} is no summary of an iteration: {error}") from error


def summary_paths(folder: Path) -> list[Path]:
    """The summaries in a loop's folder, or in the `eval_details` of one, by name."""
    details = folder / DETAILS_FOLDER
    return sorted((details if details.is_dir() else folder).glob(f"*{SUMMARY_SUFFIX}"))
