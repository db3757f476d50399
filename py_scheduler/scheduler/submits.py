"""Submits that are too large for one turn of the loop, and whatever arrives behind them.

Everything that does not change anything is done in slices: to read the tasks, to check and digest them, to batch them,
to make their records. Then one turn decides, as it does for a small submit: it looks whether there is room, and all
tasks are there, or none is.

Invariants
  1. What arrives in a namespace is decided in the order in which it arrived, one after another. So a call that is sent
     again while the first is under way waits for it, and is answered as that is. `Engine.accept`, which decides within
     one turn, stands in no line: it may be decided before a large submit that arrived earlier.
  2. What waits to be decided is bounded in bytes, and so what it holds in memory.
  3. What has arrived goes on whether or not its call waits for it, unless the engine is closed. What was decided is
     answered so, also by an engine that is closed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING

from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.scheduler.intake import command_of
from py_scheduler.scheduler.ledger.records import task_ids_of
from py_scheduler.scheduler.ledger.state import digesting
from py_scheduler.scheduler.slices import Backlog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from py_scheduler.domain.collecting import CollectRequest
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.requests import SubmissionSelector, SubmitReply, SubmitRequest
    from py_scheduler.domain.task import Batch
    from py_scheduler.scheduler.intake import Intake, IntakeLimits, Plan
    from py_scheduler.scheduler.ledger.commands import AcceptTasks
    from py_scheduler.scheduler.ledger.ledger import Ledger
    from py_scheduler.scheduler.ledger.records import RequestRecord

    Reading = Generator[None, None, SubmitRequest]
    Record = Callable[[AcceptTasks, Plan], None]

_IDS_AT_ONCE = 1_024
_LEAST_BYTES = 16 << 10
"""What a submit counts for at least, also one of which the size is not known."""


def as_it_is(request: SubmitRequest) -> Reading:
    """Of a request that is not to be read any more."""
    yield from ()
    return request


class _Arrived:
    """size: of its message, in bytes. decided: what it came to; None as long as that is open."""

    __slots__ = ("answered", "batches", "decided", "key", "reading", "size")

    def __init__(self, key: SubmissionKey, reading: Reading, batches: Sequence[Batch] | None, size: int) -> None:
        self.key = key
        self.reading = reading
        self.batches = batches
        self.size = size
        self.decided: RequestRecord | None = None
        self.answered: asyncio.Future[SubmitReply] = asyncio.get_running_loop().create_future()
        self.answered.add_done_callback(asyncio.Future.exception)  # Its call may be gone.


class LargeSubmits:
    """Of one engine. record: decides, and lets what was accepted wait for room."""

    def __init__(self, intake: Intake, limits: IntakeLimits, ledger: Ledger, clock: Clock, record: Record) -> None:
        self._intake = intake
        self._limits = limits
        self._ledger = ledger
        self._clock = clock
        self._record = record
        self._backlog = Backlog(clock)
        self.lines: dict[str, deque[_Arrived]] = {}
        """By namespace, what has arrived and was not decided; the first is under way. None is empty."""
        self._waiting: Counter[str] = Counter()
        """By namespace, the bytes of all that is in its line."""

    async def submit(
        self, key: SubmissionKey, reading: Reading, batches: Sequence[Batch] | None = None, size: int = 0
    ) -> SubmitReply:
        """Takes in what `reading` comes to. size: of its message, in bytes. Raises what that and `Engine.accept` raise,
        and ResourceExhaustedError while too much waits.
        """
        arrived = _Arrived(key, reading, batches, max(size, _LEAST_BYTES))
        self._limits.check_waiting(key.namespace, self._waiting, arrived.size)
        self._waiting[key.namespace] += arrived.size
        line = self.lines.get(key.namespace)
        if line is not None:
            line.append(arrived)
        else:
            line = self.lines[key.namespace] = deque([arrived])
            _ = self._backlog.add(self._working_off(key.namespace, line))
        return await asyncio.shield(arrived.answered)

    async def wait_decided(self, selector: SubmissionSelector | CollectRequest) -> None:
        """Returns when what has arrived before for this submission is in it: whoever gives up a submit and then aborts
        it means all of its tasks.
        """
        if not self.lines:
            return
        submission = self._ledger.state.find(selector) if selector.submission_id else None
        if submission is not None:
            await self._wait_decided(submission.key)
        elif selector.batch_id is not None:
            await self._wait_decided(SubmissionKey(selector.batch_id, selector.namespace))

    async def _wait_decided(self, key: SubmissionKey) -> None:
        for arrived in reversed(self.lines.get(key.namespace, ())):
            if arrived.key == key:
                await asyncio.wait([arrived.answered])
                return

    def close(self) -> None:
        """Takes nothing in any more."""
        self._backlog.close()
        for line in self.lines.values():
            for arrived in line:
                if arrived.decided is not None:
                    arrived.answered.set_result(arrived.decided.reply(arrived.decided.task_ids))
                    continue
                arrived.answered.set_exception(FailedPreconditionError("the server has stopped: submit to another one"))
        self.lines.clear()

    def _working_off(self, namespace: str, line: deque[_Arrived]) -> Generator[None, None, None]:
        while line:
            arrived = line[0]
            try:
                reply = yield from self._taking_in(arrived)
            except Exception as error:  # noqa: BLE001 -- it is for the call that waits
                arrived.answered.set_exception(error)
            else:
                arrived.answered.set_result(reply)
            self._waiting[namespace] -= line.popleft().size
        del self.lines[namespace], self._waiting[namespace]

    def _taking_in(self, arrived: _Arrived) -> Generator[None, None, SubmitReply]:
        request = yield from arrived.reading
        encoded: list[bytes] = []
        digest = yield from digesting(request, encoded)
        namespace, requests = request.key.namespace, self._ledger.state.requests
        arrived.decided = requests.repeated(namespace, request.request_id, digest)
        if arrived.decided is None:
            plan = yield from self._intake.planning(request, arrived.batches)
            command = command_of(request, digest, plan, self._clock)
            self._limits.check(command)  # What will be refused anyway is not prepared first.
            command = yield from self._ledger.preparing(command)
            assert command.prepared is not None
            command.prepared.encoded = encoded
            # Others were decided meanwhile, and nodes may have gone. Those that go later find its tasks.
            self._intake.guard_again(plan)
            self._limits.check(command)
            self._record(command, plan)
            arrived.decided = requests.find(namespace, request.request_id)
            assert arrived.decided is not None
            yield
        return arrived.decided.reply((yield from _task_ids(arrived.decided)))


def _task_ids(answered: RequestRecord) -> Generator[None, None, tuple[str, ...]]:
    """`answered.task_ids` in slices."""
    task_ids: list[str] = []
    end = answered.first_task_no + answered.task_count
    for begin in range(answered.first_task_no, end, _IDS_AT_ONCE):
        task_ids += task_ids_of(answered.submission_id, range(begin, min(begin + _IDS_AT_ONCE, end)))
        yield
    return tuple(task_ids)
