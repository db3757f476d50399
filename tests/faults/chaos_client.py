"""A trainer, written to survive its server: it submits, watches, aborts, acknowledges and leases, and writes down all
it sees.

Its work is numbered, and what a number means comes from its name and the number alone. So whoever takes the place of a
client that was killed reads its history, repeats what was not finished, and resumes each subscription where it stood.
"""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from py_scheduler.client import PlacementClient, SchedulerClient, Submission
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.leases import LeaseState
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.errors import (
    CursorExpiredError,
    FailedPreconditionError,
    LeaseError,
    ResourceExhaustedError,
    SchedulerError,
    ServerError,
)
from tests.faults import entries
from tests.faults.entries import (
    Acknowledged,
    FrameRead,
    GapTold,
    LeaseGranted,
    LeaseReturned,
    Recorder,
    SubmitAnswered,
    SubmitCalled,
    Unexpected,
    WorkFinished,
)
from tests.faults.handlers import BEHAVIOURS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.domain.requests import SubmissionView

GPU_SHARE = 0.5
LEASE_TTL_SECONDS = 3.0
_PAUSE_SECONDS = 0.03
_LANES = 2
_T = TypeVar("_T")


class Role(msgspec.Struct, frozen=True):
    """auditor: watches everything and submits nothing. acknowledges: lets the server drop what it has read."""

    address: str
    file: str
    name: str
    auditor: bool = False
    acknowledges: bool = True


