"""Guarded submissions when the server ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.api.disconnect_guard import DisconnectGuard
from py_scheduler.domain.requests import EventFilter
from tests.support.servers.fake_engine import FakeEngine

if TYPE_CHECKING:
    from py_scheduler.domain.requests import AbortReply, AbortRequest


class SlowEngine(FakeEngine):
    """Its aborts wait for something that does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def abort(self, request: AbortRequest) -> AbortReply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody lets it go on")


async def test_what_is_being_aborted_when_the_server_ends_is_let_go_of() -> None:
    engine = SlowEngine()
    guard = DisconnectGuard(engine, 0.0)
    try:
        with guard.watched(EventFilter(submission_id="s")):
            raise ConnectionError
    except ConnectionError:
        pass
    await engine.asked.wait()
    (abort,) = guard._aborts
    guard.close()
    await asyncio.wait([abort], timeout=5)
    assert abort.cancelled()
    assert not guard._aborts
