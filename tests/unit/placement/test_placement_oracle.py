"""The pool from Python against the plain reference pool, step by step through random sequences."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from py_scheduler.domain.resources import AMOUNTS
from py_scheduler.errors import LeaseError
from py_scheduler.placement import Lease, NodeResource, PlacementPool, Resource
from tests.support import strategies
from tests.support.reference_pool import Demand, ReferencePool, Token

SHARES = [0.0, 1 / 3, 1 / 6, 1 / 7, 0.05, 0.18, 0.29, 0.001, 0.5, 1.0, 2.0, 3.0]
REST = [(1.0, 0.0), (0.0, 2.0), (0.3, 0.7), (4.0, 16.0)]
NAMED = [{}, {}, {"licence": 1}, {"licence": 2, "sandbox": 1}, {"sandbox": 3}]
LABELS = [{}, {}, {"zone": "a"}, {"zone": "b", "gpu_type": "h100"}]
AMPLE = Resource(
    gpu=10_000,
    cpu=1_000_000,
    memory_gb=1_000_000,
    concurrency=1_000_000,
    named={"licence": 1_000_000, "sandbox": 1_000_000},
)

any_samples = st.builds(
    lambda gpu, rest, named, labels: Resource(
        gpu=gpu, cpu=rest[0], memory_gb=rest[1], named=named, required_labels=labels
    ),
    st.sampled_from(SHARES),
    st.sampled_from(REST) | st.just((0.0, 0.0)),
    st.sampled_from(NAMED),
    st.sampled_from(LABELS),
)
samples = any_samples.filter(lambda sample: bool(sample.taken))
"""Of those that take nothing there is no end."""


def test_every_kind_of_room_is_drawn() -> None:
    drawn = strategies.some_of(samples)
    assert [kind for kind in AMOUNTS if not any(getattr(sample, kind) for sample in drawn)] == []


Held = tuple[Lease, list[Token | None]]


def demand_of(sample: Resource) -> Demand:
    return Demand.of(sample.gpu, sample.cpu, sample.memory_gb, sample.named, sample.required_labels)


class PoolAgainstReference(RuleBasedStateMachine):
    """Every rule does the same to both pools and compares what they answer."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PlacementPool([])
        self.reference = ReferencePool()
        self.added = 0

    @rule(
        gpus=st.lists(st.integers(0, 15), max_size=10, unique=True),
        cpu=st.sampled_from([0.0, 3.0, 17.5, 96.0]),
        memory_gb=st.sampled_from([0.0, 5.0, 320.0]),
        named=st.dictionaries(st.sampled_from(["licence", "sandbox"]), st.integers(1, 9)),
        labels=st.sampled_from([{}, {"zone": "a"}, {"zone": "b", "gpu_type": "h100"}, {"zone": "b"}]),
    )
    def add_node(
        self, gpus: list[int], cpu: float, memory_gb: float, named: dict[str, int], labels: dict[str, str]
    ) -> None:
        name = f"node-{self.added}"
        self.added += 1
        node = NodeResource(node_ip=name, gpus=gpus, cpu=cpu, memory_gb=memory_gb, named=named, labels=labels)
        self.pool.add_node(node)
        self.reference.add(name, gpus, cpu, memory_gb, named, labels)

    @rule(target=leases, sample=samples, count=st.integers(1, 3) | st.integers(1, 60))
    def acquire(self, sample: Resource, count: int) -> Held:
        assert self.pool.free_tokens_for(sample) == self.reference.free_tokens(demand_of(sample))
        expected = self.reference.acquire(demand_of(sample), count)
        return self.compared(self.pool.try_acquire_batch(AMPLE, sample, count), expected)

    @rule(target=leases, sample=any_samples, count=st.integers(1, 12), others=st.lists(any_samples, max_size=2))
    def acquire_apart(self, sample: Resource, count: int, others: list[Resource]) -> Held:
        """On the nodes that could hold none of the others."""
        nodes, demands = self.reference.present(), [demand_of(other) for other in others]
        for other, demand in zip(others, demands, strict=True):
            assert [self.pool.could_hold(other, node.name) for node in nodes] == [
                node.could_hold(demand) for node in nodes
            ]
            everywhere = all(node.could_hold(demand) for node in nodes if node.takes_tokens)
            assert self.pool.could_hold_everywhere(other) == everywhere
            assert self.pool.emptied().free_tokens_for(other) == self.pool.max_tokens_for(other)
        apart = {node.name for node in nodes if not any(map(node.could_hold, demands))}
        expected = self.reference.acquire_on(demand_of(sample), count, apart)
        return self.compared(self.pool.try_acquire_apart(sample, count, others), expected)

    def compared(self, lease: Lease | None, expected: list[Token] | None) -> Held:
        if lease is None or expected is None:
            assert lease is None
            assert expected is None
            return multiple()  # type: ignore[return-value]
        placed = [(token.node_ip, token.gpu_ids) for token in lease.tokens]
        assert placed == [(token.node.name, token.gpu_ids) for token in expected]
        return lease, list(expected)

    @rule(held=leases, index=st.integers(0, 59))
    def release_token(self, held: Held, index: int) -> None:
        lease, tokens = held
        index %= len(tokens)
        token = tokens[index]
        if token is None:
            try:
                lease.tokens[index].release()
            except LeaseError:
                return
            raise AssertionError("a token was given back twice")
        lease.tokens[index].release()
        self.reference.release(token)
        tokens[index] = None

    @rule(held=consumes(leases), silently=st.booleans())
    def release_lease(self, held: Held, silently: bool) -> None:
        lease, tokens = held
        if silently:
            with lease:
                pass
        else:
            lease.release()
        for index, token in enumerate(tokens):
            if token is not None:
                self.reference.release(token)
                tokens[index] = None

    @precondition(lambda self: self.reference.present())
    @rule(any_node=st.integers(0, 1_000), change=st.sampled_from(["drain", "resume", "remove"]))
    def change_node(self, any_node: int, change: str) -> None:
        present = self.reference.present()
        name = present[any_node % len(present)].name
        if change == "drain":
            self.pool.drain_node(name)
            self.reference.drain(name)
        elif change == "resume":
            self.pool.resume_node(name)
            self.reference.resume(name)
        else:
            assert self.pool.remove_node(name) == self.reference.remove(name)

    @invariant()
    def both_are_alike(self) -> None:
        expected = [
            (
                node.name,
                [free for _, free in sorted(node.gpus.items())],
                node.cpu,
                node.memory,
                node.named,
                node.labels,
                node.tokens,
            )
            for node in self.reference.present()
        ]
        actual = [
            (
                node.node_ip,
                [round(free * 1e6) for free in node.gpu_free],
                round(node.cpu_free * 1000),
                round(node.memory_gb_free * 1024),
                node.named_free,
                node.labels,
                node.tokens,
            )
            for node in self.pool.nodes()
        ]
        assert actual == expected


TestPoolAgainstReference = PoolAgainstReference.TestCase
TestPoolAgainstReference.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
