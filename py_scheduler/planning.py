"""What fits a cluster: answered on an empty pool of the same nodes, before there is a server.

Every number comes from placing: the pool of the server would say the same.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.resources import AMOUNTS, NODE_AMOUNTS, NodeResource, Resource
from py_scheduler.errors import UnplaceableError
from py_scheduler.placement import PlacementPool, check_deadlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from py_scheduler.placement import NodeUsage

UNLIMITED = (1 << 63) - 1
"""The pool's answer for a sample that holds nothing."""

_LEASE_TOKENS = 1 << 20


class BatchNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluator's demand."""

    evaluator_id: str
    budget: Resource
    """What one batch may hold."""
    per_sample: Resource
    """What one sample holds."""
    max_batch_samples: int | None = None
    """The most samples of one batch; None: the budget alone decides."""


class OneMoreNode(msgspec.Struct, frozen=True, kw_only=True):
    """What a node like `like` would add to the empty cluster: the largest, of those that have the labels and named
    resources of a sample if there are any.
    """

    like: str
    tokens: int
    batches: int


class SpecPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluator gets of the empty cluster. With two nodes of 8 GPUs, and batches of 6 samples of one GPU each,
    6 tokens are needed, 16 are possible, and 2 batches run at once.
    """

    evaluator_id: str
    tokens_needed: int | None
    """By its largest batch; None when its budget holds no sample."""
    tokens_possible: int | None
    """On all nodes; None without a limit."""
    batches_at_once: int | None
    """None without a limit."""
    bounds_batch: tuple[str, ...]
    """What keeps the largest batch from being larger."""
    limits: tuple[tuple[str, int], ...]
    """What keeps one batch more out, and on how many nodes that is short (0: it is no matter of nodes). The most
    frequent comes first.
    """
    one_more_node: OneMoreNode | None
    """None when it lacks no nodes."""
    problem: str = ""
    """Why it can never run, with the way out; empty when it can."""


def plan_spec(nodes: Sequence[NodeResource], need: BatchNeed, max_running_samples: int | None = None) -> SpecPlan:
    """`max_running_samples` is the server's limit over all batches; None for none.

    Raises InvalidArgumentError for nodes or amounts that are none.
    """
    pool = PlacementPool(nodes)
    possible = pool.max_tokens_for(need.per_sample)
    bounds = bounds_of_batch(need)
    try:
        needed = _tokens_needed(need)
    except UnplaceableError as error:
        return SpecPlan(
            evaluator_id=need.evaluator_id,
            tokens_needed=None,
            tokens_possible=_limited(possible),
            batches_at_once=0,
            bounds_batch=bounds,
            limits=(("budget", 0),),
            one_more_node=None,
            problem=str(error),
        )
    batches = _batches_at_once(needed, possible, max_running_samples)
    if batches is None:
        limits: tuple[tuple[str, int], ...] = ()
    elif batches < possible // needed:
        limits = (("max_running_samples", 0),)
    else:
        with _filled(pool, nodes, need.per_sample, possible):
            limits = tuple(pool.explain(need.per_sample, 1).shortages)
    larger = _one_more_node(nodes, need, needed, possible, max_running_samples)
    return SpecPlan(
        evaluator_id=need.evaluator_id,
        tokens_needed=needed,
        tokens_possible=_limited(possible),
        batches_at_once=batches,
        bounds_batch=bounds,
        limits=limits,
        one_more_node=larger,
        problem="" if needed <= possible else _way_out(pool, nodes, need, needed - possible, larger),
    )


def sample_packing(
    nodes: Sequence[NodeResource], need: BatchNeed, max_running_samples: int | None = None
) -> list[NodeUsage]:
    """The nodes after as many of the largest batches as run at once were placed on the empty cluster."""
    pool = PlacementPool(nodes)
    needed = _tokens_needed(need)
    possible = pool.max_tokens_for(need.per_sample)
    batches = _batches_at_once(needed, possible, max_running_samples)
    if batches is None or possible == UNLIMITED:
        return pool.nodes()
    with _filled(pool, nodes, need.per_sample, min(batches * needed, max_running_samples or possible)):
        return pool.nodes()


def _one_more_node(
    nodes: Sequence[NodeResource], need: BatchNeed, needed: int, possible: int, max_running_samples: int | None
) -> OneMoreNode | None:
    if possible == UNLIMITED or not nodes:
        return None
    suiting = [node for node in nodes if not _lacks(node, need.per_sample)]
    largest = max(suiting or nodes, key=_size)
    another = msgspec.structs.replace(largest, node_ip=f"another {largest.node_ip}")
    tokens = PlacementPool([*nodes, another]).max_tokens_for(need.per_sample)
    before, after = (_batches_at_once(needed, room, max_running_samples) or 0 for room in (possible, tokens))
    return OneMoreNode(like=largest.node_ip, tokens=tokens - possible, batches=after - before)


def _size(node: NodeResource) -> tuple[float, ...]:
    return (len(node.gpus), *(getattr(node, kind) for kind in NODE_AMOUNTS))


def _lacks(node: NodeResource, sample: Resource) -> list[str]:
    """Labels and named resources of a single sample that an empty node does not have."""
    labels = sample.required_labels.items()
    return [
        *(f"{count:,} of named.{name}" for name, count in sample.named.items() if node.named.get(name, 0) < count),
        *(f"the label {key}={value}" for key, value in labels if node.labels.get(key) != value),
    ]


def _tokens_needed(need: BatchNeed) -> int:
    samples = UNLIMITED if need.max_batch_samples is None else need.max_batch_samples
    return check_deadlock(
        None,
        evaluator_id=need.evaluator_id,
        budget=need.budget,
        per_sample=need.per_sample,
        max_batch_samples=samples,
    )


def _batches_at_once(needed: int, possible: int, max_running_samples: int | None) -> int | None:
    by_cluster = None if possible == UNLIMITED else possible // needed
    if max_running_samples is None:
        return by_cluster
    # A batch that is larger than the limit gets as many tokens as the limit, and nothing runs beside it.
    by_server = max(1, max_running_samples // needed)
    return by_server if by_cluster is None else min(by_cluster, by_server)


@contextmanager
def _filled(pool: PlacementPool, nodes: Sequence[NodeResource], per_sample: Resource, tokens: int) -> Iterator[None]:
    """The pool with that many tokens taken, one after another: where batches of them would lie."""
    room = Resource(
        gpu=1 + sum(len(node.gpus) for node in nodes),
        concurrency=_LEASE_TOKENS,
        named={name: sum(node.named.get(name, 0) for node in nodes) for name in per_sample.named},
        **{kind: 1 + sum(getattr(node, kind) for node in nodes) for kind in NODE_AMOUNTS},
    )
    with ExitStack() as stack:
        for first in range(0, tokens, _LEASE_TOKENS):
            lease = pool.try_acquire_batch(room, per_sample, min(_LEASE_TOKENS, tokens - first))
            assert lease is not None
            stack.enter_context(lease)
        yield


def bounds_of_batch(need: BatchNeed) -> tuple[str, ...]:
    """The parts of the budget, or the batch's size, that hold the fewest samples."""
    holds: dict[str, float] = {"concurrency": need.budget.concurrency}
    for amount in AMOUNTS:
        per_sample = getattr(need.per_sample, amount)
        if per_sample > 0:
            only = Resource(**{amount: per_sample})
            budget = Resource(**{amount: getattr(need.budget, amount)}, concurrency=UNLIMITED >> 1)
            holds[amount] = _holds(budget, only)
    for name, count in need.per_sample.named.items():
        holds[f"named.{name}"] = need.budget.named.get(name, 0) // count
    bounds = {f"budget {name}": samples for name, samples in holds.items()}
    if need.max_batch_samples is not None:
        bounds["batch size"] = need.max_batch_samples
    least = min(bounds.values())
    return tuple(name for name, samples in bounds.items() if samples == least)


