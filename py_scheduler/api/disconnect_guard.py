"""Submissions that are to run only while a client watches them (cancel_on_disconnect).

Invariant: a submission is aborted when its client breaks off the last stream that guards it and opens no other within
the grace; it is never aborted because the server ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.api.ports import EnginePort
    from py_scheduler.domain.requests import EventFilter

_log = logging.getLogger(__name__)

_Key = tuple[str, str]


class DisconnectGuard:
    """Aborts a guarded submission when its client is gone.

    grace_seconds: how long a client that was cut off has to come back. With 10: a client that watches again after 9 s
    keeps its submission.
    """

    def __init__(self, engine: EnginePort, grace_seconds: float) -> None:
        self._engine = engine
        self._grace_seconds = grace_seconds
        self._streams: Counter[_Key] = Counter()
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextmanager
    def watched(self, event_filter: EventFilter) -> Iterator[None]:
        """Guards a submission for the time of one stream. An exception in the block means that the client has gone."""
        key = event_filter.namespace, event_filter.submission_id
        self._streams[key] += 1
        if key in self._timers:
            self._timers.pop(key).cancel()
        is_gone = True
        try:
            yield
            is_gone = False
        finally:
            self._streams[key] -= 1
            if not self._streams[key]:
                del self._streams[key]
                if is_gone and not self._is_closed:
                    loop = asyncio.get_running_loop()
                    self._timers[key] = loop.call_later(self._grace_seconds, self._abort, key)

    def _abort(self, key: _Key) -> None:
        del self._timers[key]
        task = asyncio.get_running_loop().create_task(
            self._abort_submission(*key), name="abort of a guarded submission"
        )
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_submission(self, namespace: str, submission_id: str) -> None:
        selector = SubmissionSelector(submission_id=submission_id, namespace=namespace)
        _log.info("submission %s: its client is gone, and it asked for cancel_on_disconnect", submission_id)
        try:
            await self._engine.abort(
                AbortRequest(selector=selector, reason="its client is gone (cancel_on_disconnect)")
            )
        except SchedulerError as error:
            _log.warning("submission %s could not be aborted: %s", submission_id, error)

    def close(self) -> None:
        """The server ends: what waits is left to go on after a restart."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for abort in self._aborts:
            abort.cancel()
