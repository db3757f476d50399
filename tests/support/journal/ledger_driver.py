"""A ledger that is told commands, and short ways to say them."""

from __future__ import annotations

from py_scheduler.domain.events import AttemptRef, StopCause, TaskDone
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.scheduler.ledger.commands import AcceptTasks, Command, EndAttempt, ScoreGroup, StartAttempt, StopTasks
from py_scheduler.scheduler.ledger.ledger import Ledger

KEY = SubmissionKey(7)


def task(repeat_times: int = 1, client_key: str = "", task_type: str = "agent", **retry: int) -> Task:
    config = TaskConfig(task_type=task_type, repeat_times=repeat_times, retry=RetryPolicy(**retry))
    return Task(config=config, client_key=client_key)


def grouped(repeat_times: int = 2, **retry: int) -> Task:
    """A task whose handler scores groups."""
    return task(repeat_times, "", "group", **retry)


def accept(*tasks: Task, request_id: str = "r", digest: bytes = b"d", key: SubmissionKey = KEY) -> AcceptTasks:
    return AcceptTasks(request_id, digest, key, tasks, "s", 1.0, group_scored=frozenset({"group"}))


def start(task_id: str, subtask_no: int = 0, attempt_no: int = 1) -> StartAttempt:
    return StartAttempt(AttemptRef(task_id, subtask_no, attempt_no), "10.0.0.1", (0,), 2.0)


def end(
    task_id: str, state: AttemptState, subtask_no: int = 0, attempt_no: int = 1, message: str = "because"
) -> EndAttempt:
    samples: tuple[SampleDone, ...] = ()
    if state is AttemptState.SUCCEEDED:
        done = SampleDone(task_id=task_id, sample_no=subtask_no, attempt_no=attempt_no, outcome=Outcome.SOLVED)
        samples, message = (done,), ""
    return EndAttempt(AttemptRef(task_id, subtask_no, attempt_no), state, samples, message, 3.0)


def infra(task_id: str, subtask_no: int = 0, attempt_no: int = 1, outcome: Outcome = Outcome.INFRA_CONN) -> EndAttempt:
    """An attempt that the infrastructure failed."""
    sample = SampleDone(task_id=task_id, sample_no=subtask_no, attempt_no=attempt_no, outcome=outcome)
    return EndAttempt(AttemptRef(task_id, subtask_no, attempt_no), AttemptState.FAILED, (sample,), "gone", 3.0)


def score(task_id: str, *scores: float, error: str = "", threshold: float = 1.0) -> ScoreGroup:
    return ScoreGroup(task_id, tuple(Reward(score=value) for value in scores), error, threshold, 5.0)


def stop(*task_ids: str, cause: StopCause = StopCause.REQUEST) -> StopTasks:
    return StopTasks("s", task_ids, cause, "stop it", 4.0)


class Driver:
    """Applies what is decided, and keeps it."""

    def __init__(self, *commands: Command) -> None:
        self.ledger = Ledger()
        self.events: list[object] = []
        for command in commands:
            self.tell(command)

    def tell(self, command: Command) -> list[object]:
        events = self.ledger.decide(command)
        for event in events:
            self.ledger.apply(event)
        self.events.extend(events)
        return list(events)

    def done(self) -> list[TaskDone]:
        return [event for event in self.events if isinstance(event, TaskDone)]
