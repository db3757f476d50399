"""The examples in numbers by which ARCHITECTURE.md tells its rules are what the code does."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.quotas import Quota
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.task import BatchId
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings, TrainingHistory, dynamic_timeout
from py_scheduler.scheduler.ledger.records import sort_batch_id
from py_scheduler.scheduler.ledger.staleness import StalenessSettings, StalenessWindow
from py_scheduler.scheduler.queue.entries import ReadyBatch
from py_scheduler.scheduler.queue.flows import FlowPolicy
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room, StrandedToken
from py_scheduler.scheduler.queue.shares import Shares
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of

if TYPE_CHECKING:
    from py_scheduler.placement import Lease
    from py_scheduler.scheduler.queue.entries import ReadyEntry

PAGE = Path(__file__).parents[3] / "ARCHITECTURE.md"
BUDGET = Resource(gpu=10_000, cpu=10_000, concurrency=10_000)
DEMANDS = {"gpu": Resource(gpu=1), "cpu": Resource(cpu=1), "gang": Resource(gpu=1, cpu=4)}
SPECS = {
    name: spec_of(SolvingAgent(), name, resource=BUDGET, run_resource=demand, eval_resource=demand)
    for name, demand in DEMANDS.items()
}


@cache
def page() -> str:
    return re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))


def says(*sentences: str) -> None:
    """The page tells the example that a test computes: whoever changes one changes both."""
    for sentence in sentences:
        assert sentence in page()


class Cluster:
    """Nodes, their room, and what waits for it. Nothing comes back by itself."""

    def __init__(
        self,
        gpus: int = 8,
        cpu: float = 10_000,
        *,
        eval_weight: float | None = 1.0,
        max_bypass: int = 64,
        max_wait_seconds: float | None = None,
        quotas: dict[str, Quota] | None = None,
        fixed: bool = False,
    ) -> None:
        nodes = [
            NodeResource(node_ip=f"10.0.0.{1 + no}", gpus=list(range(min(60, gpus - 60 * no))), cpu=cpu, memory_gb=1)
            for no in range(-(-gpus // 60))
        ]
        self.room = Room(PlacementPool(nodes), quotas=Quotas(quotas or {}), has_fixed_nodes=fixed)
        self.queue = ReadyQueue(Rivalry(self.room), max_bypass, FlowPolicy(eval_weight), max_wait_seconds)
        self.now = 0.0
        self.held: list[Lease | None] = []
        self.taken: list[object] = []

    def wait(self, name: str, times: int = 1, *, of: str = "gpu", count: int = 1, batch_id: BatchId = 1) -> None:
        """Names of evals begin with "e"."""
        task = task_of(name, is_eval=name.startswith("e"))
        for _ in range(times):
            refs = [AttemptRef(name, number, 1) for number in range(count)]
            self.queue.push(
                SPECS[of],
                [PlannedAttempt(ref, task, 0, 1, f"s-{name}", "a", sort_batch_id(batch_id), self.now) for ref in refs],
                self.now,
            )

    def occupy(self, tokens: int | None = None) -> None:
        """Somebody else has so many GPUs, all of them without a number."""
        pool = self.room.pool
        assert pool is not None
        for _ in range(pool.free_tokens_for(DEMANDS["gpu"]) if tokens is None else tokens):
            self.held.append(pool.try_acquire_batch(BUDGET, DEMANDS["gpu"], 1))

    def serve_what_comes_back(self, gpus: int) -> list[str]:
        """One GPU after the other, each offered before the next."""
        served: list[str] = []
        for _ in range(gpus):
            lease = self.held.pop()
            assert lease is not None
            lease.release()
            self.queue.unblock()
            served += self.serve()
        return served

    def serve(self, most: int = 10_000) -> list[str]:
        """What is let in until nothing more may go, in order."""
        served: list[str] = []
        while len(served) < most and (entry := self.queue.offer(self.now)) is not None:
            assert isinstance(entry, ReadyBatch)
            tokens = self.queue.admit(entry, self.now)
            if tokens is None:
                self.queue.refuse(entry)
            else:
                self.taken.append(tokens)  # What nobody has any more is given back.
                served.append(entry.attempts[0].task.prompt)
        return served

    def entry(self, name: str) -> ReadyEntry:
        (entry,) = self.queue.batches.of_submission(f"s-{name}")
        return entry


def test_the_order_inside_a_flow() -> None:
    says("Step 1 goes before `1/b`, and that before step 2. If `1/b` came to wait before `1/a`, all batches of `1/b`")
    cluster = Cluster(100, eval_weight=None)
    cluster.wait("t2", batch_id=2)
    cluster.wait("b", batch_id="1/b")
    cluster.wait("a", batch_id="1/a")
    cluster.wait("b", batch_id="1/b")
    cluster.wait("t1", batch_id=1)
    assert cluster.serve() == ["t1", "b", "b", "a", "t2"]


@pytest.mark.parametrize(("weight", "evals"), [(3.0, 75), (0.25, 20)])
def test_flows_by_weight(weight: float, evals: int) -> None:
    says("With weight 3, 75 of 100 tokens go to evals; with 1/4, 20.")
    cluster = Cluster(100, eval_weight=weight)
    cluster.wait("t", 200)
    cluster.wait("e", 200)
    assert abs(Counter(cluster.serve(100))["e"] - evals) <= 1


def test_flows_count_tokens() -> None:
    says("Batches of 10 training tokens beside evals of 1, weight 1: after each training batch come ten evals.")
    cluster = Cluster(100)
    cluster.wait("t", 3, count=10)
    cluster.wait("e", 100)
    assert "".join(cluster.serve(33)) == 3 * ("t" + 10 * "e")


def test_idle_time_is_no_credit() -> None:
    says("After training had 500 tokens alone, evals that arrive get 50 of the next 100")
    cluster = Cluster(600)
    cluster.wait("t", 1_000)
    cluster.serve(500)
    cluster.wait("e", 1_000)
    assert Counter(cluster.serve(100)) == {"t": 50, "e": 50}


@pytest.mark.parametrize(("weight", "training"), [(1.0, 4), (2.0, 2)])
def test_what_a_blocked_head_is_owed(weight: float, training: int) -> None:
    says("An eval batch waits for 4 GPUs, which come back one by one, while training waits in batches of 1.")
    says("With `eval_weight = 1` training takes 4 of them and then waits; with 2 it takes 2.")
    cluster = Cluster(8, eval_weight=weight)
    cluster.occupy()
    cluster.wait("e", count=4)
    cluster.wait("t", 100)
    assert cluster.serve_what_comes_back(8) == training * ["t"] + ["e"] + (4 - training) * ["t"]


def test_a_refusal_blocks_a_demand_from_so_many_tokens_on() -> None:
    says("After a batch of 4 was refused, those of 4 and of 9 are not tried, one of 2 is.")
    cluster = Cluster(3)
    for count in (4, 9, 2):
        cluster.wait(f"t{count}", count=count)
    assert cluster.serve() == ["t2"]
    assert [cluster.queue.is_blocked(cluster.entry(name)) for name in ("t4", "t9")] == [True, True]


def test_only_who_takes_what_the_head_could_use_overtakes_it_and_only_so_often() -> None:
    says("While a batch waits for 8 GPUs, samples of a CPU alone go as often as they like.")
    says("Of 1 000 samples of one GPU each, 64 go before it.")
    cluster = Cluster(72)
    cluster.occupy()
    cluster.wait("batch", count=8)
    cluster.wait("cpu", 1_000, of="cpu", batch_id=2)
    cluster.wait("gpu", 1_000, batch_id=3)
    assert Counter(cluster.serve()) == {"cpu": 1_000}
    assert cluster.entry("batch").bypassed == 0
    served = cluster.serve_what_comes_back(64)
    assert Counter(served) == {"gpu": 64}
    assert cluster.entry("batch").bypassed == 64 == EngineSettings().max_bypass
    assert cluster.serve_what_comes_back(7) == []
    assert cluster.serve_what_comes_back(1) == ["batch"]


def test_a_head_could_use_a_kind_of_room_only_if_it_waits_for_that_kind() -> None:
    says("A batch wants 8 GPUs with 4 CPUs each; no GPU and 60 CPUs are free. 28 samples of a CPU leave it the 32 CPUs")
    cluster = Cluster(8, cpu=60, max_bypass=1)
    cluster.occupy()
    cluster.wait("gang", of="gang", count=8)
    cluster.wait("cpu", 60, of="cpu", batch_id=2)
    assert len(cluster.serve(28)) == 28
    assert cluster.entry("gang").bypassed == 0
    assert cluster.serve() == ["cpu"]
    assert cluster.entry("gang").bypassed == 1


def test_nobody_waits_for_what_can_never_fit() -> None:
    says("On 8 GPUs of which such a handler holds one, a batch of 8 holds nobody back and one of 7 does.")
    for count, holds in ((8, False), (7, True)):
        cluster = Cluster(8, max_bypass=0)
        cluster.room.strand([StrandedToken("a", DEMANDS["gpu"], "10.0.0.1", (0,))])
        cluster.occupy(2)
        cluster.wait("batch", count=count)
        cluster.wait("gpu", batch_id=2)
        assert cluster.serve() == ([] if holds else ["gpu"])


def test_what_waited_too_long_goes_first() -> None:
    says('At 60 s an entry of the batch id "last" goes before one of step 1 that has waited 30 s.')
    cluster = Cluster(1, max_wait_seconds=60.0)
    cluster.wait("late", batch_id="last")
    cluster.now = 30.0
    cluster.wait("t", batch_id=1)
    cluster.now = 60.0
    assert cluster.serve() == ["late"]


def test_a_quota() -> None:
    says("With 1 of a quota of 4 held, a batch of 4 is passed over, one of 3 is let in.")
    for count, is_in in ((4, False), (3, True)):
        cluster = Cluster(8, quotas={"a": Quota(max_running_samples=4)})
        cluster.wait("first")
        assert cluster.serve() == ["first"]
        cluster.wait("batch", count=count)
        assert cluster.serve() == (["batch"] if is_in else [])


def test_a_batch_wants_no_more_than_the_nodes_that_are_left() -> None:
    says("A batch of 16 samples of one GPU each that comes back on 8 GPUs starts 8 of them")
    cluster = Cluster(8, fixed=True)
    cluster.wait("batch", count=16)
    assert cluster.entry("batch").tokens == 8
    assert cluster.serve() == ["batch"]


def test_the_dominant_share() -> None:
    says("On 8 GPUs and 64 CPUs a token of 0.5 GPU and 2 CPUs has the share 1/16 (0.5/8; its CPUs are 1/32).")
    says("4 × 1/16 × 11 = 2.75; with weight 3 they would make 0.92.")
    for weight, level in ((1.0, 2.75), (3.0, 0.92)):
        shares = Shares({"places": 4096.0, "gpu": 8.0, "cpu": 64.0, "memory_gb": 512.0}, {"a": weight})
        shares.begin_to_wait("a", 0.0)
        shares.take("a", "x", Resource(gpu=0.5, cpu=2), 4, 0.0)
        assert shares.level("a", 10.0) == pytest.approx(level, abs=0.005)


def test_staleness() -> None:
    says("`max_staleness = 1`, `step_size = 512`: 1 024 samples may be accepted or running")
    says("the limit is 1 536, and 512 more go", "the count starts anew at a limit of 1 024, with the 512 that run.")
    window = StalenessWindow(StalenessSettings(max_staleness=1, step_size=512))
    assert window.admits(1_023)
    assert not window.admits(1_024)
    window.accepted = 1_024
    window.weights_changed(1)
    assert window.limit - window.accepted == 512
    window.weights_changed(2)
    assert (window.accepted, window.limit) == (0, 1_024)
    assert window.admits(1_023)


def test_the_dynamic_timeout() -> None:
    says("Ratio 3 and a mean of 20 s give 60 s.")
    history = TrainingHistory(finished_subtasks=2, running_seconds=40.0, completed_steps=1)
    assert dynamic_timeout(DynamicTimeoutSettings(), history, None) == 60.0
