"""What follows from a record and a command: the events of an attempt's end and of a task's.

These are pure functions beside the ledger. They look at records and change none: `Ledger.apply` does that, with the
events that they make.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.events import AttemptEnded, AttemptRef, Event, StopCause, TaskDone
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone, TaskState, classify_termination
from py_scheduler.scheduler.ledger.commands import EndAttempt, ScoreGroup
from py_scheduler.scheduler.ledger.records import WAITING, SubTaskRecord, TaskRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_SUCCEEDED: Final = AttemptState.SUCCEEDED
_TASK_SUCCEEDED: Final = TaskState.SUCCEEDED
_RECOVERING = frozenset({Outcome.INFRA_CONN, Outcome.INFRA_SANDBOX})
_TRIED_AGAIN = frozenset({AttemptState.FAILED, AttemptState.TIMED_OUT, AttemptState.LOST})

_OUTCOME_OF_END = {
    AttemptState.FAILED: Outcome.INFRA_OTHER,
    AttemptState.TIMED_OUT: Outcome.AGENT_TIMEOUT,
    AttemptState.ABORTED: Outcome.ABORTED,
    AttemptState.LOST: Outcome.INFRA_OTHER,
}
"""For samples that an attempt left without a record of their own."""


def needs_backoff(state: AttemptState, samples: Sequence[SampleDone]) -> bool:
    """Whether what failed an attempt may need time to recover. Not `infra_other`: most of it is the handler's own."""
    if state is AttemptState.LOST:
        return True
    return state is AttemptState.FAILED and bool(samples) and samples[-1].outcome in _RECOVERING


def may_refill(task: TaskRecord, subtask: SubTaskRecord, command: EndAttempt) -> bool:
    """Whether the infrastructure failed the attempt, and the task has refills left for that."""
    if command.state is not AttemptState.FAILED or not command.samples or not command.samples[-1].outcome.is_infra:
        return False
    return subtask.refills < task.task.config.retry.max_infra_refills and _may_try_again(task, command)


def may_retry(task: TaskRecord, subtask: SubTaskRecord, command: EndAttempt) -> bool:
    state, retry = command.state, task.task.config.retry
    if state not in _TRIED_AGAIN or not _may_try_again(task, command):
        return False
    if retry.max_retries is not None:
        return subtask.failures + subtask.losses < retry.max_retries
    if state is AttemptState.LOST:
        return subtask.losses < retry.max_loss_retries
    return subtask.failures < retry.max_failure_retries


def _may_try_again(task: TaskRecord, command: EndAttempt) -> bool:
    """Not what was stopped, nor what is kept in part: its samples that succeeded would run twice."""
    if task.stop_cause is not None:
        return False
    return not (task.task.config.keeps_partial and any(sample.is_scored for sample in command.samples))


def final_samples(task: TaskRecord, subtask: SubTaskRecord, command: EndAttempt) -> tuple[SampleDone, ...]:
    """A record for each sample of a SubTask that is not tried again.

    Of one that did not succeed, none of several samples counts as if it had, unless the task keeps them in part.
    """
    samples = command.samples
    is_whole = command.state is _SUCCEEDED or task.task.config.keeps_partial
    if len(samples) == subtask.sample_count and (is_whole or subtask.sample_count == 1):
        return samples
    have = {sample.sample_no: sample for sample in samples if is_whole or not sample.is_scored}
    numbers = range(subtask.first_sample_no, subtask.first_sample_no + subtask.sample_count)
    return tuple([have.get(number) or _missing_sample(task, number, command) for number in numbers])


def _missing_sample(task: TaskRecord, sample_no: int, command: EndAttempt) -> SampleDone:
    return SampleDone(
        task_id=task.task_id,
        sample_no=sample_no,
        attempt_no=command.ref.attempt_no,
        outcome=_OUTCOME_OF_END.get(command.state, Outcome.INFRA_OTHER),
        error=command.message,
    )


def succeeded_among(task: TaskRecord, state: AttemptState, samples: Sequence[SampleDone]) -> int:
    """How many of a SubTask's final samples count as succeeded."""
    if state is _SUCCEEDED:
        return len(samples)
    return sum([sample.is_scored for sample in samples]) if task.task.config.keeps_partial else 0


