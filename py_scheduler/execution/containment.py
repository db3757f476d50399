"""Keeps a loop that runs other people's code from being ended by it.

asyncio lets a SystemExit or KeyboardInterrupt of any task end the loop. A handler's child task that calls `sys.exit`
would end the service with it; in a contained task it is an ordinary exception of that task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def contained_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    """A task factory: `loop.set_task_factory(contained_task)`."""
    return asyncio.Task(_Contained(coroutine), loop=loop, **options)


class _Contained(Coroutine[Any, Any, T]):
    """The coroutine itself in all but those two exceptions.

    No coroutine around it: of one that is cancelled before its first step the inner one would never be awaited.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, T] | Generator[Any, None, T]) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("a task steps it and nobody awaits it")

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exit_refused(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._inner.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit_error:
            raise _exit_refused(exit_error) from exit_error
        finally:
            # What comes out again with this frame in its traceback must not be held by the frame too.
            del error

    def close(self) -> None:
        self._inner.close()


def _exit_refused(error: BaseException) -> RuntimeError:
    return RuntimeError(f"a task tried to end the service: {type(error).__name__}({error})")
