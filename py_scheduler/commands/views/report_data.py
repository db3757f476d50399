"""What `py-scheduler report` finds below a folder: the summaries of steps and evals, and what could not be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.results import Outcome
from py_scheduler.errors import FailedPreconditionError, NotFoundError, SchedulerError
from py_scheduler.rollout.files.iteration_summary import (
    DETAILS_FOLDER,
    PLACEMENT_SUFFIX,
    SUMMARY_SUFFIX,
    IterationSummary,
    SlowSample,
    file_stem,
    read_summary,
    summary_paths,
)
from py_scheduler.rollout.files.paths import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_CHUNK_BYTES = 1 << 20


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Both in order of rollout_id. troubles: a line for each file that could not be read."""

    training: tuple[IterationSummary, ...] = ()
    evals: tuple[IterationSummary, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[IterationSummary, ...]:
        return self.training + self.evals


def read_report(folder: Path) -> Report:
    """Raises NotFoundError when there is no summary that can be read."""
    summaries, troubles = [], []
    paths = summary_paths(folder)
    for path in paths:
        try:
            summaries.append(_read(path))
        except (SchedulerError, OSError) as error:
            troubles.append(str(error))
    troubles += _unfinished(paths[0].parent, paths) if paths else ()
    if not summaries:
        reason = "; ".join(troubles) or (
            f"a rollout writes {DETAILS_FOLDER}/*{SUMMARY_SUFFIX} into its artifact folder"
            if folder.is_dir()
            else "no such folder"
        )
        raise NotFoundError(f"there is no summary to report in {folder}: {reason}")
    summaries.sort(key=lambda summary: summary.rollout_id)
    return Report(
        training=tuple(summary for summary in summaries if summary.kind == "train"),
        evals=tuple(summary for summary in summaries if summary.kind == "eval"),
        troubles=tuple(troubles),
    )


def _read(path: Path) -> IterationSummary:
    """Raises FailedPreconditionError: what is foreign has another name than what it holds would have."""
    summary = read_summary(path)
    named = file_stem(summary.kind, summary.rollout_id) + SUMMARY_SUFFIX
    if path.name != named:
        raise FailedPreconditionError(f"{path} is no summary of an iteration: what it holds would be named {named}")
    return summary


def _unfinished(folder: Path, summaries: Iterable[Path]) -> Iterator[str]:
    """Files of samples whose iteration was broken off before its summary, or is still under way."""
    summed = {path.name.removesuffix(SUMMARY_SUFFIX) for path in summaries}
    for path in sorted(folder.glob("*.jsonl")):
        if not path.name.endswith(PLACEMENT_SUFFIX) and path.stem not in summed:
            try:
                with open_regular(path) as file:
                    lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))
            except OSError as error:
                yield str(error)
                continue
            yield f"{path}: {lines} samples without a summary: broken off, or still under way"


def outcomes_seen(summaries: Iterable[IterationSummary]) -> list[str]:
    """Every outcome that occurred, in the order of Outcome; what a newer version may have added comes last."""
    seen = {name for summary in summaries for name, count in summary.total.outcomes.items() if count}
    known = [outcome.value for outcome in Outcome]
    return [name for name in known if name in seen] + sorted(seen.difference(known))


def slowest_samples(summaries: Iterable[IterationSummary], count: int) -> list[tuple[IterationSummary, SlowSample]]:
    """The slowest of all, slowest first, each with the iteration that it is from."""
    found = [(summary, sample) for summary in summaries for sample in summary.slowest]
    return sorted(found, key=lambda pair: -pair[1].held_seconds)[:count]


def iteration_name(summary: IterationSummary) -> str:
    return f"eval {summary.rollout_id}" if summary.kind == "eval" else str(summary.rollout_id)
