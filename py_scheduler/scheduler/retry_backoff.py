"""Attempts that wait before they queue again, because whatever failed the attempt before may need time to recover.

With `retry_backoff_seconds = 1` and `max_retry_backoff_seconds = 10`, attempt 2 waits at most 1 s, attempt 3 at most 2
s, then 4, 8 and 10 s; half of each wait is left to chance.

Invariant: each attempt here is QUEUED in the ledger and in no ready batch. One that the ledger has ended meanwhile
queues nowhere; it leaves when its wait would have been over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.explanations import TaskWait
from py_scheduler.domain.requests import WaitingBatch
from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.execution.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.settings import EngineSettings


class RetryBackoff:
    """One such attempt. ends_at: monotonic seconds."""

    __slots__ = ("_ledger", "attempt", "ends_at", "spec")
    is_over = False
    """Always told of its end, so that it is forgotten then."""

    def __init__(self, ledger: LedgerState, spec: EvaluatorSpec, attempt: PlannedAttempt, ends_at: float) -> None:
        self._ledger = ledger
        self.spec = spec
        self.attempt = attempt
        self.ends_at = ends_at

    @property
    def is_waiting(self) -> bool:
        return self._ledger.is_waiting(self.attempt.ref)

    def reason(self, now: float) -> str:
        """Why the attempt waits, for people."""
        left = max(0.0, self.ends_at - now)
        attempt_no = self.attempt.ref.attempt_no
        return f"the infrastructure failed the attempt before: attempt {attempt_no} queues in {left:.1f} s"


class RetryBackoffs:
    """All of them. `requeue` takes an attempt whose wait is over."""

    def __init__(
        self,
        ledger: LedgerState,
        clock: Clock,
        settings: EngineSettings,
        requeue: Callable[[EvaluatorSpec, list[PlannedAttempt]], None],
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._first_seconds = settings.retry_backoff_seconds
        self._longest_seconds = settings.max_retry_backoff_seconds
        self._requeue = requeue
        self._deadlines: Deadlines[RetryBackoff] = Deadlines(clock, self._on_expiry)
        self._waiting: dict[str, dict[RetryBackoff, None]] = {}
        """By submission, in order."""

    def add(self, spec: EvaluatorSpec, attempt: PlannedAttempt, failures: int) -> None:
        """failures: how often the infrastructure has failed this SubTask, the last time included."""
        if not self._first_seconds:
            self._requeue(spec, [attempt])
            return
        ends_at = self._clock.monotonic() + backoff_seconds(failures, self._first_seconds, self._longest_seconds)
        backoff = RetryBackoff(self._ledger, spec, attempt, ends_at)
        self._waiting.setdefault(attempt.submission_id, {})[backoff] = None
        self._deadlines.add(ends_at, backoff)

    def waiting(self, submission_id: str) -> list[RetryBackoff]:
        """The attempts of a submission that wait."""
        return [backoff for backoff in self._waiting.get(submission_id, ()) if backoff.is_waiting]

    def waits(self, submission_id: str) -> list[WaitingBatch]:
        """The same, as a submission shows them."""
        now = self._clock.monotonic()
        return [
            WaitingBatch(
                task_ids=(backoff.attempt.ref.task_id,),
                reason=backoff.reason(now),
                waiting_seconds=now - backoff.attempt.queued_at,
                bypassed=0,
            )
            for backoff in self.waiting(submission_id)
        ]

    def task_waits(self, submission_id: str, task_id: str) -> tuple[TaskWait, ...]:
        """Those of one task, as its explanation shows them."""
        now = self._clock.monotonic()
        return tuple(
            [
                TaskWait(
                    evaluator_id=backoff.spec.evaluator_id,
                    tasks=1,
                    attempts=1,
                    reason=backoff.reason(now),
                    waiting_seconds=now - backoff.attempt.queued_at,
                    bypassed=0,
                    max_bypass=0,
                    wanted_tokens=1,
                )
                for backoff in self.waiting(submission_id)
                if backoff.attempt.ref.task_id == task_id
            ]
        )

    def clear(self) -> None:
        self._deadlines.clear()
        self._waiting.clear()

    def _on_expiry(self, backoff: RetryBackoff, _when: float) -> None:
        submission_id = backoff.attempt.submission_id
        waiting = self._waiting[submission_id]
        del waiting[backoff]
        if not waiting:
            del self._waiting[submission_id]
        if backoff.is_waiting:
            self._requeue(backoff.spec, [backoff.attempt])
