"""Generation by several SGLang servers of one model, behind one GenerationBackend.

Invariants:

- A generation holds one place at one endpoint, from when it is given to it until it has ended there, however it ends.
  An endpoint gets one only while it is up and has room.
- Who waits for a place is served first come, first served, as soon as there is one.
- A generation moves to another endpoint only while not one token of it was received, and at most `max_attempts` times.
  When a server refuses it (a context that is too long, a bad parameter) it does not move: every other one would refuse
  it too.
- All endpoints that are up serve one model: of one name and one vocabulary, as far as that is known (see ServedModel).
  The context is the least of theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.adapters.in_flight import Flights
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.choice import EndpointChoice
from py_scheduler.adapters.sglang.endpoint import Endpoint, EndpointState
from py_scheduler.adapters.sglang.events import NOTHING
from py_scheduler.adapters.sglang.fleet_control import FleetControl
from py_scheduler.adapters.sglang.settings import FleetSettings, SglangSettings
from py_scheduler.domain.generation import FinishReason, Generation
from py_scheduler.errors import EngineUnavailableError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.adapters.in_flight import Flight
    from py_scheduler.domain.generation import ChatMessage, GenerationRequest, ModelInfo
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


class SglangFleet(FleetControl):
    """A GenerationBackend on the SGLang servers at `base_urls`.

    Raises InvalidArgumentError when there are none, or one of them twice.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        settings: SglangSettings | None = None,
        fleet: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not base_urls or len({url.rstrip("/") for url in base_urls}) < len(base_urls):
            raise InvalidArgumentError("must be the addresses of one or more different servers", "base_urls")
        super().__init__()
        settings = settings or SglangSettings()
        self._settings = msgspec.structs.replace(
            settings, retry=msgspec.structs.replace(settings.retry, attempts=ATTEMPTS_AT_ENDPOINT)
        )
        self._fleet = fleet or FleetSettings()
        self._endpoints = [
            Endpoint(
                SglangBackend(base_url, settings=self._settings),
                self._fleet,
                clock or LoopClock(),
                catch_up=self._catch_up,
                admit=self._admit,
                on_change=self._endpoint_changed,
            )
            for base_url in base_urls
        ]
        self._choice = EndpointChoice(self._endpoints, self._fleet)
        self._flights = Flights()
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._changed = asyncio.Event()
        self._model: ModelInfo | None = None
        self._stranger = ""
        """What is said of the last endpoint that was refused for its model."""

    async def start(self) -> None:
        """Returns when every endpoint was asked once and one of them is up; the others go on warming up.

        Raises EngineUnavailableError when none comes up before the warm-up is over, or two serve different models.
        """
        try:
            for endpoint in self._endpoints:
                endpoint.start()
            for endpoint in self._endpoints:
                await endpoint.first_look.wait()
            if self._stranger:
                raise EngineUnavailableError(self._stranger)
            while not self._any_is_up():
                if not any(endpoint.state is EndpointState.WARMING_UP for endpoint in self._endpoints):
                    raise EngineUnavailableError(f"no endpoint came up: {self._reasons()}")
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends what is in flight with EngineUnavailableError, aborts it at its endpoint, and closes the connections."""
        await asyncio.gather(
            self._flights.close(self._settings.control_timeout_seconds),
            *(endpoint.close() for endpoint in self._endpoints),
        )

    async def model_info(self) -> ModelInfo:
        """With the least context of all endpoints that have been up, and the weight version of one that is up."""
        if self._model is None:
            raise EngineUnavailableError(f"no endpoint was up yet: {self._reasons()}")
        return msgspec.structs.replace(
            self._model,
            context_length=min(each.info.context_length for each in self._endpoints if each.info is not None),
            weight_version=next((each.weight_version for each in self._endpoints if each.is_up), "")
            or self._model.weight_version,
            streaming=" and ".join(sorted({each.streaming for each in self._endpoints if each.is_up})),
        )

    async def encode(self, text: str) -> list[int]:
        return await self._ask_any(lambda backend: backend.encode(text))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return await self._ask_any(lambda backend: backend.encode_chat(messages))

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend. EngineUnavailableError carries tokens that were received as `partial`."""
        wanted = request.sampling.max_new_tokens
        default = self._settings.default_max_new_tokens
        check_request(request, await self.model_info(), default if wanted is None else wanted)
        with self._flights.enter(request.rid) as flight:
            failure: EngineUnavailableError | None = None
            failed_at: Endpoint | None = None
            for _ in range(self._fleet.max_attempts):
                endpoint = await self._place(request.session_id, flight, failed_at)
                if endpoint is None:
                    return NOTHING
                try:
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
            endpoint.in_flight -= 1
            self._serve_waiters()
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
                    if not self._any_is_up():
                        raise self._none_came_up() from error
        finally:
            self._waiters.pop(waiter, None)
            if waiter.endpoint is not None:
                waiter.endpoint.in_flight -= 1
                self._serve_waiters()

    def _serve_waiters(self) -> None:
        while self._waiters:
            waiter = next(iter(self._waiters))
            endpoint = self._choice.choose(waiter.session_id, waiter.avoid)
            if endpoint is None:
                return
            endpoint.take()
            del self._waiters[waiter]
            waiter.endpoint = endpoint
            waiter.served.set()

    async def _ask_any(self, question: Callable[[SglangBackend], Awaitable[AnswerT]]) -> AnswerT:
        """Of the endpoints that are up, the first that answers, from the least loaded on."""
        try:
            async with asyncio.timeout(self._fleet.no_endpoint_seconds):
                while not self._any_is_up():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise self._none_came_up() from error
        failure: EngineUnavailableError | None = None
        up = [endpoint for endpoint in self._endpoints if endpoint.is_up]
        for endpoint in sorted(up, key=lambda each: (each.is_silent, each.load)):
            try:
                return await question(endpoint.backend)
            except EngineUnavailableError as error:
                failure = error
        assert failure is not None
        raise failure

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
        if self._misses_update(info):
            raise EngineUnavailableError(f"{endpoint.base_url} has missed an update of the weights")
        if self._misses_resume(endpoint):
            raise EngineUnavailableError(f"{endpoint.base_url} has missed the end of a pause")
        self._model = msgspec.structs.replace(model, vocab_size=max(info.vocab_size, model.vocab_size))
        versions = {each.weight_version for each in self._endpoints if each.is_up} - {info.weight_version}
        if versions:
            others = ", ".join(sorted(versions))
            logger.warning(
                "%s has weight version %r, and other endpoints have %s: update it, or its samples are of other weights",
                endpoint.base_url,
                info.weight_version,
                others,
            )

    def _endpoint_changed(self) -> None:
        self._changed.set()
        self._serve_waiters()

    def _none_came_up(self) -> EngineUnavailableError:
        waited = f"no endpoint came up within {self._fleet.no_endpoint_seconds:g} s"
        return EngineUnavailableError(f"{waited}: {self._reasons()}")

    @property
    def is_up(self) -> bool:
        """Whether any of its endpoints is."""
        return self._any_is_up()

    def _any_is_up(self) -> bool:
        return any(endpoint.is_up for endpoint in self._endpoints)

    def _reasons(self) -> str:
        return "; ".join(f"{each.base_url}: {each.reason}" for each in self._endpoints if not each.is_up)


def has_tokens(partial: object) -> bool:
    return isinstance(partial, Generation) and bool(partial.token_ids)
