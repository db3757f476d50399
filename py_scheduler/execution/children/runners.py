"""Runners that are children outside the loop, processes or actors: how many there are, and which permit gets which.

Invariants
  1. At most `max_runners` slots have a child or one on its way: STARTING, IDLE or BUSY. A child that is dead, too large
     or under suspicion is replaced before its slot counts as capacity again, and it has ended before another one is
     launched.
  2. A child answers a ping before each attempt. A permit waits for one that does, and only then takes its attempt: a
     child that dies while it idles costs no attempt.
  3. A slot whose start failed is tried again after a backoff, for as long as somebody waits for it. So capacity is
     never lost, and a start that always fails is not tried in a loop: with `prepare_max_retries = 2`, three tries at
     once, then
     three more after at most 1 s, 2 s, 4 s and so on up to 30 s. In between the slot takes no room from others.
  4. Nobody waits in vain. A permit that waits for children of which there is none, and of which none could be started,
     gets an empty handle. An attempt there is lost, so a task's own budget bounds how often that is tried.
  5. A child sees the GPUs that it was started with, and runs samples for tokens of those GPUs alone. With `max_runners
     = 2`, two children on GPU 0 and a permit that waits for GPU 1: the next child of GPU 0 that becomes free ends and
     makes room for one on GPU 1, unless a permit that came earlier waits for GPU 0.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.runners.runner import ANYWHERE, RunnerState
from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children.handle import ChildHandle, EmptyHandle
from py_scheduler.execution.children.slots import ChildSlots
from py_scheduler.execution.children.starter import ChildStarter
from py_scheduler.execution.runner import RunnerGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.ports import Clock, TimerHandle
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.runner import ChildHost, HandlerPlan, RunnerKey, RunnerSettings, RunnerView
    from py_scheduler.execution.children.session import ChildSession, Variables
    from py_scheduler.execution.children.slots import ChildSlot, WaitQueue
    from py_scheduler.execution.runner import RunnerHandle

logger = logging.getLogger(__name__)

_PING_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0
_LOOK_SECONDS = 0.5
"""Between two looks at what children hold of their machine's memory."""


