"""Whatever happened, with checkpoints at whatever moments and processes killed in the middle of them: what a restart
makes of the snapshots and the events after them is what all events make.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.domain.events import EVERY_NAMESPACE, AttemptRef, Moment, StopCause
from py_scheduler.domain.generation import STUDENT, TEACHER
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.scheduler import slices
from py_scheduler.scheduler.ledger import snapshots as snapshots_module
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    AcknowledgeResults,
    ChangeWeights,
    CollectResults,
    DiscardResults,
    EndAttempt,
    InterruptAttempt,
    LeaseAttempts,
    ResumeTraining,
    ScoreGroup,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.snapshots import service_snapshot, snapshot_of, submission_of
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.log import checkpoints as checkpoints_module
from py_scheduler.scheduler.log.checkpoints import Checkpoints
from py_scheduler.scheduler.log.event_log import EventLog
from py_scheduler.scheduler.log.recorder import Recorder
from py_scheduler.scheduler.restore import complete_from, fold
from tests.support.journal.journal_store import Store
from tests.support.journal.journals import trajectory_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.scheduler.ledger.records import SubmissionRecord, SubTaskRecord, TaskRecord

LIMITS = {"a": StalenessSettings(max_staleness=0, step_size=2)}
NAMESPACES = ("a", "b")
ENDS = (
    AttemptState.SUCCEEDED,
    AttemptState.SUCCEEDED,
    AttemptState.FAILED,
    AttemptState.TIMED_OUT,
    AttemptState.LOST,
    AttemptState.ABORTED,
)


class World:
    """One store, and the processes that have it one after the other."""

    def __init__(self, retained_submissions: int) -> None:
        self.store = Store()
        self.retained_submissions = retained_submissions
        self.numbers = itertools.count(1)
        self.checkpoint: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.ledger = Ledger(self.retained_submissions, LIMITS)
        folded = fold(self.store, self.ledger)
        complete_from(self.store.whole(), self.ledger, folded)
        log = EventLog(self.store)
        log.start(self.ledger.state.last_sequence)
        self.recorder = Recorder(self.ledger, log)
        self.checkpoints = Checkpoints(self.store, self.recorder, log, LoopClock())
        self.checkpoints.start(folded.snapshots)
        self._log = log

    # What happens

    async def do(self, what: str, number: int, more: int) -> None:
        getattr(self, f"_{what}")(number, more)
        await asyncio.sleep(0)

    def tell(self, command: Any, namespace: str) -> None:
        self.recorder.record(command, namespace)

    def _accept(self, number: int, more: int) -> None:
        name, namespace = f"r{next(self.numbers)}", NAMESPACES[number % 2]
        config = TaskConfig(
            task_type="group" if more % 4 == 3 else "plain",
            repeat_times=1 + more % 3,
            is_eval=number % 5 == 4,
            keeps_partial=more % 5 == 4,
            max_samples_per_subtask=2 if more % 2 else 1,
            task_deadline_seconds=9.0 if more % 3 else None,
            retry=RetryPolicy(max_failure_retries=more % 2, max_loss_retries=1, max_infra_refills=1),
        )
        tasks = tuple(Task(config=config, client_key=f"{name}/{n}") for n in range(1 + number % 2))
        key = SubmissionKey(more % 2, namespace)
        grouped = frozenset({"group"})
        accept = AcceptTasks(
            name,
            b"d",
            key,
            tasks,
            f"s{name}",
            1.0,
            None,
            grouped,
            is_collected=number % 3 > 0,
            moment=Moment(b"boot", float(more)),
            warnings=("w",) * (more % 2),
        )
        self.tell(accept, namespace)

    def _submission(self, number: int, which: Callable[[SubmissionRecord], object]) -> SubmissionRecord | None:
        found = [submission for submission in self.ledger.state.submissions() if which(submission)]
        return found[number % len(found)] if found else None

    def _task(self, number: int, more: int) -> TaskRecord | None:
        submission = self._submission(number, lambda submission: submission.open_tasks)
        return None if submission is None else list(submission.open_tasks.values())[more % len(submission.open_tasks)]

    def _lease(self, number: int, more: int) -> None:
        if (task := self._task(number, more)) is not None:
            refs = [AttemptRef(task.task_id, no, subtask.attempt_no) for no, subtask in enumerate(task.subtasks)]
            self.tell(LeaseAttempts(tuple(refs)), task.submission.key.namespace)

    def _start(self, number: int, more: int) -> None:
        if (task := self._task(number, more)) is None:
            return
        for no, subtask in enumerate(task.subtasks):
            ref = AttemptRef(task.task_id, no, subtask.attempt_no)
            if self.ledger.state.is_waiting(ref):
                self.tell(StartAttempt(ref, "10.0.0.1", (0,), 2.0), task.submission.key.namespace)
                break

    def _end(self, number: int, more: int) -> None:
        running = [
            ref
            for submission in self.ledger.state.open_submissions()
            for task_id in submission.open_tasks
            for ref in self.ledger.state.running_attempts(task_id)
        ]
        if not running:
            return
        ref = running[number % len(running)]
        task = self.ledger.state.open_task(ref.task_id)
        subtask, state = task.subtasks[ref.subtask_no], ENDS[more % len(ENDS)]
        outcome = Outcome.SOLVED if state is AttemptState.SUCCEEDED else Outcome.INFRA_CONN
        have = subtask.sample_count if state is AttemptState.SUCCEEDED else more % 2
        samples = tuple(
            SampleDone(
                task_id=ref.task_id,
                sample_no=subtask.first_sample_no + n,
                attempt_no=ref.attempt_no,
                outcome=outcome,
                trajectory=trajectory_of(next(self.numbers) * (more % 7 > 0)),
                metrics={"m": 0.5 * more},
            )
            for n in range(have)
        )
        payload = f"payload of {ref}".encode()
        command = EndAttempt(ref, state, samples, "because", 3.0, True, payload, 0.25 * (1 + more))
        self.tell(command, task.submission.key.namespace)

    def _interrupt(self, number: int, more: int) -> None:
        if (task := self._task(number, more)) is not None:
            for ref in self.ledger.state.running_attempts(task.task_id):
                self.tell(InterruptAttempt(ref, 6.0), task.submission.key.namespace)

    def _score(self, number: int, more: int) -> None:
        for submission in self.ledger.state.open_submissions():
            for task in list(submission.open_tasks.values()):
                if task.awaits_group_score:
                    rewards = tuple(Reward(score=float(number)) for _ in range(task.task.config.repeat_times))
                    self.tell(ScoreGroup(task.task_id, rewards, "", 1.0, 5.0), submission.key.namespace)
                    return

    def _stop(self, number: int, more: int) -> None:
        if (task := self._task(number, more)) is not None:
            named = (task.task_id,) if more % 2 else ()
            cause = StopCause.REQUEST if more % 3 else StopCause.TASK_DEADLINE
            request_id = f"stop{next(self.numbers)}" if more % 5 else ""
            submission = task.submission
            command = StopTasks(
                submission.submission_id, named, cause, "stop", 4.0, number % 2 > 0, False, request_id, b"x"
            )
            self.tell(command, submission.key.namespace)

    def _collect(self, number: int, more: int) -> None:
        submission = self._submission(number, lambda submission: submission.kept.collectable)
        if submission is not None:
            command = CollectResults(
                submission.submission_id, f"c{next(self.numbers)}", more % 3 or None, (), ("w",), 1.0, more % 2 > 0
            )
            self.tell(command, submission.key.namespace)

    def _acknowledge(self, number: int, more: int) -> None:
        submission = self._submission(number, lambda submission: submission.kept.unacknowledged)
        if submission is not None:
            request_id = list(submission.kept.unacknowledged)[more % len(submission.kept.unacknowledged)]
            namespace = submission.key.namespace
            self.tell(AcknowledgeResults(namespace, request_id, 1.0), namespace)

    def _discard(self, number: int, more: int) -> None:
        submission = self._submission(number, lambda submission: submission.kept.is_collected)
        if submission is not None:
            self.tell(DiscardResults(submission.submission_id, 1.0), submission.key.namespace)

    def _weights(self, number: int, more: int) -> None:
        roles = ((STUDENT,), (STUDENT, TEACHER), (TEACHER,))[number % 3]
        self.tell(ChangeWeights(roles, f"v{more}", number % 2 > 0, 1.0), EVERY_NAMESPACE)

    def _resume(self, number: int, more: int) -> None:
        self.tell(ResumeTraining(1.0), NAMESPACES[number % 2])

    def _take(self, number: int, more: int) -> None:
        """Goes on beside what happens next."""
        if self.checkpoint is None or self.checkpoint.done():
            self.checkpoint = asyncio.create_task(self.checkpoints.take())

    async def kill(self) -> None:
        """In the middle of a checkpoint, if one is under way; the next process begins."""
        self._log.flush()
        if self.checkpoint is not None:
            self.checkpoint.cancel()
            with suppress(asyncio.CancelledError):
                await self.checkpoint
        self._begin()


def fields_of(submission: SubmissionRecord) -> dict[str, Any]:
    """What a record holds, field by field; not by its snapshot, which forgets the same of both that are compared."""
    tasks = []
    for task in submission.open_tasks.values():
        fields = {
            name: getattr(task, name) for name in task.__struct_fields__ if name not in {"submission", "subtasks"}
        }
        tasks.append((fields, [queued_if_leased(subtask) for subtask in task.subtasks]))
    counts = {**submission.attempts_in, AttemptState.LEASED: 0}
    counts[AttemptState.QUEUED] += submission.attempts_in[AttemptState.LEASED]
    others = set(submission.__slots__) - {"attempts_in", "open_tasks"}
    return {name: getattr(submission, name) for name in others} | {"tasks": tasks, "attempts": counts}


def queued_if_leased(subtask: SubTaskRecord) -> SubTaskRecord:
    is_leased = subtask.state is AttemptState.LEASED
    return msgspec.structs.replace(subtask, state=AttemptState.QUEUED if is_leased else subtask.state)


def said(ledger: Ledger) -> dict[str, Any]:
    """All that a ledger answers with, in plain values; what is leased counts as waiting."""
    names = {}
    for submission in ledger.state.submissions():
        waiting = submission_of(
            snapshot_of(submission, ledger.state), {result.task_id: result for result in submission.kept.results()}
        )
        plain = msgspec.msgpack.decode(snapshot_of(waiting, ledger.state).content)
        results = {result.task_id: result for result in submission.kept.results()}
        names[submission.submission_id] = (plain, results, fields_of(submission))
    return {
        "submissions": names,
        "sequence": ledger.state.last_sequence,
        "service": msgspec.msgpack.decode(service_snapshot(ledger.state).content),
        "kept_bytes": ledger.state.results.kept_bytes,
        "sets": {key: submission.submission_id for key, submission in ledger.state.results._sets.items()},
        "requests": dict(ledger.state.requests._records),
        "keys": {key: submission.submission_id for key, submission in ledger._by_key.items()},
        "finished": list(ledger._finished),
        "open": (ledger.state.open_tasks, ledger.state.open_samples, dict(ledger._open_tasks_in), set(ledger._tasks)),
    }


def of_all_events(store: Store, retained_submissions: int) -> Ledger:
    ledger = Ledger(retained_submissions, LIMITS)
    for records in store.whole():
        for record in records:
            ledger.apply(record.event, record.namespace)
    return ledger


def of_a_restart(store: Store, retained_submissions: int) -> Ledger:
    ledger = Ledger(retained_submissions, LIMITS)
    complete_from(store.whole(), ledger, fold(store, ledger))
    return ledger


STEPS = (
    *("accept", "lease", "start", "start", "start", "end", "end", "end", "score", "stop", "interrupt"),
    *("collect", "collect", "acknowledge", "discard", "weights", "resume", "take", "take", "kill"),
)
histories = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 41)), max_size=70)


@pytest.fixture(autouse=True, scope="module")
def _in_small_steps() -> Any:
    """So that a checkpoint lets the world go on after each piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_module, "_AT_ONCE", 1)
        patch.setattr(checkpoints_module, "_BYTES_AT_ONCE", 1)
        patch.setattr(snapshots_module, "_STEP", 1)
        patch.setattr(snapshots_module, "_BLOCK", 2)
        patch.setattr(slices, "SLICE_SECONDS", 0.0)
        yield


