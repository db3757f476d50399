"""What the ledger knows, and what can be asked of it. Whoever only asks gets this, and changes nothing of it: the
`Ledger` that has it does, and nobody else.

Invariants
  1. A task is here exactly as long as it is open, and `open_samples` and `open_tasks_in` count these.
  2. A key finds the newest of the submissions that had it.
  3. What lies in another namespace than the one that is asked about is not found.
  4. A request id is one call of its namespace: other content under it is refused. Content is known by its digest.
  5. What a call did is known as long as its submission is. The submission's record has it too, and so its snapshot.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.limits import check_submit, checking_submit
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from py_scheduler.scheduler.ledger.kept_results import KeptResults
from py_scheduler.scheduler.ledger.records import WAITING, RequestRecord, SubmissionRecord, TaskRecord
from py_scheduler.scheduler.ledger.service_facts import ServiceFacts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from py_scheduler.domain.collecting import CollectRequest
    from py_scheduler.domain.episodes.weight_history import WeightHistory
    from py_scheduler.domain.generation import Endpoints
    from py_scheduler.domain.requests import AbortRequest, Delivery, SubmissionSelector, SubmitRequest
    from py_scheduler.domain.task import BatchId
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.scheduler.ledger.dynamic_timeout import TrainingHistory

_DIGESTED_BYTES = 64 << 10
"""Of the tasks of a request, between two slices."""
_UNWRITABLE = (TypeError, ValueError, RecursionError, OverflowError)
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


class RememberedRequests:
    """Of all namespaces of one scheduler."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], RequestRecord] = {}

    def find(self, namespace: str, request_id: str) -> RequestRecord | None:
        return self._records.get((namespace, request_id))

    def repeated(self, namespace: str, request_id: str, digest: bytes) -> RequestRecord | None:
        """What this very call did, if it is not the first; one without an id always is. Raises AlreadyExistsError when
        the id is another call's.
        """
        known = self.find(namespace, request_id) if request_id else None
        if known is not None and known.digest != digest:
            raise AlreadyExistsError(
                f"request_id {request_id!r} was used for other tasks, or for another call: send a fresh request_id"
            )
        return known

    def remember(self, submission: SubmissionRecord, request_id: str, request: RequestRecord) -> None:
        self._records[submission.key.namespace, request_id] = submission.requests[request_id] = request

    def adopt(self, submission: SubmissionRecord) -> None:
        """Takes in a submission that was made with what it remembers, not by events."""
        for request_id, request in submission.requests.items():
            self._records[submission.key.namespace, request_id] = request

    def forget(self, submission: SubmissionRecord) -> None:
        for request_id, request in submission.requests.items():
            # A fold forgets late, when another submission may have taken the same request id.
            if self._records.get(key := (submission.key.namespace, request_id)) is request:
                del self._records[key]


class Records(msgspec.Struct, frozen=True):
    """All open tasks, and the finished submissions that are still remembered. The ledger fills these in."""

    tasks: dict[str, TaskRecord] = {}
    """By id, as long as they are open."""
    open_tasks_in: Counter[str] = msgspec.field(default_factory=Counter)
    """How many are open, by namespace; one that has none is left out."""
    submissions: dict[str, SubmissionRecord] = {}
    by_key: dict[SubmissionKey, SubmissionRecord] = {}