class ChildRunners:
    """All children of one evaluator. Implements `execution.runner.Runners`.

    variables: what a child's environment says of an iteration. import_path: where the server finds its modules.
    first_key: of the children that start with the server, before anybody waits for one.
    """

    standing_handle = None

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
        self._slots = ChildSlots(evaluator_id, settings.max_runners)
        self._next_look: TimerHandle | None = None
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
            self._start(self._slots.new(self._first_key))
        while self._tasks:  # Another try follows one that fails.
            await asyncio.wait([*self._tasks])
        failed = [slot for slot in self._slots if slot.state is RunnerState.FAILED]
        if failed:
            await self.close()
            raise RunnerStartError(f"evaluator {self._evaluator_id!r}: no runner could be started: {failed[0].message}")

    async def take_handle(self, token: PlacementToken | None) -> RunnerHandle:
        try:
            return await self._take(ANYWHERE if token is None else self._host.key_of(token))
        except RunnerStartError as error:
            return EmptyHandle(f"no runner could be started: {error}")

    def views(self) -> list[RunnerView]:
        now = self._clock.monotonic()
        return [slot.view(self.kind, self._evaluator_id, now) for slot in self._slots]

    async def close(self) -> None:
        self._is_closed = True
        for queue in self._slots.queues:
            queue.forget_failure()
            queue.refuse_all(RunnerGoneError("the server is ending"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        if self._next_look is not None:
            self._next_look.cancel()
        await self._starter.close()
        self._slots.clear()
        if self._is_open:
            self._is_open = False
            await self._host.close()

    def drop_node(self, node_ip: str) -> None:
        """The node is gone: no permit waits for runners there any more."""
        self._gone_nodes.add(node_ip)
        for queue in [queue for queue in self._slots.queues if queue.key[0] == node_ip]:
            queue.refuse_all(RunnerGoneError(f"node {node_ip} is gone"))
            if queue.failed is not None:
                self._slots.drop(queue.failed)

    def add_node(self, node_ip: str) -> None:
        self._gone_nodes.discard(node_ip)

    # Taking and leaving

    async def _take(self, key: RunnerKey) -> ChildHandle:
        while True:
            slot = self._pop_idle(key) or await self._wait_for(key)
            session = slot.session
            assert session is not None, "a slot that is handed out has a child"
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    is_alive = await session.ping()
            except TimeoutError:
                logger.warning("runner %s did not answer within %g s", slot.runner_id, _PING_SECONDS)
                is_alive = False
            except BaseException:
                self.give_back(slot)
                raise
            if is_alive:
                slot.failed_tries = slot.failed_rounds = 0
                slot.has_run = True
                return ChildHandle(self.give_back, slot, session)
            self.give_back(slot, suspicion="it did not say that it was alive")
            if slot.state is RunnerState.FAILED and self._slots.is_hopeless(self._slots.queue(key)):
                raise RunnerStartError(slot.message)

    def give_back(self, slot: ChildSlot, suspicion: str = "") -> None:
        """Takes the slot of a handle that was left, and replaces its child if that is not what it should be."""
        session, limit = slot.session, self._settings.max_resident_mib
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
            self._release(slot)
            return
        slot.message = f"the runner before this one {why}"
        logger.warning("runner %s: %s", slot.runner_id, slot.message)
        self._replace(slot)

    def _retire(self, session: ChildSession) -> None:
        """Lets a child without work leave by itself, and kills it if it does not."""
        session.retire()
        until = self._clock.monotonic() + _LEAVE_SECONDS
        self._leaving[session] = self._clock.call_at(until, lambda: session.kill("it did not leave"))

    def _replace(self, slot: ChildSlot) -> None:
        slot.session = None
        slot.restarts += 1
        if slot.has_run:
            self._start(slot)
        else:
            self._has_failed(slot)

    def _pop_idle(self, key: RunnerKey) -> ChildSlot | None:
        queue = self._slots.queue_with_idle(key)
        return None if queue is None else self._busy(queue.idle.pop())

    def _busy(self, slot: ChildSlot) -> ChildSlot:
        slot.state = RunnerState.BUSY
        self._watch_memory()
        return slot

    def _watch_memory(self) -> None:
        """Nothing tells when a child grows while it runs: looks at all of them, until none is busy any more."""
        if self._settings.hard_resident_mib is not None and self._next_look is None:
            self._next_look = self._clock.call_at(self._clock.monotonic() + _LOOK_SECONDS, self._look_at_memory)

    def _look_at_memory(self) -> None:
        self._next_look = None
        limit_mib = self._settings.hard_resident_mib
        busy = [slot.session for slot in self._slots if slot.state is RunnerState.BUSY]
        for session in busy:
            size_mib = None if session is None else session.child.resident_mib()
            if session is not None and size_mib is not None and limit_mib and size_mib > limit_mib:
                session.kill(f"it held {size_mib:.0f} MiB, hard_resident_mib is {limit_mib:g}")
        if busy:
            self._watch_memory()

    async def _wait_for(self, key: RunnerKey) -> ChildSlot:
        if self._is_closed:
            raise RunnerGoneError("the server is ending")
        if key[0] in self._gone_nodes:
            raise RunnerGoneError(f"node {key[0]} is gone")
        queue = self._slots.queue(key)
        waiter = queue.join(next(self._arrivals))
        self._provide(queue)
        try:
            return await waiter.given
        except asyncio.CancelledError:
            if (given := queue.withdraw(waiter)) is not None:
                self._release(given)
            self._provide(queue)
            raise

    def _release(self, slot: ChildSlot) -> None:
        """Gives a slot to the permit that has waited longest for one like it; without one, the slot idles. It ends
        instead, and makes room, if an earlier permit waits for children of which there is none.
        """
        queue = self._slots.queue_served_by(slot)
        if queue.first is None:
            slot.state = RunnerState.IDLE
            self._slots.queue(slot.key).idle.append(slot)
        elif not self._slots.is_anybody_starved(queue.arrival_no):
            queue.give(self._busy(slot))
            return
        else:
            self._let_go(slot)
        self._provide_all()

    # Slots

    def _let_go(self, slot: ChildSlot) -> None:
        assert slot.session is not None
        slot.session.kill("its slot is needed for other GPUs")
        slot.session = None
        self._slots.drop(slot)

    def _make_room(self) -> bool:
        """Lets an idle child go, which nobody waits for."""
        queue = self._slots.queue_with_idle(ANYWHERE)
        if queue is not None:
            self._let_go(queue.idle.pop(0))
        return queue is not None

    def _provide_all(self) -> None:
        for queue in self._slots.queues:
            self._provide(queue)

    def _provide(self, queue: WaitQueue) -> None:
        """Starts as many children as permits wait for there, as far as there is room."""
        if self._is_closed or queue.is_held_back:
            return
        if queue.failed is not None and queue.missing <= 0:
            self._slots.drop(queue.failed)
        for _ in range(queue.missing):
            if not (self._slots.has_room or self._make_room()):
                return
            if queue.failed is not None:
                slot = queue.failed
                queue.forget_failure()
                slot.restarts += 1
            else:
                slot = self._slots.new(queue.key)
            self._start(slot)

    # Starting

    def _start(self, slot: ChildSlot) -> None:
        if self._is_closed:
            return
        if slot.key[0] in self._gone_nodes:
            self._slots.drop(slot)
            self._provide_all()
            return
        slot.state = RunnerState.STARTING
        slot.has_run = False
        task = asyncio.get_running_loop().create_task(self._bring_up(slot), name=f"start {slot.runner_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, slot: ChildSlot) -> None:
        try:
            slot.session = await self._starter.launch(slot.key, lambda ended: self._ended(slot, ended))
        except RunnerStartError as error:
            slot.message = str(error)
            self._has_failed(slot)
        else:
            self._release(slot)

    def _has_failed(self, slot: ChildSlot) -> None:
        """A start came to nothing: tries once more now, or after the backoff."""
        slot.failed_tries += 1
        tries_left = self._settings.prepare_max_retries + 1 - slot.failed_tries
        logger.warning("runner %s did not start (%d tries left): %s", slot.runner_id, tries_left, slot.message)
        if tries_left > 0:
            self._start(slot)
            return
        slot.failed_tries = 0
        slot.failed_rounds += 1
        slot.state = RunnerState.FAILED
        queue = self._slots.queue(slot.key)
        if queue.failed is not None or self._is_closed or slot.key[0] in self._gone_nodes:
            self._slots.drop(slot)
        else:
            wait_seconds = backoff_seconds(slot.failed_rounds, _FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS)
            until = self._clock.monotonic() + wait_seconds
            queue.failed, queue.backoff = slot, self._clock.call_at(until, lambda: self._may_try_again(queue))
        if self._slots.is_hopeless(queue):
            queue.refuse_all(RunnerStartError(slot.message))
        self._provide_all()

    def _may_try_again(self, queue: WaitQueue) -> None:
        queue.may_try_again = True
        self._provide(queue)

    def _ended(self, slot: ChildSlot, session: ChildSession) -> None:
        """A child is no more. Its session tells an attempt that runs there; if it idled, others get its slot."""
        if (timer := self._leaving.pop(session, None)) is not None:
            timer.cancel()
        if slot.session is session and slot.state is RunnerState.IDLE and not self._is_closed:
            logger.warning("runner %s ended while it was idle: %s", slot.runner_id, session.how_it_ended)
            self._slots.queue(slot.key).idle.remove(slot)
            self._slots.drop(slot)
            self._provide_all()
