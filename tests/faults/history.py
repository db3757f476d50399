"""What clients saw of a server that was killed and started again, and the proof that nothing was lost.

Every client writes down what it sees (`entries.py`), and at the end one more reads all events from
the first to the last without an interruption: the reference. `check` then proves, for all of them together

  1. acknowledged submits exist: a request id always gets the same answer, and its tasks were accepted once;
  2. one terminal event per task, and none for a task that nobody accepted;
  3. sequences rise without holes in each subscription, however often it was resumed;
  4. what a subscription read is what the reference holds there, event by event;
  5. attempts are fenced: numbered from 1 without a gap, begun before they end, ended once;
  6. leases never exceed capacity, their fencing tokens rise, and at the end all room is free;
  7. submitted = succeeded + partial + failed + aborted + pending, in every view and at the end.

A GPU is held by an attempt from its AttemptStarted to its AttemptEnded, and by a client's lease from the reply that
granted it to the call that gives it back, its expiry, or the first grant of a later server: that is the least that can
be said.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone
from py_scheduler.domain.requests import TasksAcceptedNotice
from tests.faults.entries import (
    REFERENCE,
    Acknowledged,
    Entry,
    FrameRead,
    GapTold,
    LeaseGranted,
    LeaseReturned,
    NodesSeen,
    Seen,
    SubmitAnswered,
    Unexpected,
    Viewed,
)

_EXACT = 1e-6
_SERVER_TOKENS = 1 << 31
"""Servers are 2^32 fencing tokens apart, at least."""


class History:
    """All entries of a run, sorted by kind. gpu_share: what one attempt takes of a GPU."""

    def __init__(self, entries: Iterable[Entry], gpu_share: float = 0.0) -> None:
        self.entries = list(entries)
        self.gpu_share = gpu_share
        self.frames: dict[str, list[FrameRead | GapTold]] = defaultdict(list)
        for entry in self.entries:
            if isinstance(entry, (FrameRead, GapTold)):
                self.frames[entry.subscription].append(entry)
        reference = [frame for frame in self.frames.pop(REFERENCE, []) if isinstance(frame, FrameRead)]
        self.oldest = reference[0].after + 1 if reference else 1
        self.reference = [event for frame in reference for event in frame.events]

    def all_events(self) -> list[Seen]:
        """Every event that anybody saw, once, in order: the reference has lost what was acknowledged."""
        events = {event.sequence: event for event in self.reference}
        for frames in self.frames.values():
            for frame in frames:
                if isinstance(frame, FrameRead):
                    events.update((event.sequence, event) for event in frame.events if event.sequence < self.oldest)
        return [events[sequence] for sequence in sorted(events)]


def check(history: History) -> list[str]:
    """What is wrong; nothing, when all is well."""
    found = [f"unexpected: {entry.what}" for entry in history.entries if isinstance(entry, Unexpected)]
    for prove in (_submits, _terminals, _subscriptions, _attempts, _gpus, _leases, _nodes, _balance):
        found += prove(history)
    return found


def _submits(history: History) -> Iterator[str]:
    accepted: Counter[str] = Counter()
    of_submission: dict[str, str] = {}
    for event in history.all_events():
        if event.kind == TasksAcceptedNotice.__name__:
            accepted.update(event.task_ids)
            of_submission.update(dict.fromkeys(event.task_ids, event.submission_id))
    answers: dict[str, SubmitAnswered] = {}
    for entry in history.entries:
        if isinstance(entry, SubmitAnswered):
            first = answers.setdefault(entry.request_id, entry)
            if first != entry:
                yield f"request {entry.request_id} was answered {first.task_ids} and then {entry.task_ids}"
    for answer in answers.values():
        for task_id in answer.task_ids:
            if accepted[task_id] != 1:
                yield f"task {task_id} of request {answer.request_id} was accepted {accepted[task_id]} times"
            elif of_submission[task_id] != answer.submission_id:
                yield f"task {task_id} belongs to {of_submission[task_id]}, its submit said {answer.submission_id}"
    owners = Counter(task_id for answer in answers.values() for task_id in answer.task_ids)
    for task_id, count in owners.items():
        if count > 1:
            yield f"task {task_id} was given to {count} requests"


def _terminals(history: History) -> Iterator[str]:
    accepted: set[str] = set()
    done: Counter[str] = Counter()
    for event in history.all_events():
        if event.kind == TasksAcceptedNotice.__name__:
            accepted.update(event.task_ids)
        elif event.kind.startswith("Attempt") and done[event.task_ids[0]]:
            yield f"task {event.task_ids[0]} has {event.kind} at {event.sequence}, after its TaskDone"
        elif event.kind == TaskDone.__name__:
            done[event.task_ids[0]] += 1
    for task_id in done.keys() - accepted:
        yield f"task {task_id} is done and was never accepted"
    for task_id in accepted:
        if done[task_id] != 1:
            yield f"task {task_id} has {done[task_id]} terminal events"


def _subscriptions(history: History) -> Iterator[str]:
    acknowledged = {entry.submission_id for entry in history.entries if isinstance(entry, Acknowledged)}
    known = {event.sequence: event for event in history.all_events()}
    sequences = [event.sequence for event in history.reference]
    if sequences != list(range(history.oldest, history.oldest + len(sequences))):
        yield "the reference has holes"
    for name, frames in history.frames.items():
        yield from _subscription(name, frames, known, acknowledged)


def _subscription(
    name: str, frames: list[FrameRead | GapTold], known: dict[int, Seen], acknowledged: set[str]
) -> Iterator[str]:
    through: int | None = None
    for frame in frames:
        if isinstance(frame, GapTold):
            lost = [known[s] for s in range((through or 0) + 1, frame.oldest) if s in known]
            if any(event.submission_id not in acknowledged for event in lost):
                yield f"{name}: the gap before {frame.oldest} holds events that nobody acknowledged"
            through = frame.oldest - 1
            continue
        if through is not None and frame.after != through:
            yield f"{name}: a frame follows {frame.after}, the one before went through {through}"
        through = frame.through
        numbers = [event.sequence for event in frame.events]
        if numbers != sorted(set(numbers)) or (numbers and not frame.after < numbers[0] <= numbers[-1] <= through):
            yield f"{name}: sequences {numbers} do not rise within ({frame.after}, {through}]"
        expected = [
            known[sequence]
            for sequence in range(frame.after + 1, frame.through + 1)
            if sequence in known and frame.submission_id in ("", known[sequence].submission_id)
        ]
        if list(frame.events) != expected:
            missing = [event.sequence for event in expected if event not in frame.events]
            extra = [event.sequence for event in frame.events if event not in expected]
            yield f"{name}: ({frame.after}, {through}] lacks {missing} of the reference and has {extra} that differ"


def _attempts(history: History) -> Iterator[str]:
    """Of events in order: each subtask's attempts are begun and ended one after the other."""
    running: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for event in history.all_events():
        if event.kind not in (AttemptStarted.__name__, AttemptEnded.__name__):
            continue
        subtask, name = (event.task_ids[0], event.subtask_no), f"{event.task_ids[0]}/{event.subtask_no}"
        if event.kind == AttemptStarted.__name__:
            if subtask in running:
                yield f"attempt {event.attempt_no} of {name} began while {running[subtask]} was running"
            if event.attempt_no != last.get(subtask, 0) + 1:
                yield f"attempt {event.attempt_no} of {name} follows {last.get(subtask, 0)}"
            running[subtask] = last[subtask] = event.attempt_no
        elif running.pop(subtask, None) != event.attempt_no:
            # One that waited may end without having begun, once: when its task is stopped.
            if event.state not in ("aborted", "timed_out") or event.attempt_no != last.get(subtask, 0) + 1:
                yield f"attempt {event.attempt_no} of {name} ended ({event.state}) and was not running"
            last[subtask] = event.attempt_no


