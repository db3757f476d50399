"""Configurations of simulated clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.config import parse_config

if TYPE_CHECKING:
    from py_scheduler.config import Config


def cluster(
    *, nodes: int = 1, share: float = 0.5, concurrency: int = 1, batch_size: int = 1, evaluators: str = "a", **more: Any
) -> Config:
    """Nodes of 8 GPUs; a sample holds a share of one and a core. more: keys of [scheduler]."""
    layout = {f"n{number}": {"gpus": list(range(8)), "cpu": 512, "memory_gb": 4096} for number in range(nodes)}
    tables = [
        f"""
[[evaluator]]
evaluator_id = "{name}"
handler = "nothing.is.imported:Handler"
resource = {{ gpu = 1e4, cpu = 1e5, concurrency = {concurrency} }}
run_resource = {{ gpu = {share}, cpu = 1 }}
batch_size = {batch_size}
"""
        for name in evaluators.split()
    ]
    settings = {"max_running_samples": 100_000, **more}
    said = "\n".join(f"{key} = {str(value).lower()}" for key, value in settings.items())
    nodes_said = "\n".join(
        f'"{name}" = {{ gpus = {node["gpus"]}, cpu = {node["cpu"]}, memory_gb = {node["memory_gb"]} }}'
        for name, node in layout.items()
    )
    return parse_config(f"[scheduler]\n{said}\n[cluster.layout]\n{nodes_said}\n{''.join(tables)}")
