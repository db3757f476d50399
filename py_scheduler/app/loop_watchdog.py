"""Notices from a thread of its own that the event loop stands still, and says in whose code.

A handler that computes or sleeps without awaiting stops every other rollout and every call, and nothing in the loop
could tell. What holds the interpreter's lock all the while (native code) is noticed when it lets go of it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from py_scheduler.execution import run_sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_log = logging.getLogger(__name__)

_BEATS_TO_THE_LIMIT = 4
_MAX_BEAT_SECONDS = 1.0
_SHOWN_FRAMES = 12


class LoopWatchdog:
    """Use as `async with`, in the loop that is watched.

    blocked_seconds: how long the loop may stand still. on_change: called in the loop with True once it has, and with
    False when it went on without another such stop for as long again.
    """

    def __init__(
        self,
        blocked_seconds: float,
        on_change: Callable[[bool], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = blocked_seconds
        self._beat_seconds = min(blocked_seconds / _BEATS_TO_THE_LIMIT, _MAX_BEAT_SECONDS)
        self._on_change = on_change
        self._monotonic = monotonic
        self._last_beat = 0.0
        self._is_blocked = False
        self._moves_since = 0.0
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._last_beat = self._monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.join)

    def _beat(self) -> None:
        now = self._monotonic()
        stood_still = now - self._last_beat
        if stood_still >= self._limit + self._beat_seconds:
            _log.warning("the event loop goes on after %.1f s", stood_still)
            self._moves_since = now
            if not self._is_blocked:
                self._is_blocked = True
                self._on_change(True)
        elif self._is_blocked and now - self._moves_since >= self._limit:
            self._is_blocked = False
            self._on_change(False)
        self._last_beat = now
        self._timer = self._loop.call_later(self._beat_seconds, self._beat)

    def _watch(self) -> None:
        told_of = 0.0
        while True:
            begun = self._monotonic()
            if self._ended.wait(self._beat_seconds):
                return
            now = self._monotonic()
            if now - begun > self._beat_seconds + self._limit / 2:
                continue  # The whole process stood still, and the loop with it.
            beat = self._last_beat
            if beat != told_of and now - beat >= self._limit:
                told_of = beat
                self._tell(now - beat)

    def _tell(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
        if frame is None:
            return
        stack = "".join(traceback.format_stack(frame, limit=None)[-_SHOWN_FRAMES:])
        _log.error("the event loop stands still since %.1f s, in %s:\n%s", seconds, blamed(frame), stack)


def blamed(frame: FrameType) -> str:
    """Whose code it is, in words: that of a handler if it runs a sample, else the innermost function."""
    inner = frame
    called: FrameType | None = None
    found: FrameType | None = frame
    while found is not None:
        if found.f_code.co_filename == run_sample.__file__ and called is not None:
            spec: Any = found.f_locals.get("spec")
            evaluator = f" of evaluator {spec.evaluator_id!r}" if spec is not None else ""
            return f"handler {_place(called)}{evaluator}"
        called, found = found, found.f_back
    return _place(inner)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
