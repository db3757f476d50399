"""Placement for the rest of the package: the pool, the cluster layout and the deadlock guard.

The only importer of the extension. The pool itself is Rust (crate `placement_core`); here is what happens before there
is one. Source: seed 1, section 3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from py_scheduler._placement_core import (
    Explanation,
    Lease,
    NodeExplanation,
    NodeUsage,
    PlacementPool,
    PlacementToken,
    check_nodes,
    tokens_in_budget,
)
from py_scheduler.domain.resources import NODE_AMOUNTS, NodeResource, Resource
from py_scheduler.errors import ClusterLayoutError, FieldViolation, UnplaceableError

__all__ = [
    "Explanation",
    "Lease",
    "NodeExplanation",
    "NodeResource",
    "NodeUsage",
    "PlacementPool",
    "PlacementToken",
    "Resource",
    "check_deadlock",
    "load_cluster_layout",
    "load_pool",
    "not_taking",
    "short_words",
    "tokens_in_budget",
]

_NODE_KEYS = ("gpus", *NODE_AMOUNTS, "named", "labels")
_DRAINING = "draining"
_FALLBACK_FLAGS = {"cpu": "--env-num-cpus", "memory_gb": "--env-memory-gb"}


class _Object(list[tuple[str, Any]]):
    """What was an object in the JSON text, with its keys as they were written, so that repeated ones can be seen."""


def load_pool(
    text_or_path: str | Path | None, num_cpus: float | None = None, memory_gb: float | None = None
) -> PlacementPool | None:
    """The pool of a cluster layout; None (batches launch ungated) when there is no layout."""
    nodes = load_cluster_layout(text_or_path, num_cpus, memory_gb)
    return None if nodes is None else PlacementPool(nodes)


def load_cluster_layout(
    text_or_path: str | Path | None, num_cpus: float | None = None, memory_gb: float | None = None
) -> list[NodeResource] | None:
    """The nodes of a layout given as inline JSON or as a path; None when none is given.

    Each node is a list of GPU ids or an object with "gpus", "cpu" and "memory_gb", and "named" (amounts) and "labels"
    (strings) if it has any; a missing cpu or memory_gb becomes `num_cpus` (cores) or `memory_gb` (GiB).
    Raises ClusterLayoutError with every fault at once.
    """
    if text_or_path is None or text_or_path == "":
        return None
    violations: list[FieldViolation] = []
    nodes: list[NodeResource] = []
    fallbacks = {"cpu": num_cpus, "memory_gb": memory_gb}
    for node_ip, entry in _parse(_read(text_or_path)):
        faults: list[str] = []
        nodes.append(_node(node_ip, entry, fallbacks, faults))
        violations.extend(FieldViolation(node_ip, fault) for fault in faults)
    for index, field, description in check_nodes(nodes):
        violations.append(FieldViolation(nodes[index].node_ip, f"{field} {description}"))
    if violations:
        raise ClusterLayoutError(violations)
    return nodes


def check_deadlock(
    pool: PlacementPool | None,
    *,
    evaluator_id: str,
    budget: Resource,
    per_sample: Resource,
    max_batch_samples: int,
) -> int:
    """Refuses a spec whose largest batch could never be admitted; returns how many tokens that batch needs.

    `max_batch_samples` is the spec's largest number of samples in one batch. Without a pool only the budget is
    checked. Raises UnplaceableError, which names the spec, both numbers and the ways out.
    """
    try:
        needed = min(tokens_in_budget(budget, per_sample), max_batch_samples)
    except UnplaceableError as error:
        raise UnplaceableError(f"evaluator spec '{evaluator_id}': {error}") from None
    if pool is None:
        return needed
    capacity = pool.max_tokens_for(per_sample)
    if needed > capacity:
        labels = " and ".join(f"{key}={value}" for key, value in per_sample.required_labels.items())
        raise UnplaceableError(
            f"evaluator spec '{evaluator_id}' needs {needed} tokens for its largest batch, the pool can give "
            f"{capacity} even when empty: add nodes{' with the label ' * bool(labels)}{labels}, "
            f"lower {' or '.join(per_sample.taken) or 'nothing'} per sample, or make the "
            f"spec's budget or batch size smaller"
        )
    return needed


def short_words(explanation: Explanation) -> str:
    """What is short where, for messages: `gpu on 2 nodes, label zone=a on 1 node`; empty when nothing is. Nodes that
    take no samples are counted by `not_taking`: they are short of nothing.
    """
    short = [(what, count) for what, count in explanation.shortages if what != _DRAINING]
    return ", ".join(f"{what} on {_nodes(count)}" for what, count in short)


def not_taking(explanation: Explanation) -> str:
    """`2 nodes take no samples, they are draining`, for messages; empty when all nodes take some."""
    count = dict(explanation.shortages).get(_DRAINING, 0)
    if not count:
        return ""
    return f"{_nodes(count)} " + (
        "takes no samples, it is draining" if count == 1 else "take no samples, they are draining"
    )


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _read(text_or_path: str | Path) -> str:
    if isinstance(text_or_path, str) and text_or_path.lstrip()[:1] in {"{", "["}:
        return text_or_path
    try:
        return Path(text_or_path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ClusterLayoutError(
            f"the cluster layout is neither inline JSON (an object) nor a file that can be read: {error}"
        ) from None


def _parse(text: str) -> list[tuple[str, Any]]:
    try:
        layout = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        raise ClusterLayoutError(f"the cluster layout is not JSON: {error}") from None
    if not isinstance(layout, _Object):
        raise ClusterLayoutError('the cluster layout must be an object such as {"10.0.0.1": [0, 1]}')
    if not layout:
        raise ClusterLayoutError("the cluster layout has no nodes; leave it out to run without a pool")
    return layout


def _node(node_ip: str, entry: object, fallbacks: dict[str, float | None], faults: list[str]) -> NodeResource:
    """The node with harmless values where a fault was found, so that the rest is checked too."""
    if isinstance(entry, _Object):
        given = _fields(entry, faults)
        if "gpus" not in given:
            faults.append("gpus is absent: give a list of GPU ids, [] for a node without GPUs")
    elif isinstance(entry, list):
        given = {"gpus": entry}
    else:
        *others, last = map(json.dumps, _NODE_KEYS)
        faults.append(f"must be a list of GPU ids or an object with {', '.join(others)} and {last}")
        return NodeResource(node_ip=node_ip, gpus=[], named={}, labels={}, **dict.fromkeys(NODE_AMOUNTS, 0.0))
    amounts = {}
    for kind in NODE_AMOUNTS:
        amount = given.get(kind, fallbacks[kind])
        if kind not in given and amount is None:
            faults.append(f"{kind} is absent: give it here or with {_FALLBACK_FLAGS[kind]}")
            amount = 0.0
        amounts[kind] = _amount(kind, amount, faults)
    return NodeResource(
        node_ip=node_ip,
        gpus=_gpu_ids(given.get("gpus", []), faults),
        named=_mapping("named", given.get("named"), faults),
        labels=_mapping("labels", given.get("labels"), faults),
        **amounts,
    )


def _fields(entry: Sequence[tuple[str, Any]], faults: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for key, value in entry:
        if key not in _NODE_KEYS:
            faults.append(f"has the unknown key '{key}': known are {', '.join(_NODE_KEYS)}")
        elif key in given:
            faults.append(f"{key} is given twice")
        else:
            given[key] = value
    return given


def _mapping(field: str, value: object, faults: list[str]) -> dict[str, Any]:
    """Its names and values are judged by `check_nodes`."""
    if value is None:
        return {}
    if not isinstance(value, _Object):
        faults.append(f"{field} must be an object of names and {'whole numbers' if field == 'named' else 'strings'}")
        return {}
    entries: dict[str, Any] = {}
    for name, entry in value:
        if name in entries:
            faults.append(f"{field}.{name} is given twice")
        elif isinstance(entry, bool | list | None):
            # A truth value is an integer to everybody behind this.
            faults.append(f"{field}.{name} must be a {'whole number' if field == 'named' else 'string'}")
        else:
            entries[name] = entry
    return entries


def _gpu_ids(value: object, faults: list[str]) -> list[int]:
    if not isinstance(value, list) or isinstance(value, _Object):
        faults.append("gpus must be a list of GPU ids")
        return []
    ids = [gpu for gpu in value if isinstance(gpu, int) and not isinstance(gpu, bool)]
    if len(ids) < len(value):
        faults.append("gpus must hold whole numbers only")
    # An id that no machine integer holds would hide the other faults of the node.
    huge = [gpu for gpu in ids if abs(gpu) >= 1 << 63]
    faults.extend(f"gpus has the id {gpu:.3e}, which no GPU has" for gpu in map(_as_float, huge))
    return [gpu for gpu in ids if gpu not in huge]


def _amount(field: str, value: object, faults: list[str]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        faults.append(f"{field} must be a number")
        return 0.0
    return _as_float(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
