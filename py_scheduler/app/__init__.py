"""The composition root of the server: builds every part from a Config, runs it, and takes it down again.

    configuration -> specs, pool, backends, scheduler, steps, API -> bind -> start backends -> serve
    SIGTERM -> NOT_SERVING -> no new tasks -> running samples finish (drain_seconds) -> streams end with a cursor

Invariants

- Nothing is started before everything was built and the port was bound. So most faults of a configuration show within a
  second.
- After the signal the process ends within `stop_limit_seconds`, whatever a handler does.
"""

from __future__ import annotations

from py_scheduler.app.backends import build_generation
from py_scheduler.app.building import (
    Parts,
    build,
    build_pool,
    build_simulated,
    build_sources,
    build_specs,
    cluster_nodes,
)
from py_scheduler.app.serving import in_process, open_front, run, running, serve, start_backends, stop_limit_seconds
from py_scheduler.handlers.parts import make_sandbox

__all__ = [
    "Parts",
    "build",
    "build_generation",
    "build_pool",
    "build_simulated",
    "build_sources",
    "build_specs",
    "cluster_nodes",
    "in_process",
    "make_sandbox",
    "open_front",
    "run",
    "running",
    "serve",
    "start_backends",
    "stop_limit_seconds",
]
