"""What calls did under their request ids. The ledger's own: changed by `Ledger.apply` alone, through what is here.

Invariants
  1. One id is one call of its namespace: other content under it is refused.
  2. What a call did is known as long as its submission is. The submission's record has it too, and so its snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.errors import AlreadyExistsError

if TYPE_CHECKING:
    from py_scheduler.scheduler.ledger.records import RequestRecord, SubmissionRecord


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
