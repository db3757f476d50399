"""What the tokenizer of a server, or of a fleet, made of texts and chats that were asked a moment ago.

All samples of a group begin with the same chat, and every later turn asks for the same short one (`chat_turns.py`), so
each is asked once. *A group of 8 is one question to the server and not 8.*

Invariants

- An answer is given for exactly the body that was asked: the body is the key.
- It is as of no more than `seconds` ago, less than a server takes to start, and of no server that has failed or was
  asked anew since (`forget`). So a server that comes back with another chat template is asked again.
- Of many who want the same at once one asks. Those who wait for it fare as it does, but for its cancellation, which is
  its own.
- Kept are at most `max_bytes`; the oldest go first.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.domain.generation import ChatMessage

MAX_BYTES = 16 << 20
_ENTRY_BYTES = 400
"""Of an entry beside its body and its token ids."""


def text_body(text: str) -> bytes:
    """What a tokenizer is asked for a text."""
    return msgspec.json.encode({"prompt": text, "add_special_tokens": False})


def chat_body(messages: Sequence[ChatMessage]) -> bytes:
    """What it is asked for a chat, which the server writes by its own template."""
    return msgspec.json.encode({"messages": [{"role": said.role, "content": said.content} for said in messages]})


class _Question:
    """One that is under way. failure: how it ended, if not with an answer."""

    __slots__ = ("answer", "asked_at", "failure", "is_over")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.is_over = asyncio.Event()
        self.answer: array[int] | None = None
        self.failure: EngineUnavailableError | None = None


class EncodedPrompts:
    """seconds: how long an answer is good for; 0: each is asked for."""

    def __init__(
        self, seconds: float, *, max_bytes: int = MAX_BYTES, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._now = now
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: dict[bytes, tuple[float, array[int]]] = {}
        """When it was asked, and the answer; in the order in which they were answered."""
        self._asked: dict[bytes, _Question] = {}

    async def of(self, body: bytes, ask: Callable[[bytes], Awaitable[list[int]]]) -> list[int]:
        """The token ids, in a list of the caller's own. Raises what `ask` raises."""
        if self._seconds <= 0:
            return await ask(body)
        self._drop_old()
        while (known := self._known.get(body)) is None or self._is_old(known[0]):
            question = self._asked.get(body)
            if question is None:
                return await self._ask(body, ask)
            await question.is_over.wait()
            if question.answer is not None:
                return question.answer.tolist()
            if question.failure is not None:
                raise EngineUnavailableError(str(question.failure)) from question.failure
        return known[1].tolist()

    def forget(self) -> None:
        """Whoever asks from now on asks the server."""
        self._known.clear()
        self._asked.clear()
        self._bytes = 0

    async def _ask(self, body: bytes, ask: Callable[[bytes], Awaitable[list[int]]]) -> list[int]:
        question = self._asked[body] = _Question(self._now())
        try:
            token_ids = await ask(body)
            question.answer = array("i", token_ids)
        except EngineUnavailableError as failure:
            question.failure = failure
            raise
        finally:
            question.is_over.set()
            if self._asked.get(body) is question:
                del self._asked[body]
                if question.answer is not None:
                    self._keep(body, question.asked_at, question.answer)
        return token_ids

    def _keep(self, body: bytes, asked_at: float, token_ids: array[int]) -> None:
        self._drop(body)
        size = _size(body, token_ids)
        if size > self._max_bytes:
            return
        self._known[body] = asked_at, token_ids
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._known)))

    def _is_old(self, asked_at: float) -> bool:
        return asked_at + self._seconds < self._now()

    def _drop_old(self) -> None:
        """But for those that stand behind a younger one, since they were asked before it and answered after it."""
        while self._known:
            body, (asked_at, _) = next(iter(self._known.items()))
            if not self._is_old(asked_at):
                return
            self._drop(body)

    def _drop(self, body: bytes) -> None:
        known = self._known.pop(body, None)
        if known is not None:
            self._bytes -= _size(body, known[1])


def _size(body: bytes, token_ids: array[int]) -> int:
    return len(body) + 4 * len(token_ids) + _ENTRY_BYTES
