"""Named points of a server at which it fails on demand.

The package knows nothing of them: a process started as `python -m tests.faults.served` wraps the methods below with
what FAILPOINTS says, before it serves. So a normal run has neither a branch for them nor a variable that could switch
them on.

    FAILPOINTS = "before_commit:kill@3, after_ack:wait=/path/of/a/fifo"

Each method has a point before and one behind it; `in_commit` lies between a transaction's last statement and its
commit. `@3`: the third time that it is reached, and only then; without it the first.

Actions: `kill` (SIGKILL), `exit` (hard, status 70), `stop` (SIGSTOP, until somebody continues it), `raise` (OSError,
as a failing disk would), `wait=FIFO` (the thread waits until somebody has opened the other end of the FIFO, and goes on
when that end is closed), and `note=FILE` (writes the point's name there).
"""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.sqlite_journal.store import JournalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "FAILPOINTS"
EXIT_STATUS = 70

METHODS = {
    "restart": "py_scheduler.scheduler.log.event_log:EventLog.start",
    "submit": "py_scheduler.scheduler.intake:Intake.plan",
    "begin": "py_scheduler.scheduler.supervisor:Supervisor.begin",
    "launch": "py_scheduler.scheduler.supervisor:Supervisor.launch",
    "grant": "py_scheduler.scheduler.leases.manager:LeaseManager._grant",
    "commit": "py_scheduler.adapters.sqlite_journal.store:JournalStore.put_frame",
    "mark": "py_scheduler.adapters.sqlite_journal.files:HighWater.write",
    "ack": "py_scheduler.adapters.sqlite_journal.writer:JournalWriter._report",
    "publish": "py_scheduler.scheduler.log.event_log:EventLog._on_commit",
    "snapshot": "py_scheduler.adapters.sqlite_journal.store:JournalStore.put_snapshots",
    "checkpoint": "py_scheduler.adapters.sqlite_journal.store:JournalStore.set_checkpoint",
    "discard": "py_scheduler.adapters.sqlite_journal.store:JournalStore.discard_frames",
    "wal": "py_scheduler.adapters.sqlite_journal.store:JournalStore.move_wal",
}
"""What is wrapped: `before_X` and `after_X` are the points. A name that is no longer there is an error at the start."""

IN_COMMIT = "in_commit"
POINTS = (*(f"{when}_{name}" for name in METHODS for when in ("before", "after")), IN_COMMIT)
ACTIONS = ("kill", "exit", "stop", "raise", "wait", "note")

_ORDER = re.compile(r"(?P<point>\w+):(?P<action>\w+)(=(?P<argument>[^@,]+))?(@(?P<count>\d+))?")


class Order(msgspec.Struct, frozen=True):
    """What happens at a point, and at which of the times that it is reached (from 1)."""

    point: str
    action: str
    argument: str = ""
    count: int = 1

    def __str__(self) -> str:
        argument = f"={self.argument}" if self.argument else ""
        return f"{self.point}:{self.action}{argument}@{self.count}"


def parse(text: str) -> list[Order]:
    """Raises ValueError for what is no order, or names no point or action."""
    orders = []
    for part in filter(None, map(str.strip, text.split(","))):
        found = _ORDER.fullmatch(part)
        if found is None or found["point"] not in POINTS or found["action"] not in ACTIONS:
            raise ValueError(f"{VARIABLE}: {part!r} is not POINT:ACTION[=ARGUMENT][@COUNT] of a known point and action")
        orders.append(Order(found["point"], found["action"], found["argument"] or "", int(found["count"] or 1)))
    return orders


def act(order: Order) -> None:
    if order.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif order.action == "exit":
        os._exit(EXIT_STATUS)
    elif order.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order.action == "raise":
        raise OSError(errno.EIO, f"failpoint {order.point}")
    elif order.action == "wait":
        Path(order.argument).read_bytes()
    else:
        with Path(order.argument).open("a") as file:
            file.write(f"{order.point}\n")


def _at(orders: list[Order]) -> Callable[[], None]:
    """What one point does each time that it is reached."""
    counts = itertools.count(1)

    def reached() -> None:
        count = next(counts)
        for order in orders:
            if order.count == count:
                act(order)

    return reached


def install(text: str) -> list[str]:
    """Wraps the methods that the orders need, and no others; the names of those that were wrapped."""
    by_point: dict[str, list[Order]] = {}
    for order in parse(text):
        by_point.setdefault(order.point, []).append(order)
    wrapped = []
    for name, place in METHODS.items():
        before, after = by_point.get(f"before_{name}"), by_point.get(f"after_{name}")
        if before or after:
            _wrap(place, _at(before or []), _at(after or []))
            wrapped.append(place)
    if IN_COMMIT in by_point:
        _hook_commits(_at(by_point[IN_COMMIT]))
        wrapped.append(IN_COMMIT)
    return wrapped


def owner_of(place: str) -> tuple[type[Any], str]:
    """The class and the name of "module:Class.method"."""
    module, _, path = place.partition(":")
    class_name, _, method = path.partition(".")
    owner: type[Any] = getattr(importlib.import_module(module), class_name)
    return owner, method


def _wrap(place: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    owner, name = owner_of(place)
    method = owner.__dict__[name]

    @functools.wraps(method)
    def with_points(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(owner, name, with_points)


def _hook_commits(reached: Callable[[], None]) -> None:
    make = JournalStore.__init__

    @functools.wraps(make)
    def with_hook(self: JournalStore, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)

        def hook() -> bool:
            reached()
            return False  # SQLite goes on with its commit.

        self._database.set_commit_hook(hook)

    JournalStore.__init__ = with_hook  # type: ignore[method-assign]


def methods() -> Iterator[tuple[str, Any]]:
    """Each place with what stands there now."""
    for place in METHODS.values():
        owner, name = owner_of(place)
        yield place, owner.__dict__[name]
