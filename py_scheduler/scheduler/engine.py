"""The scheduler as its users see it: submit, abort, watch, ask.

    submit -> intake -> ledger -> [TasksAccepted] -> journal -> reply
                                        `-> admission -> supervisor -> workers: run, eval
                                                                 `-> ledger -> [AttemptEnded, TaskDone]
    all events -> event log -> journal -> watchers

Everything runs in one event loop; a fact is decided, applied and recorded within one turn of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Self

import msgspec

from py_scheduler.batching import BatchingStrategy, fifo_batching
from py_scheduler.domain.evaluator import STUDENT
from py_scheduler.domain.events import AbortRequested, Moment, StopCause, TasksAccepted
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.limits import MAX_WAITING_SHOWN
from py_scheduler.domain.plain import safe_text
from py_scheduler.domain.requests import (
    AbortReply,
    AbortRequest,
    Delivery,
    EventFilter,
    EventFrame,
    ServerInfo,
    SubmissionSelector,
    SubmissionView,
    SubmitReply,
    SubmitRequest,
)
from py_scheduler.domain.results import AttemptState, TaskState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from py_scheduler.execution.episode import EpisodeServices
from py_scheduler.execution.generation_gateway import GenerationGateway
from py_scheduler.execution.runner import start_runners
from py_scheduler.execution.workdirs import Workdirs
from py_scheduler.scheduler.admission import Admission
from py_scheduler.scheduler.checkpoints import Checkpoints
from py_scheduler.scheduler.collector import Collector
from py_scheduler.scheduler.commands import AcceptTasks, ResumeTraining, StopTasks
from py_scheduler.scheduler.deadlines import Deadlines
from py_scheduler.scheduler.dynamic_timeout import dynamic_timeout
from py_scheduler.scheduler.event_log import EventLog
from py_scheduler.scheduler.intake import Intake, abort_digest, discard_digest, request_digest, waiting_attempts
from py_scheduler.scheduler.lease_desk import LeaseDesk, node_view
from py_scheduler.scheduler.ledger import Ledger
from py_scheduler.scheduler.quotas import Quotas
from py_scheduler.scheduler.recorded_weights import RecordedWeights
from py_scheduler.scheduler.recorder import Recorder
from py_scheduler.scheduler.records import submission_and_number
from py_scheduler.scheduler.restore import (
    collector_at_rest,
    complete,
    fold,
    interrupt_running,
    open_batches,
    unscored_groups,
)
from py_scheduler.scheduler.settings import EngineSettings
from py_scheduler.scheduler.staleness_gate import StalenessGate
from py_scheduler.scheduler.supervisor import EVERYTHING, Concerned, Supervisor
from py_scheduler.scheduler.views import engine_view, evaluator_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from py_scheduler.domain.api_access import ApiFront
    from py_scheduler.domain.collecting import CollectReply, CollectRequest
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.ports import Clock, GenerationEngine, Journal
    from py_scheduler.domain.quotas import NamespaceSettings, Quota
    from py_scheduler.domain.runners import RunnerView
    from py_scheduler.domain.task import Batch, Task
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.execution.runner import Runner
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.dynamic_timeout import TrainingHistory
    from py_scheduler.scheduler.records import SubmissionRecord, TaskRecord

logger = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1.0
_WORKFLOW_ID = "workflow_id"
_LAST_COMMIT_SECONDS = 2.0


class TaskDeadline:
    """When a task ends whatever it is doing."""

    __slots__ = ("_ledger", "seconds", "submission_id", "task_id")

    def __init__(self, ledger: Ledger, submission_id: str, task_id: str, seconds: float) -> None:
        self._ledger = ledger
        self.submission_id = submission_id
        self.task_id = task_id
        self.seconds = seconds

    @property
    def is_over(self) -> bool:
        return self._ledger.task(self.task_id) is None


class Engine:
    """One scheduler. Use as `async with Engine(...) as engine`."""

    def __init__(  # noqa: PLR0913 -- the composition root hands every part in here
        self,
        *,
        specs: Sequence[EvaluatorSpec],
        pool: PlacementPool | None,
        generation_engines: Mapping[str, GenerationEngine],
        journal: Journal,
        clock: Clock,
        settings: EngineSettings = EngineSettings(),
        batching_strategy: BatchingStrategy = fifo_batching,
        default_sampling: SamplingParams = SamplingParams(),
        default_stopping: StoppingCriteria = StoppingCriteria(),
        api_front: ApiFront | None = None,
        runners: Mapping[str, Runner] | None = None,
        namespaces: Mapping[str, NamespaceSettings] = {},
    ) -> None:
        """runners: by evaluator_id; evaluators without one run in this loop. namespaces: what each weighs and may hold;
        others weigh 1 and have no quota.
        """
        self._intake = Intake(specs, pool if settings.has_fixed_nodes else None, batching_strategy)
        self._pool = pool
        self._clock = clock
        self._settings = settings
        self._journal = journal
        self._generation_engines = generation_engines
        self._ledger = Ledger(settings.retained_submissions, settings.staleness)
        self._event_log = EventLog(journal, settings.retained_events, settings.retained_bytes)
        self._gate = StalenessGate(self._ledger, settings.staleness) if settings.staleness else None
        self._recorder = Recorder(self._ledger, self._event_log, self._gate)
        self._checkpoints = Checkpoints(journal, self._ledger, self._event_log)
        self._workdirs = Workdirs(settings.workdir_root)
        weights = RecordedWeights(self._recorder, self._event_log, clock)
        self.generation = GenerationGateway(generation_engines, settings.max_running_generations, weights)
        services = EpisodeServices(
            clock, self.generation, default_sampling, default_stopping, self._workdirs, api_front
        )
        self._runners = runners or {}
        self._distinct_runners = tuple(dict.fromkeys(self._runners.values()))  # One may be several evaluators'.
        self._supervisor = Supervisor(
            self._recorder,
            services,
            settings,
            self._runners,
            self._requeue,
            self._slot_returned,
            self._room_is_stranded,
        )
        self._collector = Collector(self._recorder, self._event_log, clock, settings, self._stop_and_wait)
        self.quotas = Quotas(namespaces)
        launch = self._supervisor.launch
        self._admission = Admission(pool, self._recorder, clock, settings, launch, self.quotas, namespaces, self._gate)
        self.leases = LeaseDesk(pool, self._admission, clock, settings, self.quotas)
        self._task_deadlines: Deadlines[TaskDeadline] = Deadlines(clock, self._on_task_deadline)
        self._exit = AsyncExitStack()
        self._journal_is_taken = False
        self.is_running = False

    async def open_journal(self, stack: AsyncExitStack) -> None:
        """Takes the store, also before the engine starts; it is closed at the end of `stack`. Raises JournalError."""
        if self._journal_is_taken:
            return
        self._journal_is_taken = True
        stack.push_async_callback(self._journal.close)
        opening = asyncio.create_task(asyncio.to_thread(self._journal.open))
        try:
            await asyncio.shield(opening)
        finally:
            while not opening.done():  # A thread takes no cancel, and `close` gives back only what it has taken.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([opening])

    async def __aenter__(self) -> Self:
        try:
            await self.open_journal(self._exit)
            await start_runners(self._distinct_runners, self._exit)
            with collector_at_rest():
                await self._restore()
        except BaseException:
            await self._exit.aclose()
            raise
        tasks = await self._exit.enter_async_context(asyncio.TaskGroup())
        residents = [tasks.create_task(self._admission.run(), name="admission")]
        if self._journal.is_durable:
            residents.append(tasks.create_task(self._checkpoints.run(), name="checkpoints"))
        for resident in residents:
            self._exit.callback(resident.cancel)
        self.is_running = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.is_running = False
        self._admission.stop()
        self.leases.close()
        self._task_deadlines.clear()
        self.stranded_workers = await self._supervisor.close()
        await self._workdirs.close()
        self._event_log.close()
        await self._exit.aclose()

    async def _restore(self) -> None:
        folded = fold(self._journal, self._ledger)
        self.leases.start(self._journal.first_fencing_token)
        self._event_log.start(self._ledger.last_sequence)
        self._event_log.acknowledgements.restore(self._ledger.submissions(), self._journal.oldest_sequence)
        self._checkpoints.start(folded.snapshots)
        await complete(self._journal, self._ledger, folded)
        if folded.limits != self._ledger.service.limits:
            self._checkpoints.put_service()
        interrupt_running(self._recorder, self._clock)
        for submission in self._ledger.open_submissions():
            self._arm_deadlines(submission.open_tasks.values())
        for spec, attempts in open_batches(self._ledger, self._intake, self._clock.monotonic()):
            self._admission.enqueue(spec, attempts)
        for record in unscored_groups(self._ledger):
            self._supervisor.groups.score(record, self._intake.spec_of(record.task))

    stranded_workers = 0
    """After the exit: workers whose handlers would not end; only the end of the process stops them."""

    # Tasks in

    async def submit(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> SubmitReply:
        """Takes tasks in, all or none; returns once they will survive a crash as far as the journal does.

        See `accept`. Raises what that raises.
        """
        reply = self.accept(request, batches)
        await self._event_log.wait_committed(reply.before_sequence + 1)
        return reply

    def accept(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> SubmitReply:
        """Takes tasks in, all or none, within this turn of the loop; the journal has them a little later.

        batches: how an in-process caller wants the tasks to be grouped; None: as the engine's own strategy says, which
        is also asked for what is still to be run after a restart.
        Raises InvalidArgumentError, UnplaceableError, AlreadyExistsError, ResourceExhaustedError,
        FailedPreconditionError.
        """
        plan = self._intake.plan(request, batches)
        digest = request_digest(request)
        key = request.key
        if self._ledger.request(key.namespace, request.request_id) is None:
            self._event_log.check_writable()
            self._check_room(request.tasks, key.namespace)
            if request.delivery is Delivery.COLLECT:
                self._check_kept()
        accept = AcceptTasks(
            request.request_id,
            digest,
            key,
            request.tasks,
            f"s{os.urandom(8).hex()}",
            self._clock.unix_time(),
            request.iteration,
            plan.group_scored,
            request.delivery is Delivery.COLLECT,
            Moment(self._clock.boot_id, self._clock.monotonic()),
        )
        for event in self._recorder.record(accept, key.namespace):
            if type(event) is TasksAccepted:
                records = [self._ledger.open_task(accepted.task_id) for accepted in event.tasks]
                self._arm_deadlines(records)
                for spec, attempts in waiting_attempts(plan, records, self._clock.monotonic()):
                    self._admission.enqueue(spec, attempts)
        answered = self._ledger.request(key.namespace, request.request_id)
        assert answered is not None
        return SubmitReply(
            submission_id=answered.submission_id,
            task_ids=answered.task_ids,
            warnings=plan.warnings,
            before_sequence=answered.before_sequence,
        )

    def _check_room(self, tasks: Sequence[Task], namespace: str) -> None:
        if self._admission.is_stopped:
            raise FailedPreconditionError("the server is shutting down and takes no tasks: submit to another one")
        open_in_namespace = self._ledger.open_tasks_in(namespace)
        self.quotas.check_tasks(namespace, open_in_namespace, len(tasks))
        self.quotas.check_retained(namespace, self._event_log.unread_bytes)
        ledger, settings = self._ledger, self._settings
        samples = sum([task.config.repeat_times for task in tasks])
        for what, are_open, more, limit in (
            ("tasks", ledger.open_tasks, len(tasks), settings.max_queued_tasks),
            ("samples", ledger.open_samples, samples, settings.max_queued_samples),
        ):
            if are_open + more > limit:
                raise ResourceExhaustedError(
                    f"{are_open} {what} are open, {more} more would exceed max_queued_{what} ({limit}):"
                    " wait for some to finish",
                    _RETRY_AFTER_SECONDS,
                )

    def _check_kept(self) -> None:
        kept, limit = self._ledger.results.kept_bytes, self._settings.max_kept_bytes
        if kept >= limit:
            raise ResourceExhaustedError(
                f"results of {kept} bytes wait to be collected or acknowledged, max_kept_bytes is {limit}:"
                " collect, acknowledge or discard some",
                _RETRY_AFTER_SECONDS,
            )

    def _arm_deadlines(self, records: Iterable[TaskRecord]) -> None:
        now = self._clock.monotonic()
        for record in records:
            seconds = record.task.config.task_deadline_seconds
            if seconds is not None:
                elapsed = self._seconds_since_acceptance(record, now)
                deadline = TaskDeadline(self._ledger, record.submission.submission_id, record.task_id, seconds)
                self._task_deadlines.add(now + seconds - elapsed, deadline)

    def _seconds_since_acceptance(self, record: TaskRecord, now: float) -> float:
        """By the wall clock only where the machine was started anew meanwhile: it may jump, the other does not."""
        at = record.accepted_at
        if at is not None and at.boot_id and at.boot_id == self._clock.boot_id:
            return now - at.monotonic_seconds
        return max(0.0, self._clock.unix_time() - record.accepted_unix_seconds)

    def _requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        self._admission.requeue(spec, attempts)

    def _slot_returned(self, spec: EvaluatorSpec, namespace: str, taken_at: float) -> None:
        self._admission.slot_returned(spec, namespace, taken_at)

    def _room_is_stranded(self, tokens: int) -> None:
        self._admission.room_is_stranded(tokens)

    async def resume_training(self, namespace: str) -> int:
        """A trainer starts, perhaps again from a checkpoint: what its namespace has produced so far counts as staleness
        no more. The student's weight_epoch. Raises ResourceExhaustedError while the journal cannot write.
        """
        self._event_log.check_writable()
        self._recorder.record(ResumeTraining(self._clock.unix_time()), namespace)
        await self._event_log.wait_committed(self._ledger.last_sequence)
        return self._ledger.weights_of((STUDENT,)).epoch

    def nodes_have_changed(self) -> None:
        """To be told after nodes of the pool were added, resumed or removed: what waits may fit now, and what is held
        is another share of all room.
        """
        self._admission.nodes_changed()

    def limit_namespaces(self, quotas: Mapping[str, Quota]) -> None:
        """Quotas beside those of the settings, in place of what was said so before; "*": of every namespace."""
        self.quotas.limit_further(quotas)
        self._admission.quotas_changed()

    # Stops

    async def abort(self, request: AbortRequest) -> AbortReply:
        """Stops a submission or some of its tasks.

        Raises NotFoundError, also for a task that it never had; AlreadyExistsError when the request_id is another
        call's.
        """
        digest = abort_digest(request) if request.request_id else b""
        done = self._ledger.repeated(request.selector.namespace, request.request_id, digest)
        if done is None:
            submission = self._find(request.selector)
            for task_id in request.task_ids:
                if not submission.has_had(task_id):
                    raise NotFoundError(f"submission {submission.submission_id!r} has no task {task_id!r}")
            stopped = len(
                self._stop_tasks(
                    submission,
                    request.task_ids,
                    StopCause.REQUEST,
                    request.reason or "aborted on request",
                    keeps_results=request.keep_partial,
                    restarts_runners=request.restart_runners,
                    request_id=request.request_id,
                    request_digest=digest,
                )
            )
            submission_id, before_no = submission.submission_id, submission.next_task_no
        else:
            submission_id, before_no, stopped = done.submission_id, done.task_count, done.stopped_tasks
        await self._event_log.wait_committed(self._ledger.last_sequence)
        # What is submitted from now on is not waited for.
        concerned = Concerned(submission_id, frozenset(request.task_ids), before_no)
        if request.wait:
            try:
                async with asyncio.timeout(request.timeout_seconds):
                    await self._supervisor.wait_stopped(concerned)
            except TimeoutError:
                pass  # No failure: the answer says what is still stopping.
        return AbortReply(aborted_tasks=stopped, still_stopping=self._supervisor.unconfirmed(concerned))

    def _on_task_deadline(self, deadline: TaskDeadline, _when: float) -> None:
        submission = self._ledger.submission(deadline.submission_id)
        if submission is not None:
            reason = f"task_deadline_seconds ({deadline.seconds:g}) passed"
            self._stop_tasks(submission, (deadline.task_id,), StopCause.TASK_DEADLINE, reason)

    def _stop_tasks(
        self,
        submission: SubmissionRecord,
        task_ids: tuple[str, ...],
        cause: StopCause,
        reason: str,
        *,
        keeps_results: bool = False,
        restarts_runners: bool = False,
        request_id: str = "",
        request_digest: bytes = b"",
    ) -> tuple[str, ...]:
        """What waits ends now, what runs is told to stop; the ids of the tasks that this changed."""
        reason = safe_text(reason)
        command = StopTasks(
            submission.submission_id,
            task_ids,
            cause,
            reason,
            self._clock.unix_time(),
            keeps_results,
            restarts_runners,
            request_id,
            request_digest,
        )
        asked: tuple[str, ...] = ()
        for event in self._recorder.record(command, submission.key.namespace):
            if type(event) is AbortRequested:
                asked = event.task_ids
        for task_id in asked:
            self._supervisor.stop(task_id, cause, reason, restarts_runners=restarts_runners)
        if asked:
            self._admission.attempts_were_ended()
        return asked

    async def _stop_and_wait(
        self,
        submission: SubmissionRecord,
        task_ids: tuple[str, ...],
        reason: str,
        *,
        keeps_results: bool,
        restarts_runners: bool,
    ) -> None:
        self._stop_tasks(
            submission,
            task_ids,
            StopCause.REQUEST,
            reason,
            keeps_results=keeps_results,
            restarts_runners=restarts_runners,
        )
        await self._supervisor.wait_stopped(Concerned(submission.submission_id, frozenset(task_ids)))

    # Results out

    async def collect(self, request: CollectRequest) -> CollectReply:
        """Waits for results of tasks that were submitted with `Delivery.COLLECT`; see `CollectRequest`.

        Raises InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError.
        """
        return await self._collector.collect(request)

    async def drain_submission(self, request: CollectRequest) -> CollectReply:
        """Hands out what is finished now, without a wait; the rest goes on."""
        return await self._collector.drain(request)

    async def ack_results(self, namespace: str, request_id: str) -> None:
        """What was handed out under this id is kept no longer. An id that is not known (any more) is no error."""
        await self._collector.acknowledge(namespace, request_id)

    async def discard_submission(self, selector: SubmissionSelector, request_id: str = "") -> None:
        """Forgets the results that a submission keeps, and how many it had; under one request_id once.

        Raises NotFoundError, AlreadyExistsError when the request_id is another call's.
        """
        digest = discard_digest(selector) if request_id else b""
        if self._ledger.repeated(selector.namespace, request_id, digest) is None:
            await self._collector.discard(self._find(selector), request_id, digest)
        else:
            await self._event_log.wait_committed(self._ledger.last_sequence)

    def forget_results(self, selector: SubmissionSelector) -> None:
        """`discard_submission` within this turn of the loop; the journal hears of it a little later."""
        self._collector.forget(self._find(selector))

    def runner_views(self) -> list[RunnerView]:
        """Each runner outside this loop, as it stands; what is at work bears its `workflow_id`: batch/task/run."""
        return [self._with_workflow_id(view) for runner in self._distinct_runners for view in runner.views()]

    def _with_workflow_id(self, view: RunnerView) -> RunnerView:
        submission = self._ledger.submission(view.submission_id)
        if submission is None or _WORKFLOW_ID in view.keys:
            return view
        _, number = submission_and_number(view.task_id)
        workflow_id = f"{submission.key.batch_id}/{number}/{view.sample_no}"
        return msgspec.structs.replace(view, keys={_WORKFLOW_ID: workflow_id, **view.keys})

    @property
    def history(self) -> TrainingHistory:
        """What training came to so far, for the dynamic timeout."""
        return self._ledger.history

    def dynamic_timeout(self, cap_seconds: float | None) -> float | None:
        """How long an attempt may take now if its task asks for it. None: no limit."""
        return dynamic_timeout(self._settings.dynamic_timeout, self._ledger.history, cap_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Starts nothing any more; what runs may finish within the grace.

        What is still open then goes on after a restart if the journal is durable; otherwise it ends here, ABORTED.
        """
        self._admission.stop()
        self.leases.stop()
        self._supervisor.is_draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._supervisor.wait_stopped(EVERYTHING)
        except TimeoutError:
            logger.warning("samples were still running after %g s of draining", grace_seconds)
        if not self._journal.is_durable:
            for submission in self._ledger.open_submissions():
                self._stop_tasks(submission, (), StopCause.SHUTDOWN, "the server is shutting down")
            await self._supervisor.wait_stopped(EVERYTHING)
        try:
            # Streams end with what is committed by then: what happened last is to be in it.
            async with asyncio.timeout(_LAST_COMMIT_SECONDS):
                await self._event_log.wait_committed(self._ledger.last_sequence)
        except (TimeoutError, ResourceExhaustedError):
            logger.warning("the journal did not take the last events: streams end without them")

    # Questions

    @property
    def specs(self) -> Mapping[str, EvaluatorSpec]:
        return self._intake.specs

    @property
    def ledger(self) -> Ledger:
        """The facts, for whoever shows them in another shape; nobody but this engine changes them."""
        return self._ledger

    @property
    def takes_tasks(self) -> bool:
        """Whether it is running and was not told to drain."""
        return self.is_running and not self._admission.is_stopped

    @property
    def can_record(self) -> bool:
        """Whether the journal works, be its disk full just now. Without it nothing is taken in or given out."""
        return not self._event_log.is_broken

    @property
    def can_lease(self) -> bool:
        """Whether there is a pool, with a node that takes anything."""
        return self._pool is not None and any(node.phase == "active" for node in self._pool.nodes())

    @property
    def can_generate(self) -> bool:
        """Whether a generation engine is up."""
        return self.generation.any_is_up

    @property
    def stop_grace_seconds(self) -> float:
        return self._settings.stop_grace_seconds

    @property
    def retained_events(self) -> int:
        return self._settings.retained_events

    @property
    def max_running_samples(self) -> int:
        """How many samples could run at once at most, were all of them of the smallest demand."""
        limit = self._settings.max_running_samples
        if self._pool is None:
            return limit
        return min(limit, max(self._pool.max_tokens_for(spec.sample_resource) for spec in self.specs.values()))

    def guard(self, batches: Iterable[Batch]) -> None:
        """The deadlock guard, for batches that are still to be submitted. Raises UnplaceableError."""
        self._intake.guard(batches)

    @property
    def store_epoch(self) -> bytes:
        return self._journal.store_epoch

    @property
    def oldest_sequence(self) -> int:
        """Of the first event that can still be watched."""
        return self._journal.oldest_sequence

    @property
    def last_sequence(self) -> int:
        """Of the last event that watchers can have seen."""
        return self._event_log.committed_sequence

    def watch(self, event_filter: EventFilter, after_sequence: int | None) -> AsyncIterator[EventFrame]:
        """Frames of committed events after a sequence (None: from the oldest retained), for ever.

        The first frame comes at once, be it empty. Raises CursorExpiredError, InvalidArgumentError.
        """
        return self._event_log.watch(event_filter, after_sequence)

    def acknowledge(self, event_filter: EventFilter, through_sequence: int) -> int:
        """Lets go of the events of the filter's submission, or of its namespace, whatever their kind; the oldest
        sequence that can be watched afterwards. Raises InvalidArgumentError.
        """
        self._event_log.check_given_out(through_sequence)
        self._event_log.acknowledge(event_filter.namespace, event_filter.submission_id, through_sequence)
        return self.oldest_sequence

    def submission(self, selector: SubmissionSelector) -> SubmissionView:
        """How a submission stands, and why what waits is waiting. Raises NotFoundError."""
        record = self._find(selector)
        waiting = self._admission.waiting(record.submission_id, MAX_WAITING_SHOWN)
        waiting += self._supervisor.backoffs.waits(record.submission_id)[: MAX_WAITING_SHOWN - len(waiting)]
        attempts, done = record.attempts_in, record.done_tasks
        return SubmissionView(
            submission_id=record.submission_id,
            key=record.key,
            queued_attempts=attempts[AttemptState.QUEUED],
            leased_attempts=attempts[AttemptState.LEASED],
            running_attempts=attempts[AttemptState.RUNNING],
            open_tasks=len(record.open_tasks),
            succeeded_tasks=done[TaskState.SUCCEEDED],
            partial_tasks=done[TaskState.PARTIAL],
            failed_tasks=done[TaskState.FAILED],
            aborted_tasks=done[TaskState.ABORTED],
            waiting=tuple(waiting),
            scheduled_tasks=record.kept.scheduled_tasks,
            collectable_tasks=len(record.kept.collectable),
            unacknowledged_tasks=sum(len(collected.results) for collected in record.kept.unacknowledged.values()),
            kept_bytes=record.kept.size,
        )

    def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        """How a task stands; if it waits, what is short where and who is ahead of it. Raises NotFoundError."""
        explanation = self._admission.explain_task(task_id, namespace)
        backoffs = self._supervisor.backoffs.task_waits(explanation.submission_id, task_id)
        return msgspec.structs.replace(explanation, waits=explanation.waits + backoffs) if backoffs else explanation

    async def server_info(self, version: str) -> ServerInfo:
        """What this scheduler is made of. Engines that do not answer are shown without a model."""
        return ServerInfo(
            version=version,
            evaluators=tuple(evaluator_view(spec) for spec in self._intake.specs.values()),
            engines=tuple([await engine_view(role, engine) for role, engine in self._generation_engines.items()]),
            nodes=tuple(map(node_view, self._pool.nodes())) if self._pool is not None else (),
        )

    def _find(self, selector: SubmissionSelector) -> SubmissionRecord:
        if selector.submission_id:
            record = self._ledger.submission(selector.submission_id)
            if record is not None and record.key.namespace == selector.namespace:
                return record
            raise NotFoundError(
                f"no submission has the id {selector.submission_id!r} in namespace {selector.namespace!r}"
            )
        if selector.batch_id is None:
            raise NotFoundError("name a submission_id or a batch_id")
        record = self._ledger.submission_of_key(SubmissionKey(selector.batch_id, selector.namespace))
        if record is None:
            raise NotFoundError(f"no submission is known as {selector.batch_id!r} in namespace {selector.namespace!r}")
        return record
