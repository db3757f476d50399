"""Workloads that were written down: a table of samples, or what a server recorded of a run.

seconds,group,step,...          CSV or Parquet: a row to each sample
eval_details/3.jsonl            what a step or an eval wrote of its samples
py-scheduler journal export     every event of a server, one JSON object to a line
"""

from __future__ import annotations

import csv
import difflib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.files.parquet import load_pyarrow
from py_scheduler.simulation.workload import SimulatedStep, SimulatedTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    _Placed = tuple[str, "TraceRow"]
    """A row, and where it stands."""

logger = logging.getLogger(__name__)

SUFFIXES = (".csv", ".parquet", ".jsonl")
_ALIKE = 0.75
"""How alike two names are of which one is a slip of the other."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sample. Rows of one namespace, step and group are a task; a row without a group is one by itself."""

    seconds: float
    """Of its run."""
    eval_seconds: float = 0.0
    group: str = ""
    step: BatchId = 0
    at_seconds: float | None = None
    """When its step was submitted, from the beginning. All rows of a step that name it name the same; none: at 0."""
    evaluator_id: str = ""
    is_eval: bool = False
    namespace: str = DEFAULT_NAMESPACE


class _Step:
    """What is known of a step while its rows come."""

    def __init__(self, key: SubmissionKey) -> None:
        self.key = key
        self.at_seconds: float | None = None
        self.groups: dict[tuple[bool, str], list[TraceRow]] = {}

    def add(self, row: TraceRow, where: str) -> None:
        """Raises InvalidArgumentError when it contradicts those before."""
        if self.at_seconds is None:
            self.at_seconds = row.at_seconds
        elif row.at_seconds not in {None, self.at_seconds}:
            said = f"at_seconds is {row.at_seconds:g}, and {self.at_seconds:g} in a row of the same step before"
            raise InvalidArgumentError(f"{where}: {said}", "workload")
        rows = self.groups.setdefault((row.is_eval, row.group or f"\0{len(self.groups)}"), [])
        if rows and rows[0].evaluator_id != row.evaluator_id:
            said = (
                f"evaluator_id is {row.evaluator_id!r}, and {rows[0].evaluator_id!r} in a row of the same group before"
            )
            raise InvalidArgumentError(f"{where}: {said}", "workload")
        rows.append(row)

    def made(self) -> SimulatedStep:
        tasks: tuple[list[SimulatedTask], list[SimulatedTask]] = ([], [])
        for (is_eval, _), rows in self.groups.items():
            eval_seconds = tuple([row.eval_seconds for row in rows])
            tasks[is_eval].append(
                SimulatedTask(
                    tuple([row.seconds for row in rows]),
                    eval_seconds if any(eval_seconds) else (),
                    rows[0].evaluator_id,
                )
            )
        return _submitted(self.key, self.at_seconds or 0.0, tasks)


def _submitted(
    key: SubmissionKey, at_seconds: float, tasks: tuple[list[SimulatedTask], list[SimulatedTask]]
) -> SimulatedStep:
    """tasks: those to train on, and evals."""
    return SimulatedStep(*tasks, at_seconds=at_seconds, batch_id=key.batch_id, namespace=key.namespace)


def is_trace(workload: str) -> bool:
    """Whether this names a file that `read_trace` reads, and not a distribution."""
    return ":" not in workload and Path(workload).suffix in SUFFIXES


