"""Tasks from any Python iterable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.task import Task
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.sources.state import OnEnd, Position, read_position

if TYPE_CHECKING:
    from py_scheduler.domain.training.data import SourceState

logger = logging.getLogger(__name__)


class IterableSource:
    """Tasks from any iterable, or from a factory that gives one for each epoch (from 0). Implements `DataSource`.

    items: tasks, or whatever `make_task` turns into one. A factory or a collection can be rewound; an iterator cannot:
    its source ends with it, and restoring can only skip forward. on_end: None for "restart" where that is possible.
    """

    def __init__(
        self,
        name: str,
        items: Iterable[Any] | Callable[[int], Iterable[Any]],
        *,
        make_task: Callable[[Any], Task] | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self._name = name
        self._make_task = make_task
        self._is_rewindable = not isinstance(items, Iterator)
        if on_end == "restart" and not self._is_rewindable:
            raise InvalidArgumentError(
                "an iterator cannot be restarted: give a factory, a collection or on_end='stop'", f"data set {name!r}"
            )
        self._on_end: OnEnd = on_end or ("restart" if self._is_rewindable else "stop")
        self._open: Callable[[int], Iterable[Any]] = items if callable(items) else lambda _: items
        self._epoch = self._cursor = 0
        self._items = iter(self._open(0))

    @property
    def name(self) -> str:
        return self._name

    def take(self, count: int) -> list[Task]:
        """Raises InvalidArgumentError for an item that is no task, and for a source without items."""
        tasks: list[Task] = []
        while len(tasks) < count:
            tasks += [self._next_task(item) for item in islice(self._items, count - len(tasks))]
            if len(tasks) < count:
                if self._on_end == "stop":
                    logger.info("data set %r is at its end: %d of %d tasks taken", self.name, len(tasks), count)
                    break
                if not self._cursor:
                    raise InvalidArgumentError(f"gives no items in epoch {self._epoch}", f"data set {self.name!r}")
                self._begin(self._epoch + 1)
        return tasks

    def state(self) -> SourceState:
        """Epoch and cursor."""
        return msgspec.structs.asdict(Position(source=self.name, epoch=self._epoch, cursor=self._cursor))

    def restore(self, state: SourceState) -> None:
        """Goes to the state by running through the items before it.

        Raises FailedPreconditionError when there are fewer, and for an iterator that stands behind it already.
        """
        position = read_position(state, self.name)
        if self._is_rewindable:
            self._begin(position.epoch)
        elif position.epoch != self._epoch or position.cursor < self._cursor:
            raise FailedPreconditionError(
                f"data source {self.name!r} cannot go back from item {self._cursor} to {position.cursor}: an iterator "
                "has no way back, give a factory or a collection"
            )
        else:
            logger.warning(
                "data source %r is an iterator, so its first %d items are skipped; give a factory if it does not begin "
                "where it began before",
                self.name,
                position.cursor - self._cursor,
            )
        ahead = position.cursor - self._cursor
        skipped = sum(1 for _ in islice(self._items, ahead))
        self._cursor += skipped
        if skipped < ahead:
            raise FailedPreconditionError(
                f"data source {self.name!r} gives {self._cursor} items, but {position.cursor} were taken when the "
                "state was saved: bring the same items back, or begin anew"
            )

    def _begin(self, epoch: int) -> None:
        self._epoch, self._cursor = epoch, 0
        self._items = iter(self._open(epoch))

    def _next_task(self, item: Any) -> Task:
        task = item if self._make_task is None else self._make_task(item)
        if not isinstance(task, Task):
            raise InvalidArgumentError(
                f"is a {type(task).__name__}, no Task: give make_task", f"data set {self.name!r}, item {self._cursor}"
            )
        self._cursor += 1
        if self._epoch and task.client_key:
            # Keys are unique among live tasks, and a step may reach over the end of an epoch.
            return msgspec.structs.replace(task, client_key=f"{task.client_key}@{self._epoch}")
        return task
