"""The scheduler as its users see it: submit, abort, watch, ask.

    submit -> intake -> ledger -> [TasksAccepted] -> journal -> reply
                                        `-> admission -> supervisor -> workers: run, eval
                                                                 `-> ledger -> [AttemptEnded, TaskDone]
    all events -> event log -> journal -> watchers

Everything runs in one event loop; a fact is decided, applied and recorded within one turn of it.

What is more than passing a call on is a part of its own: `stops` ends work before its time, `refusals` what no node can
hold, `collector` hands out results (`Engine.results`), `lease_manager` room (`Engine.leases`), `views` says how things
stand, `restore` makes the state at the start.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from py_scheduler.batching import BatchingStrategy, fifo_batching
from py_scheduler.domain.events import TasksAccepted
from py_scheduler.domain.generation import STUDENT, SamplingParams, StoppingCriteria
from py_scheduler.domain.requests import (
    AbortReply,
    AbortRequest,
    EventFilter,
    EventFrame,
    ServerInfo,
    SubmissionSelector,
    SubmissionView,
    SubmitReply,
    SubmitRequest,
)
from py_scheduler.execution.episode import EpisodeServices
from py_scheduler.execution.generation.gateway import GenerationGateway
from py_scheduler.execution.runner import start_runners
from py_scheduler.execution.workdirs import Workdirs
from py_scheduler.scheduler.collector import Collector
from py_scheduler.scheduler.intake import TASKS_AT_ONCE, Intake, IntakeLimits, Plan, command_of, is_large
from py_scheduler.scheduler.leases.manager import LeaseManager
from py_scheduler.scheduler.ledger.commands import ResumeTraining
from py_scheduler.scheduler.ledger.dynamic_timeout import dynamic_timeout
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.state import request_digest
from py_scheduler.scheduler.log.checkpoints import Checkpoints
from py_scheduler.scheduler.log.event_log import EventLog
from py_scheduler.scheduler.log.recorder import RecordedBackends, Recorder
from py_scheduler.scheduler.queue.admission import Admission
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.queue.staleness_gate import StalenessGate
from py_scheduler.scheduler.refusals import Refusals
from py_scheduler.scheduler.restore import StoredState, collector_at_rest, open_batches, restore, unscored_groups
from py_scheduler.scheduler.settings import EngineSettings
from py_scheduler.scheduler.slices import Backlog
from py_scheduler.scheduler.stops import Stops
from py_scheduler.scheduler.submits import LargeSubmits, as_it_is
from py_scheduler.scheduler.supervisor import Supervisor
from py_scheduler.scheduler.views import Views, server_view

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence

    from py_scheduler.domain.episodes.api_access import ApiFront
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.ports import Clock, GenerationBackend, Journal
    from py_scheduler.domain.quotas import NamespaceSettings, Quota
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import Batch, SubmissionKey
    from py_scheduler.execution.attempt import PlannedAttempt, RunningAttempt
    from py_scheduler.execution.runner import Runners
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.ledger.commands import AcceptTasks
    from py_scheduler.scheduler.ledger.dynamic_timeout import TrainingHistory
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.ledger.state import LedgerState


class Engine:
    """One scheduler. Use as `async with Engine(...) as engine`."""

    def __init__(  # noqa: PLR0913 -- the composition root hands every part in here
        self,
        *,
        specs: Sequence[EvaluatorSpec],
        pool: PlacementPool | None,
        generation_backends: Mapping[str, GenerationBackend],
        journal: Journal,
        clock: Clock,
        settings: EngineSettings = EngineSettings(),
        batching_strategy: BatchingStrategy = fifo_batching,
        default_sampling: SamplingParams = SamplingParams(),
        default_stopping: StoppingCriteria = StoppingCriteria(),
        api_front: ApiFront | None = None,
        runners: Mapping[str, Runners] | None = None,
        namespaces: Mapping[str, NamespaceSettings] = {},
    ) -> None:
        """runners: by evaluator_id; evaluators without one run in this loop. namespaces: what each weighs and may hold;
        others weigh 1 and have no quota.
        """
        self._intake = Intake(specs, pool if settings.has_fixed_nodes else None, batching_strategy)
        self._pool = pool
        self._clock = clock
        self.settings = settings
        self._journal = journal
        self._generation_backends = generation_backends
        self._whole_ledger = Ledger(settings.retained_submissions, settings.staleness)
        self._ledger = self._whole_ledger.state
        self._event_log = EventLog(
            journal, settings.retained_events, settings.retained_bytes, settings.max_uncommitted_bytes
        )
        self._event_log.behind_listener = self._journal_is_behind
        self._gate = StalenessGate(self._ledger, settings.staleness) if settings.staleness else None
        self._recorder = Recorder(self._whole_ledger, self._event_log)
        if self._gate is not None:
            self._recorder.event_listeners.append(self._gate.apply)
        self._checkpoints = Checkpoints(journal, self._recorder, self._event_log, clock)
        self._workdirs = Workdirs(settings.workdir_root)
        backends = RecordedBackends(self._recorder, self._event_log, clock)
        self.generation = GenerationGateway(generation_backends, settings.max_running_generations, backends)
        services = EpisodeServices(
            clock, self.generation, default_sampling, default_stopping, self._workdirs, api_front
        )
        runners = runners or {}
        self._runners = tuple(dict.fromkeys(runners.values()))  # One may be several evaluators'.
        self._supervisor = Supervisor(
            self._recorder, services, settings, runners, self._requeue, self._permit_returned, self._room_is_stranded
        )
        self.quotas = Quotas(namespaces)
        launch = self._supervisor.launch
        self._admission = Admission(pool, self._recorder, clock, settings, launch, self.quotas, namespaces, self._gate)
        self._limits = IntakeLimits(self._admission, self.quotas, self._ledger, self._event_log, settings)
        self._stops = Stops(self._recorder, self._event_log, self._supervisor, self._admission, clock)
        self._refusals = Refusals(self._intake, self._recorder, self._admission, self._supervisor.groups, clock)
        self._enqueueing = Backlog(clock)
        self._large_submits = LargeSubmits(self._intake, self._limits, self._whole_ledger, clock, self._record_accepted)
        self._views = Views(self._ledger, self._admission.reasons, self._supervisor.backoffs, self._runners)
        self.leases = LeaseManager(pool, self._admission, clock, settings, self.quotas)
        stop, decided = self._stops.stop_and_wait, self._large_submits.wait_decided
        self.results = Collector(self._recorder, self._event_log, clock, settings, stop, decided)
        """Results out: collect, acknowledge, discard."""
        self._exit = AsyncExitStack()
        self._stored = StoredState(journal, self._whole_ledger)
        self.is_running = False
        self.stranded_workers = 0
        """After the exit: workers whose handlers would not end; only the end of the process stops them."""

    async def open_journal(self, stack: AsyncExitStack) -> None:
        """Takes the store, also before the engine starts; it is closed at the end of `stack`. Raises JournalError."""
        await self._stored.open(stack)

    def read_journal(self) -> None:
        """Brings the state to where the last process left it; blocks. After `open_journal`, and also before the engine
        starts: backends that start after it do so with the endpoints that were set last. Raises JournalError.
        """
        if self._stored.read():
            self.generation.restore_endpoints()

    async def __aenter__(self) -> Self:
        try:
            await self.open_journal(self._exit)
            await start_runners(self._runners, self._exit)
            self.read_journal()
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
        self._stops.close()
        self._large_submits.close()
        self._enqueueing.close()
        self._refusals.close()
        self.results.close()
        self.stranded_workers = await self._supervisor.close()
        await self._workdirs.close()
        self._event_log.close()
        await self._exit.aclose()

    async def _restore(self) -> None:
        assert self._stored.folded is not None
        parts = self._recorder, self._event_log, self._checkpoints, self._clock
        await restore(self._journal, self._whole_ledger, self._stored.folded, *parts)
        self.leases.start(self._journal.first_fencing_token)
        for submission in self._ledger.open_submissions():
            for record in submission.open_tasks.values():
                if record.task.config.task_deadline_seconds is not None:
                    self._stops.arm_deadline(record)
        for spec, attempts in open_batches(self._ledger, self._intake, self._clock.monotonic()):
            self._admission.enqueue(spec, attempts)
        for record in unscored_groups(self._ledger):
            self._supervisor.groups.score(record, self._intake.spec_of(record.task))

    # Tasks in

    async def submit(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> SubmitReply:
        """Takes tasks in, all or none; returns once they will survive a crash as far as the journal does.

        See `accept`, whose turn of the loop is here several where there are many tasks. Raises what that raises.
        """
        if self._large_submits.lines or is_large(request):
            return await self.submit_as_read(request.key, as_it_is(request), batches)
        reply = self.accept(request, batches)
        await self._event_log.wait_committed(reply.before_sequence + 1)
        return reply

    async def submit_as_read(
        self,
        key: SubmissionKey,
        reading: Generator[None, None, SubmitRequest],
        batches: Sequence[Batch] | None = None,
        *,
        size: int = 0,
    ) -> SubmitReply:
        """`submit` of a request that is still to be read, in slices. key: its own, by which it has arrived now. size:
        of its message, in bytes. Raises what `reading` raises.
        """
        reply = await self._large_submits.submit(key, reading, batches, size)
        await self._event_log.wait_committed(reply.before_sequence + 1)
        return reply

    def accept(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> SubmitReply:
        """Takes tasks in, all or none, within this turn of the loop; the journal has them a little later.

        A thousand hold the loop for 10 ms, and 10 000 for 70: for as many as that there is `submit`.
        batches: how an in-process caller wants the tasks to be grouped; None: as the engine's own strategy says, which
        is also asked for what is still to be run after a restart.
        Raises InvalidArgumentError, UnplaceableError, AlreadyExistsError, ResourceExhaustedError,
        FailedPreconditionError.
        """
        digest, requests = request_digest(request), self._ledger.requests
        # Before anything else: a call that was answered once is answered so again, whatever has room here by now.
        answered = requests.repeated(request.key.namespace, request.request_id, digest)
        if answered is None:
            plan = self._intake.plan(request, batches)
            command = command_of(request, digest, plan, self._clock)
            self._limits.check(command)
            self._record_accepted(command, plan)
            answered = requests.find(request.key.namespace, request.request_id)
            assert answered is not None
        return answered.reply(answered.task_ids)

    def _record_accepted(self, command: AcceptTasks, plan: Plan) -> None:
        made = command.prepared
        if made is not None and not self._journal.is_durable:
            made.encoded = None
        for event in self._recorder.record(command, command.key.namespace, made):
            if type(event) is not TasksAccepted:
                continue
            if made is not None and made.accepted is event.tasks:
                self._enqueueing.add_later(self._enqueue(plan, list(made.records.values())))
                continue
            records = [self._ledger.open_task(accepted.task_id) for accepted in event.tasks]
            if len(records) <= TASKS_AT_ONCE:
                for _ in self._enqueue(plan, records):
                    pass
            else:
                _ = self._enqueueing.add(self._enqueue(plan, records))

    def _enqueue(self, plan: Plan, records: Sequence[TaskRecord]) -> Generator[None, None, None]:
        """Lets the tasks of a submit wait for room; in slices, since there may be many. What ends before it came to
        wait never does.
        """
        for begin in range(0, len(records), TASKS_AT_ONCE):
            for record in records[begin : begin + TASKS_AT_ONCE]:
                if record.task.config.task_deadline_seconds is not None:
                    self._stops.arm_deadline(record)
            if begin + TASKS_AT_ONCE < len(records):
                yield
        yield from self._admission.enqueueing(plan.batches, records)

    def _requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        self._refusals.requeue(spec, attempts)

    def _permit_returned(self, spec: EvaluatorSpec, namespace: str, taken_at: float) -> None:
        self._admission.permit_returned(spec, namespace, taken_at)

    def _journal_is_behind(self, is_behind: bool) -> None:
        self._supervisor.is_paused = is_behind
        self._admission.pause() if is_behind else self._admission.resume()

    def _room_is_stranded(self, attempts: Iterable[tuple[EvaluatorSpec, RunningAttempt]]) -> None:
        self._admission.room_is_stranded(attempts)

    async def resume_training(self, namespace: str) -> int:
        """A trainer starts, perhaps again from a checkpoint: what its namespace has produced so far counts as staleness
        no more. The student's weight_epoch. Raises ResourceExhaustedError while the journal cannot write.
        """
        self._event_log.check_writable()
        self._recorder.record(ResumeTraining(self._clock.unix_time()), namespace)
        await self._event_log.wait_committed(self._ledger.last_sequence)
        return self._ledger.weights_of((STUDENT,)).epoch

    def nodes_have_changed(self) -> None:
        """To be told after nodes of the pool were added, drained, resumed or removed: what waits may fit now, and what
        is held is another share of all room.

        Without `has_fixed_nodes` what fits no more waits, since nodes may come back. With it a batch wants no more than
        the nodes that are left could hold; what waits and of which they could not hold one sample ends FAILED.
        """
        self._admission.nodes_changed()
        if self._pool is not None:
            self._supervisor.nodes_have_changed(self._pool)
        self._refusals.nodes_have_changed()

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
        await self._large_submits.wait_decided(request.selector)
        return await self._stops.abort(request)

    @property
    def history(self) -> TrainingHistory:
        """What training came to so far, for the dynamic timeout."""
        return self._ledger.history

    def dynamic_timeout(self, cap_seconds: float | None) -> float | None:
        """How long an attempt may take now if its task asks for it. None: no limit."""
        return dynamic_timeout(self.settings.dynamic_timeout, self._ledger.history, cap_seconds)

    async def drain(self, grace_seconds: float) -> None:
        """Starts nothing any more; what runs may finish within the grace.

        What is still open then goes on after a restart if the journal is durable; otherwise it ends here, ABORTED.
        """
        self._admission.stop()
        self.leases.stop()
        await self._stops.drain(grace_seconds, ends_what_is_open=not self._journal.is_durable)

    # Questions

    @property
    def specs(self) -> Mapping[str, EvaluatorSpec]:
        return self._intake.specs

    @property
    def ledger(self) -> LedgerState:
        """The facts, for whoever shows them in another shape."""
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
    def max_running_samples(self) -> int:
        """How many samples could run at once at most, were all of them of the smallest demand."""
        limit = self.settings.max_running_samples
        if self._pool is None:
            return limit
        return min(limit, max(self._pool.max_tokens_for(spec.sample_resource) for spec in self.specs.values()))

    def guard(self, batches: Iterable[Batch]) -> None:
        """The deadlock guard, for batches that are still to be submitted. Raises UnplaceableError."""
        self._intake.guard(batches)

    def has_taken_in(self, namespace: str, request_id: str) -> bool:
        """Whether a submit under this id was answered: sent again it is answered so again, whatever has room now."""
        return self._ledger.requests.find(namespace, request_id) is not None

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
        return self._views.submission(selector)

    async def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        """How a task stands; if it waits, what is short where and who is ahead of it. Raises NotFoundError."""
        return await self._views.task(task_id, namespace)

    def runner_views(self) -> list[RunnerView]:
        """Each runner outside this loop, as it stands; what is at work bears its `workflow_id`: batch/task/run."""
        return self._views.runners()

    async def server_info(self, version: str) -> ServerInfo:
        """What this scheduler is made of. Engines that do not answer are shown without a model."""
        backends = self._generation_backends
        return await server_view(version, self._intake.specs.values(), self.generation, backends, self._pool)
