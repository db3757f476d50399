"""A language model that generates when a test says so, and takes control calls as SGLang does.

Every token's id is its position in the context, so that a generation which goes on is told from one that begins anew.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    LogProbKind,
    ModelInfo,
    PauseMode,
    WeightSpan,
    WeightUpdate,
)
from py_scheduler.errors import EngineUnavailableError
from tests.support.fake_clock import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.generation import ChatMessage
    from py_scheduler.errors import GenerationError


class _Flight:
    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.versions: list[str] = []
        self.over: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def end(self, reason: FinishReason) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    def generation(self, reason: FinishReason) -> Generation:
        start, spans = len(self.request.token_ids), list[WeightSpan]()
        for number, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = WeightSpan(version, spans[-1].start, number + 1)
            else:
                spans.append(WeightSpan(version, number, number + 1))
        ids = list(range(start, start + len(self.versions)))
        return Generation.of(
            token_ids=ids,
            log_probs=[-token_id / 128 for token_id in ids],
            text="".join(f"<{token_id}>" for token_id in ids),
            finish_reason=reason,
            weight_spans=tuple(spans),
            prompt_tokens=start,
        )


class ControlledModel:
    """A GenerationBackend with GenerationControl. `fail_with` is raised by the next control call, without effect."""

    def __init__(self, default_max_new_tokens: int | None = 16, context_length: int = 10_000) -> None:
        self.version = "v0"
        self.mode: PauseMode | None = None
        self.requests: list[GenerationRequest] = []
        self.flights: dict[str, _Flight] = {}
        self.loaded: list[WeightUpdate] = []
        self.control_calls: list[str] = []
        self.fail_with: GenerationError | None = None
        self.default_max_new_tokens = default_max_new_tokens
        self.context_length = context_length
        self._begun = asyncio.Event()

    # What a test makes happen

    async def asked(self, count: int = 1) -> None:
        """Waits for so many requests in all, wherever they come from."""
        async with asyncio.timeout(10):
            while len(self.requests) < count:
                self._begun.clear()
                await self._begun.wait()

    async def step(self, tokens: int = 1) -> None:
        """Everything that runs gets that many tokens, and ends when it has its budget."""
        await settle()
        if self.mode is None:
            for flight in list(self.flights.values()):
                budget = flight.request.sampling.max_new_tokens or self.default_max_new_tokens or 1_000
                flight.versions += [self.version] * min(tokens, budget - len(flight.versions))
                if len(flight.versions) == budget:
                    flight.end(FinishReason.LENGTH)
        await settle()

    async def end(self, rid: str, reason: FinishReason) -> None:
        self.flights[rid].end(reason)
        await settle()

    async def break_down(self) -> None:
        """What runs fails, with the tokens that it has."""
        for flight in self.flights.values():
            partial = flight.generation(FinishReason.ABORT)
            flight.over.set_exception(EngineUnavailableError("it broke down", partial))
        await settle()

    # GenerationBackend

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="controlled",
            vocab_size=10_000,
            context_length=self.context_length,
            weight_version=self.version,
            log_prob_kind=LogProbKind.SAMPLED,
            default_max_new_tokens=self.default_max_new_tokens,
        )

    async def encode(self, text: str) -> list[int]:
        return list(range(len(text)))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return list(range(len(messages)))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        flight = self.flights[request.rid] = _Flight(request)
        self._begun.set()
        try:
            return flight.generation(await flight.over)
        finally:
            del self.flights[request.rid]

    async def abort(self, rid: str) -> None:
        if rid in self.flights:
            self.flights[rid].end(FinishReason.ABORT)

    # GenerationControl

    async def pause(self, mode: PauseMode) -> None:
        self._called(f"pause {mode}")
        self.mode = mode
        if mode is PauseMode.ABORT:
            for flight in self.flights.values():
                flight.end(FinishReason.ABORT)

    async def resume(self) -> None:
        self._called("resume")
        self.mode = None

    async def update_weights(self, update: WeightUpdate) -> None:
        self._called(f"update {update.weight_version}")
        self.loaded.append(update)
        self.version = update.weight_version

    async def name_weights(self, version: str) -> None:
        self._called(f"name {version}")
        self.version = version

    async def weight_version(self) -> str:
        return self.version

    def _called(self, what: str) -> None:
        self.control_calls.append(what)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
