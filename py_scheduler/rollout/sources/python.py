"""A data set that a function of the user's makes: `kind = "python"` in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.task import Task
from py_scheduler.errors import InvalidArgumentError, SchedulerError
from py_scheduler.rollout.sources.iterable import IterableSource
from py_scheduler.rollout.sources.row_tasks import RowTasks

if TYPE_CHECKING:
    from py_scheduler.rollout.sources.settings import SourceSettings

Factory = Callable[..., Iterable[Any]]
"""Called as factory(epoch, **options): gives the items of an epoch (from 0), the same ones whenever it is asked."""

_PROMPT_KEY = "prompt"


def python_source(settings: SourceSettings, factory: Factory) -> IterableSource:
    """The factory's items, epoch after epoch: tasks, or rows that become tasks as those of a file do.

    Raises InvalidArgumentError for a factory that gives nothing at first, or what can be no task.
    """
    items = _Items(settings, factory)
    source = IterableSource(settings.name, items.of_epoch, make_task=items.task, on_end=settings.on_end)
    # A faulty factory is told when the source is opened, not in the first step.
    beginning = source.state()
    if not source.take(1):
        raise InvalidArgumentError("gives no items", items.field)
    source.restore(beginning)
    return source


class _Items:
    """Numbered items, and the tasks that they become."""

    def __init__(self, settings: SourceSettings, factory: Factory) -> None:
        self.field = f"data set {settings.name!r}, factory"
        self._settings = settings
        self._factory = factory
        self._rows = RowTasks(settings, _PROMPT_KEY)

    def of_epoch(self, epoch: int) -> Iterator[tuple[int, Any]]:
        name = self._settings.factory
        try:
            items = self._factory(epoch, **self._settings.options)
            if not isinstance(items, Iterable):
                raise InvalidArgumentError(f"{name} returned {type(items).__name__}, which gives no items", self.field)
            yield from enumerate(islice(items, self._settings.limit))
        except SchedulerError:
            raise
        except Exception as error:  # a factory may raise anything
            reason = f"{name} failed in epoch {epoch}: {type(error).__name__}: {error}"
            raise InvalidArgumentError(reason, self.field) from error

    def task(self, numbered: tuple[int, Any]) -> Task:
        number, item = numbered
        if isinstance(item, Task):
            return item
        if isinstance(item, Mapping):
            return self._rows.task(item, f"{self._settings.name}/{number}", f"item {number}")
        reason = (
            f"item {number} of {self._settings.factory} is a {type(item).__name__}, must be a row (a mapping) or a Task"
        )
        raise InvalidArgumentError(reason, self.field)
