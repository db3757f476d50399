"""The asyncio clients for plain loops: each method is the other one's, run on a loop in a thread of its own."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from py_scheduler.client.connection import DEFAULT_TARGET, ConnectionSettings, ServiceClient
from py_scheduler.client.generation import GenerationClient
from py_scheduler.client.placement import DEFAULT_TTL_SECONDS, PlacementClient
from py_scheduler.client.scheduler import SchedulerClient
from py_scheduler.domain.generation import STUDENT, PauseMode
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Unpack

    from anyio.from_thread import BlockingPortal

    from py_scheduler.client.held_lease import HeldLease
    from py_scheduler.client.submissions import RolloutEvent
    from py_scheduler.domain.generation import GenerationState
    from py_scheduler.domain.leases import LeaseToken
    from py_scheduler.domain.resources import Resource
    from py_scheduler.domain.task import BatchId, Task
    from py_scheduler.domain.training.iteration import IterationContext

ClientT = TypeVar("ClientT", bound=ServiceClient)
P = ParamSpec("P")
T = TypeVar("T")


def _calling(
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

    def __init__(self, target: str = DEFAULT_TARGET, **settings: Unpack[ConnectionSettings]) -> None:
        """Takes what the asyncio client takes."""
        self.client: ClientT = self.asyncio_class(target, **settings)
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

    submit = _calling(SchedulerClient.submit)
    get_submission = _calling(SchedulerClient.get_submission)
    explain_task = _calling(SchedulerClient.explain_task)
    abort = _calling(SchedulerClient.abort)
    resume_training = _calling(SchedulerClient.resume_training)
    ack = _calling(SchedulerClient.ack)
    server_info = _calling(SchedulerClient.server_info)
    collect = _calling(SchedulerClient.collect)
    drain = _calling(SchedulerClient.drain)
    ack_results = _calling(SchedulerClient.ack_results)
    discard = _calling(SchedulerClient.discard)
    list_runners = _calling(SchedulerClient.list_runners)
    schedule = _calling(SchedulerClient.schedule)
    get_payload_results = _calling(SchedulerClient.get_payload_results)
    get_statuses = _calling(SchedulerClient.get_statuses)
    drain_batch_payload_results = _calling(SchedulerClient.drain_batch_payload_results)
    discard_completed_results = _calling(SchedulerClient.discard_completed_results)
    abort_batch = _calling(SchedulerClient.abort_batch)
    has_step = _calling(SchedulerClient.has_step)
    get_key_state = _calling(SchedulerClient.get_key_state)
    get_runner_state = _calling(SchedulerClient.get_runner_state)
    get_all_state = _calling(SchedulerClient.get_all_state)
    print_all_state = _calling(SchedulerClient.print_all_state)
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


class BlockingHeldLease:
    """`HeldLease` in a plain thread, which nobody can cancel: look at `is_lost`, or call `check`, between steps."""

    def __init__(self, held: HeldLease, portal: BlockingPortal) -> None:
        self._held = held
        self._portal = portal

    @property
    def lease_id(self) -> str:
        return self._held.lease_id

    @property
    def fencing_token(self) -> int:
        return self._held.fencing_token

    @property
    def tokens(self) -> tuple[LeaseToken, ...]:
        """Those that are still held."""
        return self._held.tokens

    @property
    def is_lost(self) -> bool:
        return self._held.loss is not None

    def check(self) -> None:
        """Raises LeaseError when the lease was lost."""
        self._held.check()

    def release(self, *tokens: LeaseToken) -> None:
        """Gives back some tokens before the block ends. Raises LeaseError."""
        self._portal.call(self._held.release, *tokens)


class BlockingPlacementClient(BlockingServiceClient[PlacementClient]):
    """`PlacementClient` with blocking methods."""

    asyncio_class = PlacementClient

    acquire = _calling(PlacementClient.acquire)
    renew = _calling(PlacementClient.renew)
    release = _calling(PlacementClient.release)
    capacity = _calling(PlacementClient.capacity)
    explain = _calling(PlacementClient.explain)

    @contextmanager
    def lease(
        self,
        per_sample: Resource,
        max_tokens: int = 1,
        *,
        budget: Resource | None = None,
        batch_id: BatchId = 0,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        timeout_seconds: float | None = None,
    ) -> Iterator[BlockingHeldLease]:
        """See PlacementClient.lease. Nothing cancels the block; a lost lease raises LeaseError at its end."""
        lease = self.client.lease(
            per_sample,
            max_tokens,
            budget=budget,
            batch_id=batch_id,
            ttl_seconds=ttl_seconds,
            timeout_seconds=timeout_seconds,
            cancel_on_loss=False,
        )
        with self.portal.wrap_async_context_manager(lease) as held:
            yield BlockingHeldLease(held, self.portal)


class BlockingGenerationClient(BlockingServiceClient[GenerationClient]):
    """`GenerationClient` with blocking methods."""

    asyncio_class = GenerationClient

    pause = _calling(GenerationClient.pause)
    resume = _calling(GenerationClient.resume)
    update_weights = _calling(GenerationClient.update_weights)
    weights_changed = _calling(GenerationClient.weights_changed)
    set_endpoints = _calling(GenerationClient.set_endpoints)
    endpoints = _calling(GenerationClient.endpoints)
    states = _calling(GenerationClient.states)

    @contextmanager
    def paused(self, mode: PauseMode = PauseMode.ABORT, *, role: str = STUDENT) -> Iterator[GenerationState]:
        """See GenerationClient.paused."""
        with self.portal.wrap_async_context_manager(self.client.paused(mode, role=role)) as state:
            yield state