def _holds(budget: Resource, per_sample: Resource) -> int:
    need = BatchNeed(evaluator_id="", budget=budget, per_sample=per_sample)
    try:
        return _tokens_needed(need)
    except UnplaceableError:
        return 0


def _way_out(
    pool: PlacementPool, nodes: Sequence[NodeResource], need: BatchNeed, missing: int, larger: OneMoreNode | None
) -> str:
    try:
        check_deadlock(
            pool,
            evaluator_id=need.evaluator_id,
            budget=need.budget,
            per_sample=need.per_sample,
            max_batch_samples=UNLIMITED if need.max_batch_samples is None else need.max_batch_samples,
        )
    except UnplaceableError as error:
        problem = str(error)
    else:
        raise AssertionError("the pool takes what was counted as too much")
    nobody_has = set.intersection(*(set(_lacks(node, need.per_sample)) for node in nodes)) if nodes else set()
    if nobody_has:
        return f"{problem}; no node has {' or '.join(sorted(nobody_has))}"
    if larger is None or larger.tokens == 0:
        return f"{problem}; no node like the largest takes a single sample: lower what a sample holds first"
    more = -(-missing // larger.tokens)
    return f"{problem}; {more} more {'node' if more == 1 else 'nodes'} like {larger.like} would do"


def _limited(tokens: int) -> int | None:
    return None if tokens == UNLIMITED else tokens
