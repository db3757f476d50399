"""What has been read and may be dropped, and how much each namespace still keeps.

Whoever acknowledges says up to where, for one submission or for a whole namespace. What nobody acknowledged is kept as
far as the journal's caps allow. What lies before everything that is unacknowledged can be dropped at once: if the
oldest unacknowledged event of any namespace is number 501, events 1 to 500 can go.

Invariants
  1. No event that may be dropped is one that its submission's reader has not acknowledged.
  2. `bytes_in` is, to a span's size, what unacknowledged retained events of the namespace take.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.scheduler.ledger.records import SubmissionRecord

_SPAN_BYTES = 256 << 10
_WORTH_A_SWEEP = 1_024


class _Span(msgspec.Struct, gc=False):
    """Some consecutive events of one submission."""

    first_sequence: int
    last_sequence: int
    bytes: int


class _Reader(msgspec.Struct, gc=False):
    """Of one submission: the spans that were not acknowledged, oldest first."""

    namespace: str
    spans: deque[_Span]


class Acknowledgements:
    """Counts every event as it is made."""

    def __init__(self) -> None:
        self._readers: dict[str, _Reader] = {}
        self._bytes: Counter[str] = Counter()
        self._oldest: list[tuple[int, str]] = []
        """A heap of where the unacknowledged spans of submissions begin; some are over."""
        self._sweep_at = _WORTH_A_SWEEP

    def restore(self, submissions: Iterable[SubmissionRecord], oldest_sequence: int) -> None:
        """Takes what is remembered from before as unacknowledged; how large it is, only the journal knows."""
        for submission in submissions:
            if submission.last_sequence >= oldest_sequence:
                span = _Span(oldest_sequence, submission.last_sequence, 0)
                self._readers[submission.submission_id] = _Reader(submission.key.namespace, deque([span]))
                heapq.heappush(self._oldest, (oldest_sequence, submission.submission_id))

    def count(self, records: Iterable[EventRecord]) -> None:
        """Takes the next events, in their order."""
        of, first, last, size = "", 0, 0, 0
        namespace = ""
        for record in records:
            submission_id = record.event.submission_id
            if submission_id != of:
                if of:
                    self._add(namespace, of, _Span(first, last, size))
                of, namespace, first, size = submission_id, record.namespace, record.sequence, 0
            last = record.sequence
            size += record.size
        if of:
            self._add(namespace, of, _Span(first, last, size))

    def _add(self, namespace: str, submission_id: str, span: _Span) -> None:
        reader = self._readers.get(submission_id)
        if reader is None:
            reader = self._readers[submission_id] = _Reader(namespace, deque())
        spans = reader.spans
        if spans and spans[-1].bytes < _SPAN_BYTES:
            spans[-1].last_sequence = span.last_sequence
            spans[-1].bytes += span.bytes
        else:
            if not spans:
                heapq.heappush(self._oldest, (span.first_sequence, submission_id))
            spans.append(span)
        self._bytes[namespace] += span.bytes

    def acknowledge(self, namespace: str, submission_id: str, through_sequence: int) -> None:
        """submission_id: empty for all of the namespace; one of another namespace changes nothing."""
        named = [submission_id] if submission_id else list(self._readers)
        for name in named:
            reader = self._readers.get(name)
            if reader is not None and reader.namespace == namespace:
                self._cut(name, reader, through_sequence)

    def forget_before(self, oldest_sequence: int) -> None:
        """The journal has dropped everything before."""
        if max(len(self._readers), len(self._oldest)) < self._sweep_at:
            return
        for submission_id, reader in list(self._readers.items()):
            self._cut(submission_id, reader, oldest_sequence - 1)
        self._oldest = [(reader.spans[0].first_sequence, name) for name, reader in self._readers.items()]
        heapq.heapify(self._oldest)
        self._sweep_at = max(_WORTH_A_SWEEP, 2 * len(self._readers))

    def bytes_in(self, namespace: str, oldest_sequence: int) -> int:
        """oldest_sequence: the first that the journal still has."""
        for submission_id, reader in list(self._readers.items()):
            if reader.namespace == namespace:
                self._cut(submission_id, reader, oldest_sequence - 1)
        return self._bytes[namespace]

    def droppable_through(self, last_sequence: int) -> int:
        """Up to where nobody has anything left to read; last_sequence: of all events."""
        oldest = self._oldest
        while oldest:
            sequence, submission_id = oldest[0]
            reader = self._readers.get(submission_id)
            if reader is not None and reader.spans[0].first_sequence == sequence:
                return sequence - 1
            heapq.heappop(oldest)
        return last_sequence

    def _cut(self, submission_id: str, reader: _Reader, through_sequence: int) -> None:
        spans = reader.spans
        before = spans[0].first_sequence
        while spans and spans[0].last_sequence <= through_sequence:
            self._bytes[reader.namespace] -= spans.popleft().bytes
        if not spans:
            del self._readers[submission_id]
            if not self._bytes[reader.namespace]:
                del self._bytes[reader.namespace]
        elif spans[0].first_sequence != before:
            heapq.heappush(self._oldest, (spans[0].first_sequence, submission_id))
