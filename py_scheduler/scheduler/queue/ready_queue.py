"""Batches and outside claims that wait for room, in the order of service.

Order: between namespaces by weight (see `shares`), between the flows of one likewise (see `flows`); inside a flow the
batch id's key, then which batch came to wait first, then arrival. What has waited for max_wait_seconds goes before the
rest of its namespace. An entry that was refused blocks its shape: entries of that demand and at least its count are
passed over until something is released, so that a wake is not a scan. Entries that fit may overtake a blocked head, but
only `max_bypass` times; from then on nothing behind it is offered until it is admitted.
Those of another flow or namespace may not once the head is due before all of them, unless they want other room. A
namespace that is at its quota is passed over as if it did not wait, and a head for which there are no longer nodes
enough holds nobody back.

Invariants: every claim in the queue is pending (whoever ends one removes it). A batch may hold attempts that have been
ended meanwhile: looking through a long queue for them would hold the loop, so they are found when it is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.resources import Resource
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.queue.flows import ARRIVAL, CAME, EVEN, Flow, FlowPolicy, Flows, ReadyEntry, Shape
from py_scheduler.scheduler.queue.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.placement import Lease


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


class ReadyLease(ReadyEntry, gc=True, kw_only=True):
    """Room that a scheduler outside asked for; `grant` gets it in the turn that admits the claim."""

    budget: Resource
    per_sample: Resource
    grant: Callable[[Lease], None]

    @property
    def tokens(self) -> int:
        return self.shape[1]


def _wants_its_cost(entry: ReadyEntry) -> tuple[Resource | None, int]:
    return None, entry.cost


class ReadyQueue:
    """All that waits. `policy` says who shares with whom inside a namespace, `shares` how namespaces do;
    max_wait_seconds None: nobody is promoted.

    competes: whether an entry would take room that a waiting head could use. wants: the demand of one of its tokens,
    and how many it takes at once. is_capped: whether its namespace's quota keeps it from being admitted.
    can_fit: whether it would fit if everything else were released.
    """

    def __init__(
        self,
        max_bypass: int,
        policy: FlowPolicy = EVEN,
        max_wait_seconds: float | None = None,
        competes: Callable[[ReadyEntry, ReadyEntry], bool] = lambda _entry, _head: True,
        *,
        shares: Shares | None = None,
        wants: Callable[[ReadyEntry], tuple[Resource | None, int]] = _wants_its_cost,
        is_capped: Callable[[ReadyEntry], bool] = lambda _entry: False,
        can_fit: Callable[[ReadyEntry], bool] = lambda _entry: True,
    ) -> None:
        self.max_bypass = max_bypass
        self.policy = policy
        self.shares = shares if shares is not None else Shares()
        self.namespaces: dict[str, Flows] = {}
        """Of those that wait."""
        self._max_wait_seconds = max_wait_seconds
        self._competes = competes
        self.wants = wants
        self.is_capped = is_capped
        self._can_fit = can_fit
        self._tells_evals_apart = policy.tells_evals_apart
        self._blocked: dict[Hashable, int] = {}
        """The least count that was refused of each demand since the last release."""
        self._batches_of: dict[str, dict[int, ReadyBatch]] = {}
        """The batches of each submission, by arrival; they come in their order."""
        self._arrivals = itertools.count()
        self.holds_back = True
        """Whether a head that was overtaken often enough holds the others back."""
        self.claims = 0
        """How many of the entries are outside claims."""

    def __len__(self) -> int:
        return sum([len(flows) for flows in self.namespaces.values()])

    @property
    def flows(self) -> list[Flow]:
        """All flows that wait."""
        return [flow for flows in self.namespaces.values() for flow in flows.waiting.values()]

    def batches_of(self, submission_id: str) -> Iterable[ReadyBatch]:
        """A submission's batches, as they came."""
        return self._batches_of.get(submission_id, {}).values()

    def entries(self) -> Iterator[ReadyEntry]:
        """All entries, in no order: for a look that must not sort a long queue."""
        return itertools.chain.from_iterable(flow.entries() for flow in self.flows)

    # In

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> None:
        """Adds a batch of at least one attempt; which flow it is in, the first of them says."""
        first, arrival = attempts[0], next(self._arrivals)
        siblings = self._batches_of.setdefault(first.submission_id, {})
        # What joins a batch that waits stands before batches of the same place that came later.
        came = next(iter(siblings.values())).order[CAME] if siblings else arrival
        entry = ReadyBatch(
            flow=(first.namespace, self._tells_evals_apart and first.task.config.is_eval),
            order=(*first.batch_key, came, arrival),
            shape=(spec.evaluator_id, len(attempts)),
            queued_at=queued_at,
            spec=spec,
            attempts=attempts,
        )
        siblings[arrival] = entry
        self._push(entry)

    def push_lease(
        self,
        batch_key: tuple[float, int],
        demand: PlacementDemand,
        tokens: int,
        grant: Callable[[Lease], None],
        queued_at: float,
        namespace: str,
    ) -> ReadyLease:
        """Adds a claim of at least one token, beside the namespace's training. `tokens` is what the demand comes to."""
        arrival = next(self._arrivals)
        entry = ReadyLease(
            flow=(namespace, False),
            order=(*batch_key, arrival, arrival),
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
        namespace = entry.flow[0]
        flows = self.namespaces.get(namespace)
        if flows is None:
            flows = self.namespaces[namespace] = Flows(namespace, self.policy, self._max_wait_seconds)
            self.shares.begin_to_wait(namespace, entry.queued_at)
        flows.push(entry)

    # Out

    def offer(self, now: float) -> ReadyEntry | None:
        """The next entry to try: `admit` or `refuse` it. None when all that is left is blocked or held back.

        now: monotonic seconds.
        """
        passed: list[ReadyEntry] = []
        if not self.namespaces:
            return None
        for flows in self._in_order(now):
            if self.is_capped(foremost := flows.foremost(now)):
                continue
            if not self._blocked:
                return foremost
            owed = [head for head in passed if self._is_due_before(head, flows.namespace, now)]
            entry, holds_back = self._offer_of(flows, owed, now)
            if entry is not None or holds_back:
                return entry
            passed += flows.passed_by(None, now)
        return None

    def _offer_of(self, flows: Flows, owed: list[ReadyEntry], now: float) -> tuple[ReadyEntry | None, bool]:
        """The first entry of a namespace that may go, and whether it holds back all behind it."""
        overdue = flows.overdue(now)
        if overdue is not None:
            if self._may_go(owed, overdue):
                return overdue, False
            if self._holds_back(overdue):
                return None, True
        heads: list[ReadyEntry] = []
        for flow in flows.in_order():
            head = flow.head()
            if self.is_capped(head):
                continue
            due = [other for other in heads if flows.waiting[other.flow].comes_before_all_of(flow)]
            best = flow.first(partial(self._may_go, owed + due))
            if best is not head and self._holds_back(head):
                return None, True
            if best is not None:
                return best, False
            heads.append(head)
        return None, False

    def _in_order(self, now: float) -> Iterable[Flows]:
        if len(self.namespaces) < 2:  # noqa: PLR2004 -- nothing to be put in order
            return tuple(self.namespaces.values())
        return sorted(
            self.namespaces.values(),
            key=lambda flows: (self.shares.level(flows.namespace, now), flows.foremost(now).order),
        )

    def _is_due_before(self, head: ReadyEntry, namespace: str, now: float) -> bool:
        """Whether a head of a namespace in front is due before anything of this one, which had its share until then."""
        own = head.flow[0]
        return self.shares.level(namespace, now) >= self.shares.level(own, now) + self.level_of(head)

    def level_of(self, entry: ReadyEntry) -> float:
        """How much higher its namespace's level is once it was admitted."""
        return self.shares.level_of(entry.flow[0], entry.shape[0], *self.wants(entry))

    def _may_go(self, owed: list[ReadyEntry], entry: ReadyEntry) -> bool:
        if self._is_blocked(entry.shape) or self.is_capped(entry):
            return False
        return not (self.holds_back and any(self._competes(entry, head) and self._can_fit(head) for head in owed))

    def _holds_back(self, head: ReadyEntry) -> bool:
        return self.holds_back and head.bypassed >= self.max_bypass and self._can_fit(head)

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it has waited so long that it goes before what has not, in its namespace."""
        return self.namespaces[entry.flow[0]].is_overdue(entry, now)

    def admit(self, entry: ReadyEntry, now: float) -> None:
        """Removes the entry that was offered, counts it against those that it overtook, and charges its flow and its
        namespace: what it takes is held until `give_back`.
        """
        if self._blocked:
            for passed in self._passed_by(entry, now):
                passed.bypassed += 1
        namespace = entry.flow[0]
        self.namespaces[namespace].waiting[entry.flow].charge(entry.cost)
        demand, tokens = self.wants(entry)
        self.shares.take(namespace, entry.shape[0], demand, tokens, now)
        self.drop(entry, now)

    def _passed_by(self, entry: ReadyEntry, now: float) -> list[ReadyEntry]:
        passed: list[ReadyEntry] = []
        for flows in self._in_order(now):
            if flows.namespace == entry.flow[0]:
                return passed + flows.passed_by(entry, now)
            if not self.is_capped(flows.foremost(now)):
                passed += flows.passed_by(None, now)
        return passed

    def _take_out(self, entry: ReadyEntry, now: float) -> bool:
        flows = self.namespaces[entry.flow[0]]
        was_last = flows.take_out(entry)
        if not flows.waiting:
            del self.namespaces[flows.namespace]
            self.shares.wait_no_longer(flows.namespace, now)
        return was_last

    def drop(self, entry: ReadyEntry, now: float) -> None:
        """Removes the entry that was offered: nothing of it is left to run."""
        self._take_out(entry, now)
        if isinstance(entry, ReadyBatch):
            submission_id = entry.submission_id
            siblings = self._batches_of[submission_id]
            del siblings[entry.order[ARRIVAL]]
            if not siblings:
                del self._batches_of[submission_id]
        else:
            self.claims -= 1

    def remove(self, entry: ReadyLease, now: float) -> None:
        """Takes out a claim that ended while it waited, wherever it stands."""
        self.claims -= 1
        if self._take_out(entry, now):
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
