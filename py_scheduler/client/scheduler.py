"""`SchedulerClient`: one object for every call of a trainer, over one connection."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from py_scheduler.client.collecting import Results
from py_scheduler.client.connection import CALL_SECONDS, DEFAULT_TARGET, ServiceClient
from py_scheduler.client.steps import Steps
from py_scheduler.client.submissions import Rollouts, Submissions, chunks_of
from py_scheduler.domain.collecting import DEFAULT_COLLECT_SECONDS, CollectReply, CollectRequest, TaskResult
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES
from py_scheduler.domain.requests import AbortRequest, Delivery, EventFilter, SubmissionSelector
from py_scheduler.domain.runners.table import runner_state, runner_table
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from py_scheduler.client.channel import ClientTls
    from py_scheduler.client.steps import StepEvent
    from py_scheduler.client.submissions import RolloutEvent, Submission
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.requests import AbortReply, EventKind, ServerInfo, SubmissionView, WatchedFrame
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.domain.training.samples import TrainingSample
    from py_scheduler.wire.tasks import SubmitChunk


class SchedulerClient(ServiceClient):
    """Talks to one server; any number of calls at a time. Use it as `async with`, or call `open` and `close`.

    target: "host:port" or "unix:/path"; anything else is an InvalidArgumentError.
    namespace: the one that calls are made in unless they name another.
    reconnect_seconds: how long a connection may stay broken before calls and watches give up. 0: not at all.
    max_message_bytes: the largest message that the client sends or takes.
    token: the bearer token that `py-scheduler token new` printed. tls: for a server with TLS; without it a token goes
    to this machine alone.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        reconnect_seconds: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(
            target,
            namespace=namespace,
            reconnect_seconds=reconnect_seconds,
            max_message_bytes=max_message_bytes,
            token=token,
            tls=tls,
        )
        self._submissions = Submissions(self._connection)
        self._rollouts = Rollouts(self._submissions)
        self._results = Results(self._connection)
        self._steps = Steps(self._connection)

    async def close(self) -> None:
        """Leaves open rollouts and ends open watches. Work on the server goes on, unless a rollout aborts its own."""
        await self._rollouts.leave()
        await super().close()

    # Submissions

    async def submit(
        self,
        tasks: Iterable[Task],
        batch_id: BatchId,
        *,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        delivery: Delivery = Delivery.WATCH,
    ) -> Submission:
        """Hands in tasks, in several calls when they are many; returns when the server has taken them all.

        request_id: the same one with the same tasks again gives the same task ids and runs nothing twice; None makes a
        fresh one. iteration: what every episode of these tasks is told of the training step. delivery: whether the
        server keeps the results until they are collected.
        A call is all or nothing. When the server refuses one of several calls, the tasks of the earlier ones stay
        accepted.
        Raises InvalidArgumentError, UnplaceableError, AlreadyExistsError, ResourceExhaustedError, ServerError.
        """
        return await self._submissions.submit(self._chunks(tasks, batch_id, request_id, namespace, iteration, delivery))

    async def get_submission(
        self, batch_id: BatchId | None = None, *, submission_id: str = "", namespace: str | None = None
    ) -> SubmissionView:
        """How a submission stands, and why what waits is waiting. Raises NotFoundError."""
        return await self._submissions.view(self._selector(batch_id, submission_id, namespace))

    async def explain_task(self, task_id: str, *, namespace: str | None = None) -> TaskExplanation:
        """How a task stands; if it waits, what is short where and who is ahead of it. Raises NotFoundError."""
        return await self._submissions.explain_task(task_id, namespace or self._namespace)

    async def abort(  # noqa: PLR0913 -- the fields of an AbortRequest
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        task_ids: Iterable[str] = (),
        reason: str = "",
        wait: bool = True,
        timeout_seconds: float = CALL_SECONDS,
        keep_partial: bool = False,
        restart_runners: bool = False,
    ) -> AbortReply:
        """Stops a submission, or those of its tasks that are named. Each task still ends with its own TaskDone.

        request_id: repeats an abort; it stops nothing that was submitted after the first. None makes a fresh one,
        since the client repeats a call that the network lost.
        wait: return when the work has stopped, or shortly before `timeout_seconds` with what is `still_stopping`.
        keep_partial, restart_runners: see `AbortRequest`.
        Raises NotFoundError, AlreadyExistsError (the request_id is another call's).
        """
        request = AbortRequest(
            selector=self._selector(batch_id, submission_id, namespace),
            request_id=request_id or uuid.uuid4().hex,
            task_ids=tuple(task_ids),
            reason=reason,
            wait=wait,
            keep_partial=keep_partial,
            restart_runners=restart_runners,
        )
        return await self._submissions.abort(request, timeout_seconds)

    async def resume_training(self, *, namespace: str | None = None) -> int:
        """For a trainer that starts, perhaps again from a checkpoint: what its namespace has produced until now no
        longer counts towards its `max_staleness`. Returns the student's weight_epoch.
        """
        return await self._submissions.resume_training(namespace or self._namespace)

    async def server_info(self) -> ServerInfo:
        """The server's evaluators, generation backends (`engines`) and nodes."""
        return await self._submissions.server_info()

    # Events

    def watch(
        self,
        *,
        submission_id: str = "",
        kinds: Iterable[EventKind] = (),
        cursor: bytes = b"",
        namespace: str | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[WatchedFrame, None]:
        """Yields frames of events from a cursor on, for as long as they are read.

        cursor: empty starts at the oldest event. submission_id: empty watches all submissions of the namespace.
        kinds: none watches all kinds. cancel_on_disconnect: the server aborts the submission when this client goes.
        Frames without events come now and then: their cursor is as good to resume from. When the connection breaks,
        the watch resumes from the last frame.
        Raises CursorExpiredError, CursorMismatchError, InvalidArgumentError, ServerError.
        """
        return self._submissions.watch(
            self._filter(submission_id, kinds, namespace), cursor, cancel_on_disconnect=cancel_on_disconnect
        )

    async def ack(
        self,
        cursor: bytes,
        *,
        submission_id: str = "",
        kinds: Iterable[EventKind] = (),
        namespace: str | None = None,
    ) -> int:
        """Says that events have been read up to a cursor, so that the server may drop them.

        cursor: of a frame. The other arguments are those of the watch that gave the frame. It concerns all events of
        the submission (without one: of the namespace), of every kind. Returns the oldest sequence that can still be
        watched. Raises InvalidArgumentError, CursorExpiredError.
        """
        return await self._submissions.ack(self._filter(submission_id, kinds, namespace), cursor)

    # Rollouts

    def rollout(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        abort_on_exit: bool = False,
    ) -> AsyncGenerator[RolloutEvent, None]:
        """Submits tasks and yields each `SampleDone` and `TaskDone` as it happens, until every task is done.

        Leaving early (break, an exception, a cancel) leaves the work running, to be watched again from the server. With
        `abort_on_exit` the client aborts it instead, also when the client is closed.
        Raises what `submit` and `watch` raise.
        """
        chunks = self._chunks(tasks, batch_id, request_id, namespace, iteration)
        return self._rollouts.events(chunks, namespace or self._namespace, abort_on_exit=abort_on_exit)

    def rollout_batches(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        abort_on_exit: bool = False,
    ) -> AsyncGenerator[list[RolloutEvent], None]:
        """`rollout` with the events that arrived together in one list."""
        chunks = self._chunks(tasks, batch_id, request_id, namespace, iteration)
        return self._rollouts.batches(chunks, namespace or self._namespace, abort_on_exit=abort_on_exit)

    # Steps

    def execute_rollout(
        self,
        rollout_id: int,
        *,
        request_id: str | None = None,
        groups: int | None = None,
        samples: int | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[StepEvent, None]:
        """Has the server roll out a whole training step on its own data sets. Yields each `SampleDone` and `TaskDone`
        as it happens, and last the `StepReport`.

        request_id: the same one again joins the step, or is told its report once more; None makes a fresh one.
        groups, samples: in place of the server's settings.
        Leaving early leaves the step running, unless `cancel_on_disconnect` is set.
        Raises FailedPreconditionError (the server has no data set, or another step is under way), AlreadyExistsError,
        InvalidArgumentError, and what the step itself fails of.
        """
        request = StepRequest(
            kind=StepKind.ROLLOUT,
            rollout_id=rollout_id,
            request_id=request_id or uuid.uuid4().hex,
            groups=groups,
            samples=samples,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        return self._steps.events(request)

    def execute_eval(
        self,
        rollout_id: int,
        *,
        request_id: str | None = None,
        samples: int | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[StepEvent, None]:
        """Has the server evaluate every prompt of its eval data sets; otherwise as `execute_rollout`.

        samples: copies of each prompt, in place of the server's setting.
        """
        request = StepRequest(
            kind=StepKind.EVAL,
            rollout_id=rollout_id,
            request_id=request_id or uuid.uuid4().hex,
            samples=samples,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        return self._steps.events(request)

    def step_frames(self, request: StepRequest, cursor: bytes = b"") -> AsyncGenerator[WatchedFrame | StepReport, None]:
        """A step's frames from a cursor on (empty: from its first event), and then its report.

        For those who keep cursors: with a frame's cursor the same request goes on where the frame ended, in another
        process too. Raises what `execute_rollout` and `watch` raise.
        """
        return self._steps.frames(request, cursor)

    def read_samples(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]:
        """The groups that a rollout handed out to train on, dummies included, as the server saved them.

        rollout_id: `samples_of` in the step's report. A broken connection is an error: read from the beginning again.
        Raises NotFoundError when that iteration's samples are not saved, FailedPreconditionError.
        """
        return self._steps.saved_groups(rollout_id)

    # Results of tasks that were submitted with `Delivery.COLLECT`

    async def collect(  # noqa: PLR0913 -- the fields of a CollectRequest
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        min_num: int | None = None,
        max_num: int | None = None,
        timeout_seconds: float = DEFAULT_COLLECT_SECONDS,
        wait_after_min_seconds: float | None = None,
        clear_unfinished: bool = True,
        include_partial: bool = False,
        with_payloads: bool = True,
        acknowledge: bool = True,
    ) -> CollectReply:
        """Waits for results and takes them; see `CollectRequest`. A broken connection loses none of them.

        acknowledge: have the server forget them once all have arrived. Without it the same request_id gives them again
        until `ack_results`. Raises InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError, ServerError.
        """
        request = CollectRequest(
            request_id=request_id or uuid.uuid4().hex,
            batch_id=batch_id,
            submission_id=submission_id,
            namespace=namespace or self._namespace,
            min_num=min_num,
            max_num=max_num,
            timeout_seconds=timeout_seconds,
            wait_after_min_seconds=wait_after_min_seconds,
            clear_unfinished=clear_unfinished,
            include_partial=include_partial,
            with_payloads=with_payloads,
        )
        return await self._results.collect(request, acknowledge=acknowledge)

    async def drain(
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        with_payloads: bool = True,
        acknowledge: bool = True,
    ) -> CollectReply:
        """Takes what is finished now, without a wait. Raises what `collect` raises."""
        request = CollectRequest(
            request_id=request_id or uuid.uuid4().hex,
            batch_id=batch_id,
            submission_id=submission_id,
            namespace=namespace or self._namespace,
            with_payloads=with_payloads,
        )
        return await self._results.drain(request, acknowledge=acknowledge)

    async def ack_results(self, request_id: str, *, namespace: str | None = None) -> None:
        """Has the server forget what it gave under this id. An id that it does not know (any more) is no error."""
        await self._results.acknowledge(namespace or self._namespace, request_id)

    async def discard(
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """Has the server forget all results that it keeps of a submission; under one request_id it does so once.

        Raises NotFoundError.
        """
        selector = self._selector(batch_id, submission_id, namespace)
        await self._results.discard(selector, request_id or uuid.uuid4().hex)

    async def list_runners(self) -> tuple[RunnerView, ...]:
        """Each runner outside the server's own loop, as it stands."""
        return await self._results.runners()

    # By the names of Trinity's Scheduler

    async def schedule(self, tasks: Iterable[Task], batch_id: BatchId) -> Submission | None:
        """`submit` for results that are collected. No tasks: nothing happens. Raises what `submit` raises."""
        tasks = list(tasks)
        return await self.submit(tasks, batch_id, delivery=Delivery.COLLECT) if tasks else None

    async def abort_batch(
        self,
        batch_id: BatchId,
        return_partial_tasks: bool = False,
        restart_runners: bool = True,
    ) -> None:
        """`abort`; a batch that is not known has nothing to stop. What is completed can still be drained."""
        try:
            await self.abort(batch_id, keep_partial=return_partial_tasks, restart_runners=restart_runners)
        except NotFoundError:
            return

    async def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything waits, runs or is to be collected under this id."""
        try:
            return (await self.get_submission(batch_id)).has_step
        except NotFoundError:
            return False

    async def get_payload_results(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> tuple[list[TaskResult], list[bytes]]:
        """`collect`: the results, and the payloads of all of them in order."""
        reply = await self.collect(
            batch_id,
            min_num=min_num,
            timeout_seconds=DEFAULT_COLLECT_SECONDS if timeout is None else timeout,
            clear_unfinished=clear_timeout_tasks,
            include_partial=return_partial_tasks,
        )
        return list(reply.results), reply.payloads

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> list[TaskResult]:
        """`collect` without samples and payloads, which the server forgets all the same."""
        reply = await self.collect(
            batch_id,
            min_num=min_num,
            timeout_seconds=DEFAULT_COLLECT_SECONDS if timeout is None else timeout,
            clear_unfinished=clear_timeout_tasks,
            include_partial=return_partial_tasks,
            with_payloads=False,
        )
        return list(reply.results)

    async def drain_batch_payload_results(self, batch_id: BatchId) -> tuple[list[TaskResult], list[bytes]]:
        """`drain`: the results that are there, and their payloads."""
        reply = await self.drain(batch_id)
        return list(reply.results), reply.payloads

    async def discard_completed_results(self, batch_id: BatchId) -> None:
        """`discard`; a batch that is not known has nothing to discard."""
        try:
            await self.discard(batch_id)
        except NotFoundError:
            return

    async def get_key_state(self, key: str) -> dict[str, Any]:
        """What each runner that has this key says under it, by runner_id."""
        states = await self.get_all_state()
        return {runner_id: state[key] for runner_id, state in states.items() if key in state}

    async def get_runner_state(self, runner_id: str) -> dict[str, Any]:
        """What one runner is at; {} when it is unknown."""
        return (await self.get_all_state()).get(runner_id, {})

    async def get_all_state(self) -> dict[str, dict[str, Any]]:
        """What every runner is at, by runner_id."""
        return {view.runner_id: runner_state(view) for view in await self.list_runners()}

    async def print_all_state(self) -> None:
        """Prints what every runner is at as an aligned table."""
        print(runner_table(await self.list_runners()))  # noqa: T201 -- what it is for

    # Inside

    def _chunks(
        self,
        tasks: Iterable[Task],
        batch_id: BatchId,
        request_id: str | None,
        namespace: str | None,
        iteration: IterationContext | None,
        delivery: Delivery = Delivery.WATCH,
    ) -> Iterator[SubmitChunk]:
        key = SubmissionKey(batch_id, namespace or self._namespace)
        return chunks_of(tasks, key, request_id or uuid.uuid4().hex, iteration, delivery)

    def _selector(self, batch_id: BatchId | None, submission_id: str, namespace: str | None) -> SubmissionSelector:
        if (batch_id is None) != bool(submission_id):
            raise InvalidArgumentError("name the submission by exactly one of batch_id and submission_id", "batch_id")
        return SubmissionSelector(
            submission_id=submission_id, batch_id=batch_id, namespace=namespace or self._namespace
        )

    def _filter(self, submission_id: str, kinds: Iterable[EventKind], namespace: str | None) -> EventFilter:
        return EventFilter(submission_id=submission_id, kinds=frozenset(kinds), namespace=namespace or self._namespace)
