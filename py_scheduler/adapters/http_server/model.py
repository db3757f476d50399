"""What an inference server tells of the model that it serves.

Invariants

- The server is asked once, again by `refresh`, and before the next attempt after it was seen to be away: who answers
  then may be another one, with other weights and flags. In between the weight version follows what generations report.
- Of many who wait for it to be asked again one asks, and those fare as it does.
- What its tokenizer has answered is forgotten with all that may come with another one (`encoded.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.http_client import UnknownPathError, is_away, read_as
from py_scheduler.adapters.http_server.values import Tokenized
from py_scheduler.errors import EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.domain.generation import ModelInfo


class ServedModel:
    """Of the server at `base_url`, as its control addresses tell it."""

    _tokenizer = "/tokenize"
    """Where its tokenizer answers."""

    def __init__(
        self, base_url: str, controls: Sequence[HttpClient], settings: ServerSettings, encoded: EncodedPrompts
    ) -> None:
        self.info: ModelInfo | None = None
        self._base_url = base_url
        self._controls = controls
        self._asked_by = settings
        self._asking = asyncio.Lock()
        self._encoded = encoded
        self._absences = 0
        self._asked_after = 0
        """As many absences as there were when it was asked last."""
        self._meeting = asyncio.Lock()
        self._meetings = 0
        self._failure: GenerationError | None = None
        """Of the last meeting."""

    @property
    def is_doubted(self) -> bool:
        """Whether it was away since it was asked."""
        return self._absences != self._asked_after

    def was_away(self) -> None:
        self._absences += 1
        self._encoded.forget()

    async def meet_again(self, refresh: Callable[[], Awaitable[ModelInfo]]) -> None:
        """Raises EngineUnavailableError. refresh: asks it, whatever else that takes."""
        seen = self._meetings
        async with self._meeting:
            if self._meetings == seen or (self._failure is None and self.is_doubted):
                self._failure = None
                try:
                    await refresh()
                except GenerationError as failure:
                    self._failure = failure
                self._meetings += 1
            if self._failure is not None:
                raise EngineUnavailableError(str(self._failure)) from self._failure

    async def known(self) -> ModelInfo:
        """Raises EngineUnavailableError when the server has not told it yet and does not now."""
        if self.info is None:
            async with self._asking:
                if self.info is None:
                    return await self._ask_anew()
        return self.info

    async def refresh(self) -> ModelInfo:
        async with self._asking:
            return await self._ask_anew()

    async def _ask_anew(self) -> ModelInfo:
        self._encoded.forget()
        absences = self._absences
        info = self.info = await self._ask_info()
        self._asked_after = absences
        return info

    def has_weights(self, version: str) -> None:
        """That, it was seen to have."""
        if self.info is not None and version != self.info.weight_version:
            self.info = msgspec.structs.replace(self.info, weight_version=version)
            self._encoded.forget()

    async def tokenize(self, body: bytes) -> list[int]:
        """Asks the server, whatever is known. body: as `encoded.py` writes it. Raises EngineUnavailableError."""
        path = self._tokenizer
        return read_as(Tokenized, await self.ask(path, msgspec.Raw(body)), self._base_url + path).tokens

    async def ask(self, path: str, body: Any = None) -> Any:
        """An idempotent call, with retries, by one worker after another. Raises EngineUnavailableError."""
        retry, timeout = self._asked_by.retry, self._asked_by.control_timeout_seconds
        failed = 0
        while True:
            client = self._controls[failed % len(self._controls)]
            try:
                fresh = failed > 0 or self.is_doubted
                if body is None:
                    return await client.get_json(path, timeout_seconds=timeout, fresh=fresh)
                return await client.post_json(path, body, timeout_seconds=timeout, fresh=fresh)
            except EngineUnavailableError as error:
                failed += 1
                self._encoded.forget()
                if is_away(error.__cause__):
                    self.was_away()
                if failed >= retry.attempts:
                    raise
            await asyncio.sleep(retry.wait_seconds(failed))

    async def _ask_or_tell(self, path: str, way_out: str) -> Any:
        """`ask`; way_out: what to do about a server that does not know the path."""
        try:
            return await self.ask(path)
        except UnknownPathError as error:
            raise EngineUnavailableError(f"{error}: {way_out}") from error

    async def _ask_info(self) -> ModelInfo:
        """Raises EngineUnavailableError."""
        raise NotImplementedError
