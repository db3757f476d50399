"""One episode's access: its key, and its request, of which there is one at a time.

Invariant: a generation outlives neither its client's connection nor its episode; both ends cut it short, and once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.api.generation_http.conversation import Answer, Conversation
from py_scheduler.api.generation_http.refusals import CONFLICT, UNAUTHORIZED, RefusedError
from py_scheduler.errors import GenerationError

if TYPE_CHECKING:
    from py_scheduler.api.generation_http.chat import ChatAsked
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.values.keys import Keys


class EpisodeApi:
    """Implements `domain.episodes.api_access.ApiAccess`."""

    def __init__(self, episode: Episode, keys: Keys[EpisodeApi], base_url: str, socket_path: str) -> None:
        self.base_url = base_url
        self.socket_path = socket_path
        self.failure: GenerationError | None = None
        self._is_over = False
        self._keys = keys
        self._conversation = Conversation(episode)
        self._flight: asyncio.Task[Answer] | None = None
        self.api_key = keys.issue(self)

    async def complete(self, asked: ChatAsked, role: str) -> Answer:
        """Raises RefusedError, and what the episode raises."""
        if self._is_over:
            raise RefusedError(UNAUTHORIZED, "this episode is over, and its API key dead", "invalid_api_key")
        if self._flight is not None:
            message = "another request of this episode is under way: wait for its end, also when its client has left"
            raise RefusedError(CONFLICT, message, "episode_is_busy", may_retry=True)
        flight = self._flight = asyncio.create_task(self._conversation.answer(asked, role))
        flight.add_done_callback(self._landed)
        try:
            await asyncio.wait([flight])
        except asyncio.CancelledError:  # The client has left.
            self._cut()
            await asyncio.wait([flight])
            raise
        if flight.cancelled():
            message = "the episode was stopped meanwhile; the tokens made until then are recorded"
            raise RefusedError(CONFLICT, message, "episode_stopped")
        return flight.result()

    def _landed(self, flight: asyncio.Task[Answer]) -> None:
        self._flight = None
        if flight.cancelled():
            return
        error = flight.exception()
        # A refused request in between changes nothing: what its agent fails of is still the same.
        if error is None or isinstance(error, GenerationError):
            self.failure = error

    def end(self) -> None:
        self._is_over = True
        self._keys.revoke(self.api_key)
        self._cut()

    def _cut(self) -> None:
        # A second cancellation would strike the episode while it gathers what the engine has made.
        if self._flight is not None and not self._flight.cancelling():
            self._flight.cancel()

    @property
    def is_quiet(self) -> bool:
        return self._flight is None

    async def wait_quiet(self) -> None:
        if self._flight is not None:
            await asyncio.wait([self._flight])
