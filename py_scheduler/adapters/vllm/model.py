"""What a vLLM server tells of the model that it serves.

Invariants

- What its log-probs are of is found out by a question, since no answer of the server says it: with one token allowed,
  its log-prob is 0 after sampling, whichever token that is, and the model's own before it. Until that question was
  answered nothing is generated: a server that was paused when it was met holds it, like everything else.
- The size of the vocabulary is told by a refusal, also while the server is paused.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.adapters.http_client import (
    HTTP_NOT_FOUND,
    HTTP_OK,
    LOST_CONNECTION,
    body_of,
    error_message,
    read_as,
)
from py_scheduler.adapters.http_server.model import ServedModel
from py_scheduler.adapters.vllm.answers import Models, ServedWeights
from py_scheduler.adapters.vllm.events import Event
from py_scheduler.adapters.vllm.requests import GENERATE
from py_scheduler.domain.generation import LogProbKind, ModelInfo
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.adapters.http_server.settings import ServerSettings

logger = logging.getLogger(__name__)

VOCAB_SIZE: Final = re.compile(r"Vocabulary size: (\d+)")
VOCAB_QUESTION: Final = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "logit_bias": {2**31 - 1: 0}}}
"""No endpoint tells the size of the vocabulary, but the refusal of this does. Nothing is generated."""
LOG_PROB_QUESTION: Final = {
    "token_ids": [0],
    "sampling_params": {"max_tokens": 1, "logprobs": 0, "allowed_token_ids": [0], "ignore_eos": True},
}
SCALE_OUT: Final = "--enable-scale-out"
_NO_VLLM: Final = (
    f"give the address of a vLLM server that was started with {SCALE_OUT}, without a path such as /v1 "
    '(kind = "sglang" asks an SGLang server)'
)


class ServedVllm(ServedModel):
    """Of the server at `base_url`, as its control addresses tell it."""

    def __init__(
        self, base_url: str, controls: Sequence[HttpClient], settings: ServerSettings, encoded: EncodedPrompts
    ) -> None:
        super().__init__(base_url, controls, settings, encoded)
        self._settings = settings
        self.is_certain = False
        """Whether the server has told what its log-probs are of."""
        self._making_certain = asyncio.Lock()

    async def make_certain(self) -> None:
        """Waits for as long as the server is paused. Raises EngineUnavailableError."""
        async with self._making_certain:
            if not self.is_certain:
                kind = await self._ask_log_prob_kind()
                self.info = msgspec.structs.replace(await self.known(), log_prob_kind=kind)
                self.is_certain = True

    async def _ask_info(self) -> ModelInfo:
        served = read_as(Models, await self._ask_or_tell("/v1/models", _NO_VLLM), self._base_url + "/v1/models").data[0]
        context_length = self._settings.context_length or served.max_model_len
        if context_length is None:
            raise EngineUnavailableError(f"{self._base_url} does not tell its context: set context_length")
        vocab_size = self._settings.vocab_size or await self._ask_vocab_size()
        # It may have come back with other flags.
        self.is_certain = False
        kind = await self._ask_log_prob_kind_in_time()
        return ModelInfo(
            name=served.id,
            vocab_size=vocab_size,
            context_length=context_length,
            weight_version=await self._ask_weight_version(),
            log_prob_kind=kind,
            default_max_new_tokens=self._settings.default_max_new_tokens,
            streaming="increments",
        )

    async def _ask_weight_version(self) -> str:
        answer = await self._ask_or_tell("/weight_info", "start it with VLLM_SERVER_DEV_MODE=1")
        return read_as(ServedWeights, answer, self._base_url + "/weight_info").weight_version

    async def _ask_log_prob_kind_in_time(self) -> LogProbKind:
        try:
            async with asyncio.timeout(self._settings.control_timeout_seconds):
                kind = await self._ask_log_prob_kind()
        except TimeoutError:
            # It has just answered everything else, so it is paused, and what waits for it now waits for its trainer.
            logger.warning("%s is paused: it holds what it is asked to generate until it continues", self._base_url)
            return LogProbKind.SAMPLED
        self.is_certain = True
        return kind

    async def _ask_log_prob_kind(self) -> LogProbKind:
        status, content = await self._question(LOG_PROB_QUESTION)
        if status != HTTP_OK:
            raise EngineUnavailableError(f"{self._base_url}{GENERATE} answered {status}: {error_message(content)}")
        try:
            choices = msgspec.json.decode(content, type=Event).choices or []
            (choice,) = choices
            (scored,) = (choice.logprobs.content if choice.logprobs is not None else None) or []
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineUnavailableError(f"{self._base_url} gives no log-probs in any known way: {error}") from error
        if scored.logprob > 0:
            raise EngineUnavailableError(
                f"{self._base_url} gives logits in place of log-probs: start it with --logprobs-mode processed_logprobs"
            )
        return LogProbKind.SAMPLED if scored.logprob == 0 else LogProbKind.MODEL

    async def _ask_vocab_size(self) -> int:
        status, content = await self._question(VOCAB_QUESTION)
        message = error_message(content)
        said = VOCAB_SIZE.search(message)
        if said is None and SCALE_OUT in message:
            raise EngineUnavailableError(f"{self._base_url} takes no token ids: start it with {SCALE_OUT}")
        if status == HTTP_NOT_FOUND:
            raise EngineUnavailableError(f"{self._base_url}{GENERATE} answered {status}: {message[:200]}: {_NO_VLLM}")
        if said is None:
            raise EngineUnavailableError(
                f"{self._base_url} does not tell the size of its vocabulary: set vocab_size, which stands in the "
                f"model's config.json. It said: {message[:200]}"
            )
        return int(said[1])

    async def _question(self, body: object) -> tuple[int, bytes]:
        try:
            async with self._controls[0].post(GENERATE, body, fresh=self.is_doubted) as response:
                return response.status, await body_of(response)
        except LOST_CONNECTION as error:
            raise EngineUnavailableError(f"{self._base_url}: {error}") from error
