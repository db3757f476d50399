"""What an inference server tells of the model that it serves.

Invariants

- The server is asked once, and again only by `refresh`. In between the weight version follows what generations report.
- What its tokenizer has answered is forgotten with all that may come with another one (`encoded.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.http_client import UnknownPathError, read_as
from py_scheduler.adapters.http_server.values import Tokenized
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    async def known(self) -> ModelInfo:
        """Raises EngineUnavailableError when the server has not told it yet and does not now."""
        if self.info is None:
            async with self._asking:
                if self.info is None:
                    self.info = await self._ask_info()
        return self.info

    async def refresh(self) -> ModelInfo:
        async with self._asking:
            self._encoded.forget()
            self.info = await self._ask_info()
        return self.info

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
                if body is None:
                    return await client.get_json(path, timeout_seconds=timeout)
                return await client.post_json(path, body, timeout_seconds=timeout)
            except EngineUnavailableError:
                failed += 1
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