class Trainer:
    """One client."""

    def __init__(self, role: Role) -> None:
        self._role = role
        written = entries.read(Path(role.file)) if Path(role.file).exists() else []
        _drop_torn_end(Path(role.file))
        self._recorder = Recorder(Path(role.file))
        self._stopping = asyncio.Event()
        self._cursors: dict[str, bytes] = {}
        self._done: dict[str, set[str]] = {}
        self._answers: dict[str, set[str]] = {}
        called, finished = set[int](), set[int]()
        for entry in written:
            if isinstance(entry, FrameRead):
                self._read(entry)
            elif isinstance(entry, SubmitAnswered):
                self._answers.setdefault(entry.submission_id, set()).update(entry.task_ids)
            elif isinstance(entry, SubmitCalled):
                called.add(entry.number)
            elif isinstance(entry, WorkFinished):
                finished.add(entry.number)
        self._unfinished = sorted(called - finished)
        self._next = max(called, default=-1) + 1
        self._chance = random.Random(f"{role.name}/{self._next}/{len(written)}")

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        role = self._role
        patience = 600.0 if role.auditor else 0.0
        async with (
            SchedulerClient(role.address, reconnect_seconds=patience) as self._client,
            PlacementClient(role.address, reconnect_seconds=0.0) as self._placement,
        ):
            if role.auditor:
                await self._audit()
                return
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease_now_and_then())
                for _ in range(_LANES):
                    tasks.create_task(self._work())
            for submission_id, task_ids in self._answers.items():
                view = await self._view(submission_id)
                self._recorder.note(entries.viewed(view, len(task_ids), is_last=True))

    async def _insist(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Until there is a server that answers."""
        while True:
            try:
                return await call()
            except (ResourceExhaustedError, FailedPreconditionError):
                pass
            except ServerError as error:
                if error.code not in ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"):
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _view(self, submission_id: str) -> SubmissionView:
        return await self._insist(lambda: self._client.get_submission(submission_id=submission_id))

    # Work

    async def _work(self) -> None:
        while self._unfinished or not self._stopping.is_set():
            if self._unfinished:
                number = self._unfinished.pop(0)
            else:
                number, self._next = self._next, self._next + 1
                self._recorder.note(SubmitCalled(number))
            await self._do(number)
            self._recorder.note(WorkFinished(number))

    async def _do(self, number: int) -> None:
        chance = random.Random(f"{self._role.name}/{number}")
        requests = [
            (f"{self._role.name}-{number}-{part}", tasks_of(chance)) for part in range(chance.choice((1, 1, 2)))
        ]
        repeated = requests if chance.random() < 0.3 else []
        aborts, acknowledges = chance.random() < 0.25, chance.random() < 0.8
        first = await self._submit(*requests[0], number)
        others = await asyncio.gather(*[self._submit(*request, number) for request in [*requests[1:], *repeated]])
        # A later request may have joined the submission of the first, whose cursor is then the earlier one.
        for submission in {s.submission_id: s for s in [*reversed(others), first]}.values():
            submission_id = submission.submission_id
            following = asyncio.create_task(self._follow(submission_id, submission.cursor))
            if aborts:
                await self._abort(submission_id)
            if self._chance.random() < 0.3:
                expected = len(self._answers[submission_id])
                view = await self._view(submission_id)
                self._recorder.note(entries.viewed(view, expected))
            await following
            if acknowledges and self._role.acknowledges:
                self._recorder.note(Acknowledged(submission_id))
                await self._acknowledge(submission_id)

    async def _submit(self, request_id: str, tasks: Sequence[Task], number: int) -> Submission:
        label = f"{number}/{self._role.name}"
        reply = await self._insist(lambda: self._client.submit(tasks, label, request_id=request_id))
        self._recorder.note(SubmitAnswered(request_id, reply.submission_id, reply.task_ids))
        self._answers.setdefault(reply.submission_id, set()).update(reply.task_ids)
        return reply

    async def _abort(self, submission_id: str) -> None:
        await asyncio.sleep(self._chance.random() * 0.05)
        wait = self._chance.random() < 0.5
        await self._insist(
            lambda: self._client.abort(submission_id=submission_id, reason="chaos", wait=wait, timeout_seconds=10.0)
        )

    async def _acknowledge(self, submission_id: str) -> None:
        with suppress(CursorExpiredError):  # It was acknowledged, and dropped, before its answer got here.
            cursor = self._cursors[self._subscription(submission_id)]
            await self._insist(lambda: self._client.ack(cursor, submission_id=submission_id))

    # Watching

    def _subscription(self, submission_id: str) -> str:
        return f"{self._role.name}/{submission_id}"

    def _read(self, frame: FrameRead) -> None:
        self._cursors[frame.subscription] = frame.cursor
        done = self._done.setdefault(frame.submission_id, set())
        done.update(event.task_ids[0] for event in frame.events if event.kind == TaskDone.__name__)

    async def _follow(self, submission_id: str, first_cursor: bytes) -> None:
        """Until all that was acknowledged is done; breaks off and resumes as it pleases."""
        subscription = self._subscription(submission_id)
        self._cursors.setdefault(subscription, first_cursor)
        while not self._answers[submission_id] <= self._done.setdefault(submission_id, set()):
            with suppress(ResourceExhaustedError):
                try:
                    await self._watch(subscription, submission_id)
                except ServerError as error:
                    if error.code not in ("UNAVAILABLE", "CANCELLED"):
                        raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch(self, subscription: str, submission_id: str) -> None:
        frames = self._client.watch(submission_id=submission_id, cursor=self._cursors[subscription])
        async with aclosing(frames):
            async for frame in frames:
                entry = entries.frame_read(subscription, submission_id, frame)
                self._recorder.note(entry)
                self._read(entry)
                if self._answers[submission_id] <= self._done[submission_id] or self._chance.random() < 0.05:
                    return

    async def _audit(self) -> None:
        """Everything, by one watch that the client resumes itself."""
        name = self._role.name
        stopping = asyncio.create_task(self._stopping.wait())
        while not self._stopping.is_set():
            reading = asyncio.create_task(self._watch_everything(name))
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _watch_everything(self, name: str) -> None:
        try:
            frames = self._client.watch(cursor=self._cursors.get(name, b""))
            async with aclosing(frames):
                async for frame in frames:
                    entry = entries.frame_read(name, "", frame)
                    self._recorder.note(entry)
                    self._read(entry)
        except CursorExpiredError as error:
            self._recorder.note(GapTold(name, error.oldest_sequence))
            self._cursors.pop(name, None)

    # Leasing

    async def _lease_now_and_then(self) -> None:
        number = 0
        while not self._stopping.is_set():
            with suppress(ServerError, ResourceExhaustedError, FailedPreconditionError, LeaseError):
                await self._lease(f"{self._role.name}-{self._chance.getrandbits(64):x}-{number}")
                self._recorder.note(entries.nodes_seen((await self._client.server_info()).nodes))
            number += 1
            await asyncio.sleep(self._chance.random() * 0.1)

    async def _lease(self, request_id: str) -> None:
        asked_at = entries.now()
        tokens = self._chance.randint(1, 4)
        lease = await self._placement.acquire(
            Resource(gpu=GPU_SHARE, cpu=1.0),
            tokens,
            ttl_seconds=LEASE_TTL_SECONDS,
            timeout_seconds=1.0,
            request_id=request_id,
        )
        if lease.state is LeaseState.PENDING:
            await self._placement.release(lease, request_id=f"{request_id}-withdrawn")
            return
        at = entries.now()
        gpus = tuple((token.node_ip, gpu_id) for token in lease.tokens for gpu_id in token.gpu_ids)
        expires = asked_at + LEASE_TTL_SECONDS
        self._recorder.note(LeaseGranted(lease.lease_id, lease.fencing_token, gpus, GPU_SHARE, asked_at, at, expires))
        await asyncio.sleep(self._chance.random() * 0.05)
        if self._chance.random() < 0.3:
            await self._placement.renew(lease)
        self._recorder.note(LeaseReturned(lease.lease_id, entries.now()))
        with suppress(LeaseError):
            await self._insist(lambda: self._placement.release(lease, request_id=f"{request_id}-returned"))


def tasks_of(chance: random.Random) -> list[Task]:
    kinds = [chance.choice(BEHAVIOURS) for _ in range(chance.randint(1, 12))]
    return [
        Task(
            config=TaskConfig(
                task_type=chance.choice(("plain", "group")),
                repeat_times=chance.choice((1, 1, 3)),
                retry=RetryPolicy(max_failure_retries=chance.randint(0, 1), max_infra_refills=chance.randint(0, 1)),
            ),
            prompt=f"{kind} {chance.randint(0, 30)}",
        )
        for kind in kinds
    ]


def _drop_torn_end(file: Path) -> None:
    if file.exists():
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(b"\n") + 1])


async def _run(role: Role) -> None:
    trainer = Trainer(role)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, trainer.stop)
    try:
        await trainer.run()
    except BaseException as error:
        group: Any = error
        while isinstance(group, BaseExceptionGroup):
            group = group.exceptions[0]
        if isinstance(group, SchedulerError):
            trainer._recorder.note(Unexpected(f"{role.name}: {type(group).__name__}: {group}"))
        raise


def run(arguments: Sequence[str]) -> int:
    asyncio.run(_run(msgspec.json.decode(arguments[0], type=Role)))
    return 0
