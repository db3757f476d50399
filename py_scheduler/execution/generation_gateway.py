"""The one place through which every episode generates: holds, caps, rids, aborts, and which weights are at work.

Invariants

- A generation is at its engine, or it is held in the queue of its role. While a role is paused none begins, and when a
  pause or a place ends, those that were held longest begin first.
- Roles that rest on one engine are paused together and share its weights.
- `weight_epoch` rises by one with every version of the weights that was confirmed by an update or seen in a generation
  for the first time. An answer that was made before a change and arrives after it is no change.
- The clock of an attempt's phase stands still from the pause, or from the generation's begin in it, to the resume.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from py_scheduler.domain.generation import FinishReason, Generation, GenerationState, PauseMode, WeightUpdate
from py_scheduler.domain.ports import DerivedEngine, GenerationControl
from py_scheduler.errors import (
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    GenerationError,
    NotFoundError,
)
from py_scheduler.execution.partial import NOTHING, joined, rest_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from py_scheduler.domain.generation import GenerationRequest, WeightSpan
    from py_scheduler.domain.ports import GenerationEngine

logger = logging.getLogger(__name__)

_REMEMBERED_VERSIONS = 64
AnswerT = TypeVar("AnswerT")


class StoppableClock(Protocol):
    """The clock of a phase. Stopping twice, or starting what runs, changes nothing."""

    def stop_clock(self) -> None: ...

    def start_clock(self) -> None: ...


class _Weights:
    """An engine's pause and the weights that it has, whichever roles it is asked in.

    confirmed: the last update that the engine is known to have loaded; None when the last try did not end well.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.pause_mode: PauseMode | None = None
        self.version = ""
        self.epoch = 0
        self.confirmed: WeightUpdate | None = None
        self.changing = asyncio.Lock()
        self._seen: deque[str] = deque(maxlen=_REMEMBERED_VERSIONS)

    def observe(self, spans: tuple[WeightSpan, ...]) -> None:
        for span in spans:
            if span.version != self.version:
                self.saw(span.version)

    def saw(self, version: str) -> None:
        """A version that something was generated with, or that the engine names as its own; empty: it names none."""
        if version and version not in self._seen:
            if self.version:
                self.epoch += 1
            self._became(version)

    def loaded(self, update: WeightUpdate) -> None:
        self.confirmed = update
        if update.weight_version != self.version:
            self.epoch += 1
            self._became(update.weight_version)

    def _became(self, version: str) -> None:
        self.version = version
        if version not in self._seen:
            self._seen.append(version)


class _Call:
    """One `generate`. woken: while it is held; True: it may begin. was_paused: a pause aborted it at its engine."""

    __slots__ = ("clock", "is_at_engine", "role", "stop_asked", "was_paused", "woken")

    def __init__(self, role: _Role, clock: StoppableClock | None) -> None:
        self.role = role
        self.clock = clock
        self.woken: asyncio.Future[bool] | None = None
        self.is_at_engine = False
        self.was_paused = False
        self.stop_asked = False

    def is_wanted(self) -> bool:
        return not self.stop_asked


class _Role:
    """The queue in front of an engine. limit: generations at once, None for no limit."""

    __slots__ = ("engine", "limit", "name", "running", "waiting", "weights")

    def __init__(self, name: str, engine: GenerationEngine, weights: _Weights, limit: int | None) -> None:
        self.name = name
        self.engine = engine
        self.weights = weights
        self.limit = limit
        self.running = 0
        self.waiting: deque[_Call] = deque()

    @property
    def may_begin(self) -> bool:
        return self.weights.pause_mode is None and (self.limit is None or self.running < self.limit)

    def entered(self, call: _Call) -> bool:
        """Takes a place if there is one. Apart from `waited`, so that nothing is awaited while nothing is held."""
        if not (self.may_begin and call.is_wanted()):
            return False
        self.running += 1
        return True

    async def waited(self, call: _Call) -> bool:
        """Waits for a place and takes it; False, without a place, when the call is no longer wanted."""
        if not call.is_wanted():
            return False
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        call.woken = woken
        self.waiting.append(call)
        try:
            has_place = await woken
        except asyncio.CancelledError:
            if woken.cancelled():
                self.waiting.remove(call)
                self.begin_held()
            elif woken.result():
                self.leave()
            raise
        finally:
            call.woken = None
        if has_place and not call.is_wanted():
            self.leave()
            return False
        return has_place

    def leave(self) -> None:
        self.running -= 1
        self.begin_held()

    def begin_held(self) -> None:
        while self.waiting and self.may_begin:
            woken = self.waiting[0].woken
            if woken is not None and not woken.done():
                self.running += 1
                woken.set_result(True)
                self.waiting.popleft()
            else:  # cancelled, and on its way out of the queue
                return

    def withdraw(self, call: _Call) -> None:
        if call.woken is not None and not call.woken.done():
            self.waiting.remove(call)
            call.woken.set_result(False)


