"""The one place through which every episode generates: holds, caps, rids, aborts, and which weights are at work.

Invariants
  1. A generation is at its backend, or the queue of its role holds it (`execution/generation/queue.py`).
  2. Caps: with `limits = {"student": 2}`, generations 1 and 2 of the student are at the backend and 3 and 4 are held.
     When 1 ends, 3 begins: the one that was held longest.
  3. Pauses: no generation begins while its role is paused. A pause with mode `abort` cuts 1 and 2 at the backend, and
     they queue behind 3 and 4. After the resume a cut generation goes on from its tokens so far if its evaluator has
     `on_weight_update = "resume"` (40 of 100 tokens made: 60 are left), else it begins anew. Roles on one backend pause
     together and share its weights.
  4. The clock of an attempt's phase stands still while its generation is paused. A phase of 60 seconds generates as a
     pause comes at second 20; the role resumes at 50, and the phase ends at 90. A phase that asks for its generation
     only at 30, during that pause, ends at 80.
  5. The gateway only notices which weights there are. Its BackendLog decides what changes `weight_epoch` (see
     `domain.episodes.weight_history`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    GenerationState,
    PauseMode,
    WeightSpan,
    WeightUpdate,
    token_ids_of,
)
from py_scheduler.domain.ports import CONTROLLED_KINDS_SAID, GenerationControl, MovableBackend, ProbedBackend, base_of
from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import (
    EngineRejectedError,
    FailedPreconditionError,
    GenerationError,
    NotFoundError,
)
from py_scheduler.execution.generation.known_backend import ForgetfulBackendLog, KnownBackend, asked
from py_scheduler.execution.generation.queue import Call, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.domain.episodes.weight_history import WeightHistory
    from py_scheduler.domain.generation import Endpoints, EndpointView, GenerationRequest
    from py_scheduler.domain.ports import GenerationBackend
    from py_scheduler.execution.generation.known_backend import BackendLog
    from py_scheduler.execution.generation.queue import StoppableClock

logger = logging.getLogger(__name__)

_NOTHING = Generation(token_id_bytes=b"", log_prob_bytes=b"", text="", finish_reason=FinishReason.ABORT)


class GenerationGateway:
    """Over the backends, by role. limits: how many generations of a role may run at once; a role that is not named
    there has no limit. log: writes down what changes; None: nobody does.
    """

    def __init__(
        self,
        backends: Mapping[str, GenerationBackend],
        limits: Mapping[str, int] | None = None,
        log: BackendLog | None = None,
    ) -> None:
        log = log or ForgetfulBackendLog()
        bases = {name: base_of(backend) for name, backend in backends.items()}
        known = {
            id(base): KnownBackend(base, tuple([name for name in bases if bases[name] is base]), log)
            for base in bases.values()
        }
        self._roles = {
            name: Role(name, backend, known[id(bases[name])], (limits or {}).get(name))
            for name, backend in backends.items()
        }
        self._calls: dict[str, Call] = {}

    # Generating

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    @property
    def any_is_up(self) -> bool:
        """Whether there is a backend that is not known to be gone."""
        return any(map(self.is_up, self._roles))

    def is_up(self, role: str) -> bool:
        """Whether its backend is not known to be gone, or to have no server yet. Raises NotFoundError."""
        backend = self._known_role(role).known.backend
        return not isinstance(backend, ProbedBackend) or backend.is_up

    def backend(self, role: str) -> GenerationBackend:
        """For calls that need no turn: encoding, and what the model is. Raises FailedPreconditionError."""
        found = self._roles.get(role)
        if found is None:
            raise FailedPreconditionError(
                f"no generation engine has the role {role!r} (configured: {self._known()}): add [generation.{role}]"
            )
        return found.backend

    def weights(self, role: str) -> WeightHistory:
        """Which weights a role has had. Raises NotFoundError."""
        return self._known_role(role).known.history

    def have_same_weights(self, *roles: str) -> bool:
        """Whether these roles rest on one backend."""
        return len({id(self._known_role(role).known) for role in roles}) == 1

    async def generate(
        self, role: str, request: GenerationRequest, *, clock: StoppableClock | None = None, resumes: bool = False
    ) -> Generation:
        """Generates when its turn comes. A generation that a pause aborts goes on after the pause: from the tokens that
        it has made and with what they leave of its budget (`resumes`), or anew.

        A finish reason ABORT means that `abort` ended it, or somebody else at the backend. Raises what the backend
        raises, FailedPreconditionError for a role without a backend, EngineRejectedError for a rid that is in use.
        """
        self.backend(role)
        if request.rid in self._calls:
            raise EngineRejectedError(f"rid {request.rid!r} is in use: give every generation a rid of its own")
        call = self._calls[request.rid] = Call(self._roles[role], clock)
        known = call.role.known
        if clock is not None and known.pause_mode is not None:
            clock.stop_clock()
        try:
            return await self._generate(call, request, resumes=resumes)
        finally:
            del self._calls[request.rid]
            if clock is not None and known.pause_mode is not None:
                clock.start_clock()

    async def _generate(self, call: Call, request: GenerationRequest, *, resumes: bool) -> Generation:
        role, rest, made = call.role, request, None
        while role.entered(call) or await role.waited(call):
            try:
                call.is_at_backend, call.was_paused = True, False
                generation = await role.backend.generate(rest)
            except GenerationError as error:
                if isinstance(error.partial, Generation):
                    role.known.observe(error.partial.weight_spans)
                    error.partial = _joined(made, error.partial)
                else:
                    error.partial = made
                raise
            finally:
                call.is_at_backend = False
                role.leave()
            role.known.observe(generation.weight_spans)
            if generation.finish_reason is not FinishReason.ABORT or not call.was_paused or call.stop_asked:
                return _joined(made, generation)
            budget = await _budget(role.backend, request) if resumes else None
            if budget is not None:
                made = _joined(made, generation)
                if made.token_count >= budget:
                    return msgspec.structs.replace(made, finish_reason=FinishReason.LENGTH)
                rest = _rest_of(request, made, budget)
        return made or _NOTHING

    async def abort(self, rid: str) -> None:
        """Ends a generation, which returns what it has made. Does nothing for one that is unknown or over."""
        call = self._calls.get(rid)
        if call is None:
            return
        call.stop_asked = True
        if call.is_at_backend:
            await call.role.backend.abort(rid)
        else:
            call.role.withdraw(call)

    # Control

    async def pause(self, role: str, mode: PauseMode) -> GenerationState:
        """Holds new generations, then pauses the backend.

        Raises NotFoundError for an unknown role, FailedPreconditionError for a backend that cannot be paused or is
        paused in another mode, GenerationError; then nothing is held that was not held before.
        """
        known, control = self._controlled(role)
        async with known.changing:
            before = known.pause_mode
            if before not in (None, mode):
                # SGLang would wait for the end of what it has stopped itself, and answer no call any more.
                raise FailedPreconditionError(f"role {role!r} is paused in mode {before}: continue first")
            self._hold(known, mode)
            try:
                await asked(control.pause(mode), role, "pause")
            except GenerationError:
                if before is None:
                    self._release(known)
                raise
        return await self._known_state(self._roles[role])

    async def resume(self, role: str) -> GenerationState:
        """Lets the backend go on, paused or not, then the held generations. Raises as `pause` does; then all stays
        held.
        """
        known, control = self._controlled(role)
        async with known.changing:
            await asked(control.resume(), role, "continue")
            self._release(known)
        return await self._known_state(self._roles[role])

    async def update_weights(self, role: str, update: WeightUpdate) -> GenerationState:
        """Loads weights, unless they are loaded already. Returns once the epoch is written down.

        Raises as `pause` does, and ResourceExhaustedError while the epoch cannot be written down.
        """
        known, control = self._controlled(role)
        self._check_servers(known, role)
        async with known.changing:
            version = await asked(control.weight_version(), role, "tell its weight version")
            known.saw(version)
            if known.confirmed != update or version != update.weight_version:
                known.confirmed = None
                await asked(control.update_weights(update), role, "load the weights")
                known.loaded(update)
            # A caller that is told of an epoch finds it again, whatever crashes.
            await known.log.committed()
        return await self._known_state(self._roles[role])

    async def weights_changed(self, role: str, version: str) -> GenerationState:
        """The backend's trainer has put these weights there itself. Returns once the epoch is written down.

        Raises as `update_weights` does, and FailedPreconditionError while the role is not paused: tokens generated
        during the push would be told to be of other weights than they are.
        """
        known, control = self._controlled(role)
        self._check_servers(known, role)
        async with known.changing:
            if known.pause_mode is None:
                raise FailedPreconditionError(
                    f"role {role!r} is not paused: push weights, and say so, within one pause (`with client.paused():`)"
                )
            known.confirmed = None
            await asked(control.name_weights(version), role, "take the name of its weights")
            known.pushed(version)
            await known.log.committed()
        return await self._known_state(self._roles[role])

    # Endpoints

    async def set_endpoints(self, role: str, endpoints: Endpoints | None) -> list[EndpointView]:
        """Has the role's backend generate at these servers and no others; None: at those of its configuration. Returns
        once that is written down. Roles that rest on one backend have one list.

        Raises NotFoundError for an unknown role, FailedPreconditionError for a backend whose servers are not to be
        named, InvalidArgumentError, and ResourceExhaustedError while it cannot be written down.
        """
        known = self._known_role(role).known
        backend = known.backend
        if not isinstance(backend, MovableBackend):
            raise FailedPreconditionError(
                f"the servers of role {role!r} are fixed: give [generation.{role}] {CONTROLLED_KINDS_SAID} and "
                "base_urls (also one alone, or none), in place of what it has, and start the scheduler again"
            )
        # Both within one turn of the loop: the last list that was set is the last that was written down.
        backend.set_endpoints(endpoints)
        known.endpoints_were_set(endpoints)
        await known.log.committed()
        return backend.endpoint_views()

    def restore_endpoints(self) -> None:
        """Those that were set before the last end of the process count again."""
        for name, role in self._roles.items():
            known, backend = role.known, role.known.backend
            if role.backend is not backend or (endpoints := known.endpoints_set) is None:
                continue
            if isinstance(backend, MovableBackend):
                logger.info("role %s: its endpoints are the %d that were set last", name, len(endpoints.urls))
                backend.set_endpoints(endpoints)
            else:
                logger.warning("role %s: the endpoints that were set for it count no more: its servers are fixed", name)

    def endpoints(self) -> dict[str, list[EndpointView]]:
        """Of the roles whose servers can be named."""
        backends = {name: role.known.backend for name, role in self._roles.items()}
        return {
            name: backend.endpoint_views() for name, backend in backends.items() if isinstance(backend, MovableBackend)
        }

    def _check_servers(self, known: KnownBackend, role: str) -> None:
        if isinstance(known.backend, MovableBackend) and not known.backend.endpoints.urls:
            raise FailedPreconditionError(
                f"role {role!r} has no servers: name them with set_endpoints, or `py-scheduler endpoints {role} URL`"
            )

    async def states(self, *roles: str) -> list[GenerationState]:
        """Of these roles, or of all. It asks their backends, so it notices a change of weights that nobody has told of,
        also while nothing is generated. Raises NotFoundError.
        """
        roles_asked = [self._known_role(name) for name in roles or self._roles]
        for each in {id(role.known): role.known for role in roles_asked if self.is_up(role.name)}.values():
            await each.look()
        return [await self._known_state(role) for role in roles_asked]

    async def _known_state(self, role: Role) -> GenerationState:
        known = role.known
        if not known.was_heard and self.is_up(role.name):
            try:
                known.saw((await known.backend.model_info()).weight_version)
            except GenerationError as error:
                logger.warning("the engine in role %s does not say what it serves: %s", role.name, error)
        return GenerationState(
            role=role.name,
            pause_mode=known.pause_mode,
            weight_version=known.history.version,
            weight_epoch=known.history.epoch,
            running=role.running,
            held=len(role.waiting),
        )

    def _hold(self, known: KnownBackend, mode: PauseMode) -> None:
        known.pause_mode = mode
        for role in self._roles.values():
            if role.known is known:
                role.take_back()
        for call in self._calls.values():
            if call.role.known is known:
                call.was_paused = call.was_paused or (mode is PauseMode.ABORT and call.is_at_backend)
                if call.clock is not None:
                    call.clock.stop_clock()

    def _release(self, known: KnownBackend) -> None:
        known.pause_mode = None
        for call in self._calls.values():
            if call.role.known is known and call.clock is not None:
                call.clock.start_clock()
        for role in self._roles.values():
            role.begin_held()

    def _controlled(self, name: str) -> tuple[KnownBackend, GenerationControl]:
        known = self._known_role(name).known
        if not isinstance(known.backend, GenerationControl):
            raise FailedPreconditionError(
                f"the engine in role {name!r} can be neither paused nor given other weights: serve its model by "
                f"{CONTROLLED_KINDS_SAID}"
            )
        return known, known.backend

    def _known_role(self, name: str) -> Role:
        role = self._roles.get(name)
        if role is None:
            raise NotFoundError(f"no generation engine has the role {name!r} (configured: {self._known()})")
        return role

    def _known(self) -> str:
        return ", ".join(self._roles) or "none"


async def _budget(backend: GenerationBackend, request: GenerationRequest) -> int | None:
    """How many new tokens a request gets in all; None when nobody knows."""
    if request.sampling.max_new_tokens is not None:
        return request.sampling.max_new_tokens
    return (await backend.model_info()).default_max_new_tokens


def _rest_of(request: GenerationRequest, made: Generation, budget: int) -> GenerationRequest:
    """The request that continues `made`, with what is left of `budget` new tokens in all.

    The backend takes `made` for a part of the prompt. So it does not see a stop string that begins in `made`, and its
    penalties count `made` as prompt.
    """
    count = made.token_count
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=budget - count)
    if sampling.min_new_tokens:
        sampling = msgspec.structs.replace(sampling, min_new_tokens=max(0, sampling.min_new_tokens - count))
    context = Prompt.of(request.token_ids).grown(token_ids_of(made.token_id_bytes))
    return msgspec.structs.replace(request, token_ids=context, sampling=sampling)


def _joined(made: Generation | None, more: Generation) -> Generation:
    """Both parts as one generation; it ends as the second one did."""
    if made is None or not made.token_count:
        return more
    start = made.token_count
    spans = list(made.weight_spans)
    for span in more.weight_spans:
        end = start + span.end
        if spans and spans[-1].version == span.version and spans[-1].end == start + span.start:
            spans[-1] = WeightSpan(span.version, spans[-1].start, end)
        else:
            spans.append(WeightSpan(span.version, start + span.start, end))
    return msgspec.structs.replace(
        more,
        token_id_bytes=made.token_id_bytes + more.token_id_bytes,
        log_prob_bytes=made.log_prob_bytes + more.log_prob_bytes,
        text=made.text + more.text,
        weight_spans=tuple(spans),
        # Those of the request's own prompt: the second part's prompt holds the first part.
        prompt_tokens=made.prompt_tokens,
        cached_tokens=made.cached_tokens,
    )
