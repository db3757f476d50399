"""Where tasks come from. A source is asked for so many tasks, and can say where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from py_scheduler.domain.task import Task

SourceState = dict[str, Any]
"""JSON values that bring a source of the same settings back to where it stood: its cursor and its random state."""


class DataSource(Protocol):
    """Tasks in an order that its settings and its state fix: the same state gives the same tasks."""

    @property
    def name(self) -> str:
        """Names it in reports and metrics; unique among the sources of one loop."""
        ...

    def take(self, count: int) -> list[Task]:
        """The next tasks: `count` of them, fewer only at the end of a source that does not restart."""
        ...

    def state(self) -> SourceState:
        """Where the source stands: JSON values."""
        ...

    def restore(self, state: SourceState) -> None:
        """Goes back to a state that `state` gave. Raises FailedPreconditionError when it is another source's."""
        ...