class GenerationGateway:
    """Over the engines by role. limits: how many generations of a role may run at once; absent: any number."""

    def __init__(self, engines: Mapping[str, GenerationEngine], limits: Mapping[str, int] | None = None) -> None:
        weights: dict[int, _Weights] = {}
        self._roles: dict[str, _Role] = {}
        for name, engine in engines.items():
            base = _base_of(engine)
            of_base = weights.setdefault(id(base), _Weights(base))
            self._roles[name] = _Role(name, engine, of_base, (limits or {}).get(name))
        self._calls: dict[str, _Call] = {}

    # Generating

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    def engine(self, role: str) -> GenerationEngine:
        """For what needs no turn: encoding, and what the model is. Raises FailedPreconditionError."""
        found = self._roles.get(role)
        if found is None:
            raise FailedPreconditionError(
                f"no generation engine has the role {role!r} (configured: {self._known()}): add [generation.{role}]"
            )
        return found.engine

    async def generate(
        self, role: str, request: GenerationRequest, *, clock: StoppableClock | None = None, resumes: bool = False
    ) -> Generation:
        """Generates when its turn comes. What a pause aborts is done again after it: from the tokens that were made and
        with what they leave of the budget (`resumes`), or anew.

        A finish reason ABORT means that `abort` ended it, or somebody else at the engine. Raises what the engine
        raises, FailedPreconditionError for a role without engine, EngineRejectedError for a rid that is in use.
        """
        self.engine(role)
        if request.rid in self._calls:
            raise EngineRejectedError(f"rid {request.rid!r} is in use: give every generation a rid of its own")
        call = self._calls[request.rid] = _Call(self._roles[role], clock)
        weights = call.role.weights
        if clock is not None and weights.pause_mode is not None:
            clock.stop_clock()
        try:
            return await self._generate(call, request, resumes=resumes)
        finally:
            del self._calls[request.rid]
            if clock is not None and weights.pause_mode is not None:
                clock.start_clock()

    async def _generate(self, call: _Call, request: GenerationRequest, *, resumes: bool) -> Generation:
        role, rest, made = call.role, request, None
        while role.entered(call) or await role.waited(call):
            try:
                call.is_at_engine, call.was_paused = True, False
                generation = await role.engine.generate(rest)
            except GenerationError as error:
                if isinstance(error.partial, Generation):
                    role.weights.observe(error.partial.weight_spans)
                    error.partial = joined(made, error.partial)
                else:
                    error.partial = made
                raise
            finally:
                call.is_at_engine = False
                role.leave()
            role.weights.observe(generation.weight_spans)
            if generation.finish_reason is not FinishReason.ABORT or not call.was_paused or call.stop_asked:
                return joined(made, generation)
            budget = await _budget(role.engine, request) if resumes else None
            if budget is not None:
                made = joined(made, generation)
                if len(made.token_ids) >= budget:
                    return msgspec.structs.replace(made, finish_reason=FinishReason.LENGTH)
                rest = rest_of(request, made, budget)
        return made or NOTHING

    async def abort(self, rid: str) -> None:
        """Ends a generation, which returns what it has; one that is unknown or over is not an error."""
        call = self._calls.get(rid)
        if call is None:
            return
        call.stop_asked = True
        if call.is_at_engine:
            await call.role.engine.abort(rid)
        else:
            call.role.withdraw(call)

    # Control

    async def pause(self, role: str, mode: PauseMode) -> GenerationState:
        """Holds new generations, then pauses the engine.

        Raises NotFoundError for an unknown role, FailedPreconditionError for an engine that cannot be paused or is
        paused in another mode, GenerationError; then nothing is held that was not before.
        """
        weights, control = self._controlled(role)
        async with weights.changing:
            before = weights.pause_mode
            if before not in (None, mode):
                # SGLang would wait for the end of what it has stopped itself, and answer no call any more.
                raise FailedPreconditionError(f"role {role!r} is paused in mode {before}: continue first")
            self._hold(weights, mode)
            try:
                await _asked(control.pause(mode), role, "pause")
            except GenerationError:
                if before is None:
                    self._release(weights)
                raise
        return await self._known_state(self._roles[role])

    async def resume(self, role: str) -> GenerationState:
        """Lets the engine go on, paused or not, then what was held. Raises as `pause` does; all stays held then."""
        weights, control = self._controlled(role)
        async with weights.changing:
            await _asked(control.resume(), role, "continue")
            self._release(weights)
        return await self._known_state(self._roles[role])

    async def update_weights(self, role: str, update: WeightUpdate) -> GenerationState:
        """Loads weights; those that are loaded already are not loaded again. Raises as `pause` does."""
        weights, control = self._controlled(role)
        async with weights.changing:
            version = await _asked(control.weight_version(), role, "tell its weight version")
            weights.saw(version)
            if weights.confirmed != update or version != update.weight_version:
                weights.confirmed = None
                await _asked(control.update_weights(update), role, "load the weights")
                weights.loaded(update)
        return await self._known_state(self._roles[role])

    async def states(self, *roles: str) -> list[GenerationState]:
        """Of these roles, or of all. Raises NotFoundError."""
        return [await self._known_state(self._known_role(name)) for name in roles or self._roles]

    async def _known_state(self, role: _Role) -> GenerationState:
        weights = role.weights
        if not weights.version:
            try:
                weights.saw((await weights.engine.model_info()).weight_version)
            except GenerationError as error:
                logger.warning("the engine in role %s does not say what it serves: %s", role.name, error)
        return GenerationState(
            role=role.name,
            pause_mode=weights.pause_mode,
            weight_version=weights.version,
            weight_epoch=weights.epoch,
            running=role.running,
            held=len(role.waiting),
        )

    def _hold(self, weights: _Weights, mode: PauseMode) -> None:
        weights.pause_mode = mode
        for call in self._calls.values():
            if call.role.weights is weights:
                call.was_paused = call.was_paused or (mode is PauseMode.ABORT and call.is_at_engine)
                if call.clock is not None:
                    call.clock.stop_clock()

    def _release(self, weights: _Weights) -> None:
        weights.pause_mode = None
        for call in self._calls.values():
            if call.role.weights is weights and call.clock is not None:
                call.clock.start_clock()
        for role in self._roles.values():
            role.begin_held()

    def _controlled(self, name: str) -> tuple[_Weights, GenerationControl]:
        weights = self._known_role(name).weights
        if not isinstance(weights.engine, GenerationControl):
            raise FailedPreconditionError(
                f"the engine in role {name!r} can be neither paused nor given other weights: serve its model with "
                'SGLang, and set kind = "sglang"'
            )
        return weights, weights.engine

    def _known_role(self, name: str) -> _Role:
        role = self._roles.get(name)
        if role is None:
            raise NotFoundError(f"no generation engine has the role {name!r} (configured: {self._known()})")
        return role

    def _known(self) -> str:
        return ", ".join(self._roles) or "none"


def _base_of(engine: GenerationEngine) -> GenerationEngine:
    """The engine that has the weights."""
    while isinstance(engine, DerivedEngine):
        engine = engine.base
    return engine


async def _budget(engine: GenerationEngine, request: GenerationRequest) -> int | None:
    """How many new tokens a request gets in all; None when nobody knows."""
    if request.sampling.max_new_tokens is not None:
        return request.sampling.max_new_tokens
    return (await engine.model_info()).default_max_new_tokens


async def _asked(answer: Awaitable[AnswerT], role: str, what: str) -> AnswerT:
    """What the engine answered. Its address is none of a client's business; the log has it."""
    try:
        return await answer
    except EngineUnavailableError as error:
        logger.warning("the engine in role %s did not %s: %s", role, what, error)
        raise EngineUnavailableError(f"the engine in role {role!r} did not {what}: the log says why") from error
