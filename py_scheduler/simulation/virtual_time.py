"""An event loop whose time is not the machine's: it stands still while anything is to be done, and then jumps to the
next timer. What would take days is over in as long as its callbacks take, and the same callbacks give the same order.

Invariants
  1. Time never moves while a callback is ready, nor while a thread works for the loop: what that brings back comes at
     the virtual moment at which it was asked for.
  2. A timer is called at its own moment: not before, by no rounding, and not after.
  3. A loop in which nothing is left to happen says so, instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")

_UNIX_START = float(1 << 20)
"""Not 0, which stands for "never" in places; and small, so that virtual seconds keep their last digits beside it."""


class _Selector(selectors.SelectSelector):
    """Waits for real only while the world outside has something to bring."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.waits_outside:
            return super().select(None)  # A thread that is done wakes the loop.
        self._loop.move_on(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`when_idle` is called when there is neither a callback nor a timer left."""

    def __init__(self) -> None:
        self._now = 0.0
        self._calls_outside = 0
        self.when_idle: Callable[[], None] | None = None
        super().__init__(_Selector(self))
        self._move_to(0.0)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    @property
    def waits_outside(self) -> bool:
        """Whether a thread works for it."""
        return self._calls_outside > 0

    def move_on(self, seconds: float | None) -> None:
        """Lets virtual time pass. None: no timer is left, so there is nothing to move on to."""
        if seconds is None:
            if self.when_idle is None:
                raise RuntimeError("nothing is left that could happen in this loop, and somebody still waits")
            self.when_idle()
            return
        self._move_to(self._now + max(seconds, 0.0))

    def _move_to(self, now: float) -> None:
        self._now = now
        # The loop calls what is due before `time() + _clock_resolution`. With less than a step of the float a timer of
        # this very moment would never be due; with more than that, one of a later moment would be called too early.
        self._clock_resolution = math.ulp(now)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> asyncio.Future[_Result]:
        """As every loop does; time stands still until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._calls_outside += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self._calls_outside -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        """As every loop does; its threads are waited for in real time."""
        self._calls_outside += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._calls_outside -= 1


class VirtualClock:
    """Implements `domain.ports.Clock` by a loop's time."""

    boot_id = b""
    """Nobody else counts from where it counts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic = loop.time
        self.call_at = loop.call_at

    def unix_time(self) -> float:
        return _UNIX_START + self.monotonic()


def run_in_virtual_time(
    main: Callable[[VirtualClock], Coroutine[Any, Any, _Result]], why_idle: Callable[[], Exception]
) -> _Result:
    """What `main` returns, in a loop of its own with that clock. Not to be called from a running loop.

    why_idle: asked when nothing is left that could happen and `main` still waits. `main` is cancelled then, and what
    this returned is raised.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_watched(main, why_idle))


async def _watched(
    main: Callable[[VirtualClock], Coroutine[Any, Any, _Result]], why_idle: Callable[[], Exception]
) -> _Result:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    task = loop.create_task(main(VirtualClock(loop)))
    found: list[Exception] = []

    def idle() -> None:
        if found:  # Cancelled, and still it waits for what cannot come.
            raise RuntimeError("nothing is left that could happen in this loop") from found[0]
        found.append(why_idle())
        task.cancel()

    loop.when_idle = idle
    try:
        return await task
    except asyncio.CancelledError:
        if found:
            raise found[0] from None
        raise
    finally:
        loop.when_idle = None
