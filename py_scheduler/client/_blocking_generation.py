"""The generation client for plain training loops."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from py_scheduler.client._blocking import BlockingServiceClient, blocking
from py_scheduler.client._generation import GenerationClient
from py_scheduler.domain.generation import STUDENT, PauseMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.generation import GenerationState


class BlockingGenerationClient(BlockingServiceClient[GenerationClient]):
    """`GenerationClient` with blocking methods."""

    asyncio_class = GenerationClient

    pause = blocking(GenerationClient.pause)
    resume = blocking(GenerationClient.resume)
    update_weights = blocking(GenerationClient.update_weights)
    states = blocking(GenerationClient.states)

    @contextmanager
    def paused(self, mode: PauseMode = PauseMode.ABORT, *, role: str = STUDENT) -> Iterator[GenerationState]:
        """See GenerationClient.paused."""
        with self.portal.wrap_async_context_manager(self.client.paused(mode, role=role)) as state:
            yield state
