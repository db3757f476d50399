"""Nobody waits for room that only others want, and nobody is overtaken without end, whatever wants what.

The real admission, queue, room and pool under random demands, quotas, weights and ends, beside an oracle that knows
neither index nor cache. Three rules hold after every step:

(a) Who was held back, was held back by a head that could use the room that he would have taken.
(b) Whoever is admitted takes nothing from a head that was overtaken `max_bypass` times or is due before him; and what a
    head counts is exactly how often somebody took room that it could have used.
(c) When admission rests, each head before which nobody stands like that does not fit.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.quotas import NamespaceSettings, Quota
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.queue import admission as admission_module
from py_scheduler.scheduler.queue.admission import Admission
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.settings import EngineSettings
from tests.faults.queue_oracle import Held, RoomOracle, Want, demand_of
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.placement import Lease
    from py_scheduler.scheduler.queue.entries import ReadyEntry

LAYOUTS = (
    [NodeResource(node_ip="n", gpus=[0, 1, 2, 3], cpu=8, memory_gb=8)],
    [
        NodeResource(node_ip="a", gpus=[0, 1], cpu=4, memory_gb=8, named={"licence": 2}, labels={"zone": "a"}),
        NodeResource(node_ip="b", gpus=[0, 1], cpu=4, memory_gb=4, labels={"zone": "b"}),
        NodeResource(node_ip="c", gpus=[], cpu=6, memory_gb=4, named={"licence": 1}),
    ],
    [
        NodeResource(node_ip="a", gpus=[0, 1, 2], cpu=3, memory_gb=4, named={"licence": 3}, labels={"zone": "a"}),
        NodeResource(node_ip="b", gpus=[0], cpu=8, memory_gb=8, named={"licence": 1}, labels={"zone": "b"}),
    ],
)
SAMPLES = {
    "gpu": Resource(gpu=1),
    "pair": Resource(gpu=2),
    "share": Resource(gpu=0.5, cpu=1),
    "cpu": Resource(cpu=2),
    "both": Resource(gpu=1, cpu=3),
    "licence": Resource(named={"licence": 1}),
    "zone a": Resource(gpu=1, required_labels={"zone": "a"}),
    "zone b": Resource(cpu=1, memory_gb=1, required_labels={"zone": "b"}),
    "memory": Resource(memory_gb=2, cpu=1),
    "nothing": Resource(),
}
LEASES = (Resource(gpu=1), Resource(gpu=0.25), Resource(cpu=2), Resource(gpu=1, cpu=1, named={"licence": 1}))
NAMESPACES = ("x", "y")
BUDGET = 4
BATCHES = st.tuples(
    st.sampled_from(sorted(SAMPLES)),
    st.integers(1, 6),
    st.sampled_from(NAMESPACES),
    st.booleans(),
    st.integers(0, 3),
)
"""What sample and how many, whose they are, whether evals, and of which step."""


def specs() -> dict[str, EvaluatorSpec]:
    def budget(one: Resource) -> Resource:
        return Resource(
            gpu=BUDGET * one.gpu,
            cpu=BUDGET * one.cpu,
            memory_gb=BUDGET * one.memory_gb,
            named={name: BUDGET * amount for name, amount in one.named.items()},
            concurrency=BUDGET,
        )

    return {
        name: spec_of(SolvingAgent(), name, resource=budget(one), run_resource=one, eval_resource=one, batch_size=None)
        for name, one in SAMPLES.items()
    }


def one_look_a_turn() -> AbstractContextManager[object]:
    """So that no busy machine changes what a turn admits, and anything may happen between two looks at the line."""
    return patch.multiple(admission_module, _TURN_SECONDS=0.0, _LOOKS=1)


class Running:
    """A token that was handed out, in the pool and in the oracle."""

    def __init__(self, entry: ReadyEntry, token: PlacementToken, held: Held, taken_at: float) -> None:
        self.entry, self.token, self.held, self.taken_at = entry, token, held, taken_at


class QueueAndRules(RuleBasedStateMachine):
    """Everything that may come and go around admission."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        permits=st.sampled_from((3, 6, 1_000)),
        max_bypass=st.integers(0, 3),
        eval_weight=st.sampled_from((1.0, 0.0, 3.0, "by_batch_id")),
        max_wait=st.sampled_from((None, 5.0)),
        quota=st.sampled_from((None, 2, 3, 5)),
        weight=st.sampled_from((1.0, 3.0)),
        turns=st.sampled_from((1 << 30, 1 << 30, 1, 4)),
        load=st.lists(BATCHES, min_size=4, max_size=10),
    )
    def begin(
        self,
        *,
        layout: list[NodeResource],
        permits: int,
        max_bypass: int,
        eval_weight: Any,
        max_wait: float | None,
        quota: int | None,
        weight: float,
        turns: int,
        load: list[tuple[str, int, str, bool, int]],
    ) -> None:
        """turns: how many pass between two events at most, each of which looks at one entry. load: what is there at
        once, so that much waits from the start.
        """
        self.turns = turns
        self.now = 0.0
        self.max_bypass = max_bypass
        self.pool = PlacementPool(layout)
        self.oracle = RoomOracle(layout, permits)
        self.specs = specs()
        namespaces = {"x": NamespaceSettings(weight=weight, max_running_samples=quota)}
        self.quotas = Quotas(namespaces)
        self.configured = quota
        self.ended: set[AttemptRef] = set()
        self.running: list[Running] = []
        self.leases: dict[str, ReadyLease] = {}
        self.overtaken: dict[int, int] = {}
        """By arrival: how often each waiting entry was, as the oracle counts."""
        self.pushed = 0
        ledger = SimpleNamespace(is_waiting=lambda ref: ref not in self.ended)
        recorder = SimpleNamespace(ledger=ledger, record=lambda *_: ())
        self.admission = Admission(
            self.pool,
            cast("Any", recorder),
            cast("Any", SimpleNamespace(monotonic=lambda: self.now)),
            EngineSettings(
                max_running_samples=permits,
                max_bypass=max_bypass,
                eval_weight=eval_weight,
                max_wait_seconds=max_wait,
                has_fixed_nodes=False,
            ),
            lambda *_: None,
            self.quotas,
            namespaces,
        )
        self.queue, self.room = self.admission._queue, self.admission.room
        self.take, self.room.take = self.room.take, self.is_taken  # type: ignore[method-assign]
        self.admit, self.queue.admit = self.queue.admit, self.is_admitted  # type: ignore[method-assign]
        self._set_quota()
        for batch in load:
            self.push(batch)

    def _set_quota(self, further: int | None = None) -> None:
        self.quotas.limit_further({} if further is None else {"*": Quota(max_running_samples=further)})
        for namespace in NAMESPACES:
            said = [limit for limit in (self.configured if namespace == "x" else None, further) if limit is not None]
            self.oracle.quotas[namespace] = min(said, default=1 << 30)

    # What comes

    @rule(batch=BATCHES)
    def push(self, batch: tuple[str, int, str, bool, int]) -> None:
        name, count, namespace, is_eval, step = batch
        self.pushed += 1
        task, submission = task_of(name, is_eval=is_eval), f"s{self.pushed}"
        attempts = [
            PlannedAttempt(
                ref=AttemptRef(submission, number, 1),
                task=task,
                first_sample_no=number,
                sample_count=1,
                submission_id=submission,
                namespace=namespace,
                batch_key=(float(step), 0),
                queued_at=self.now,
            )
            for number in range(count)
        ]
        self.admission.enqueue(self.specs[name], attempts)
        self.sweep()

    @rule(
        one=st.sampled_from(LEASES),
        count=st.integers(1, 3),
        namespace=st.sampled_from(NAMESPACES),
        step=st.integers(0, 3),
    )
    def request_lease(self, one: Resource, count: int, namespace: str, step: int) -> None:
        if count > self.oracle.quotas[namespace]:
            return  # The lease manager refuses it.
        self.pushed += 1
        name = f"l{self.pushed}"

        def grant(_: Lease) -> None:
            self.leases.pop(name, None)

        demand = PlacementDemand(per_sample=one, max_tokens=count)
        with one_look_a_turn():
            entry = self.admission.enqueue_lease(namespace, (float(step), 0), demand, count, grant)
        if not entry.is_gone:
            self.leases[name] = entry
        self.sweep()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.admission.withdraw(self.leases.pop(data.draw(st.sampled_from(sorted(self.leases)))))
        self.sweep()

    @rule(data=st.data(), share=st.sampled_from((0.5, 1.0)))
    def end_attempts(self, data: st.DataObject, share: float) -> None:
        batches = [entry for entry in self.queue.entries() if isinstance(entry, ReadyBatch)]
        if batches:
            batch = data.draw(st.sampled_from(batches))
            ended = {attempt.ref for attempt in batch.attempts[: int(share * len(batch.attempts))]}
            self.ended |= ended
            self.admission.attempts_were_ended()
            for task_id in sorted({ref.task_id for ref in ended}):
                self.admission.leave_out(task_id)
        self.sweep()

    # What comes back

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.sampled_from((0.0, 0.5, 3.0)))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        self._give_back(data.draw(st.sampled_from(self.running)))
        self.sweep()

    def _give_back(self, running: Running) -> None:
        self.running.remove(running)
        running.token.release()
        self.oracle.give_back(running.held)
        entry = running.entry
        if running.held.is_stranded:
            self._tell_of_stranded()
        if isinstance(entry, ReadyBatch):
            self.admission.permit_returned(entry.spec, entry.flow[0], running.taken_at)
        else:
            self.admission.lease_returned(entry.flow[0], entry.per_sample, 1, running.taken_at)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def strand(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        if isinstance(running.entry, ReadyBatch):
            running.held.is_stranded = True
            self._tell_of_stranded()
        self.sweep()

    def _tell_of_stranded(self) -> None:
        stranded = [running for running in self.running if running.held.is_stranded]
        self.admission.room_is_stranded(
            [
                (
                    cast("ReadyBatch", running.entry).spec,
                    cast(
                        "Any",
                        SimpleNamespace(
                            planned=SimpleNamespace(namespace=running.entry.flow[0]),
                            node_ip=running.token.node_ip,
                            gpu_ids=tuple(running.token.gpu_ids),
                        ),
                    ),
                )
                for running in stranded
            ]
        )

    @rule(data=st.data())
    def drain_or_resume(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.oracle.pool.present()))
        if node.takes_tokens:
            self.pool.drain_node(node.name)
            self.oracle.pool.drain(node.name)
        else:
            self.pool.resume_node(node.name)
            self.oracle.pool.resume(node.name)
        self.admission.nodes_changed()
        self.sweep()

    @rule(further=st.sampled_from((None, 1, 3)))
    def change_quotas(self, further: int | None) -> None:
        self._set_quota(further)
        self.admission.quotas_changed()
        self.sweep()

    @rule(seconds=st.sampled_from((0.5, 4.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.admission.room_returned()
        self.sweep()

    # The rules

    def sweep(self) -> None:
        with one_look_a_turn():
            if any(not self.admission._admit_for_one_turn() for _ in range(self.turns)):
                self.check_that_nobody_waits_for_others()

    def want_of(self, entry: ReadyEntry) -> Want:
        namespace, demand = entry.flow[0], demand_of(entry.per_sample)
        if not isinstance(entry, ReadyBatch):
            return Want(namespace, demand, entry.shape[1], takes_permits=False)
        live = sum(attempt.ref not in self.ended for attempt in entry.attempts)
        limits = (live, BUDGET, self.oracle.max_permits, self.oracle.quotas[namespace])
        return Want(namespace, demand, min(limits), takes_permits=True)

    def line_up(self) -> list[ReadyEntry]:
        """The heads in the order of service, each of which is the first of its shape."""
        line = list(self.queue._line_up(self.now))
        oldest_first: dict[object, ReadyEntry] = {}
        for entry in self.queue.entries():
            known = oldest_first.get((entry.flow, entry.shape))
            if known is None or entry.order < known.order:
                oldest_first[entry.flow, entry.shape] = entry
        assert {id(entry) for entry in oldest_first.values()} <= {id(entry) for entry in line}
        return line

    def holds(self, head: ReadyEntry, entry: ReadyEntry) -> bool:
        """Whether nobody may take room any more that the head could use, of those that stand where the entry does."""
        if not self.oracle.fits_ever(self.want_of(head)):
            return False
        if self.overtaken.get(head.order[3], 0) >= self.max_bypass:
            return True
        if head.flow == entry.flow:
            return False
        if head.flow[0] == entry.flow[0]:
            waiting, weight_of = self.queue.namespaces[head.flow[0]].waiting, self.queue.policy.weight_of
            own, other = waiting[head.flow], waiting[entry.flow]
            if own.is_background != other.is_background:
                return other.is_background
            return other.virtual_time >= own.virtual_time + head.shape[1] / (weight_of(head.flow) or 1.0)
        shares = self.room.shares
        after = shares.level(head.flow[0], self.now) + self.queue.level_of(head)
        return shares.level(entry.flow[0], self.now) >= after

    def is_taken(self, entry: ReadyEntry, now: float) -> Any:
        """In place of the room's own `take`."""
        if self.oracle.fits_now(self.want_of(entry)):
            line = self.line_up()
            place = next(place for place, other in enumerate(line) if other is entry)
            self.passed = [(head, self.holds(head, entry)) for head in line[:place]]
        return self.take(entry, now)

    def is_admitted(self, entry: ReadyEntry, now: float) -> Any:
        """In place of the queue's own `admit`."""
        want, taken = self.want_of(entry), self.admit(entry, now)
        if taken is None:
            return None
        real = list(self.room.last_taken)
        assert len(real) == want.tokens == entry.tokens
        assert self.oracle.quota_left(want.namespace) >= want.tokens
        held = [self.oracle.take_at(want, token.node_ip, token.gpu_ids) for token in real if token is not None]
        self.running += [
            Running(entry, token, mine, self.now) for token, mine in zip(real, held, strict=True) if token is not None
        ]
        for head, holds in self.passed:
            took = self.oracle.took_from(want, [mine.token for mine in held], self.want_of(head))
            assert not (took and holds), "it took room that a head kept"
            self.overtaken[head.order[3]] = self.overtaken.get(head.order[3], 0) + took
            assert head.bypassed == self.overtaken[head.order[3]]
        return taken

    def check_that_nobody_waits_for_others(self) -> None:
        line = self.line_up()
        for place, entry in enumerate(line):
            want = self.want_of(entry)
            if not want.tokens:
                assert self.room.permits_out >= self.oracle.max_permits, "nothing of it is left to run"
                continue
            if not self.oracle.fits_now(want):
                continue
            heads = [self.want_of(head) for head in line[:place] if self.holds(head, entry)]
            assert not self.oracle.can_go_beside(want, heads), f"{entry} could go, and waits"

    def teardown(self) -> None:
        """Nothing waits for ever: whatever can fit goes, once all comes back."""
        if not hasattr(self, "admission"):
            return
        self.turns = 1 << 30
        for node in self.oracle.pool.present():
            if not node.takes_tokens:
                self.pool.resume_node(node.name)
                self.oracle.pool.resume(node.name)
        self.admission.nodes_changed()
        self._set_quota()
        self.admission.quotas_changed()
        self.sweep()
        while self.running:
            self._give_back(self.running[0])
            self.sweep()
        left = [self.want_of(entry) for entry in self.queue.entries()]
        stuck = [want for want in left if want.tokens and self.oracle.fits_ever(want)]
        assert not stuck, f"{stuck} still wait, {self.room.permits_out} permits are out"


TestQueueRules = QueueAndRules.TestCase
# 100 examples take 12 s of processor time, of which two busy cores made 64 s: a test may take 120.
# For a longer run, TEST_QUEUE_EXAMPLES=2000 with `--timeout 0`.
# A failing run is told as it was drawn, because to shrink it takes longer than a test may. To shrink it, run it again
# with all phases and `--timeout 0`: .hypothesis remembers the example.
TestQueueRules.settings = settings(
    max_examples=int(os.environ.get("TEST_QUEUE_EXAMPLES", "60")),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
    print_blob=True,
)