def _gpus(history: History) -> Iterator[str]:
    """Attempts alone, by the order of their events."""
    load: dict[tuple[str, int], float] = defaultdict(float)
    held: dict[tuple[str, int, int], list[tuple[str, int]]] = {}
    for event in history.all_events():
        attempt = (event.task_ids[0], event.subtask_no, event.attempt_no) if event.task_ids else ("", 0, 0)
        if event.kind == AttemptStarted.__name__:
            held[attempt] = [(event.node_ip, gpu_id) for gpu_id in event.gpu_ids]
            for gpu in held[attempt]:
                load[gpu] += history.gpu_share
                if load[gpu] > 1 + _EXACT:
                    yield f"GPU {gpu} carries {load[gpu]:.2f} at sequence {event.sequence}"
        elif event.kind == AttemptEnded.__name__:
            for gpu in held.pop(attempt, []):
                load[gpu] -= history.gpu_share


def _leases(history: History) -> Iterator[str]:
    returned = {entry.lease_id: entry.at for entry in history.entries if isinstance(entry, LeaseReturned)}
    first: dict[str, LeaseGranted] = {}
    for entry in history.entries:
        if (
            isinstance(entry, LeaseGranted)
            and first.setdefault(entry.lease_id, entry).fencing_token != entry.fencing_token
        ):
            yield f"lease {entry.lease_id} has two fencing tokens"
    grants = sorted(first.values(), key=lambda grant: grant.fencing_token)
    yield from _fencing(grants)
    moments: list[tuple[float, int, LeaseGranted]] = []
    for server in _by_server(grants):
        later = [grant.at for grant in grants if grant.fencing_token > server[-1].fencing_token]
        for grant in server:
            until = min([grant.until, returned.get(grant.lease_id, grant.until), *later])
            if until > grant.at:
                moments += [(grant.at, 1, grant), (until, 0, grant)]
    load: dict[tuple[str, int], float] = defaultdict(float)
    for _at, begins, grant in sorted(moments, key=lambda moment: moment[:2]):
        for gpu in grant.gpus:
            load[gpu] += grant.share if begins else -grant.share
            if load[gpu] > 1 + _EXACT:
                yield f"GPU {gpu} carries leases of {load[gpu]:.2f} when {grant.lease_id} is granted"


