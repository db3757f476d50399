"""Results that wait to be collected. They are the ledger's own: `Ledger.apply` alone changes them, through the
functions here. What a submit adds to the counts of tasks, it counts itself.

Invariants
  1. A task that is to be collected is open, or has one result kept, or left none because it was stopped on request.
  2. A result is collectable or in exactly one collected set. A set is kept until it is acknowledged or discarded. That
     is so too for the empty set of a call that stopped tasks and was handed nothing.
  3. `kept_bytes` is about what both take, over all submissions.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from msgspec.structs import replace

from py_scheduler.domain.collecting import TaskResult
from py_scheduler.domain.events import (
    EVENT_BYTES,
    Event,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    StopCause,
    sample_size,
)
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.values.metrics import RUN_SECONDS, TASK_SECONDS, task_metrics
from py_scheduler.scheduler.ledger.records import CollectedSet, SubmissionRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from py_scheduler.domain.events import AttemptEnded, TaskDone
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.trajectory import Trajectory
    from py_scheduler.scheduler.ledger.commands import AcknowledgeResults, CollectResults, DiscardResults
    from py_scheduler.scheduler.ledger.records import StagedResult, SubTaskRecord, TaskRecord


class KeptResults:
    """All of one scheduler. `kept_bytes` is what may have to be bounded."""

    def __init__(self, submissions: Mapping[str, SubmissionRecord]) -> None:
        self.kept_bytes = 0
        self.released_bytes = 0
        """Of all results so far that are kept no longer."""
        self._submissions = submissions
        self._sets: dict[tuple[str, str], SubmissionRecord] = {}

    def collected(self, namespace: str, request_id: str) -> CollectedSet | None:
        """What was handed out under this id and not acknowledged."""
        submission = self._sets.get((namespace, request_id))
        return None if submission is None else submission.kept.unacknowledged[request_id]

    # Decisions

    def decide_collect(self, command: CollectResults) -> list[Event]:
        submission = self._submissions.get(command.submission_id)
        if submission is None:  # All was taken by others meanwhile, and so it was forgotten.
            return []
        task_ids = tuple(itertools.islice(submission.kept.collectable, command.max_num))
        changes_nothing = not task_ids and not any(task.is_stopped for task in command.unfinished)
        if changes_nothing or self.collected(submission.key.namespace, command.request_id) is not None:
            return []
        kept = submission.kept
        is_the_rest = bool(task_ids) and not submission.open_tasks and len(task_ids) == len(kept.collectable)
        is_whole = is_the_rest and kept.returned_tasks + len(task_ids) == kept.scheduled_tasks
        return [
            ResultsCollected(
                submission_id=command.submission_id,
                request_id=command.request_id,
                task_ids=task_ids,
                unix_seconds=command.unix_seconds,
                unfinished=command.unfinished,
                warnings=command.warnings,
                is_timed_out=command.is_timed_out,
                completes_step=is_whole and not kept.is_eval,
            )
        ]

    def decide_acknowledge(self, command: AcknowledgeResults) -> list[Event]:
        submission = self._sets.get((command.namespace, command.request_id))
        if submission is None:
            return []
        return [
            ResultsAcknowledged(
                submission_id=submission.submission_id,
                request_id=command.request_id,
                unix_seconds=command.unix_seconds,
            )
        ]

    def decide_discard(self, command: DiscardResults) -> list[Event]:
        submission = self._submissions[command.submission_id]
        keeps_nothing = not submission.kept.size and submission.kept.scheduled_tasks == len(submission.open_tasks)
        if keeps_nothing and not command.request_id:
            return []
        # As with a stop: remembered although there was nothing, or sent again it would take what has come since.
        return [
            ResultsDiscarded(
                submission_id=command.submission_id,
                unix_seconds=command.unix_seconds,
                request_id=command.request_id,
                request_digest=command.request_digest,
            )
        ]

    # Facts

    def adopt(self, submission: SubmissionRecord) -> None:
        """Takes in a submission that was made with what it keeps, not by events."""
        submission.kept.size = 0
        self._recount(submission)
        for request_id in submission.kept.unacknowledged:
            self._sets[submission.key.namespace, request_id] = submission

    def apply_done(self, task: TaskRecord, done: TaskDone) -> None:
        """Makes the result of a task that is to be collected, unless it was stopped and is to leave none."""
        staged, submission = task.staged, task.submission
        assert staged is not None
        submission.kept.open_tasks -= 1
        if not leaves_result(task):
            return
        result = submission.kept.collectable[task.task_id] = _result(task, staged, done)
        size = submission.kept.sizes[task.task_id] = result_size(result)
        self._count(submission, size)

    def apply_collected(self, event: ResultsCollected) -> None:
        submission = self._submissions[event.submission_id]
        results = tuple([submission.kept.collectable.pop(task_id) for task_id in event.task_ids])
        submission.kept.unacknowledged[event.request_id] = CollectedSet(
            event.submission_id, results, event.unfinished, event.warnings, event.is_timed_out
        )
        self._sets[submission.key.namespace, event.request_id] = submission
        submission.kept.returned_tasks += len(results)

    def apply_acknowledged(self, event: ResultsAcknowledged) -> None:
        submission = self._submissions[event.submission_id]
        del self._sets[submission.key.namespace, event.request_id]
        collected = submission.kept.unacknowledged.pop(event.request_id)
        sizes = submission.kept.sizes
        self._count(submission, -sum([sizes.pop(result.task_id) for result in collected.results]))

    def apply_discarded(self, event: ResultsDiscarded) -> None:
        submission = self._submissions[event.submission_id]
        for request_id in submission.kept.unacknowledged:
            del self._sets[submission.key.namespace, request_id]
        submission.kept.unacknowledged.clear()
        submission.kept.collectable.clear()
        submission.kept.sizes.clear()
        submission.kept.scheduled_tasks = len(submission.open_tasks)
        submission.kept.returned_tasks = 0
        self._count(submission, -submission.kept.size)

    def complete(self, submission: SubmissionRecord, trajectories: Mapping[str, Mapping[int, Trajectory]]) -> None:
        """Gives results that were made of samples without tokens these tokens: by task, by sample_no."""
        kept = submission.kept

        def whole(result: TaskResult) -> TaskResult:
            found = trajectories.get(result.task_id)
            return result if found is None else replace(result, samples=tuple(with_tokens(result.samples, found)))

        kept.collectable = {task_id: whole(result) for task_id, result in kept.collectable.items()}
        kept.unacknowledged = {
            request_id: replace(collected, results=tuple(map(whole, collected.results)))
            for request_id, collected in kept.unacknowledged.items()
        }
        self._recount(submission)

    def _recount(self, submission: SubmissionRecord) -> None:
        kept = submission.kept
        kept.sizes = {result.task_id: result_size(result) for result in kept.results()}
        self._count(submission, sum(kept.sizes.values()) - kept.size)

    def _count(self, submission: SubmissionRecord, size: int) -> None:
        if size < 0:
            self.released_bytes -= size
        submission.kept.size += size
        self.kept_bytes += size


def leaves_result(task: TaskRecord) -> bool:
    """Whether a task that is to be collected has a result in its end: not if it was stopped and is to leave none."""
    assert task.staged is not None
    was_stopped = task.stop_cause is StopCause.REQUEST
    return task.staged.keeps_result and not (was_stopped and not task.succeeded_samples)


def stage(staged: StagedResult, subtask: SubTaskRecord, event: AttemptEnded) -> None:
    """Takes what a SubTask came to."""
    staged.samples.extend(event.samples)
    if event.payload:
        staged.payloads.append(event.payload)
    if subtask.running_seconds:
        staged.subtask_seconds.append(subtask.running_seconds)


def with_tokens(samples: Iterable[SampleDone], trajectories: Mapping[int, Trajectory]) -> list[SampleDone]:
    """The same samples with their trajectories, by sample_no; those that have none there keep what they have."""
    return [
        replace(sample, trajectory=trajectories[sample.sample_no]) if sample.sample_no in trajectories else sample
        for sample in samples
    ]


def result_size(result: TaskResult) -> int:
    """Bytes in memory, about."""
    samples = sum([EVENT_BYTES + sample_size(sample) for sample in result.samples])
    return EVENT_BYTES + samples + sum(map(len, result.payloads))


def why_incomplete(succeeded_samples: int, planned_samples: int, reason: str) -> str:
    """What the trainer is told of a task that has fewer runs than planned; empty for one that has all."""
    if succeeded_samples == planned_samples:
        return ""
    return f"{succeeded_samples}/{planned_samples} runs completed successfully. {reason}".rstrip()


def _result(task: TaskRecord, staged: StagedResult, done: TaskDone) -> TaskResult:
    samples = sorted(staged.samples, key=lambda sample: sample.sample_no)
    if done.rewards:
        samples = [
            replace(sample, reward=reward, outcome=outcome)
            for sample, reward, outcome in zip(samples, done.rewards, done.group_outcomes, strict=True)
        ]
    completed = task.succeeded_samples
    runs = [_run_metrics(sample) for sample in staged.samples if sample.is_scored]
    seconds = [{TASK_SECONDS: subtask_seconds} for subtask_seconds in staged.subtask_seconds]
    message = why_incomplete(completed, done.planned_samples, done.reason)
    if not message and done.state is not TaskState.SUCCEEDED:
        message = done.reason
    return TaskResult(
        task_id=task.task_id,
        client_key=done.client_key,
        state=done.state,
        succeeded_samples=completed,
        planned_samples=done.planned_samples,
        is_eval=task.task.config.is_eval,
        message=message,
        metrics=task_metrics([*runs, *seconds], is_eval=task.task.config.is_eval),
        samples=tuple(samples),
        payloads=tuple(staged.payloads),
    )


def _run_metrics(sample: SampleDone) -> dict[str, float]:
    if RUN_SECONDS in sample.metrics or not sample.timings.held_seconds:
        return sample.metrics
    return {**sample.metrics, RUN_SECONDS: sample.timings.held_seconds}