class LedgerState:
    """Questions about `records`, which are the ledger's."""

    def __init__(self, records: Records) -> None:
        self.last_sequence = 0
        """Of the journalled events that were applied."""
        self.open_samples = 0
        """Planned samples of open tasks."""
        self._tasks = records.tasks
        self._open_tasks_in = records.open_tasks_in
        self._submissions = records.submissions
        self._by_key = records.by_key
        self.results = KeptResults(self._submissions)
        self.requests = RememberedRequests()
        self.service = ServiceFacts()

    # Tasks and attempts

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def open_tasks_in(self, namespace: str) -> int:
        return self._open_tasks_in[namespace]

    def task(self, task_id: str) -> TaskRecord | None:
        """The record of an open task; None once it is done."""
        return self._tasks.get(task_id)

    def open_task(self, task_id: str) -> TaskRecord:
        """The record of a task that is known to be open."""
        return self._tasks[task_id]

    def task_at(self, ref: AttemptRef, states: tuple[AttemptState, ...]) -> TaskRecord | None:
        """The task of an attempt that is in one of these states; None too when it is not its SubTask's latest, or waits
        and its task was stopped.
        """
        task = self._tasks.get(ref.task_id)
        if task is None:
            return None
        subtask = task.subtasks[ref.subtask_no]
        if subtask.attempt_no != ref.attempt_no or subtask.state not in states:
            return None
        return None if task.stop_cause is not None and states is WAITING else task

    def is_waiting(self, ref: AttemptRef) -> bool:
        """Whether this attempt is still to be started."""
        return self.task_at(ref, WAITING) is not None

    def running_attempts(self, task_id: str) -> list[AttemptRef]:
        task = self._tasks.get(task_id)
        if task is None:
            return []
        return [
            AttemptRef(task_id, subtask_no, subtask.attempt_no)
            for subtask_no, subtask in enumerate(task.subtasks)
            if subtask.state is AttemptState.RUNNING
        ]

    # Submissions

    def submission(self, submission_id: str) -> SubmissionRecord | None:
        return self._submissions.get(submission_id)

    def submission_of_key(self, key: SubmissionKey) -> SubmissionRecord | None:
        return self._by_key.get(key)

    def find(self, selector: SubmissionSelector | CollectRequest) -> SubmissionRecord | None:
        """Which submission is meant: by its own id, or else by the batch_id that its trainer gave it."""
        if selector.submission_id:
            submission = self._submissions.get(selector.submission_id)
            return submission if submission and submission.key.namespace == selector.namespace else None
        if selector.batch_id is None:
            return None
        return self._by_key.get(SubmissionKey(selector.batch_id, selector.namespace))

    def require(self, selector: SubmissionSelector) -> SubmissionRecord:
        """As `find`. Raises NotFoundError."""
        submission = self.find(selector)
        if submission is not None:
            return submission
        if selector.submission_id:
            raise NotFoundError(
                f"no submission has the id {selector.submission_id!r} in namespace {selector.namespace!r}"
            )
        if selector.batch_id is None:
            raise NotFoundError("name a submission_id or a batch_id")
        message = f"no submission is known as {selector.batch_id!r} in namespace {selector.namespace!r}"
        for key, other in self._by_key.items():
            if key.namespace == selector.namespace and str(key.batch_id) == str(selector.batch_id):
                message += f"; {other.submission_id} is known as {key.batch_id!r}, which is another label"
        raise NotFoundError(message)

    def submissions(self) -> list[SubmissionRecord]:
        """The open ones, and the finished ones that are still remembered."""
        return list(self._submissions.values())

    def open_submissions(self) -> list[SubmissionRecord]:
        return [submission for submission in self._submissions.values() if submission.open_tasks]

    # The service as a whole

    def weights_of(self, roles: Iterable[str]) -> WeightHistory:
        """The history of the engine that these roles rest on. Where each had one of its own before, the longer one."""
        return self.service.weights_of(roles)

    def endpoints_of(self, roles: Iterable[str]) -> Endpoints | None:
        """What was set for the engine that these roles rest on; None: nothing, its configuration counts."""
        known = self.service.endpoints
        return next((known[role] for role in roles if role in known), None)

    @property
    def history(self) -> TrainingHistory:
        """What training came to so far."""
        return self.service.history


def request_digest(request: SubmitRequest) -> bytes:
    """What the same request has in common with itself when it is sent again.

    The order of the keys of a JSON object says nothing: {"a": 1, "b": 2} and {"b": 2, "a": 1} are the same metadata.
    """
    try:
        content = _encode_sorted((*_said_before(request), request.tasks, *_said_after(request)))
    except _UNWRITABLE as error:
        # A batch_id of np.int64(1) cannot be written down either: where the limits know the fault, they name its field.
        check_submit(request)
        raise _unwritable(error) from error
    return hashlib.blake2b(content, digest_size=16).digest()


def digesting(request: SubmitRequest, tasks_encoded: list[bytes]) -> Generator[None, None, bytes]:
    """`request_digest` in slices: of the same bytes, as they come one after another. tasks_encoded: gets those of each
    task.
    """
    before, after, tasks = _said_before(request), _said_after(request), request.tasks
    hashed = hashlib.blake2b(_list_head(len(before) + 1 + len(after)), digest_size=16)
    try:
        hashed.update(b"".join(map(_encode_sorted, before)))
        hashed.update(_list_head(len(tasks)))
        size = 0
        for encoded in map(_encode_sorted, tasks):
            hashed.update(encoded)
            tasks_encoded.append(encoded)
            size += len(encoded)
            if size > _DIGESTED_BYTES:
                size = 0
                yield
        hashed.update(b"".join(map(_encode_sorted, after)))
    except _UNWRITABLE as error:
        yield from checking_submit(request)
        raise _unwritable(error) from error
    return hashed.digest()


def _said_before(request: SubmitRequest) -> tuple[str, BatchId]:
    return request.key.namespace, request.key.batch_id


def _said_after(request: SubmitRequest) -> tuple[IterationContext | None, Delivery]:
    return request.iteration, request.delivery


def _list_head(count: int) -> bytes:
    """What stands before the items of a list: a None is one byte."""
    encoded = _encode_sorted((None,) * count)
    return encoded[: len(encoded) - count]


def _unwritable(error: Exception) -> InvalidArgumentError:
    reason = f"only JSON values, with integers of 64 bits at most, can be stored: {error}"
    return InvalidArgumentError(reason, "tasks[].metadata")


def abort_digest(request: AbortRequest) -> bytes:
    """As `request_digest`. Whether and how long a call waits is no part of what it does."""
    selector = request.selector
    said = ("abort", *_named(selector), request.task_ids, request.keep_partial, request.restart_runners)
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()


def discard_digest(selector: SubmissionSelector) -> bytes:
    """As `request_digest`."""
    return hashlib.blake2b(msgspec.msgpack.encode(("discard", *_named(selector))), digest_size=16).digest()


def _named(selector: SubmissionSelector) -> tuple[str, BatchId | None]:
    return selector.submission_id, selector.batch_id
