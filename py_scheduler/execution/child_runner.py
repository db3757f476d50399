"""Runners that are children outside the loop, processes or actors: how many there are, and who gets which.

Invariants
  1. A resident is one child's place, kept over restarts: STARTING, IDLE, BUSY or FAILED, and at most `max_runners` of
     them. One that is dead, too large or under suspicion is replaced before its place counts as capacity again.
  2. A child that is handed out has answered a ping since; a slot waits for one before its attempt is begun, so a child
     that dies while nobody plays costs no attempt.
  3. A place whose start failed is tried again after a backoff, for as long as somebody waits for it: capacity is never
     lost, and a start that always fails is not tried in a loop.
  4. A child sees the GPUs that it was started with: it plays for tokens of those GPUs alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING

from py_scheduler.domain.runners import RunnerState
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.child_session import ChildSession
from py_scheduler.execution.resident import ChildSeat, Resident
from py_scheduler.execution.runner import SeatGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.ports import Clock, TimerHandle
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners import ChildHost, HandlerPlan, RunnerKey, RunnerSettings, RunnerView
    from py_scheduler.execution.child_session import Variables

logger = logging.getLogger(__name__)

ANYWHERE: RunnerKey = ("", None)
_PING_SECONDS = 10.0
_END_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 30.0
_MEMORY_SECONDS = 0.5
"""Between two looks at what busy children hold: nothing tells when memory grows."""


class _Waiter:
    """A slot that wants a child. arrival_no: who is older goes first, whichever of the children would do for both."""

    def __init__(self, arrival_no: int) -> None:
        self.arrival_no = arrival_no
        self.given: asyncio.Future[Resident] = asyncio.get_running_loop().create_future()


class ChildRunner:
    """All children of one evaluator. Implements `execution.runner.Runner`.

    variables: what a child's environment says of an iteration. import_path: where the server finds its modules.
    first_key: of the children that are started before anything waits for one.
    """

    standing_seat = None

    def __init__(
        self,
        evaluator_id: str,
        plan: HandlerPlan,
        host: ChildHost,
        settings: RunnerSettings,
        clock: Clock,
        variables: Variables,
        import_path: Sequence[str] = (),
        first_key: RunnerKey = ANYWHERE,
    ) -> None:
        self.kind = host.kind
        self._evaluator_id = evaluator_id
        self._plan = plan
        self._host = host
        self._settings = settings
        self._clock = clock
        self._variables = variables
        self._import_path = import_path
        self._first_key = first_key
        self._numbers = itertools.count()
        self._residents: dict[str, Resident] = {}
        self._idle: dict[RunnerKey, list[Resident]] = {}
        self._arrivals = itertools.count()
        self._waiting: dict[RunnerKey, deque[_Waiter]] = {}
        self._gone_nodes: set[str] = set()
        self._starting = asyncio.Semaphore(settings.prepare_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: set[ChildSession] = set()
        self._leaving: dict[ChildSession, TimerHandle] = {}
        self._is_watching_memory = False
        self._is_open = False
        self._is_closed = False

    # Runner

    async def start(self) -> None:
        await self._host.open()
        self._is_open = True
        for _ in range(min(self._settings.min_runners, self._settings.max_runners)):
            self._start(self._new_resident(self._first_key))
        if self._tasks:
            await asyncio.wait([*self._tasks])
        failed = [resident for resident in self._residents.values() if resident.state is RunnerState.FAILED]
        if failed:
            await self.close()
            raise RunnerStartError(f"evaluator {self._evaluator_id!r}: no runner could be started: {failed[0].message}")

    async def take_seat(self, token: PlacementToken | None) -> ChildSeat:
        return await self._take(ANYWHERE if token is None else self._host.key_of(token))

    def views(self) -> list[RunnerView]:
        now = self._clock.monotonic()
        return [resident.view(self.kind, self._evaluator_id, now) for resident in self._residents.values()]

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        for session in self._sessions:
            session.kill("the server is ending")
        ends = [asyncio.ensure_future(session.over.wait()) for session in self._sessions]
        if ends:
            _done, late = await asyncio.wait(ends, timeout=_END_SECONDS)
            for end in late:
                end.cancel()
        self._residents.clear()
        self._idle.clear()
        if self._is_open:
            self._is_open = False
            await self._host.close()

    # Taking and leaving

    async def _take(self, key: RunnerKey) -> ChildSeat:
        while True:
            resident = self._pop_idle(key) or await self._wait_for(key)
            session = resident.session
            assert session is not None, "who is handed out has a child"
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    is_alive = await session.ping()
            except TimeoutError:
                logger.warning("runner %s did not answer within %g s", resident.runner_id, _PING_SECONDS)
                is_alive = False
            except asyncio.CancelledError:
                self.leave(resident)
                raise
            if is_alive:
                return ChildSeat(self.leave, resident, session)
            self.leave(resident, suspicion="it did not say that it was alive")

    def leave(self, resident: Resident, *, suspicion: str = "") -> None:
        """Gives a resident back, and replaces its child if that is not what it should be."""
        session = resident.session
        assert session is not None
        if not session.is_alive:
            resident.message = f"the runner before this one ended: {session.how_it_ended or 'its connection broke'}"
        elif suspicion:
            session.kill("it is replaced")
            resident.message = f"the runner before this one was replaced: {suspicion}"
        elif self._is_too_large(session):
            # It has nothing to do any more; one that does not leave by itself is made to.
            session.retire()
            self._leaving[session] = self._clock.call_at(
                self._clock.monotonic() + _END_SECONDS, lambda: session.kill("it did not leave")
            )
            resident.message = (
                f"the runner before this one was replaced: it held {session.resident_mib:.0f} MiB, max_resident_mib is "
                f"{self._settings.max_resident_mib:g}"
            )
        else:
            self._release(resident)
            return
        logger.warning("runner %s: %s", resident.runner_id, resident.message)
        resident.session = None
        if resident.key[0] in self._gone_nodes:
            self._residents.pop(resident.runner_id, None)
            self._provide_all()
            return
        resident.restarts += 1
        self._start(resident)

    def drop_node(self, node_ip: str) -> None:
        """The node is gone: nobody waits for runners there any more."""
        self._gone_nodes.add(node_ip)
        for key in [key for key in self._waiting if key[0] == node_ip]:
            for waiter in self._waiting.pop(key):
                if not waiter.given.done():
                    waiter.given.set_exception(SeatGoneError(f"node {node_ip} is gone"))

    def add_node(self, node_ip: str) -> None:
        self._gone_nodes.discard(node_ip)

    def _pop_idle(self, key: RunnerKey) -> Resident | None:
        if key != ANYWHERE:
            idle = self._idle.get(key)
        else:
            idle = self._idle.get(key) or next((some for some in self._idle.values() if some), None)
        if not idle:
            return None
        resident = idle.pop()
        resident.state = RunnerState.BUSY
        self._watch_memory()
        return resident

    async def _wait_for(self, key: RunnerKey) -> Resident:
        if key[0] in self._gone_nodes:
            raise SeatGoneError(f"node {key[0]} is gone")
        waiter, queue = _Waiter(next(self._arrivals)), self._waiting.setdefault(key, deque())
        queue.append(waiter)
        self._provide(key)
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
            elif not waiter.given.cancelled() and waiter.given.exception() is None:
                self._release(waiter.given.result())
            raise

    def _release(self, resident: Resident) -> None:
        """To whoever has waited longest for one like it, or it idles."""
        queues = [queue for key in {resident.key, ANYWHERE} if (queue := self._waiting_for(key))]
        if queues:
            waiter = min(queues, key=lambda queue: queue[0].arrival_no).popleft()
            resident.state = RunnerState.BUSY
            waiter.given.set_result(resident)
            self._watch_memory()
            return
        resident.state = RunnerState.IDLE
        self._idle.setdefault(resident.key, []).append(resident)
        self._provide_all()

    def _waiting_for(self, key: RunnerKey) -> deque[_Waiter]:
        """Without those that were cancelled and have not had their turn to leave yet."""
        queue = self._waiting.get(key, deque())
        while queue and queue[0].given.cancelled():
            queue.popleft()
        return queue

    # Starting

    def _provide_all(self) -> None:
        for key in [*self._waiting]:
            self._provide(key)

    def _provide(self, key: RunnerKey) -> None:
        """Starts as many as are waited for, as far as there is room."""
        like_it = [resident for resident in self._residents.values() if resident.key == key]
        if self._is_closed or any(resident.state is RunnerState.FAILED for resident in like_it):
            return
        missing = len(self._waiting_for(key)) - sum(one.state is RunnerState.STARTING for one in like_it)
        for _ in range(missing):
            if len(self._residents) >= self._settings.max_runners and not self._make_room():
                return
            self._start(self._new_resident(key))

    def _make_room(self) -> bool:
        """Lets an idle child go that nobody waits for."""
        idle = next((some for some in self._idle.values() if some), None)
        if idle is None:
            return False
        resident = idle.pop(0)
        assert resident.session is not None
        resident.session.kill("its place is needed for other GPUs")
        resident.session = None
        del self._residents[resident.runner_id]
        return True

    def _new_resident(self, key: RunnerKey) -> Resident:
        resident = Resident(f"{self._evaluator_id}/{next(self._numbers)}", key)
        self._residents[resident.runner_id] = resident
        return resident

    def _start(self, resident: Resident) -> None:
        if self._is_closed:
            return
        resident.state = RunnerState.STARTING
        task = asyncio.get_running_loop().create_task(self._bring_up(resident), name=f"start {resident.runner_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, resident: Resident) -> None:
        for tries_left in range(self._settings.prepare_max_retries, -1, -1):
            try:
                async with self._starting:
                    resident.session = await self._launch(resident)
            except RunnerStartError as error:
                resident.message = str(error)
                logger.warning("runner %s did not start (%d tries left): %s", resident.runner_id, tries_left, error)
            else:
                resident.failed_starts = 0
                self._release(resident)
                return
        self._failed(resident)

    async def _launch(self, resident: Resident) -> ChildSession:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.start_seconds):
                child = await self._host.launch(resident.key, settings)
                session = ChildSession(child, self._variables, lambda ended: self._ended(resident, ended))
                self._sessions.add(session)
                try:
                    await session.prepare(self._plan, self._import_path)
                except BaseException:
                    session.kill("it was not ready")
                    raise
        except TimeoutError:
            raise RunnerStartError(f"not ready within start_seconds ({settings.start_seconds:g})") from None
        except (RunnerStartError, asyncio.CancelledError):
            raise
        except Exception as error:  # whatever a host meets, the place is tried again
            raise RunnerStartError(f"{type(error).__name__}: {error}") from error
        return session

    def _failed(self, resident: Resident) -> None:
        resident.state = RunnerState.FAILED
        resident.failed_starts += 1
        backoff = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** (resident.failed_starts - 1))
        self._clock.call_at(self._clock.monotonic() + backoff, lambda: self._try_again(resident))

    def _try_again(self, resident: Resident) -> None:
        if self._residents.get(resident.runner_id) is not resident or self._is_closed:
            return
        if self._waiting_for(resident.key):
            resident.restarts += 1
            self._start(resident)
        else:
            del self._residents[resident.runner_id]
            self._provide_all()

    def _ended(self, resident: Resident, session: ChildSession) -> None:
        """A child is no more. Who plays with it hears so by himself; one that idled leaves its place to others."""
        self._sessions.discard(session)
        if (timer := self._leaving.pop(session, None)) is not None:
            timer.cancel()
        if resident.session is session and resident.state is RunnerState.IDLE and not self._is_closed:
            logger.warning("runner %s ended while it was idle: %s", resident.runner_id, session.how_it_ended)
            self._idle[resident.key].remove(resident)
            self._residents.pop(resident.runner_id, None)
            self._provide_all()

    # Memory

    def _is_too_large(self, session: ChildSession) -> bool:
        limit = self._settings.max_resident_mib
        return limit is not None and session.resident_mib > limit

    def _watch_memory(self) -> None:
        if self._settings.hard_resident_mib is not None and not self._is_watching_memory:
            self._is_watching_memory = True
            self._clock.call_at(self._clock.monotonic() + _MEMORY_SECONDS, self._look_at_memory)

    def _look_at_memory(self) -> None:
        self._is_watching_memory = False
        limit = self._settings.hard_resident_mib
        busy = [one for one in self._residents.values() if one.state is RunnerState.BUSY and one.session is not None]
        for session in [one.session for one in busy if one.session is not None]:
            size = session.child.resident_mib()
            if limit is not None and size is not None and size > limit:
                session.kill(f"it held {size:.0f} MiB, hard_resident_mib is {limit:g}")
        if busy and not self._is_closed:
            self._watch_memory()