def _by_server(grants: list[LeaseGranted]) -> list[list[LeaseGranted]]:
    """In the order of their fencing tokens; each server begins far above the one before."""
    servers: list[list[LeaseGranted]] = []
    for grant in grants:
        if not servers or grant.fencing_token - servers[-1][-1].fencing_token > _SERVER_TOKENS:
            servers.append([])
        servers[-1].append(grant)
    return servers


def _fencing(grants: list[LeaseGranted]) -> Iterator[str]:
    """Whoever asks after another was answered gets a higher token."""
    for lower, higher in itertools.pairwise(grants):
        if lower.fencing_token == higher.fencing_token:
            yield f"leases {lower.lease_id} and {higher.lease_id} have the same fencing token"
    earliest_above = float("inf")
    for grant in reversed(grants):
        if earliest_above < grant.asked_at:
            yield f"lease {grant.lease_id} was asked for after a higher fencing token had been granted"
        earliest_above = min(earliest_above, grant.at)


def _nodes(history: History) -> Iterator[str]:
    views = [entry for entry in history.entries if isinstance(entry, NodesSeen)]
    for view in views:
        for name, free, supply in view.amounts:
            if not -_EXACT <= free <= supply + _EXACT:
                yield f"{name}: {free} of {supply} is free"
            if view.is_last and abs(free - supply) > _EXACT:
                yield f"{name}: at the end only {free} of {supply} is free"
    if not any(view.is_last for view in views):
        yield "nobody looked at the nodes at the end"


def _balance(history: History) -> Iterator[str]:
    states: dict[str, Counter[str]] = defaultdict(Counter)
    for event in history.all_events():
        if event.kind == TaskDone.__name__:
            states[event.submission_id][event.state] += 1
    submitted: dict[str, set[str]] = defaultdict(set)
    for entry in history.entries:
        if isinstance(entry, SubmitAnswered):
            submitted[entry.submission_id].update(entry.task_ids)
    last: set[str] = set()
    for view in (entry for entry in history.entries if isinstance(entry, Viewed)):
        name, counted = view.submission_id, sum(view.states.values()) + view.pending
        if counted < view.tasks:
            yield f"{name}: {counted} tasks are accounted for when {view.tasks} were acknowledged"
        if view.is_last:
            last.add(name)
            if view.pending:
                yield f"{name}: {view.pending} tasks are pending at the end"
            if counted != len(submitted[name]):
                yield f"{name}: {len(submitted[name])} were submitted, {counted} are accounted for"
            if {state: n for state, n in view.states.items() if n} != dict(states[name]):
                yield f"{name}: the view says {view.states}, the events {dict(states[name])}"
    for name in submitted.keys() - last:
        yield f"{name}: nobody asked how it stood at the end"
