"""What the API needs of the engine: `scheduler.engine.Engine`, or a stand-in for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.requests import (
        AbortReply,
        AbortRequest,
        EventFilter,
        EventFrame,
        ServerInfo,
        SubmissionSelector,
        SubmissionView,
        SubmitReply,
        SubmitRequest,
    )


class EnginePort(Protocol):
    @property
    def store_epoch(self) -> bytes: ...

    @property
    def last_sequence(self) -> int: ...

    async def submit(self, request: SubmitRequest) -> SubmitReply: ...

    async def abort(self, request: AbortRequest) -> AbortReply: ...

    def submission(self, selector: SubmissionSelector) -> SubmissionView: ...

    def watch(self, event_filter: EventFilter, after_sequence: int | None) -> AsyncIterator[EventFrame]: ...

    async def server_info(self, version: str) -> ServerInfo: ...
