"""The asyncio client for plain loops: each method is the other one's, run on a loop in a thread of its own."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from py_scheduler.client._aio import SchedulerClient
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from py_scheduler.client._rollout import RolloutEvent
    from py_scheduler.domain.task import BatchId, Task

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[SchedulerClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingSchedulerClient, P], T]:
    @wraps(method)
    def call(self: BlockingSchedulerClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._portal.call(partial(method, self._client, *args, **kwargs))
        return result

    return call


def _iterating(
    method: Callable[Concatenate[SchedulerClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[BlockingSchedulerClient, P], Iterator[T]]:
    @wraps(method)
    def iterate(self: BlockingSchedulerClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        portal = self._portal
        items = method(self._client, *args, **kwargs)
        try:
            while (item := portal.call(_next_or_none, items)) is not None:
                yield item
        finally:
            portal.call(items.aclose)

    return iterate


async def _next_or_none(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


class BlockingSchedulerClient:
    """`SchedulerClient` with blocking methods and plain iterators. Use it in a `with`; threads may share it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Takes what SchedulerClient takes."""
        self._client = SchedulerClient(*args, **settings)
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._portal_of_thread: BlockingPortal | None = None

    def __enter__(self) -> Self:
        thread = start_blocking_portal()
        self._portal_of_thread = thread.__enter__()
        self._thread = thread
        self._portal.call(self._client.open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        portal, thread = self._portal, self._thread
        self._portal_of_thread = self._thread = None
        try:
            portal.call(self._client.close)
        finally:
            if thread is not None:
                thread.__exit__(kind, error, trace)

    @property
    def _portal(self) -> BlockingPortal:
        if self._portal_of_thread is None:
            raise FailedPreconditionError("the client is not open: use `with BlockingSchedulerClient(...) as client`")
        return self._portal_of_thread

    submit = _blocking(SchedulerClient.submit)
    get_submission = _blocking(SchedulerClient.get_submission)
    abort = _blocking(SchedulerClient.abort)
    server_info = _blocking(SchedulerClient.server_info)
    watch = _iterating(SchedulerClient.watch)
    rollout_batches = _iterating(SchedulerClient.rollout_batches)

    def rollout(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        abort_on_exit: bool = False,
    ) -> Iterator[RolloutEvent]:
        """See SchedulerClient.rollout. Crosses threads once for the events that arrived together."""
        for batch in self.rollout_batches(
            tasks, batch_id=batch_id, request_id=request_id, namespace=namespace, abort_on_exit=abort_on_exit
        ):
            yield from batch
