"""The asyncio clients for plain loops: each method is the other one's, run on a loop in a thread of its own."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from py_scheduler.client._aio import SchedulerClient
from py_scheduler.client._base import ServiceClient
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from py_scheduler.client._rollout import RolloutEvent
    from py_scheduler.domain.task import BatchId, Task
    from py_scheduler.domain.training.iteration import IterationContext

ClientT = TypeVar("ClientT", bound=ServiceClient[Any])
P = ParamSpec("P")
T = TypeVar("T")


def blocking(
    method: Callable[Concatenate[ClientT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingServiceClient[Any], P], T]:
    """The same method, for the client's blocking twin."""

    @wraps(method)
    def call(self: BlockingServiceClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.portal.call(partial(method, self.client, *args, **kwargs))
        return result

    return call


def _iterating(
    method: Callable[Concatenate[ClientT, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[BlockingServiceClient[Any], P], Iterator[T]]:
    @wraps(method)
    def iterate(self: BlockingServiceClient[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        portal = self.portal
        items = method(self.client, *args, **kwargs)
        try:
            while (item := portal.call(_next_or_none, items)) is not None:
                yield item
        finally:
            portal.call(items.aclose)

    return iterate


async def _next_or_none(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


class BlockingServiceClient(Generic[ClientT]):
    """An asyncio client on a loop in a thread of its own. Use it in a `with`; threads may share it."""

    asyncio_class: ClassVar[type[Any]]

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Takes what the asyncio client takes."""
        self.client: ClientT = self.asyncio_class(*args, **settings)
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._portal_of_thread: BlockingPortal | None = None

    def __enter__(self) -> Self:
        thread = start_blocking_portal()
        self._portal_of_thread = thread.__enter__()
        self._thread = thread
        self.portal.call(self.client.open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        portal, thread = self.portal, self._thread
        self._portal_of_thread = self._thread = None
        try:
            portal.call(self.client.close)
        finally:
            if thread is not None:
                thread.__exit__(kind, error, trace)

    @property
    def portal(self) -> BlockingPortal:
        """Runs coroutines in the client's loop. For the twins' own use, as is `client`."""
        if self._portal_of_thread is None:
            name = type(self).__name__
            raise FailedPreconditionError(f"the client is not open: use `with {name}(...) as client`")
        return self._portal_of_thread


class BlockingSchedulerClient(BlockingServiceClient[SchedulerClient]):
    """`SchedulerClient` with blocking methods and plain iterators."""

    asyncio_class = SchedulerClient

    submit = blocking(SchedulerClient.submit)
    get_submission = blocking(SchedulerClient.get_submission)
    explain_task = blocking(SchedulerClient.explain_task)
    abort = blocking(SchedulerClient.abort)
    resume_training = blocking(SchedulerClient.resume_training)
    ack = blocking(SchedulerClient.ack)
    server_info = blocking(SchedulerClient.server_info)
    collect = blocking(SchedulerClient.collect)
    drain = blocking(SchedulerClient.drain)
    ack_results = blocking(SchedulerClient.ack_results)
    discard = blocking(SchedulerClient.discard)
    list_runners = blocking(SchedulerClient.list_runners)
    schedule = blocking(SchedulerClient.schedule)
    get_payload_results = blocking(SchedulerClient.get_payload_results)
    get_statuses = blocking(SchedulerClient.get_statuses)
    drain_batch_payload_results = blocking(SchedulerClient.drain_batch_payload_results)
    discard_completed_results = blocking(SchedulerClient.discard_completed_results)
    abort_batch = blocking(SchedulerClient.abort_batch)
    has_step = blocking(SchedulerClient.has_step)
    get_key_state = blocking(SchedulerClient.get_key_state)
    get_runner_state = blocking(SchedulerClient.get_runner_state)
    get_all_state = blocking(SchedulerClient.get_all_state)
    print_all_state = blocking(SchedulerClient.print_all_state)
    watch = _iterating(SchedulerClient.watch)
    rollout_batches = _iterating(SchedulerClient.rollout_batches)
    execute_rollout = _iterating(SchedulerClient.execute_rollout)
    execute_eval = _iterating(SchedulerClient.execute_eval)
    step_frames = _iterating(SchedulerClient.step_frames)
    read_samples = _iterating(SchedulerClient.read_samples)

    def rollout(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        abort_on_exit: bool = False,
    ) -> Iterator[RolloutEvent]:
        """See SchedulerClient.rollout. Crosses threads once for the events that arrived together."""
        for batch in self.rollout_batches(
            tasks,
            batch_id=batch_id,
            request_id=request_id,
            namespace=namespace,
            iteration=iteration,
            abort_on_exit=abort_on_exit,
        ):
            yield from batch
