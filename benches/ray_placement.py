"""Ray placement groups on a local cluster of several nodes: what one bundle costs, created, ready and removed.

    python benches/ray_placement.py --nodes 16 32 --batch 64

Runs in an environment of its own (requirements/ray.txt) and imports nothing of this project. A node here is a raylet
process with the resources it says it has; no GPU is touched. Prints one JSON object a line, {"nodes", "batch",
"ns_per_token", "rounds"}, as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter

# Before the import, which reads them. Nothing is reported to anybody, and no worker is started: nothing runs here.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DEDUP_LOGS"] = "0"

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

GPUS = 8
CPUS = 96
MEMORY_BYTES = 384 << 30
BUNDLE = {"GPU": 0.33, "CPU": 1.0, "memory": 4 << 30}
MOST_BUNDLES_OF_A_NODE = GPUS * 3
OBJECT_STORE_BYTES = 80 << 20
READY_SECONDS = 120.0


def grow(cluster: Cluster, more: int, end: float) -> bool:
    """Adds nodes and waits for them; False when `end` (monotonic seconds) came before."""
    for _ in range(more):
        if time.monotonic() > end:
            return False
        cluster.add_node(
            wait=False,
            num_cpus=CPUS,
            num_gpus=GPUS,
            memory=MEMORY_BYTES,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
        )
    cluster.wait_for_nodes(timeout=READY_SECONDS)
    return True


def one_round(batch: int, *, check: bool = False) -> float:
    """Seconds for one batch, all or nothing, as a trainer would ask for it."""
    begin = time.perf_counter()
    group = placement_group([BUNDLE] * batch, strategy="SPREAD")
    if not group.wait(READY_SECONDS):
        message = f"a placement group of {batch} bundles was not ready after {READY_SECONDS:g} s"
        raise AssertionError(message)
    ready = time.perf_counter()
    if check:
        bundles = placement_group_table(group)["bundles_to_node_id"]
        assert len(bundles) == batch
        assert max(Counter(bundles.values()).values()) <= MOST_BUNDLES_OF_A_NODE
    before_removal = time.perf_counter()
    remove_placement_group(group)
    return ready - begin + time.perf_counter() - before_removal


def measure(batch: int, seconds: float) -> tuple[float, int]:
    """The median cost of a token in nanoseconds, and of how many rounds."""
    for _ in range(2):
        one_round(batch, check=True)
    rounds: list[float] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 3 or time.perf_counter() < end:
        rounds.append(one_round(batch))
    return statistics.median(rounds) / batch * 1e9, len(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of Ray placement groups.")
    parser.add_argument("--nodes", type=int, nargs="+", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each size is timed")
    parser.add_argument("--stop-after", type=float, default=300.0, help="seconds after which no node is added")
    options = parser.parse_args()
    end = time.monotonic() + options.stop_after
    settings = {"prestart_worker_first_driver": False}
    head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": settings})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        have = 0
        for nodes in sorted(options.nodes):
            if not grow(cluster, nodes - have, end):
                break
            have = nodes
            cost, rounds = measure(options.batch, options.seconds)
            result = {"nodes": nodes, "batch": options.batch, "ns_per_token": cost, "rounds": rounds}
            print(json.dumps(result), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
