"""Who is next of all that waits for room, and who has to wait for whom.

**The order of service.** Between namespaces by weight (see `shares`), between the flows of one namespace likewise (see
`flows`); inside a flow by batch id, then by which batch came to wait first, then by arrival. What has waited for
max_wait_seconds goes before the rest of its namespace.

**Heads.** Entries of one flow and shape want the same room, so they go one after another: only the first of them, the
head of its shape, is ever looked at. An offer looks at one head of each shape, however long the queue is.

**Overtaken.** Entries that fit may go although heads before them do not. A head is overtaken by an entry behind it that
takes room which the head could have used (see `rivalry`), and by nobody else: while a batch waits for 8 GPUs, a
sample that needs a CPU alone may go as often as it likes, and one that takes one of the GPUs overtakes it.

**Holding back.** From two moments on a head lets nobody behind it take room that it could use:
- when it was overtaken `max_bypass` times: of 1000 small samples with one GPU each, 64 go before that batch of 8;
- for entries of another flow or namespace, once it is due before all of them: their own share is used up.

A head that would not fit if everything came back that still can (`Room.fits_ever`) holds nobody back.

Only the 32 foremost heads that wait are protected so, because whoever goes is compared with each of them. The 33rd
neither counts who passes it nor holds anybody back, until one before it has gone. Heads that may hold nobody back take
none of these places, and those that their quota caps take places of their own namespace: behind 40 heads of a namespace
whose quota is used up a batch for 8 GPUs is protected as if it stood in front.

**Half way.** A thousand pending leases may be of as many demands, each of them a head that must be looked at. So an
offer looks at so many heads as it is told to, and the next one goes on behind them. Whatever changes the line makes it
begin again at the front; then it may look at twice as many, so that what stands at the end has its turn however often
something changes.

**Blocked.** An entry that was refused blocks its demand: entries of that demand which want as many tokens or more are
passed over until something is given back, so that a wake is not a scan. After 8 tokens of an evaluator were refused, 9
are not tried, and 2 are.

Invariants
  1. Every lease request in the queue is pending: whoever ends one removes it.
  2. A batch may hold attempts that have been ended meanwhile. To look for them in a long queue would hold the loop, so
     `look_again` raises `generation`, and each head is offered once to be looked at before it goes or counts.
  3. Nothing is blocked that would fit: what blocks is forgotten when anything comes back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, overload

import msgspec

from py_scheduler.scheduler.queue.entries import CAME, ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.flows import EVEN, Flow, FlowPolicy, Flows, WaitingBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.placement import Lease
    from py_scheduler.scheduler.queue.entries import DemandKey, FlowKey, ReadyEntry
    from py_scheduler.scheduler.queue.rivalry import Rivalry
    from py_scheduler.scheduler.queue.room import Tokens


_PROTECTED_HEADS = 32
_NO_LIMIT = 1 << 30
_NOBODY, _EVERYBODY = False, True


class _Holding(msgspec.Struct):
    """Which of the heads that were passed hold a flow back."""

    heads: list[ReadyEntry]
    asked: int = 0
    """Of how many of the heads that is known."""


class ReadyQueue:
    """All that waits for one room, by the rules of `rivalry`. `policy` says who shares with whom inside a namespace;
    max_wait_seconds None: nobody is promoted.

    `offer` names the next entry to try. Then `was_looked_at`, `admit`, `refuse` or `drop` it, before anything else
    happens.
    """

    def __init__(
        self,
        rivalry: Rivalry,
        max_bypass: int,
        policy: FlowPolicy = EVEN,
        max_wait_seconds: float | None = None,
    ) -> None:
        self.rivalry = rivalry
        self.room = rivalry.room
        self.max_bypass = max_bypass
        self.policy = policy
        self.shares = self.room.shares
        self.namespaces: dict[str, Flows] = {}
        """Of those that wait."""
        self.generation = 0
        """Rises when what entries want may have changed."""
        self.pending_leases = 0
        """How many of the entries are requests for leases."""
        self._max_wait_seconds = max_wait_seconds
        self._tells_evals_apart = policy.tells_evals_apart
        self._blocked: dict[DemandKey, int] = {}
        """The least number of tokens that was refused of each demand since something came back."""
        self._passed: list[ReadyEntry] = []
        """The protected heads before the entry that was offered last."""
        self._protected: Counter[str | bool] = Counter()
        """How many of them hold back at most everybody, nobody, or who is of the namespace whose quota caps them."""
        self._behind: Iterator[ReadyEntry] | None = None
        """The heads behind that entry."""
        self._again: tuple[ReadyEntry, ...] = ()
        """The entry before those, if it was offered to be looked at and is still to be tried."""
        self._next: Iterator[ReadyEntry] | None = None
        """Where the next offer goes on; None: it begins again at the front, because something changed."""
        self._holding: dict[FlowKey, _Holding] = {}
        """Of this line, and of the moment `_holding_at`."""
        self._holding_at = 0.0
        self.is_half_way = False
        """Whether the last offer ended before the line did: there may be more to try."""
        self._begun_anew = 0
        """How often in a row the line has begun again before its end."""
        self.batches = WaitingBatches()
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum([len(flows) for flows in self.namespaces.values()])

    @property
    def flows(self) -> list[Flow]:
        """All flows that wait."""
        return [flow for flows in self.namespaces.values() for flow in flows.waiting.values()]

    def entries(self) -> Iterator[ReadyEntry]:
        """All entries, in no order: for a look that must not sort a long queue."""
        return itertools.chain.from_iterable(flow.entries() for flow in self.flows)

    # In

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> None:
        """Adds a batch of at least one attempt; which flow it is in, the first of them says."""
        first, arrival, room = attempts[0], next(self._arrivals), self.room
        namespace = first.namespace
        count = len(attempts)
        flow, shape = (namespace, self._tells_evals_apart and first.task.config.is_eval), (spec.evaluator_id, count)
        sibling = next(iter(self.batches.of_submission(first.submission_id)), None)
        came = arrival
        if sibling is not None:
            # What joins a batch that waits stands before batches of the same place that came later.
            came = sibling.order[CAME]
            # Of a million that wait, each would have a copy of its own.
            flow = sibling.flow if sibling.flow == flow else flow
            shape = sibling.shape if sibling.shape == shape else shape
        entry = ReadyBatch(
            flow=flow,
            order=(*first.batch_key, came, arrival),
            shape=shape,
            per_sample=room.sample_of(spec),
            tokens=1 if count == 1 else room.tokens_at_once(spec, count, namespace),
            cost=count,
            queued_at=queued_at,
            looked_at=self.generation,
            submission_id=first.submission_id,
            spec=spec,
            attempts=attempts,
        )
        self.batches.add(entry)
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
        """Adds a request for a lease of at least one token, beside the namespace's training. `tokens` is what the
        demand comes to.
        """
        arrival = next(self._arrivals)
        entry = ReadyLease(
            flow=(namespace, False),
            order=(*batch_key, arrival, arrival),
            shape=(demand.per_sample, tokens),
            per_sample=demand.per_sample,
            tokens=tokens,
            cost=tokens,
            queued_at=queued_at,
            looked_at=self.generation,
            budget=demand.ceiling,
            grant=grant,
        )
        self.pending_leases += 1
        self._push(entry)
        return entry

    def _push(self, entry: ReadyEntry) -> None:
        namespace = entry.flow[0]
        flows = self.namespaces.get(namespace)
        if flows is None:
            flows = self.namespaces[namespace] = Flows(namespace, self.policy, self._max_wait_seconds)
            self.shares.begin_to_wait(namespace, entry.queued_at)
        flows.push(entry)
        self.begin_anew()

    # Who is next

    def offer(self, now: float, looks: int = _NO_LIMIT) -> ReadyEntry | None:
        """The next entry to try. None when all that is left is blocked, capped or held back, or when it has looked at
        `looks` heads: then it `is_half_way`, and the next offer goes on.

        One whose `looked_at` is not the present generation is to be looked at, and goes nowhere yet.
        now: monotonic seconds.
        """
        was_half_way, self.is_half_way = self.is_half_way, False
        if not self.namespaces:
            self._begun_anew = 0
            return None
        line = self._next
        if line is None:
            self._begun_anew += was_half_way
            self._behind, self._again, self._holding = None, (), {}
            self._passed, self._protected = [], Counter()
            if not self._blocked:  # Then nothing keeps the very first back, but its quota.
                foremost = self._in_order(now)[0].foremost(now)
                if foremost.looked_at != self.generation or not self.room.is_capped(foremost):
                    return foremost
            line = self._line_up(now)
        again, self._again, self._next = self._again, (), None
        left = looks << self._begun_anew
        for entry in itertools.chain(again, line):
            if entry.looked_at != self.generation or self._may_go(entry, now):
                self._behind = line
                return entry
            self._pass(entry)
            left -= 1
            if not left:
                self._next, self.is_half_way = line, True
                return None
        self._begun_anew = 0
        return None

    def _pass(self, head: ReadyEntry) -> None:
        """Protects a head unless as many are protected that compete with as many others as it does."""
        group: str | bool = _EVERYBODY
        if not self.room.fits_ever(head):
            group = _NOBODY
        elif self.room.is_capped(head):
            group = head.flow[0]
        if self._protected[group] < _PROTECTED_HEADS:
            self._protected[group] += 1
            self._passed.append(head)

    def _line_up(self, now: float) -> Iterator[ReadyEntry]:
        """The heads of all shapes, in the order of service."""
        for flows in self._in_order(now):
            yield from flows.line_up(now)

    def _in_order(self, now: float) -> Sequence[Flows]:
        if len(self.namespaces) < 2:  # noqa: PLR2004 -- nothing to be put in order
            return tuple(self.namespaces.values())
        return sorted(
            self.namespaces.values(),
            key=lambda flows: (self.shares.level(flows.namespace, now), flows.foremost(now).order),
        )

    def _may_go(self, entry: ReadyEntry, now: float) -> bool:
        if self.is_blocked(entry) or self.room.is_capped(entry):
            return False
        holding = self._who_holds_back(entry, now)
        return not holding or not self.rivalry.has_to_take_from(entry, holding)

    def _who_holds_back(self, entry: ReadyEntry, now: float) -> Sequence[ReadyEntry]:
        """The heads before an entry that let nobody of its flow take what they could use. Asked once of each head."""
        if now != self._holding_at:
            self._holding, self._holding_at = {}, now
        known = self._holding.get(entry.flow)
        if known is None:
            known = self._holding[entry.flow] = _Holding([])
        if known.asked < len(self._passed):
            known.heads += [head for head in self._passed[known.asked :] if self._holds_back(head, entry, now)]
            known.asked = len(self._passed)
        return known.heads

    def _holds_back(self, head: ReadyEntry, entry: ReadyEntry, now: float) -> bool:
        """Whether an entry behind a head may take nothing any more that the head could use: the same for all entries of
        its flow.
        """
        is_due = head.bypassed >= self.max_bypass or self._is_due_before(head, entry, now)
        return is_due and self.room.fits_ever(head)

    def _is_due_before(self, head: ReadyEntry, entry: ReadyEntry, now: float) -> bool:
        """Whether a head is due before anything of the flow or namespace of an entry behind it, which had its share."""
        if head.flow == entry.flow:
            return False
        own, other = self.namespaces[head.flow[0]], self.namespaces[entry.flow[0]]
        if own is other:
            return own.waiting[head.flow].comes_before_all_of(own.waiting[entry.flow], head.cost)
        level = self.shares.level
        return level(other.namespace, now) >= level(own.namespace, now) + self.level_of(head)

    def level_of(self, entry: ReadyEntry) -> float:
        """How much higher its namespace's level is once it was admitted."""
        return self.shares.level_of(entry.flow[0], entry.shape[0], entry.per_sample, entry.tokens)

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it has waited so long that it goes before what has not, in its namespace."""
        return self.namespaces[entry.flow[0]].is_overdue(entry, now)

    def is_blocked(self, entry: ReadyEntry) -> bool:
        """Whether so many tokens of its demand, or fewer, were refused since something came back."""
        least = self._blocked.get(entry.shape[0])
        return least is not None and entry.tokens >= least

    def was_looked_at(self, entry: ReadyEntry) -> None:
        """Something is left of the entry that was offered: the next offer goes on with it."""
        entry.looked_at = self.generation
        self._next, self._again = self._behind, (entry,)

    # Out

    @overload
    def admit(self, entry: ReadyBatch, now: float) -> Tokens | None: ...
    @overload
    def admit(self, entry: ReadyLease, now: float) -> Lease | None: ...
    @overload
    def admit(self, entry: ReadyEntry, now: float) -> Tokens | Lease | None: ...
    def admit(self, entry: ReadyEntry, now: float) -> Tokens | Lease | None:
        """Lets the entry in that was offered: it takes its room, its flow and its namespace are charged, and it counts
        against each head that it overtook. Returns what `Room.take` does; None when it does not fit now, and then it is
        to be refused.
        """
        taken = self.room.take(entry, now)
        if taken is None:
            return None
        self.namespaces[entry.flow[0]].waiting[entry.flow].charge(entry.cost)
        for head in self._passed:
            if self.rivalry.took_from(entry, head):
                head.bypassed += 1
        self.drop(entry, now)
        return taken

    def drop(self, entry: ReadyEntry, now: float) -> None:
        """Removes an entry of which nothing is left to run."""
        self._take_out(entry, now)
        if isinstance(entry, ReadyBatch):
            self.batches.take_out(entry)
        else:
            self.pending_leases -= 1

    def remove(self, entry: ReadyLease, now: float) -> None:
        """Takes out a request for a lease that ended while it waited, wherever it stands."""
        self.pending_leases -= 1
        if self._take_out(entry, now):
            # Demands of leases are without number, and until a release may be long: none may outlive its last entry.
            self._blocked.pop(entry.per_sample, None)
            self.rivalry.forget(entry.per_sample)

    def _take_out(self, entry: ReadyEntry, now: float) -> bool:
        self.begin_anew()
        flows = self.namespaces[entry.flow[0]]
        was_last = flows.take_out(entry)
        if not flows.waiting:
            del self.namespaces[flows.namespace]
            self.shares.wait_no_longer(flows.namespace, now)
        return was_last

    # Not now

    def begin_anew(self) -> None:
        """The line, or what its heads may keep to themselves, has changed: the next offer begins at the front."""
        self._next = None

    def refuse(self, entry: ReadyEntry) -> None:
        """Blocks the entry's demand, from so many tokens on, until something comes back. The next offer goes on behind
        it.
        """
        self._next = self._behind
        self._pass(entry)
        key, tokens = entry.shape[0], entry.tokens
        self._blocked[key] = min(tokens, self._blocked.get(key, tokens))

    def unblock(self) -> None:
        """Something came back: everything may be tried again."""
        self.begin_anew()
        self._blocked.clear()
        self.rivalry.known_short.clear()

    def shrink(self, batch: ReadyBatch, attempts: list[PlannedAttempt]) -> None:
        """Leaves these attempts of a batch, at least one. It keeps its place, and stands with those that want as much:
        behind a batch of 16 that never fits it would never be looked at.
        """
        count = len(attempts)
        left = msgspec.structs.replace(
            batch,
            shape=(batch.spec.evaluator_id, count),
            tokens=self.room.tokens_at_once(batch.spec, count, batch.namespace),
            cost=count,
            attempts=attempts,
            looked_at=self.generation,
        )
        self.batches.add(left)
        self.batches.take_out(batch)
        self.namespaces[batch.namespace].push(left)
        self._take_out(batch, batch.queued_at)

    def look_again(self) -> None:
        """Attempts were ended, or quotas changed: what waits is looked at before it goes or counts."""
        self.begin_anew()
        self.generation += 1