def ended(
    task: TaskRecord,
    command: EndAttempt,
    samples: tuple[SampleDone, ...],
    next_attempt_no: int,
    *,
    is_counted: bool = True,
    is_refill: bool = False,
) -> AttemptEnded:
    config = task.task.config
    is_published = not next_attempt_no and (command.state is _SUCCEEDED or config.keeps_partial)
    earlier_seconds = 0.0 if next_attempt_no else task.subtasks[command.ref.subtask_no].running_seconds
    return AttemptEnded(
        submission_id=task.submission.submission_id,
        task_id=task.task_id,
        subtask_no=command.ref.subtask_no,
        attempt_no=command.ref.attempt_no,
        state=command.state,
        samples=samples,
        message=command.message,
        next_attempt_no=next_attempt_no,
        unix_seconds=command.unix_seconds,
        is_counted=is_counted,
        is_refill=is_refill,
        payload=command.payload if is_published else b"",
        running_seconds=command.running_seconds,
        is_eval=config.is_eval,
        subtask_seconds=earlier_seconds + command.running_seconds,
        trainable_samples=0 if config.is_eval else sum([sample.is_trainable for sample in samples]),
    )


def end_for_good(task: TaskRecord, subtask: SubTaskRecord, command: EndAttempt) -> list[Event]:
    """The end of a SubTask that is not tried again, and of its task if nothing else of that is open."""
    samples = final_samples(task, subtask, command)
    events: list[Event] = [ended(task, command, samples, 0)]
    if task.open_subtasks == 1:
        succeeded = succeeded_among(task, command.state, samples)
        if task.group_samples is None or task.stop_cause is not None or not task.succeeded_samples + succeeded:
            events.append(task_done(task, samples, succeeded, command.message, command.unix_seconds))
    return events


def end_waiting(
    task: TaskRecord, cause: StopCause, reason: str, unix_seconds: float, at_most: int | None = None
) -> Iterator[Event]:
    """Ends what has not started of a stopped task, or so many of that; what runs is ended by the report of its stop."""
    state = cause.attempt_state
    every = ((no, sub) for no, sub in enumerate(task.subtasks) if sub.state in WAITING)
    waiting = list(itertools.islice(every, at_most))
    last_samples: list[SampleDone] = []
    for subtask_no, subtask in waiting:
        ref = AttemptRef(task.task_id, subtask_no, subtask.attempt_no)
        end = EndAttempt(ref, state, (), reason, unix_seconds)
        samples = final_samples(task, subtask, end)
        last_samples.extend(samples)
        yield ended(task, end, samples, 0)
    if task.open_subtasks == len(waiting):
        yield task_done(task, last_samples, 0, reason, unix_seconds, cause)


def task_done(
    task: TaskRecord,
    last_samples: Iterable[SampleDone],
    last_succeeded: int,
    message: str,
    unix_seconds: float,
    stop_cause: StopCause | None = None,
) -> TaskDone:
    outcomes = dict(task.outcomes)
    for sample in last_samples:
        outcomes[sample.outcome] = outcomes.get(sample.outcome, 0) + 1
    planned = task.task.config.repeat_times
    cause = stop_cause or task.stop_cause
    aborted = Outcome.ABORTED in outcomes or cause is StopCause.REQUEST
    # A group that was stopped has no score as a group, whatever became of its samples: it is never whole.
    is_unscored = cause is not None and task.group_samples is not None
    succeeded = 0 if is_unscored else task.succeeded_samples + last_succeeded
    state = _task_state(succeeded, planned, aborted=aborted or (is_unscored and cause is StopCause.SHUTDOWN))
    return TaskDone(
        submission_id=task.submission.submission_id,
        task_id=task.task_id,
        client_key=task.task.client_key,
        state=state,
        planned_samples=planned,
        outcomes=outcomes,
        reason="" if state is _TASK_SUCCEEDED else (message if stop_cause else task.reason or message),
        unix_seconds=unix_seconds,
        is_eval=task.task.config.is_eval,
    )


def group_done(task: TaskRecord, command: ScoreGroup) -> TaskDone:
    """The end of a task whose samples are there, by what the handler said of them as a group."""
    done = task_done(task, (), 0, command.error, command.unix_seconds)
    if command.error:
        return msgspec.structs.replace(done, state=TaskState.FAILED, reason=command.error)
    if not command.rewards:
        return done
    samples = sorted(task.group_samples or (), key=lambda sample: sample.sample_no)
    outcomes = tuple(
        _group_outcome(sample, reward, command.solve_threshold)
        for sample, reward in zip(samples, command.rewards, strict=True)
    )
    return msgspec.structs.replace(
        done, rewards=command.rewards, group_outcomes=outcomes, outcomes=dict(Counter(outcomes))
    )


def _group_outcome(sample: SampleDone, reward: Reward, solve_threshold: float) -> Outcome:
    """What the group's score makes of a sample; how one ended that did not run to its end, no score changes."""
    if not sample.is_scored:
        return sample.outcome
    return classify_termination(reward.score, sample.termination_reason, solve_threshold)


def _task_state(succeeded: int, planned: int, *, aborted: bool) -> TaskState:
    if succeeded == planned:
        return _TASK_SUCCEEDED
    if aborted:
        return TaskState.ABORTED
    return TaskState.PARTIAL if succeeded else TaskState.FAILED
