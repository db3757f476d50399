"""How namespaces share room: weights, what is held over time, unlike demands, and what is forgotten."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.quotas import Quota
from py_scheduler.domain.resources import Resource
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.queue.entries import ReadyBatch
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room
from py_scheduler.scheduler.queue.shares import Shares
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of
from tests.support.rooms import OneKindOfRoom

SPEC = spec_of(SolvingAgent(), "agent")


class Teams:
    """A cluster of places, and namespaces whose samples take seconds of their own. `used` is tokens x time of each."""

    def __init__(self, places: int, weights: dict[str, float], seed: int = 0, max_bypass: int = 64) -> None:
        self.shares = Shares({"places": float(places)}, weights)
        self.queue = ReadyQueue(OneKindOfRoom(Room(shares=self.shares)), max_bypass)
        self.free = places
        self.now = 0.0
        self.seconds: dict[str, float] = {}
        self.used: dict[str, float] = {}
        self.drawn = random.Random(seed)
        self.held: list[tuple[float, float, str]] = []

    def push(self, team: str, batches: int, *, count: int = 1, seconds: float = 1.0) -> None:
        self.seconds[team] = seconds
        self.used.setdefault(team, 0.0)
        for batch in range(batches):
            attempts = [
                PlannedAttempt(AttemptRef(f"{team}-{batch}", no, 1), task_of(), no, 1, f"s-{team}", team, (0, 0), 0.0)
                for no in range(count)
            ]
            self.queue.push(SPEC, attempts, self.now)

    def admit(self) -> None:
        while (entry := self.queue.offer(self.now)) is not None:
            assert isinstance(entry, ReadyBatch)
            if entry.cost > self.free:
                self.queue.refuse(entry)
                continue
            self.queue.admit(entry, self.now)
            self.free -= entry.cost
            team = entry.flow[0]
            for _ in range(entry.cost):
                seconds = self.seconds[team] * self.drawn.uniform(0.5, 1.5)
                self.used[team] += seconds
                heapq.heappush(self.held, (self.now + seconds, self.now, team))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        self.admit()
        while self.held and self.held[0][0] <= until:
            self.now, taken_at, team = heapq.heappop(self.held)
            self.free += 1
            self.shares.give_back(team, SPEC.evaluator_id, None, 1, taken_at, self.now)
            self.queue.unblock()
            self.admit()
        self.now = until

    def share(self, team: str) -> float:
        return self.used[team] / sum(self.used.values())


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([1.0, 3.0]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.integers(0, 1_000),
)
def test_what_is_held_over_time_is_as_the_weights_are(
    weight: float, batch_a: int, batch_b: int, seconds_b: float, seed: int
) -> None:
    """However large the batches of both are, and however long their samples take."""
    teams = Teams(8, {"a": weight}, seed)
    teams.push("a", 3_000 // batch_a, count=batch_a)
    teams.push("b", 3_000 // batch_b, count=batch_b, seconds=seconds_b)
    teams.run(150)
    assert len(teams.queue.namespaces) == 2, "both had work all the time"
    assert teams.share("a") == pytest.approx(weight / (1 + weight), abs=0.05)


def test_a_namespace_that_was_alone_is_owed_nothing_and_owes_nothing() -> None:
    teams = Teams(8, {})
    teams.push("old", 20_000)
    teams.run(500)
    teams.used = dict.fromkeys(teams.used, 0.0)
    teams.push("new", 5_000)
    teams.run(100)
    assert teams.share("new") == pytest.approx(0.5, abs=0.05)


def test_long_samples_of_one_do_not_take_all_room_before_the_first_ends() -> None:
    teams = Teams(8, {})
    teams.push("long", 1_000, seconds=200.0)
    teams.push("short", 25_000, seconds=0.1)
    teams.run(400)
    assert teams.shares.tokens_of("long") <= 5
    assert teams.used["short"] > 400 * 8 * 0.35


def test_a_large_batch_gathers_its_room_beside_small_ones_of_another() -> None:
    teams = Teams(8, {})
    teams.push("large", 500, count=8)
    teams.push("small", 20_000)
    teams.run(200)
    assert teams.share("large") == pytest.approx(0.5, abs=0.06)


def test_many_small_namespaces_do_not_starve_one_and_it_does_not_starve_them() -> None:
    teams = Teams(10, {})
    for number in range(9):
        teams.push(f"team-{number}", 1_000)
    teams.push("crowd", 1_000, count=5)
    teams.run(150)
    assert all(teams.share(team) == pytest.approx(0.1, abs=0.03) for team in teams.used)


# Unlike demands


def test_the_largest_fraction_of_any_kind_of_room_counts() -> None:
    shares = Shares({"places": 1_000.0, "gpu": 8.0, "cpu": 100.0, "memory_gb": 1_000.0, "named.licence": 4.0})
    for kind, demand, dominant in (
        ("gpu", Resource(gpu=0.5, cpu=2), 0.5 / 8),
        ("cpu", Resource(cpu=10, memory_gb=50), 0.1),
        ("memory", Resource(cpu=1, memory_gb=100), 0.1),
        ("licence", Resource(gpu=1, named={"licence": 1}), 0.25),
        ("nothing", None, 0.001),
    ):
        shares.take(kind, kind, demand, 2, 0.0)
        assert shares.level(kind, 0.0) == pytest.approx(2 * dominant)
        assert shares.level_of(kind, kind, demand, 1) == pytest.approx(dominant)
    assert shares.level_of("gpu", Resource(), Resource(gpu=2), 1) == pytest.approx(0.25), "a lease needs no place"


def test_nodes_that_come_and_go_change_what_a_token_counts_for_from_then_on() -> None:
    """What was used before stays used; what is held goes on as a share of what there is now."""
    shares = Shares({"places": 100.0, "gpu": 8.0})
    shares.begin_to_wait("waits", 0.0)
    half, lease = Resource(gpu=2), Resource(gpu=1)
    shares.take("a", "agent", half, 2, 0.0)
    shares.take("b", lease, lease, 4, 0.0)
    usual = shares._usual_seconds
    assert shares.level("a", 10.0) == shares.level("b", 10.0) == pytest.approx(0.5 * (10 + usual))
    shares.supply_is({"places": 100.0, "gpu": 16.0}, 10.0)
    for name in "ab":
        assert shares.level(name, 10.0) == pytest.approx(0.5 * 10 + 0.25 * usual)
        assert shares.level(name, 20.0) == pytest.approx(0.5 * 10 + 0.25 * (10 + usual))
    shares.supply_is({"places": 100.0}, 20.0)
    shares.give_back("a", "agent", half, 2, 0.0, 30.0)
    shares.give_back("b", lease, lease, 4, 0.0, 30.0)
    assert shares._accounts["a"].settled == pytest.approx(0.5 * 10 + 0.25 * 10 + 0.02 * 10), "only places are left"
    assert shares._accounts["b"].settled == pytest.approx(0.5 * 10 + 0.25 * 10, abs=0.01)
    for account in (shares._accounts["a"], shares._accounts["b"]):
        assert (account.held, account.held_since, account.tokens, account.tokens_of) == (0.0, 0.0, 0, {})


def test_what_is_given_back_leaves_nothing_held() -> None:
    shares = Shares({"places": 10.0})
    shares.begin_to_wait("b", 0.0)
    for number in range(100):
        shares.take("a", "x", None, 3, number * 0.1)
        for _ in range(3):
            shares.give_back("a", "x", None, 1, number * 0.1, number * 0.1 + 0.7)
    assert shares.tokens_of("a") == 0
    account = shares._accounts["a"]
    assert (account.held, account.held_since) == (0.0, 0.0)
    assert account.settled == pytest.approx(100 * 3 * 0.1 * 0.7)
    assert account.usual_seconds == pytest.approx(0.7)


def test_when_nobody_waits_the_past_is_forgotten() -> None:
    shares = Shares({"places": 10.0})
    shares.begin_to_wait("a", 0.0)
    shares.take("a", "x", None, 1, 0.0)
    shares.take("gone", "x", None, 1, 0.0)
    shares.give_back("gone", "x", None, 1, 0.0, 50.0)
    shares.wait_no_longer("a", 100.0)
    shares.begin_to_wait("b", 100.0)
    assert shares.level("a", 100.0) == pytest.approx(0.1 * shares._usual_seconds)
    assert set(shares._accounts) == {"a", "b"}
    shares.give_back("a", "x", None, 1, 0.0, 101.0)
    assert shares.level("a", 101.0) == pytest.approx(0.1), "of the hundred seconds the last one counts"


# Quotas


def test_a_namespace_at_its_quota_is_passed_over_and_holds_nobody_back() -> None:
    shares = Shares({"places": 100.0})
    queue = ReadyQueue(Rivalry(Room(quotas=Quotas({"a": Quota(max_running_samples=2)}), shares=shares)), 0)
    teams = Teams(100, {})
    teams.queue = queue
    teams.push("a", 5)
    teams.push("b", 5)
    served = ""
    while (entry := queue.offer(0.0)) is not None:
        queue.admit(entry, 0.0)
        served += entry.flow[0]
    assert served == "ababbbb"
    for _ in range(2):
        shares.give_back("a", SPEC.evaluator_id, None, 1, 0.0, 0.0)
    assert queue.offer(0.0) is not None
