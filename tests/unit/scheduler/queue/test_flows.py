"""How evals and training share the ready queue."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import BatchId
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.ledger.records import sort_batch_id
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyEntry
from py_scheduler.scheduler.queue.flows import FlowPolicy
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.service_order import describe_ahead
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of
from tests.support.looks import ahead_of
from tests.support.rooms import OneKindOfRoom, RoomOfEachEvaluator, StrandedRoom

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECS = {name: spec_of(SolvingAgent(), name) for name in ("small", "large")}


class Line:
    """A ready queue, and entries with short names: "e" is an eval, "t" training."""

    def __init__(
        self, eval_weight: float | None = 1.0, max_wait_seconds: float | None = None, max_bypass: int = 4
    ) -> None:
        self.queue = ReadyQueue(OneKindOfRoom(), max_bypass, FlowPolicy(eval_weight), max_wait_seconds)
        self.now = 0.0

    def push(
        self, kind: str, times: int = 1, *, count: int = 1, batch_id: BatchId = 0, spec: str = "small", team: str = "a"
    ) -> None:
        task = task_of(kind, is_eval=kind.startswith("e"))
        for _ in range(times):
            attempts = [
                PlannedAttempt(
                    AttemptRef(kind, no, 1), task, no, 1, f"s-{kind}", team, sort_batch_id(batch_id), self.now
                )
                for no in range(count)
            ]
            self.queue.push(SPECS[spec], attempts, self.now)

    def served(self, limit: int = 1_000_000) -> Iterator[str]:
        for _ in range(limit):
            entry = self.queue.offer(self.now)
            if entry is None:
                return
            self.queue.admit(entry, self.now)
            yield name_of(entry)

    def give_back(self, team: str, tokens: int) -> None:
        self.queue.shares.give_back(team, "small", None, tokens, self.now, self.now)

    def take(self, limit: int = 1_000_000) -> str:
        return "".join(self.served(limit))


def name_of(entry: ReadyEntry) -> str:
    return entry.attempts[0].task.prompt if isinstance(entry, ReadyBatch) else "lease"


def test_evals_and_training_take_turns_whatever_their_batch_ids() -> None:
    line = Line()
    line.push("t", 100, batch_id=1)
    line.push("e", 100, batch_id="9/gsm8k")
    assert line.take(10) == "te" * 5
    line.push("t", 5, batch_id=0)
    assert Counter(line.take(100)) == {"t": 50, "e": 50}


@pytest.mark.parametrize(("weight", "evals"), [(3.0, 75), (1.0, 50), (0.25, 20), (1 / 3, 25)])
def test_room_is_given_in_the_ratio_of_the_weights(weight: float, evals: int) -> None:
    line = Line(weight)
    line.push("t", 1_000, batch_id=1)
    line.push("e", 1_000, batch_id=9)
    assert abs(Counter(line.take(100))["e"] - evals) <= 1


def test_what_counts_is_the_tokens_and_not_the_batches() -> None:
    line = Line()
    line.push("t", 100, count=10)
    line.push("e", 1_000)
    counts = Counter(line.take(110))
    assert abs(10 * counts["t"] - counts["e"]) <= 10


def test_strictly_by_batch_id_when_there_is_no_weight() -> None:
    line = Line(None)
    line.push("e", 3, batch_id="1/eval")
    line.push("t", 3, batch_id=1)
    line.push("t", 3, batch_id=2)
    assert line.take() == "ttteeettt"


def test_weight_0_serves_evals_when_no_training_waits() -> None:
    line = Line(0.0)
    line.push("e", 3, batch_id=0)
    line.push("t", 3, batch_id=9)
    assert line.take(4) == "ttte"
    line.push("t", 1)
    assert line.take() == "tee"


def test_a_flow_that_was_idle_has_no_credit() -> None:
    line = Line()
    line.push("t", 1_000)
    line.take(500)
    line.push("e", 500)
    assert Counter(line.take(100)) == {"t": 50, "e": 50}


def test_a_flow_that_comes_and_goes_is_not_forgiven_what_it_took() -> None:
    line = Line()
    line.push("t", 1_000)
    taken = ""
    for _ in range(50):
        line.push("e", count=10)
        while not taken.endswith("e"):
            taken += line.take(1)
        taken += line.take(1)
    counts = Counter(taken)
    assert abs(counts["t"] - 10 * counts["e"]) <= 20


def test_namespaces_share_too_and_many_that_left_are_not_remembered_for_ever() -> None:
    line = Line()
    line.push("t", 10_000, team="steady")
    line.push("t", 100, team="other", batch_id=9)
    line.take(100)
    assert len(line.queue.namespaces["other"]) == 50
    for number in range(2_000):
        line.push("e", count=3, team=f"team-{number}", batch_id=-1)
        line.take(1)
        line.give_back(f"team-{number}", 3)
    assert len(line.queue.namespaces) == 2
    assert len(line.queue.shares._accounts) < 200


def test_inside_a_flow_the_order_is_as_ever() -> None:
    line = Line()
    for batch_id in ("x", 2, "1/eval", 1):
        line.push(f"t{batch_id} ", batch_id=batch_id)
        line.push(f"e{batch_id} ", batch_id=batch_id)
    assert line.take().split() == ["t1", "e1", "t1/eval", "e1/eval", "t2", "e2", "tx", "ex"]


def test_a_head_that_is_blocked_is_passed_only_so_often_by_its_own_flow_and_by_others() -> None:
    line = Line()
    line.push("t", count=8, spec="large")
    line.push("t", 20)
    line.push("e", 20, batch_id=1)
    blocked = line.queue.offer(line.now)
    assert blocked is not None
    line.queue.refuse(blocked)
    taken = line.take()
    assert blocked.bypassed == 4
    assert taken.count("t") == 4, "of its own flow so many as may pass it"
    assert taken.count("e") <= taken.count("t") + 1, "of the other its share, and no more"
    line.queue.unblock()
    assert line.queue.offer(line.now) is blocked


def test_a_blocked_eval_is_not_starved_by_training() -> None:
    line = Line()
    line.push("e", count=8, spec="large")
    line.push("t", 100, batch_id=1)
    blocked = line.queue.offer(line.now)
    assert isinstance(blocked, ReadyBatch)
    line.queue.refuse(blocked)
    assert line.take() == "tttt"
    assert blocked.bypassed == 4


def test_what_waits_too_long_goes_first() -> None:
    line = Line(max_wait_seconds=60.0)
    line.push("t late ", batch_id="last")
    line.now = 30.0
    line.push("e ", 2, batch_id=1)
    line.push("t ", 2, batch_id=1)
    line.now = 59.0
    assert line.take(1) == "e "
    line.now = 60.0
    assert line.take(1) == "t late "
    line.now = 90.0
    assert line.take() == "e t t "


def test_of_those_that_wait_too_long_the_oldest_goes_first_whatever_its_flow_shape_or_batch_id() -> None:
    line = Line(max_wait_seconds=60.0)
    for second, (kind, spec, batch_id) in enumerate(
        [("t1 ", "large", 9), ("e2 ", "small", 7), ("t3 ", "small", 8), ("e4 ", "large", 1), ("t5 ", "large", 0)]
    ):
        line.now = float(second)
        line.push(kind, spec=spec, batch_id=batch_id)
    line.push("e6 ", batch_id=5)
    line.now = 120.0
    line.push("t young ", batch_id=0)
    assert line.take() == "t1 e2 t3 e4 t5 e6 t young ", "of two that came at once the one that arrived first"


def test_what_waits_too_long_and_is_blocked_holds_back_as_a_head_does() -> None:
    line = Line(max_wait_seconds=60.0)
    line.push("t large ", count=8, spec="large", batch_id="last")
    line.now = 61.0
    line.push("t ", 10)
    overdue = line.queue.offer(line.now)
    assert overdue is not None
    line.queue.refuse(overdue)
    assert line.take() == "t t t t "
    assert overdue.bypassed == 4
    line.queue.unblock()
    assert line.take(1) == "t large "
    assert len(line.queue) == 6


def test_entries_that_left_from_the_middle_are_not_kept() -> None:
    line = Line(max_wait_seconds=1.0)
    for number in range(2_000):
        line.now = float(number)
        line.push("t", batch_id=2_000 - number)
        line.push("t")
        line.take(1)
    flow = line.queue.namespaces["a"].waiting["a", False]
    kept = sum(len(heap) for heap in flow._heaps.values())
    assert kept <= 2 * flow.count + 70
    by_age = line.queue.namespaces["a"]._by_age
    assert by_age is not None
    assert sum(len(entries) for entries in by_age._queues.values()) <= 2 * len(line.queue) + 70
    assert len(line.take()) == 2_000
    assert len(line.queue) == 0


def test_demands_that_are_gone_are_not_looked_at_for_their_age() -> None:
    line = Line(max_wait_seconds=1.0)
    line.push("t")
    for number in range(2_000):
        demand = PlacementDemand(per_sample=Resource(cpu=number + 1), max_tokens=1)
        entry = line.queue.push_lease((0.0, 0), demand, 1, lambda _lease: None, line.now, "a")
        line.queue.offer(line.now)
        line.queue.remove(entry, line.now)
    assert len(line.queue) == 1
    by_age = line.queue.namespaces["a"]._by_age
    assert by_age is not None
    assert len(by_age._queues) == len(by_age._oldest) == 1


# Batches of unlike sizes, in room that comes back token by token


class Cluster:
    """So many tokens of one kind, each held for a time drawn by a seed. `used` is tokens x time of each flow."""

    def __init__(self, line: Line, tokens: int, seed: int = 0) -> None:
        self.line = line
        self.tokens = self.free = tokens
        self.drawn = random.Random(seed)
        self.held: list[float] = []
        self.used = {"t": 0.0, "e": 0.0}

    def admit(self) -> None:
        queue = self.line.queue
        while (entry := queue.offer(self.line.now)) is not None:
            tokens = entry.shape[1]
            if tokens > self.free:
                queue.refuse(entry)
                continue
            queue.admit(entry, self.line.now)
            self.free -= tokens
            for _ in range(tokens):
                seconds = self.drawn.uniform(0.5, 1.5)
                self.used[name_of(entry)] += seconds
                heapq.heappush(self.held, self.line.now + seconds)

    def run(self, seconds: float) -> None:
        until = self.line.now + seconds
        self.admit()
        while self.held and self.held[0] <= until:
            self.line.now = heapq.heappop(self.held)
            self.free += 1
            self.line.queue.unblock()
            self.admit()
        self.line.now = until


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([0.1, 0.25, 1.0, 3.0]),
    st.integers(8, 12),
    st.integers(0, 1_000),
)
def test_tokens_and_time_are_shared_by_weight_whatever_the_sizes_of_batches(
    training: int, evals: int, weight: float, tokens: int, seed: int
) -> None:
    line = Line(weight, max_bypass=64)
    line.push("t", 4_000 // training, count=training)
    line.push("e", 4_000 // evals, count=evals)
    cluster = Cluster(line, tokens, seed)
    cluster.run(150)
    assert len(line.queue.flows) == 2, "both had work all the time"
    share = cluster.used["e"] / sum(cluster.used.values())
    assert share == pytest.approx(weight / (1 + weight), abs=0.04)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1_000))
def test_at_weight_0_small_evals_get_only_what_training_leaves(training: int, seed: int) -> None:
    line = Line(0.0, max_bypass=64)
    line.push("t", 100, count=training)
    line.push("e", 1_000)
    cluster = Cluster(line, 4, seed)
    while any(flow.key == ("a", False) for flow in line.queue.flows):
        assert not cluster.used["e"]
        cluster.run(0.1)
    cluster.run(10)
    assert cluster.used["e"] > 30, "and then all of it"


def test_room_that_the_head_has_no_use_for_is_not_kept_for_it() -> None:
    line = Line(0.0)
    line.queue = ReadyQueue(RoomOfEachEvaluator(), 64, FlowPolicy(0.0))
    line.push("t", 2, count=4, spec="large")
    line.push("e same ", 2, spec="large")
    line.push("e other ", 2)
    head = line.queue.offer(line.now)
    assert head is not None
    line.queue.refuse(head)
    assert line.take() == "e other e other "
    assert head.bypassed == 0, "they took nothing that it could have used"
    line.queue.unblock()
    assert line.take() == "tte same e same "


def test_a_head_that_waits_for_stranded_room_keeps_nothing() -> None:
    line = Line(0.0)
    line.push("t", count=4, spec="large")
    line.push("e", 3)
    head = line.queue.offer(line.now)
    assert head is not None
    line.queue.refuse(head)
    assert line.take() == ""
    line.queue.room = StrandedRoom()
    assert line.take() == "eee"


# Why does it wait?

PUSHES = st.lists(
    st.tuples(st.sampled_from("te"), st.integers(0, 3), st.sampled_from(("a", "b"))), min_size=1, max_size=40
)


@settings(max_examples=150, deadline=None)
@given(PUSHES, st.sampled_from([0.0, 0.5, 1.0, 4.0, None]), st.integers(0, 12), st.sampled_from([None, 5.0]))
def test_what_is_told_to_be_ahead_is_what_is_served_before(
    pushes: list[tuple[str, int, str]], weight: float | None, served: int, max_wait: float | None
) -> None:
    line = Line(weight, max_wait)
    for kind, batch_id, team in pushes:
        line.now += 0.25  # Exact, and so are the sums of it: flows that are level stay so.
        line.push(kind, batch_id=batch_id, team=team)
    line.take(served)
    line.now += 1.0
    told = {entry.order: ahead_of(line.queue, entry, line.now, limit=100) for entry in line.queue.entries()}
    order: list[ReadyEntry] = []
    while (entry := line.queue.offer(line.now)) is not None:
        ahead = told[entry.order]
        assert [other.order for other in ahead.first] == [other.order for other in order]
        assert ahead.in_all == len(order)
        line.queue.admit(entry, line.now)
        order.append(entry)


SIZED_PUSHES = st.lists(
    st.tuples(st.sampled_from("te"), st.integers(0, 3), st.sampled_from("abc"), st.integers(1, 9)),
    min_size=1,
    max_size=80,
)


@settings(max_examples=50, deadline=None)
@given(SIZED_PUSHES, st.sampled_from([None, 5.0]), st.integers(0, 12))
def test_nor_does_it_matter_between_namespaces_of_what_sizes_all_of_them_are(
    pushes: list[tuple[str, int, str, int]], max_wait: float | None, served: int
) -> None:
    line = Line(None, max_wait)
    for kind, batch_id, team, count in pushes:
        line.now += 0.25
        line.push(kind, batch_id=batch_id, team=team, count=count)
    line.take(served)
    told = {entry.order: ahead_of(line.queue, entry, line.now, limit=20) for entry in line.queue.entries()}
    order: list[ReadyEntry] = []
    while (entry := line.queue.offer(line.now)) is not None:
        ahead = told[entry.order]
        assert ahead.in_all == len(order)
        assert [other.order for other in ahead.first] == [other.order for other in order[:20]]
        line.queue.admit(entry, line.now)
        order.append(entry)


@pytest.mark.parametrize(("small", "tokens"), [(100, 64), (300, 1), (1_000, 64)])
def test_small_batches_before_a_large_one_count_as_what_they_are(small: int, tokens: int) -> None:
    line = Line()
    line.push("t", small, batch_id=1)
    line.push("t", batch_id=2, count=tokens, spec="large")
    line.push("t", 5_000, batch_id=1, team="b")
    (asked,) = [entry for entry in line.queue.entries() if entry.shape[0] == "large"]
    ahead = ahead_of(line.queue, asked, 0.0, limit=20)
    served = Counter[str]()
    while (entry := line.queue.offer(0.0)) is not asked:
        assert entry is not None
        served[entry.flow[0]] += 1
        line.queue.admit(entry, 0.0)
    assert ahead.counts == {("a", False): small}
    assert abs(ahead.elsewhere["b"] - served["b"]) <= 1, "level with it, either may be first"


def test_the_reason_names_the_flows_and_their_weights() -> None:
    line = Line(3.0)
    line.push("t", 10, batch_id=1)
    line.push("e", 10, batch_id=9)
    last = max(line.queue.entries(), key=lambda entry: (entry.flow, entry.order))
    reason = describe_ahead(line.queue, last, ahead_of(line.queue, last, 0.0))
    assert reason == (
        "13 batches are ahead of it: 4 of training in 'a' (weight 1), 9 of evals in 'a' (weight 3); "
        "itself it is of evals in 'a' (weight 3)"
    )


def test_lease_requests_stand_beside_the_training_of_their_namespace() -> None:
    line = Line()
    line.push("e", 10)
    demand = PlacementDemand(per_sample=Resource(gpu=1), max_tokens=1)
    for _ in range(3):
        line.queue.push_lease((0, 0), demand, 1, lambda _: None, 0.0, "a")
    assert list(line.served(6)) == ["e", "lease"] * 3