def read_trace(path: Path) -> list[SimulatedStep]:
    """The steps of a file, in the order in which they were submitted.

    Raises InvalidArgumentError that says where the fault is; FailedPreconditionError for Parquet without pyarrow.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidArgumentError(f"{path} is none of {', '.join(SUFFIXES)}", "workload")
    try:
        match path.suffix:
            case ".csv":
                steps = _steps(_from_csv(path))
            case ".parquet":
                steps = _steps(_from_parquet(path))
            case _:
                steps = _from_lines(path)
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror or error}", "workload") from error
    if not steps:
        raise InvalidArgumentError(f"{path} has no sample that ended", "workload")
    return steps


def _steps(rows: Iterable[_Placed]) -> list[SimulatedStep]:
    steps: dict[SubmissionKey, _Step] = {}
    for where, row in rows:
        key = SubmissionKey(row.step, row.namespace)
        step = steps.get(key)
        if step is None:
            step = steps[key] = _Step(key)
        step.add(row, where)
    return [step.made() for step in sorted(steps.values(), key=lambda step: step.at_seconds or 0.0)]


def _from_csv(path: Path) -> Iterator[_Placed]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            columns = [name.strip() for name in next(lines, [])]
            _check_columns(columns, f"{path}, line 1")
            for row in lines:
                if not row:
                    continue
                where = f"{path}, line {lines.line_num}"
                if len(row) != len(columns):
                    raise InvalidArgumentError(
                        f"{where}: there are {len(row)} values, and {len(columns)} columns in line 1", "workload"
                    )
                texts = {name: text.strip() for name, text in zip(columns, row, strict=True)}
                said = {name: _step_of(text) if name == "step" else text for name, text in texts.items() if text}
                yield where, _row(said, where)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path}, behind line {lines.line_num}: {error}", "workload") from error


def _check_columns(columns: Sequence[str], where: str) -> None:
    """Raises InvalidArgumentError for a table without durations, and for names that look like a slip. Columns of other
    names are somebody else's.
    """
    known = TraceRow.__struct_fields__
    found = ", ".join(columns) or "none"
    others = [name for name in dict.fromkeys(columns) if name not in known]
    for name in others:
        if near := _meant(name, [one for one in known if one not in columns]):
            raise InvalidArgumentError(
                f"{where}: there is no column {name!r}: did you mean {near!r}? The columns are {found}", "workload"
            )
    if "seconds" not in columns:
        raise InvalidArgumentError(f"{where}: the column 'seconds' is missing. The columns are {found}", "workload")
    if twice := [name for name in known if columns.count(name) > 1]:
        raise InvalidArgumentError(f"{where}: the column {twice[0]!r} is there twice", "workload")
    if others:
        logger.warning("%s: columns that say nothing to a simulation: %s", where, ", ".join(map(repr, others)))


def _meant(name: str, known: Sequence[str]) -> str:
    """The column whose name this is, but for a slip; empty if it looks like none."""
    for one in known:
        # That both are seconds makes `wait_seconds` no slip of `eval_seconds`.
        stems = name.casefold(), one
        if all(stem.endswith("_seconds") for stem in stems):
            stems = stems[0].removesuffix("_seconds"), stems[1].removesuffix("_seconds")
        if difflib.SequenceMatcher(None, *stems).ratio() >= _ALIKE:
            return one
    return ""


def _step_of(text: str) -> BatchId:
    return int(text) if text.isdecimal() else text


def _from_parquet(path: Path) -> Iterator[_Placed]:
    _, pq = load_pyarrow("a workload in Parquet")
    number = 0
    try:
        table = pq.ParquetFile(path)
        _check_columns(table.schema_arrow.names, str(path))
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                where = f"{path}, row {number}"
                yield where, _row({name: value for name, value in row.items() if value is not None}, where)
    except ValueError as error:  # pyarrow's own, of a file that is none.
        raise InvalidArgumentError(f"{path} is not Parquet: {error}", "workload") from error


def _row(said: Mapping[str, Any], where: str) -> TraceRow:
    try:
        row = msgspec.convert(said, TraceRow, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(f"{where}: {error}", "workload") from error
    for name in ("seconds", "eval_seconds", "at_seconds"):
        value: float | None = getattr(row, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidArgumentError(f"{where}: {name} is {value:g}, must be a number from 0 on", "workload")
    return row


def _from_lines(path: Path) -> list[SimulatedStep]:
    lines = _objects(path)
    first = next(lines, None)
    if first is None:
        return []
    if "event" in first:
        return _Recorded(path).steps(_again(first, lines))
    return _steps(sorted(_from_details(path, _again(first, lines)), key=lambda placed: _place(placed[1].group)))


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise InvalidArgumentError(f"{path}, line {number}: {error}", "workload") from error


def _again(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _place(task_id: str) -> tuple[str, int]:
    """Where a task stood in its submission: lines are in the order of ends."""
    submission, _, number = task_id.rpartition("-")
    return submission, int(number) if number.isdecimal() else 0


def _from_details(path: Path, lines: Iterable[dict[str, Any]]) -> Iterator[_Placed]:
    for number, line in enumerate(lines, 1):
        said = {
            "group": line.get("task_id"),
            "seconds": line.get("run_seconds"),
            "eval_seconds": line.get("eval_seconds"),
        }
        where = f"{path}, entry {number}"
        yield where, _row({name: value for name, value in said.items() if value is not None}, where)


class _Recorded:
    """Events of a server: each submit is a step, at its moment and under its batch_id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: float | None = None
        self._submits: list[tuple[SubmissionKey, float, list[str]]] = []
        self._tasks: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, dict[int, tuple[float, float]]] = {}

    def steps(self, events: Iterable[dict[str, Any]]) -> list[SimulatedStep]:
        for event in events:
            try:
                if event["event"] == "TasksAccepted":
                    self._accepted(event)
                elif event["event"] == "AttemptEnded":
                    self._ended(event)
            except (KeyError, TypeError) as error:
                raise InvalidArgumentError(
                    f"{self._path}, event {event.get('sequence')}: is not as `journal export` writes it ({error})",
                    "workload",
                ) from error
        return [step for submit in self._submits if (step := self._step(*submit)) is not None]

    def _accepted(self, event: dict[str, Any]) -> None:
        if self._began is None:
            self._began = event["unix_seconds"]
        ids = []
        for accepted in event["tasks"]:
            ids.append(accepted["task_id"])
            self._tasks[accepted["task_id"]] = accepted["task"]["config"]
        key = SubmissionKey(event["batch_id"], event["namespace"])
        self._submits.append((key, max(event["unix_seconds"] - self._began, 0.0), ids))

    def _ended(self, event: dict[str, Any]) -> None:
        ended = self._seconds.setdefault(event["task_id"], {})
        for sample in event.get("samples", ()):
            timings = sample["timings"]
            ended[sample["sample_no"]] = timings["run_seconds"], timings["eval_seconds"]

    def _step(self, key: SubmissionKey, at_seconds: float, ids: list[str]) -> SimulatedStep | None:
        """None when none of its samples has ended."""
        tasks: tuple[list[SimulatedTask], list[SimulatedTask]] = ([], [])
        for task_id in ids:
            if ended := self._seconds.get(task_id):
                config = self._tasks[task_id]
                run, scoring = zip(*[ended[number] for number in sorted(ended)], strict=True)
                task = SimulatedTask(run, scoring if any(scoring) else (), config["task_type"])
                tasks[bool(config.get("is_eval"))].append(task)
        return _submitted(key, at_seconds, tasks) if any(tasks) else None
