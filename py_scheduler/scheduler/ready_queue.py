"""Batches and outside claims that wait for room, in the order of service.

Order: between flows by weight (see `flows`); inside one the batch id's key, then arrival. What has waited for
max_wait_seconds goes before all of that. An entry that was refused blocks its shape: entries of that demand and at
least its count are passed over until something is released, so that a wake is not a scan. Entries that fit may
overtake a blocked head, but only `max_bypass` times; from then on nothing behind it is offered until it is admitted.
Those of another flow may not once the head is due before all of them (see `flows`), unless they want other room.

Invariants: every claim in the queue is pending (whoever ends one removes it). A batch may hold attempts that have been
ended meanwhile: looking through a long queue for them would hold the loop, so they are found when it is offered.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.resources import Resource
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.flows import EVEN, FlowPolicy, Flows, ReadyEntry, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.placement import Lease

_KEEP_GONE = 64


class ReadyBatch(ReadyEntry, gc=False, kw_only=True):
    """Attempts of one batch, waiting to be admitted together."""

    spec: EvaluatorSpec
    attempts: list[PlannedAttempt]

    @property
    def submission_id(self) -> str:
        return self.attempts[0].submission_id

    @property
    def namespace(self) -> str:
        return self.attempts[0].namespace


class ReadyClaim(ReadyEntry, gc=True, kw_only=True):
    """Room that a scheduler outside asked for; `grant` gets it in the turn that admits the claim."""

    budget: Resource
    per_sample: Resource
    grant: Callable[[Lease], None]

    @property
    def tokens(self) -> int:
        return self.shape[1]


class ReadyQueue:
    """All that waits. `policy` says who shares with whom and how; max_wait_seconds None: nobody is promoted.

    competes: whether an entry would take room that a waiting head could use.
    """

    def __init__(
        self,
        max_bypass: int,
        policy: FlowPolicy = EVEN,
        max_wait_seconds: float | None = None,
        competes: Callable[[ReadyEntry, ReadyEntry], bool] = lambda _entry, _head: True,
    ) -> None:
        self.max_bypass = max_bypass
        self.max_wait_seconds = max_wait_seconds
        self._competes = competes
        self.flows = Flows(policy)
        self._tells_evals_apart = policy.tells_evals_apart
        self._blocked: dict[Hashable, int] = {}
        """The least count that was refused of each demand since the last release."""
        self._batches_of: dict[str, dict[int, ReadyBatch]] = {}
        """The batches of each submission, by arrival; they come in their order."""
        self._arrivals = itertools.count()
        self._by_age: deque[ReadyEntry] = deque()
        """As they came, if somebody may be promoted; some are gone."""
        self._overdue: ReadyEntry | None = None
        """What goes first for its age, as of the last offer."""
        self.holds_back = True
        """Whether a head that was overtaken often enough holds the others back."""
        self.claims = 0
        """How many of the entries are outside claims."""

    def __len__(self) -> int:
        return len(self.flows)

    def batches_of(self, submission_id: str) -> Iterable[ReadyBatch]:
        """A submission's batches, as they came."""
        return self._batches_of.get(submission_id, {}).values()

    def entries(self) -> Iterator[ReadyEntry]:
        """All entries, in no order: for a look that must not sort a long queue."""
        return itertools.chain.from_iterable(flow.entries() for flow in self.flows.waiting.values())

    # In

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> None:
        """Adds a batch of at least one attempt; which flow it is in, the first of them says."""
        first, arrival = attempts[0], next(self._arrivals)
        entry = ReadyBatch(
            flow=(first.namespace, self._tells_evals_apart and first.task.config.is_eval),
            order=(*first.batch_key, arrival),
            shape=(spec.evaluator_id, len(attempts)),
            queued_at=queued_at,
            spec=spec,
            attempts=attempts,
        )
        siblings = self._batches_of.get(first.submission_id)
        if siblings is None:
            siblings = self._batches_of[first.submission_id] = {}
        siblings[arrival] = entry
        self._push(entry)

    def push_claim(
        self,
        batch_key: tuple[float, int],
        demand: PlacementDemand,
        tokens: int,
        grant: Callable[[Lease], None],
        queued_at: float,
        namespace: str,
    ) -> ReadyClaim:
        """Adds a claim of at least one token, beside the namespace's training. `tokens` is what the demand comes to."""
        entry = ReadyClaim(
            flow=(namespace, False),
            order=(*batch_key, next(self._arrivals)),
            shape=(demand.per_sample, tokens),
            queued_at=queued_at,
            budget=demand.ceiling,
            per_sample=demand.per_sample,
            grant=grant,
        )
        self.claims += 1
        self._push(entry)
        return entry

    def _push(self, entry: ReadyEntry) -> None:
        self.flows.open(entry.flow).push(entry)
        if self.max_wait_seconds is not None:
            self._by_age.append(entry)
            if len(self._by_age) > 2 * len(self.flows) + _KEEP_GONE:
                self._by_age = deque(entry for entry in self._by_age if not entry.is_gone)

    # Out

    def offer(self, now: float = 0.0) -> ReadyEntry | None:
        """The next entry to try: `admit` or `refuse` it. None when all that is left is blocked or held back.

        now: monotonic seconds.
        """
        waiting = self.flows.waiting
        if not waiting:
            return None
        overdue = self._overdue = self._find_overdue(now) if self._by_age else None
        if not self._blocked:
            if overdue is not None:
                return overdue
            flow = next(iter(waiting.values())) if len(waiting) == 1 else self.flows.foremost()
            return flow.head()
        if overdue is not None:
            if not self._is_blocked(overdue.shape):
                return overdue
            if self._holds_back(overdue):
                return None
        heads: list[ReadyEntry] = []
        for flow in self.flows.in_order():
            owed = [head for head in heads if waiting[head.flow].comes_before_all_of(flow)]
            head = flow.head()
            best = flow.first(partial(self._may_go, owed))
            if best is not head and self._holds_back(head):
                return None
            if best is not None:
                return best
            heads.append(head)
        return None

    def _may_go(self, owed: list[ReadyEntry], entry: ReadyEntry) -> bool:
        if self._is_blocked(entry.shape):
            return False
        return not (self.holds_back and any(self._competes(entry, head) for head in owed))

    def _holds_back(self, head: ReadyEntry) -> bool:
        return self.holds_back and head.bypassed >= self.max_bypass

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it has waited so long that it goes before what has not."""
        return self.max_wait_seconds is not None and now - entry.queued_at >= self.max_wait_seconds

    def _find_overdue(self, now: float) -> ReadyEntry | None:
        by_age = self._by_age
        while by_age and by_age[0].is_gone:
            by_age.popleft()
        return by_age[0] if by_age and self.is_overdue(by_age[0], now) else None

    def admit(self, entry: ReadyEntry) -> None:
        """Removes the entry that was offered, counts it against those that it overtook, and charges its flow."""
        if self._blocked and entry is not self._overdue:
            for passed in self._passed_by(entry):
                passed.bypassed += 1
        self.flows.waiting[entry.flow].charge(entry.shape[1])
        self.drop(entry)

    def _passed_by(self, entry: ReadyEntry) -> list[ReadyEntry]:
        """Whoever was first by age, and the heads of the flows up to the entry's own."""
        passed = [] if self._overdue is None else [self._overdue]
        for flow in self.flows.in_order():
            head = flow.head()
            if head is not entry and head is not self._overdue:
                passed.append(head)
            if flow.key == entry.flow:
                break
        return passed

    def drop(self, entry: ReadyEntry) -> None:
        """Removes the entry that was offered: nothing of it is left to run."""
        self.flows.take_out(entry)
        if isinstance(entry, ReadyBatch):
            submission_id = entry.submission_id
            siblings = self._batches_of[submission_id]
            del siblings[entry.order[2]]
            if not siblings:
                del self._batches_of[submission_id]
        else:
            self.claims -= 1

    def remove(self, entry: ReadyClaim) -> None:
        """Takes out a claim that ended while it waited, wherever it stands."""
        self.claims -= 1
        if self.flows.take_out(entry):
            # Demands of claims are without number, and until a release may be long: none may outlive its last entry.
            self._blocked.pop(entry.per_sample, None)

    def refuse(self, entry: ReadyEntry) -> None:
        """Blocks the entry's demand, from its count on, until the next release."""
        demand, count = entry.shape
        self._blocked[demand] = min(count, self._blocked.get(demand, count))

    def unblock(self) -> None:
        """Something was released: everything may be tried again."""
        self._blocked.clear()

    def is_blocked(self, entry: ReadyEntry) -> bool:
        return self._is_blocked(entry.shape)

    def _is_blocked(self, shape: Shape) -> bool:
        demand, count = shape
        least = self._blocked.get(demand)
        return least is not None and count >= least
