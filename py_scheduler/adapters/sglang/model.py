"""What an SGLang server tells of the model that it serves.

Invariants

- How it streams follows what it said when it was asked last, and what its streams have shown since.
- The size of the vocabulary, once known, stays that of the model of this name. It is 0 only while the server was paused
  each time it was asked: a paused server does not answer the one question that tells it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.http_client import LOST_CONNECTION, body_of, error_message
from py_scheduler.adapters.http_server.model import ServedModel
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import LogProbKind, ModelInfo
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.adapters.sglang.settings import SglangSettings

logger = logging.getLogger(__name__)

_NO_SGLANG = 'give the address of an SGLang server, without a path such as /v1 (kind = "vllm" asks a vLLM server)'
INPUT_MARGIN = 4
"""Tokens that fit beside the longest input: two less than the model's context has, and the server silently generates
fewer than asked for rather than use those two."""
VALID_IDS = re.compile(r"valid range is \[0, (\d+)\)")
VOCAB_QUESTION = {
    "input_ids": [0],
    "return_logprob": True,
    "token_ids_logprob": [-1],
    "sampling_params": {"max_new_tokens": 1},
}
"""No endpoint tells the size of the vocabulary, but the refusal of this does. Nothing is generated."""


class ServedSglang(ServedModel):
    """Of the server at `base_url`, as its control addresses tell it."""

    _tokenizer = "/v1/tokenize"

    def __init__(
        self, base_url: str, controls: Sequence[HttpClient], settings: SglangSettings, encoded: EncodedPrompts
    ) -> None:
        super().__init__(base_url, controls, settings, encoded)
        self._settings = settings
        self._asking_vocabulary = asyncio.Lock()
        self._ignores_seeds = False
        chosen = settings.streaming
        self.streaming = Streaming.CUMULATIVE if chosen == "auto" else Streaming(chosen)
        """How it is asked for tokens. Of a stream that comes otherwise nothing is lost: it only costs more."""
        self._told = set[Streaming]()

    async def with_vocabulary(self) -> ModelInfo:
        """Waits for as long as the server is paused. Raises EngineUnavailableError."""
        info = await self.known()
        if not info.vocab_size:
            async with self._asking_vocabulary:
                if not (await self.known()).vocab_size:
                    vocab_size = await self._ask_vocab_size()
                    self.info = msgspec.structs.replace(await self.known(), vocab_size=vocab_size)
                info = await self.known()
        return info

    def streams(self, streaming: Streaming) -> None:
        """So it does, as it says or was seen to: generations are asked for accordingly, unless that is set."""
        if self._settings.streaming == "auto" and streaming is not self.streaming:
            self.streaming = streaming
            if self.info is not None:
                self.info = msgspec.structs.replace(self.info, streaming=streaming)
        if self.streaming not in self._told:
            self._told.add(self.streaming)
            logger.info("%s is asked for %s", self._base_url, self.streaming.words)

    def warn_of_ignored_seed(self) -> None:
        """Once: the server takes a seed without a word and draws as it likes."""
        if self._ignores_seeds:
            self._ignores_seeds = False
            logger.warning("%s ignores sampling_seed: start it with --enable-deterministic-inference", self._base_url)

    async def _ask_info(self) -> ModelInfo:
        model = await self._ask_or_tell("/model_info", _NO_SGLANG)
        server = await self.ask("/server_info")
        try:
            return await self._read_info(model, server)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineUnavailableError(f"{self._base_url} tells of its model in no known way: {error!r}") from error

    async def _read_info(self, model: dict[str, Any], server: dict[str, Any]) -> ModelInfo:
        context_length = self._settings.context_length
        if context_length is None and server.get("max_req_input_len") is not None:
            # Not the model's context: the server may have memory for less than that.
            context_length = int(server["max_req_input_len"]) + INPUT_MARGIN
        if context_length is None:
            raise EngineUnavailableError(f"{self._base_url} does not tell its context: set context_length")
        self._ignores_seeds = not server.get("enable_deterministic_inference")
        self.streams(Streaming.INCREMENTS if server.get("incremental_streaming_output") else Streaming.CUMULATIVE)
        # The name that it was started with. In /model_info each update puts the path of its weights in its place.
        name = str(server.get("served_model_name") or server["model_path"])
        return ModelInfo(
            name=name,
            vocab_size=self._settings.vocab_size or self._vocab_size_of(name) or await self._ask_vocab_size_in_time(),
            context_length=int(context_length),
            weight_version=str(model.get("weight_version") or "default"),
            log_prob_kind=LogProbKind.SAMPLED,
            default_max_new_tokens=self._settings.default_max_new_tokens,
            streaming=self.streaming,
        )

    def _vocab_size_of(self, name: str) -> int:
        return self.info.vocab_size if self.info is not None and self.info.name == name else 0

    async def _ask_vocab_size_in_time(self) -> int:
        try:
            async with asyncio.timeout(self._settings.control_timeout_seconds):
                return await self._ask_vocab_size()
        except TimeoutError:
            # It has just answered everything else, so it is paused, and what waits for it now waits for its trainer.
            logger.warning("%s is paused: it holds what it is asked to generate until it continues", self._base_url)
            return 0

    async def _ask_vocab_size(self) -> int:
        try:
            async with self._controls[0].post("/generate", VOCAB_QUESTION, fresh=self.is_doubted) as response:
                said = VALID_IDS.search(error_message(await body_of(response)))
        except LOST_CONNECTION as error:
            raise EngineUnavailableError(f"{self._base_url}: {error}") from error
        if said is None:
            raise EngineUnavailableError(
                f"{self._base_url} does not tell the size of its vocabulary: set vocab_size, "
                "which stands in the model's config.json"
            )
        return int(said[1])
