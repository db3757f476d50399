"""Runners that are children outside the loop, processes or actors: how many there are, and who gets which.

Invariants
  1. At most `max_runners` places have a child or one on its way: STARTING, IDLE or BUSY. A child that is dead, too
     large or under suspicion is replaced before its place counts as capacity again, and has ended before another one
     is launched.
  2. A child that is handed out has answered a ping since; a slot waits for one before its attempt is begun, so a child
     that dies while nobody plays costs no attempt.
  3. A place whose start failed is tried again after a backoff, for as long as somebody waits for it: capacity is never
     lost, and a start that always fails is not tried in a loop. Meanwhile the place takes no room from others.
  4. Nobody waits in vain: who waits for children of which there is none, and could be started none, gets an empty seat.
     What is played there is lost, so a task's own budget bounds how often that is tried.
  5. A child sees the GPUs that it was started with: it plays for tokens of those GPUs alone. Who waits for GPUs that
     have no child at all is not passed over for ever by who shares one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.runners.runner import ANYWHERE, RunnerState
from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children.handle import ChildSeat, EmptySeat
from py_scheduler.execution.children.memory import MemoryWatch
from py_scheduler.execution.children.slots import ChildPlaces
from py_scheduler.execution.children.starter import ChildStarter
from py_scheduler.execution.runner import SeatGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.ports import Clock, TimerHandle
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.runner import ChildHost, HandlerPlan, RunnerKey, RunnerSettings, RunnerView
    from py_scheduler.execution.children.session import ChildSession, Variables
    from py_scheduler.execution.children.slots import ChildPlace, Line
    from py_scheduler.execution.runner import Seat

logger = logging.getLogger(__name__)

_PING_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0


class ChildRunners:
    """All children of one evaluator. Implements `execution.runner.Runners`.

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
        self._host = host
        self._settings = settings
        self._clock = clock
        self._first_key = first_key
        self._starter = ChildStarter(host, settings, plan, variables, import_path)
        self._places = ChildPlaces(evaluator_id, settings.max_runners)
        self._memory = MemoryWatch(self._places, settings.hard_resident_mib, clock)
        self._arrivals = itertools.count()
        self._gone_nodes: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[ChildSession, TimerHandle] = {}
        self._is_open = False
        self._is_closed = False

    # Runners

    async def start(self) -> None:
        await self._host.open()
        self._is_open = True
        for _ in range(min(self._settings.min_runners, self._settings.max_runners)):
            self._start(self._places.new(self._first_key))
        while self._tasks:  # One that fails is followed by another try.
            await asyncio.wait([*self._tasks])
        failed = [place for place in self._places if place.state is RunnerState.FAILED]
        if failed:
            await self.close()
            raise RunnerStartError(f"evaluator {self._evaluator_id!r}: no runner could be started: {failed[0].message}")

    async def take_seat(self, token: PlacementToken | None) -> Seat:
        try:
            return await self._take(ANYWHERE if token is None else self._host.key_of(token))
        except RunnerStartError as error:
            return EmptySeat(f"no runner could be started: {error}")

    def views(self) -> list[RunnerView]:
        now = self._clock.monotonic()
        return [place.view(self.kind, self._evaluator_id, now) for place in self._places]

    async def close(self) -> None:
        self._is_closed = True
        for line in self._places.lines:
            line.forget_failure()
            line.refuse_all(SeatGoneError("the server is ending"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        self._memory.end()
        await self._starter.close()
        self._places.clear()
        if self._is_open:
            self._is_open = False
            await self._host.close()

    def drop_node(self, node_ip: str) -> None:
        """The node is gone: nobody waits for runners there any more."""
        self._gone_nodes.add(node_ip)
        for line in [line for line in self._places.lines if line.key[0] == node_ip]:
            line.refuse_all(SeatGoneError(f"node {node_ip} is gone"))
            if line.failed is not None:
                self._places.drop(line.failed)

    def add_node(self, node_ip: str) -> None:
        self._gone_nodes.discard(node_ip)

    # Taking and leaving

    async def _take(self, key: RunnerKey) -> ChildSeat:
        while True:
            place = self._pop_idle(key) or await self._wait_for(key)
            session = place.session
            assert session is not None, "who is handed out has a child"
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    is_alive = await session.ping()
            except TimeoutError:
                logger.warning("runner %s did not answer within %g s", place.runner_id, _PING_SECONDS)
                is_alive = False
            except BaseException:
                self.give_back(place)
                raise
            if is_alive:
                place.failed_tries = place.failed_rounds = 0
                place.has_played = True
                return ChildSeat(self.give_back, place, session)
            self.give_back(place, suspicion="it did not say that it was alive")
            if place.state is RunnerState.FAILED and self._places.is_hopeless(self._places.line(key)):
                raise RunnerStartError(place.message)

    def give_back(self, place: ChildPlace, suspicion: str = "") -> None:
        """Of a seat that is left: replaces the child if it is not what it should be."""
        session, limit = place.session, self._settings.max_resident_mib
        assert session is not None
        if self._is_closed:
            return
        if not session.is_alive:
            why = f"ended: {session.how_it_ended or 'its connection broke'}"
        elif suspicion:
            session.kill("it is replaced")
            why = f"was replaced: {suspicion}"
        elif limit is not None and session.resident_mib > limit:
            self._retire(session)
            why = f"was replaced: it held {session.resident_mib:.0f} MiB, max_resident_mib is {limit:g}"
        else:
            self._release(place)
            return
        place.message = f"the runner before this one {why}"
        logger.warning("runner %s: %s", place.runner_id, place.message)
        self._replace(place)

    def _retire(self, session: ChildSession) -> None:
        """It has nothing to do any more; one that does not leave by itself is made to."""
        session.retire()
        until = self._clock.monotonic() + _LEAVE_SECONDS
        self._leaving[session] = self._clock.call_at(until, lambda: session.kill("it did not leave"))

    def _replace(self, place: ChildPlace) -> None:
        place.session = None
        place.restarts += 1
        if place.has_played:
            self._start(place)
        else:
            self._has_failed(place)

    def _pop_idle(self, key: RunnerKey) -> ChildPlace | None:
        line = self._places.line_with_idle(key)
        return None if line is None else self._busy(line.idle.pop())

    def _busy(self, place: ChildPlace) -> ChildPlace:
        place.state = RunnerState.BUSY
        self._memory.begin()
        return place

    async def _wait_for(self, key: RunnerKey) -> ChildPlace:
        if self._is_closed:
            raise SeatGoneError("the server is ending")
        if key[0] in self._gone_nodes:
            raise SeatGoneError(f"node {key[0]} is gone")
        line = self._places.line(key)
        waiter = line.join(next(self._arrivals))
        self._provide(line)
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if (given := line.withdraw(waiter)) is not None:
                self._release(given)
            self._provide(line)
            raise

    def _release(self, place: ChildPlace) -> None:
        """To whoever has waited longest for one like it, or it idles; or it makes room for who has none at all."""
        line = self._places.line_served_by(place)
        if line.first is None:
            place.state = RunnerState.IDLE
            self._places.line(place.key).idle.append(place)
        elif not self._places.is_anybody_starved(line.arrival_no):
            line.give(self._busy(place))
            return
        else:
            self._let_go(place)
        self._provide_all()

    # Places

    def _let_go(self, place: ChildPlace) -> None:
        assert place.session is not None
        place.session.kill("its place is needed for other GPUs")
        place.session = None
        self._places.drop(place)

    def _make_room(self) -> bool:
        """Lets an idle child go that nobody waits for."""
        line = self._places.line_with_idle(ANYWHERE)
        if line is not None:
            self._let_go(line.idle.pop(0))
        return line is not None

    def _provide_all(self) -> None:
        for line in self._places.lines:
            self._provide(line)

    def _provide(self, line: Line) -> None:
        """Starts as many as are waited for, as far as there is room."""
        if self._is_closed or line.is_held_back:
            return
        if line.failed is not None and line.missing <= 0:
            self._places.drop(line.failed)
        for _ in range(line.missing):
            if not (self._places.has_room or self._make_room()):
                return
            if line.failed is not None:
                place = line.failed
                line.forget_failure()
                place.restarts += 1
            else:
                place = self._places.new(line.key)
            self._start(place)

    # Starting

    def _start(self, place: ChildPlace) -> None:
        if self._is_closed:
            return
        if place.key[0] in self._gone_nodes:
            self._places.drop(place)
            self._provide_all()
            return
        place.state = RunnerState.STARTING
        place.has_played = False
        task = asyncio.get_running_loop().create_task(self._bring_up(place), name=f"start {place.runner_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, place: ChildPlace) -> None:
        try:
            place.session = await self._starter.launch(place.key, lambda ended: self._ended(place, ended))
        except RunnerStartError as error:
            place.message = str(error)
            self._has_failed(place)
        else:
            self._release(place)

    def _has_failed(self, place: ChildPlace) -> None:
        """A start came to nothing: once more, or not before a while."""
        place.failed_tries += 1
        tries_left = self._settings.prepare_max_retries + 1 - place.failed_tries
        logger.warning("runner %s did not start (%d tries left): %s", place.runner_id, tries_left, place.message)
        if tries_left > 0:
            self._start(place)
            return
        place.failed_tries = 0
        place.failed_rounds += 1
        place.state = RunnerState.FAILED
        line = self._places.line(place.key)
        if line.failed is not None or self._is_closed or place.key[0] in self._gone_nodes:
            self._places.drop(place)
        else:
            wait_seconds = backoff_seconds(place.failed_rounds, _FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
            until = self._clock.monotonic() + wait_seconds
            line.failed, line.backoff = place, self._clock.call_at(until, lambda: self._may_try_again(line))
        if self._places.is_hopeless(line):
            line.refuse_all(RunnerStartError(place.message))
        self._provide_all()

    def _may_try_again(self, line: Line) -> None:
        line.may_try_again = True
        self._provide(line)

    def _ended(self, place: ChildPlace, session: ChildSession) -> None:
        """A child is no more. Who plays with it hears so by himself; one that idled leaves its place to others."""
        if (timer := self._leaving.pop(session, None)) is not None:
            timer.cancel()
        if place.session is session and place.state is RunnerState.IDLE and not self._is_closed:
            logger.warning("runner %s ended while it was idle: %s", place.runner_id, session.how_it_ended)
            self._places.line(place.key).idle.remove(place)
            self._places.drop(place)
            self._provide_all()
