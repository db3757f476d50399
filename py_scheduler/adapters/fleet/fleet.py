"""Generation by several inference servers of one model, behind one GenerationBackend.

Invariants:

- A generation holds one place at one endpoint, from when it is given to it until it has ended there, however it ends.
  An endpoint gets one only while it is up and has room.
- Who waits for a place is served first come, first served, as soon as there is one.
- A generation moves to another endpoint only while not one token of it was received, and at most `max_attempts` times.
  When a server refuses it (a context that is too long, a bad parameter) it does not move: every other one would refuse
  it too.
- All endpoints that are up serve one model: of one name and one vocabulary, as far as that is known (see ServedModel).
  The context is the least of theirs.
- Which endpoints there are may change while it runs (`members.py`). While none is named, or one that is named may still
  be loading its model, nothing has failed: generations wait, and `no_endpoint_seconds` is no limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.adapters.fleet.choice import EndpointChoice
from py_scheduler.adapters.fleet.control import FleetControl
from py_scheduler.adapters.fleet.endpoint import Endpoint
from py_scheduler.adapters.fleet.members import Members
from py_scheduler.adapters.fleet.settings import FleetSettings
from py_scheduler.adapters.http_server.encoded import EncodedPrompts, chat_body, text_body
from py_scheduler.adapters.http_server.values import NOTHING
from py_scheduler.adapters.in_flight import Flights
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.domain.generation import Endpoints, EndpointState, FinishReason, Generation
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.adapters.http_server.backend import HttpBackend
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.adapters.in_flight import Flight
    from py_scheduler.domain.generation import ChatMessage, EndpointView, GenerationRequest, ModelInfo
    from py_scheduler.domain.ports import Clock

logger = logging.getLogger(__name__)

UNKNOWN_VOCAB_SIZE = 0
ATTEMPTS_AT_ENDPOINT = 2
"""The second for a kept connection that the server closed meanwhile; after that another endpoint may do better."""

AnswerT = TypeVar("AnswerT")


class _Waiter:
    """A generation without an endpoint; `served` is set with `endpoint`, which holds a place for it from then on."""

    def __init__(self, session_id: str, avoid: Endpoint | None) -> None:
        self.session_id = session_id
        self.avoid = avoid
        self.endpoint: Endpoint | None = None
        self.served = asyncio.Event()


ServerSettingsT = TypeVar("ServerSettingsT", bound="ServerSettings")


def tried_twice(settings: ServerSettingsT) -> ServerSettingsT:
    """As the servers of a fleet are spoken to."""
    return msgspec.structs.replace(
        settings, retry=msgspec.structs.replace(settings.retry, attempts=ATTEMPTS_AT_ENDPOINT)
    )


class Fleet(FleetControl):
    """A GenerationBackend, with GenerationControl, on the servers at `base_urls`, until `set_endpoints` names others.
    control_urls: of the workers, where `base_urls` is one router. settings: with which `make_backend` makes the backend
    of one address, with the workers behind it.

    Raises InvalidArgumentError when one is named twice.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        control_urls: Sequence[str],
        make_backend: Callable[[str, tuple[str, ...], EncodedPrompts], HttpBackend],
        settings: ServerSettings,
        fleet: FleetSettings | None,
        clock: Clock | None,
    ) -> None:
        super().__init__()
        self._make_backend = make_backend
        self._settings = settings
        self._fleet = fleet or FleetSettings()
        self._clock = clock or LoopClock()
        self._encoded = EncodedPrompts(settings.encoded_seconds)
        self._members = Members(
            Endpoints(urls=tuple(base_urls), control_urls=tuple(control_urls)),
            make=self._make_endpoint,
            may_leave=self._may_leave,
            named_again=self._named_again,
            let_go=self._let_go,
        )
        self._endpoints = self._members.endpoints
        self._choice = EndpointChoice(self._endpoints, self._fleet)
        self._flights = Flights()
        self._closing = Flights()
        """Endpoints that have left."""
        self._is_closed = False
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._changed = asyncio.Event()
        self._model: ModelInfo | None = None
        self._stranger = ""
        """What is said of the last endpoint that was refused for its model."""

    async def start(self) -> None:
        """Returns when every endpoint was asked once and one of them is up; the others go on warming up. Waits for none
        where there is none, or where they were set: whoever sets them may yet have to start them, or to set others.

        Raises EngineUnavailableError when none comes up before the warm-up is over, or two serve different models.
        """
        self._members.start()
        if self._members.are_set or not self._endpoints:
            return
        try:
            for endpoint in tuple(self._endpoints):
                await endpoint.first_look.wait()
            if self._stranger:
                raise EngineUnavailableError(self._stranger)
            while not self.is_up:
                if not any(endpoint.state is EndpointState.WARMING_UP for endpoint in self._endpoints):
                    raise EngineUnavailableError(f"no endpoint came up: {self._reasons()}")
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends what is in flight with EngineUnavailableError, aborts it at its endpoint, and closes the connections."""
        self._is_closed = True
        self._changed.set()
        await asyncio.gather(
            self._flights.close(self._settings.control_timeout_seconds),
            *(endpoint.close() for endpoint in tuple(self._endpoints)),
        )
        await self._closing.close(self._settings.control_timeout_seconds)

    # -- which servers

    @property
    def endpoints(self) -> Endpoints:
        return self._members.named

    def set_endpoints(self, endpoints: Endpoints | None) -> None:
        self._members.name(endpoints)
        self._endpoint_changed()

    def endpoint_views(self) -> list[EndpointView]:
        return [endpoint.view for endpoint in self._endpoints]

    def _make_endpoint(self, base_url: str, control_urls: tuple[str, ...]) -> Endpoint:
        endpoint = Endpoint(
            self._make_backend(base_url, control_urls, self._encoded),
            self._fleet,
            self._clock,
            catch_up=self._catch_up,
            admit=self._admit,
            on_change=self._endpoint_changed,
        )
        self._has_come(endpoint)
        return endpoint

    def _named_again(self, endpoint: Endpoint) -> None:
        if self._misses_weights(endpoint, endpoint.weight_version):
            endpoint.failed("has missed an update of the weights while it was removed")

    def _let_go(self, endpoint: Endpoint) -> None:
        self._has_left(endpoint)
        self._choice.forget(endpoint)
        self._closing.clean_up(endpoint.close())  # type: ignore[unused-awaitable]

    def _let_go_of_idle(self) -> None:
        self._members.let_go_of_idle()

    # -- the model

    async def model_info(self) -> ModelInfo:
        """With the least context of all endpoints that have been up, and the weight version of one that is up.

        Waits for the first that comes up, as `generate` does. Raises EngineUnavailableError.
        """
        if self._model is None:
            await self._until_one_is_up()
        return self._known_info()

    def _known_info(self) -> ModelInfo:
        assert self._model is not None
        lengths = [each.info.context_length for each in self._endpoints if each.info is not None]
        return msgspec.structs.replace(
            self._model,
            context_length=min(lengths, default=self._model.context_length),
            weight_version=next((each.weight_version for each in self._endpoints if each.takes), "")
            or self._model.weight_version,
            streaming=" and ".join(sorted({each.streaming for each in self._endpoints if each.is_up})),
        )

    async def encode(self, text: str) -> list[int]:
        return await self._encoded.of(text_body(text), self._tokenize)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return await self._encoded.of(chat_body(messages), self._tokenize)

    async def _tokenize(self, body: bytes) -> list[int]:
        return await self._ask_any(lambda backend: backend.tokenize(body))

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend. EngineUnavailableError carries tokens that were received as `partial`."""
        wanted = request.sampling.max_new_tokens
        default = self._settings.default_max_new_tokens
        if self._model is not None:
            check_request(request, self._known_info(), default if wanted is None else wanted)
        with self._flights.enter(request.rid) as flight:
            failure: EngineUnavailableError | None = None
            failed_at: Endpoint | None = None
            for _ in range(self._fleet.max_attempts):
                endpoint = await self._place(request.session_id, flight, failed_at)
                if endpoint is None:
                    return NOTHING
                try:
                    # Which checks the request, so also one that came before any model was known.
                    return await self._generate_at(endpoint, request, flight)
                except EngineUnavailableError as error:
                    if flight.was_cut or has_tokens(error.partial):
                        raise
                    failure, failed_at = error, endpoint
            raise EngineUnavailableError(
                f"failed at {self._fleet.max_attempts} endpoints in a row, last: {failure}"
            ) from failure

    async def abort(self, rid: str) -> None:
        """Asks the endpoint that has it; one that waits for an endpoint ends at once."""
        flight = self._flights.get(rid)
        if flight is None:
            return
        flight.abort_requested = True
        flight.cut()
        # A backend that has not got the rid does nothing.
        await asyncio.gather(*(endpoint.backend.abort(rid) for endpoint in self._endpoints))

    # -- one generation

    async def _generate_at(self, endpoint: Endpoint, request: GenerationRequest, flight: Flight) -> Generation:
        try:
            generation = await endpoint.backend.generate(request)
        except EngineUnavailableError as error:
            if not flight.was_cut:
                endpoint.failed(str(error))
            raise
        finally:
            self._leave(endpoint)
        if generation.finish_reason is not FinishReason.ABORT:
            endpoint.succeeded()
        return generation

    async def _place(self, session_id: str, flight: Flight, avoid: Endpoint | None) -> Endpoint | None:
        """An endpoint with a place taken there; None when the generation was aborted meanwhile.

        Raises EngineUnavailableError when no endpoint was up for too long, or the fleet is closed.
        """
        waiter = _Waiter(session_id, avoid)
        self._waiters[waiter] = None
        self._serve_waiters()
        try:
            while True:
                try:
                    async with flight.watched(self._fleet.no_endpoint_seconds):
                        await waiter.served.wait()
                        placed, waiter.endpoint = waiter.endpoint, None
                        return placed
                except TimeoutError as error:
                    if flight.abort_requested:
                        return None
                    if flight.was_cut:
                        raise EngineUnavailableError("the engine was closed") from error
                    if not (self.is_up or self._one_may_come_up()):
                        raise self._none_came_up() from error
        finally:
            self._waiters.pop(waiter, None)
            if waiter.endpoint is not None:
                self._leave(waiter.endpoint)

    def _leave(self, endpoint: Endpoint) -> None:
        """Gives back a place there."""
        endpoint.in_flight -= 1
        self._serve_waiters()
        if endpoint.is_draining:
            self._members.let_go_of_idle()

    def _serve_waiters(self) -> None:
        if self._waiters and self._are_being_met():
            return
        while self._waiters:
            waiter = next(iter(self._waiters))
            endpoint = self._choice.choose(waiter.session_id, waiter.avoid)
            if endpoint is None:
                return
            endpoint.take()
            del self._waiters[waiter]
            waiter.endpoint = endpoint
            waiter.served.set()

    def _are_being_met(self) -> bool:
        """Whether some of those that are named were not looked at yet, and nobody was given to any: the first that
        answers would get all that has waited.
        """
        named = [endpoint for endpoint in self._endpoints if not endpoint.is_draining]
        are_met = all(endpoint.first_look.is_set() for endpoint in named)
        return not are_met and not any(endpoint.taken for endpoint in named)

    async def _ask_any(self, question: Callable[[HttpBackend], Awaitable[AnswerT]]) -> AnswerT:
        """Of the endpoints that are up, the first that answers, from the least loaded on."""
        await self._until_one_is_up()
        failure: EngineUnavailableError | None = None
        up = [endpoint for endpoint in self._endpoints if endpoint.takes]
        for endpoint in sorted(up, key=lambda each: (each.is_silent, each.load)):
            endpoint.questions += 1
            try:
                return await question(endpoint.backend)
            except EngineUnavailableError as error:
                failure = error
            finally:
                endpoint.questions -= 1
                if endpoint.is_draining:
                    self._members.let_go_of_idle()
        assert failure is not None
        raise failure

    async def _until_one_is_up(self) -> None:
        """Raises EngineUnavailableError when none comes up for too long, or the fleet is closed."""
        while not self.is_up:
            try:
                async with asyncio.timeout(self._fleet.no_endpoint_seconds):
                    while not self.is_up:
                        if self._is_closed:
                            raise EngineUnavailableError("the engine was closed")
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError as error:
                if not self._one_may_come_up():
                    raise self._none_came_up() from error

    def _one_may_come_up(self) -> bool:
        """Whether it is too early to say that none does."""
        named = [endpoint for endpoint in self._endpoints if not endpoint.is_draining]
        return not named or any(endpoint.state is EndpointState.WARMING_UP for endpoint in named)

    # -- the endpoints

    def _admit(self, endpoint: Endpoint, info: ModelInfo) -> None:
        """Raises EngineUnavailableError for another model than the fleet's, which is that of the first endpoint up.

        So it does for weights that were replaced, or a pause that ended, while the endpoint was being asked.
        """
        model = self._model or info
        vocabularies = {info.vocab_size, model.vocab_size} - {UNKNOWN_VOCAB_SIZE}
        if info.name != model.name or len(vocabularies) > 1:
            stranger = (
                f"{endpoint.base_url} serves {info.name!r} with a vocabulary of {info.vocab_size}, and the other "
                f"endpoints {model.name!r} with {model.vocab_size}: serve one model at all of them, "
                "under one --served-model-name"
            )
            self._stranger = stranger
            raise EngineUnavailableError(stranger)
        if missed := self._what_it_misses(endpoint, info.weight_version):
            raise EngineUnavailableError(f"{endpoint.base_url} {missed}")
        self._model = msgspec.structs.replace(model, vocab_size=max(info.vocab_size, model.vocab_size))
        versions = {each.weight_version for each in self._endpoints if each.takes} - {info.weight_version}
        if versions:
            others = ", ".join(sorted(versions))
            logger.warning(
                "%s has weight version %r, and other endpoints have %s: update it, or its samples are of other weights",
                endpoint.base_url,
                info.weight_version,
                others,
            )

    def _endpoint_changed(self) -> None:
        self._encoded.forget()
        self._members.let_go_of_idle()
        self._changed.set()
        self._serve_waiters()

    def _none_came_up(self) -> EngineUnavailableError:
        waited = f"no endpoint came up within {self._fleet.no_endpoint_seconds:g} s"
        return EngineUnavailableError(f"{waited}: {self._reasons()}")

    @property
    def is_up(self) -> bool:
        """Whether any of its endpoints takes generations."""
        return any(endpoint.takes for endpoint in self._endpoints)

    def _reasons(self) -> str:
        return "; ".join(f"{each.base_url}: {each.reason}" for each in self._endpoints if not each.is_up)


def has_tokens(partial: object) -> bool:
    return isinstance(partial, Generation) and partial.token_count > 0
