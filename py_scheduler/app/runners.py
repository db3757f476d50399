"""The runners of evaluators that do not run in the server's loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.adapters.children.process_host import ProcessHost, import_path
from py_scheduler.domain.runners.runner import ANYWHERE, HandlerPlan
from py_scheduler.errors import AlreadyExistsError, NotFoundError
from py_scheduler.execution.children.runners import ChildRunners
from py_scheduler.rollout.environment import variables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.children.ray_host import RayHost
    from py_scheduler.config import Config
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import NodeResource
    from py_scheduler.domain.runners.runner import ChildHost
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.engine import Engine


def build_runners(
    config: Config, pool: PlacementPool | None, ray: RayHost | None, clock: Clock
) -> dict[str, ChildRunners]:
    """By evaluator_id; evaluators that are not there run in the loop. Nothing is started here."""
    hosts: dict[str, ChildHost] = {"process": ProcessHost()}
    if ray is not None:
        hosts["ray"] = ray
    return {
        evaluator.evaluator_id: ChildRunners(
            evaluator.evaluator_id,
            HandlerPlan(name=evaluator.handler, arguments=evaluator.handler_args, key=f"evaluator[{number}]"),
            hosts[evaluator.runner],
            evaluator.runner_settings,
            clock,
            variables,
            import_path=import_path(),
            first_key=ANYWHERE if pool is None or evaluator.runner == "ray" else ("", ()),
        )
        for number, evaluator in enumerate(config.evaluator)
        if evaluator.runner != "inline"
    }


def build_ray(config: Config) -> RayHost | None:
    """None when no evaluator runs there."""
    if all(evaluator.runner != "ray" for evaluator in config.evaluator):
        return None
    from py_scheduler.adapters.children.ray_host import RayHost  # noqa: PLC0415 - most servers need none

    return RayHost(config.ray)


class NodesOfRay:
    """Lets the pool's nodes go and come with those of the Ray cluster.

    Nodes of the cluster that the layout does not name are none of the pool's.
    """

    def __init__(
        self, pool: PlacementPool, nodes: Sequence[NodeResource], runners: Sequence[ChildRunners], engine: Engine
    ) -> None:
        self._pool = pool
        self._nodes = {node.node_ip: node for node in nodes}
        self._runners = runners
        self._engine = engine
        self._telling: asyncio.Handle | None = None

    def changed(self, node: str, is_there: bool) -> None:
        if node not in self._nodes:
            return
        for runners in self._runners:
            if is_there:
                runners.add_node(node)
            else:
                runners.drop_node(node)
        try:
            if is_there:
                self._pool.add_node(self._nodes[node])
            else:
                self._pool.remove_node(node)
        except AlreadyExistsError:  # What ran on it has not ended yet.
            self._pool.resume_node(node)
        except NotFoundError:
            pass  # It was gone before.
        if self._telling is None:  # Once, however many come and go together.
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        self._engine.nodes_have_changed()
