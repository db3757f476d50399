"""Which submission is meant: by its own id, or by the batch_id that its trainer gave it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import NotFoundError

if TYPE_CHECKING:
    from py_scheduler.domain.requests import SubmissionSelector
    from py_scheduler.scheduler.ledger import Ledger
    from py_scheduler.scheduler.records import SubmissionRecord


def find_submission(ledger: Ledger, selector: SubmissionSelector) -> SubmissionRecord:
    """Raises NotFoundError; what lies in another namespace is not found either."""
    namespace = selector.namespace
    if selector.submission_id:
        record = ledger.submission(selector.submission_id)
        if record is not None and record.key.namespace == namespace:
            return record
        raise NotFoundError(f"no submission has the id {selector.submission_id!r} in namespace {namespace!r}")
    if selector.batch_id is None:
        raise NotFoundError("name a submission_id or a batch_id")
    record = ledger.submission_of_key(SubmissionKey(selector.batch_id, namespace))
    if record is None:
        raise NotFoundError(f"no submission is known as {selector.batch_id!r} in namespace {namespace!r}")
    return record
