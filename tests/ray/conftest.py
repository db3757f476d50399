"""A real Ray cluster of several nodes on this machine, each a raylet of its own. Collected where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
LABEL = "py-scheduler/node"
_OBJECT_STORE_BYTES = 80 << 20

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]
# Before the import, which reads them. Nothing is reported to anybody.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


class LocalCluster:
    """Nodes by the name that a placement token has for them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - only where Ray is installed

        # What the nodes' workers import is what the tests import.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # A node that fails is to be noticed within seconds, also by a cluster whose other nodes are as busy.
        watching = {"health_check_period_ms": 1_000, "health_check_failure_threshold": 4}
        head = _node_args(num_cpus=0, _system_config=watching)
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(labels={LABEL: name}, **_node_args(num_cpus=2))

    def remove(self, name: str) -> None:
        """As a machine that fails: its raylet and all workers are killed."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


def _node_args(**args: Any) -> dict[str, Any]:
    return {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False, **args}


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    import ray  # noqa: PLC0415 - as above

    made = LocalCluster()
    for name in ("node-a", "node-b"):
        made.add(name)
    ray.init(address=made.cluster.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.cluster.shutdown()
    sys.stdout.flush()