async def lived(steps: list[tuple[str, int, int]], retained_submissions: int) -> World:
    world = World(retained_submissions)
    for what, number, more in steps:
        if what == "kill":
            await world.kill()
        else:
            await world.do(what, number, more)
    world._log.flush()
    return world


@settings(max_examples=300, deadline=None)
@given(histories)
def test_a_restart_cannot_be_told_apart(steps: list[tuple[str, int, int]]) -> None:
    world = asyncio.run(lived(steps, 1_000))
    everything = said(of_all_events(world.store, 1_000))
    assert said(of_a_restart(world.store, 1_000)) == everything
    assert said(world.ledger) == everything


@pytest.mark.parametrize("seed", range(20))
def test_nor_can_the_last_of_many_processes(seed: int) -> None:
    """Longer than a search for small failures would try."""
    chance = random.Random(seed)
    steps = [(chance.choice(STEPS), chance.randrange(10), chance.randrange(42)) for _ in range(400)]
    world = asyncio.run(lived(steps, 1_000))
    everything = said(of_all_events(world.store, 1_000))
    assert said(of_a_restart(world.store, 1_000)) == everything
    assert said(world.ledger) == everything
    assert world.store.through


@settings(max_examples=100, deadline=None)
@given(histories)
def test_where_little_is_remembered_a_restart_knows_at_least_that(steps: list[tuple[str, int, int]]) -> None:
    world = asyncio.run(lived(steps, 1))
    live, again = said(world.ledger), said(of_a_restart(world.store, 1))
    for part in ("requests", "sets"):
        assert live[part].items() <= again[part].items()
    assert {name: again["submissions"].get(name) for name in live["submissions"]} == live["submissions"]
    for part in ("sequence", "service", "kept_bytes", "open"):
        assert again[part] == live[part]
