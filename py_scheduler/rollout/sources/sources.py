"""Where a loop's tasks come from: files, made problems, any iterable (`iterable_source`), mixtures (`multi_source`).

Invariants

- Settings and state fix what comes next, so a restored source goes on exactly as the saved one would have.
- A source's state is its epoch and its cursor. The order of an epoch is drawn from seed, name and epoch, so these two
  are its random state as well.
- A step that asks for more than is left gets a new epoch or, where `on_end` is "stop", what there is.
- Memory holds the order of one epoch (8 bytes a row), never the rows.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.limits import check_task_config, name_fault
from py_scheduler.errors import FailedPreconditionError, FieldViolation, InvalidArgumentError
from py_scheduler.rollout.sources.mixture import MultiDataSource, WeightedSource, weight_fault
from py_scheduler.rollout.sources.python import Factory, python_source
from py_scheduler.rollout.sources.reasoning_gym import reasoning_gym_rows
from py_scheduler.rollout.sources.row_tasks import RowTasks, task_config_of
from py_scheduler.rollout.sources.rows import JsonLines, ParquetRows
from py_scheduler.rollout.sources.settings import FILE_KINDS, KINDS, SourceSettings
from py_scheduler.rollout.sources.state import Position, read_position

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.data import DataSource, SourceState
    from py_scheduler.rollout.sources.rows import Rows

logger = logging.getLogger(__name__)


def check_source(settings: SourceSettings) -> Iterator[FieldViolation]:
    """What is wrong with settings, without opening anything."""
    if fault := name_fault(settings.name):
        yield FieldViolation("name", fault)
    if settings.kind not in KINDS:
        yield FieldViolation("kind", f"is {settings.kind!r}, must be one of {', '.join(KINDS)}")
    else:
        yield from _check_kind(settings)
    if fault := weight_fault(settings.weight):
        yield FieldViolation("weight", fault)
    if settings.limit is not None and settings.limit < 1:
        yield FieldViolation("limit", f"is {settings.limit}, must be at least 1")
    config = task_config_of(settings)
    # Tasks say these in their metadata, where they beat everything else; the rules are the same.
    yield from check_task_config(
        msgspec.structs.replace(config, sampling=settings.sampling, stopping=settings.stopping)
    )


def _check_kind(settings: SourceSettings) -> Iterator[FieldViolation]:
    if bool(settings.path) != (settings.kind in FILE_KINDS):
        rule = "a file" if settings.kind in FILE_KINDS else "none, it is made"
        yield FieldViolation("path", f"is {settings.path!r}: a {settings.kind} data set has {rule}")
    if "\0" in settings.path:
        yield FieldViolation("path", f"is {settings.path!r}: no file's name has a NUL")
    is_python = settings.kind == "python"
    if bool(settings.factory) != is_python:
        rule = 'one, "module:function"' if is_python else 'none, only kind "python" has'
        yield FieldViolation("factory", f"is {settings.factory!r}: a {settings.kind} data set has {rule}")
    if is_python and (settings.shuffle or settings.seed):
        field = "shuffle" if settings.shuffle else "seed"
        yield FieldViolation(field, "is the factory's matter in a python data set: give it by options")


def open_source(settings: SourceSettings, base_dir: Path, factory: Factory | None = None) -> DataSource:
    """factory: what `settings.factory` names, for kind "python".

    Raises InvalidArgumentError that names the data set and the line, column or key that is wrong.
    """
    _refuse_faults(settings)
    if settings.kind == "python":
        if factory is None:
            raise InvalidArgumentError("is not loaded: give open_source the function", f"{settings.name!r}, factory")
        return python_source(settings, factory)
    if settings.kind == "reasoning_gym":
        return RowSource(settings, reasoning_gym_rows(settings.options, settings.seed, settings.name))
    label = f"data set {settings.name!r}"
    if settings.options:
        raise InvalidArgumentError(f"a {settings.kind} data set takes none", f"{label}, options")
    path = base_dir / settings.path  # Anywhere: it stands in the operator's own file, and no client can name one.
    if settings.kind == "jsonl":
        return RowSource(settings, JsonLines(path, settings.name))
    return RowSource(settings, ParquetRows(path, settings.name, _columns(settings)))


def open_sources(
    settings: Sequence[SourceSettings],
    base_dir: Path,
    name: str = "mixture",
    *,
    factories: Mapping[str, Factory | None] | None = None,
) -> MultiDataSource:
    """Several data sets as one source, mixed by their weights. factories: of the python data sets, by name."""
    made = factories or {}
    opened = [
        WeightedSource(source=open_source(one, base_dir, made.get(one.name)), weight=one.weight) for one in settings
    ]
    return MultiDataSource(opened, name)


def _columns(settings: SourceSettings) -> list[str] | None:
    """Those of a Parquet file that are read; None for all."""
    if settings.metadata_keys is None:
        return None
    prompt_key = ParquetRows.prompt_key if settings.prompt_key is None else settings.prompt_key
    return [*dict.fromkeys([*([prompt_key] if prompt_key else []), *settings.metadata_keys])]


def _refuse_faults(settings: SourceSettings) -> None:
    faults = [FieldViolation(f"data set {settings.name!r}, {f.field}", f.description) for f in check_source(settings)]
    if faults:
        raise InvalidArgumentError(faults)


class RowSource:
    """Tasks from numbered rows, epoch after epoch. Implements `domain.training.data.DataSource`."""

    def __init__(self, settings: SourceSettings, rows: Rows) -> None:
        _refuse_faults(settings)
        self._settings = settings
        self._rows = rows
        self._tasks = RowTasks(settings, rows.prompt_key)
        self._count = len(rows) if settings.limit is None else min(settings.limit, len(rows))
        if not self._count:
            raise InvalidArgumentError("has no rows", f"data set {settings.name!r}")
        self._epoch = self._cursor = 0
        self._order = self._order_of(0)
        # A wrong key is told when the source is opened, not in the first step.
        self._task(0, 0)

    @property
    def name(self) -> str:
        return self._settings.name

    def take(self, count: int) -> list[Task]:
        """Raises InvalidArgumentError for a faulty row; the source then stands where it stood before the call."""
        epoch, cursor, order = self._epoch, self._cursor, self._order
        tasks: list[Task] = []
        while len(tasks) < count:
            if cursor == self._count:
                if self._settings.on_end == "stop":
                    logger.info("data set %r is at its end: %d of %d tasks taken", self.name, len(tasks), count)
                    break
                epoch, cursor = epoch + 1, 0
                order = self._order_of(epoch)
            tasks.append(self._task(order[cursor], epoch))
            cursor += 1
        self._epoch, self._cursor, self._order = epoch, cursor, order
        return tasks

    def state(self) -> SourceState:
        """Epoch and cursor, with what tells them from another source's."""
        return self._state(self._epoch, self._cursor)

    def restore(self, state: SourceState) -> None:
        """Goes to the state. Raises FailedPreconditionError when it is another source's, or the rows have changed."""
        position = read_position(state, self.name)
        own = self._state(position.epoch, position.cursor)
        if differing := [key for key in own if own[key] != state.get(key)]:
            told = ", ".join(f"{key} were {state.get(key)!r} and are {own[key]!r}" for key in differing)
            raise FailedPreconditionError(
                f"data set {self.name!r} has changed since its state was saved ({told}): bring it back, or begin anew; "
                "if every row still stands where it stood (a faulty line was mended), write what is now over what was "
                "in the saved state"
            )
        if position.epoch < 0 or not 0 <= position.cursor <= self._count:
            raise FailedPreconditionError(f"data set {self.name!r} has no row {position.cursor}: the state is damaged")
        self._epoch, self._cursor = position.epoch, position.cursor
        self._order = self._order_of(position.epoch)

    def _state(self, epoch: int, cursor: int) -> SourceState:
        settings = self._settings
        order = f"shuffled by seed {settings.seed}" if settings.shuffle else "as they stand"
        rows = f"the first {self._count} of {self._rows.fingerprint}"
        return msgspec.structs.asdict(Position(source=self.name, epoch=epoch, cursor=cursor, rows=rows, order=order))

    def _order_of(self, epoch: int) -> Sequence[int]:
        if not self._settings.shuffle:
            return range(self._count)
        drawn = random.Random(f"{self._settings.seed}/{self.name}/{epoch}")
        blocks = [range(block.start, min(block.stop, self._count)) for block in self._rows.blocks]
        drawn.shuffle(blocks)
        order = array("Q")
        for block in blocks:
            numbers = array("Q", block)
            drawn.shuffle(numbers)
            order.extend(numbers)
        return order

    def _task(self, row_no: int, epoch: int) -> Task:
        where = self._rows.where(row_no)
        return self._tasks.task(self._rows.row(row_no), f"{self.name}/{epoch}/{row_no}", where)
