"""Children as actors of a Ray cluster. Implements `domain.runners.runner.ChildHost`.

PlacementPool decides and Ray obeys: an actor is bound to the node that its token names and asks Ray for no resources.
The server and an actor talk past Ray, over TCP (`domain/runners/frames.py`).

Invariants
  1. A connection belongs to no actor until its first frame, a small one, has named the secret of an actor that is being
     started. Each secret opens one connection, once.
  2. An actor runs on the node that its token names, or not at all.
  3. An actor ends with its connection, and the connection is cut when Ray says that the actor has ended.
  4. The loop never waits for Ray: threads make its calls.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.children.ray_actor import END_SECONDS, Newcomer, RayActor, how_it_ended, kill, told
from py_scheduler.domain.runners.runner import DEFAULT_ENVIRONMENT, is_forbidden
from py_scheduler.domain.values.keys import Keys
from py_scheduler.errors import RunnerStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from py_scheduler.adapters.children.frames import FrameProtocol
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.frames import Hello
    from py_scheduler.domain.runners.runner import RaySettings, RunnerKey, RunnerSettings

    _Arrived = asyncio.Future[tuple[FrameProtocol, int]]

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_ENTRY = "py_scheduler.child_main"


class RayChild:
    """The actor. It is a child like any other, once it is connected."""

    def serve(self, host: str, port: int, secret: str, variables: dict[str, str]) -> None:
        """Returns when the server lets it go."""
        os.environ.update(variables)
        connected = socket.create_connection((host, port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # By name, because what composes a child stands above the adapters.
        importlib.import_module(_ENTRY).serve(connected, secret)


class RayHost:
    """For any number of users, between `open` and `close` of each.

    `node_changed(node, is_there)` is told when nodes of the cluster come and go.
    """

    kind = "ray"

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._users = 0
        self._opening = asyncio.Lock()
        self._ray: Any = None
        self._actor_class: Any = None
        self._server: asyncio.Server | None = None
        self._address = ("", 0)
        self._expected: Keys[_Arrived] = Keys()
        self._children: set[RayActor] = set()
        self._unwanted: set[asyncio.Future[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._known_nodes: set[str] | None = None
        self.node_changed: Callable[[str, bool], None] = lambda _node, _is_there: None

    def key_of(self, token: PlacementToken) -> RunnerKey:
        return (token.node_ip, tuple(token.gpu_ids))

    async def open(self) -> None:
        async with self._opening:
            if self._users == 0:
                await self._open()
            self._users += 1

    async def close(self) -> None:
        async with self._opening:
            self._users -= 1
            if self._users == 0:
                await self._close()

    async def _open(self) -> None:
        """Connects to the cluster and listens for actors."""
        try:
            self._ray = await asyncio.to_thread(_connected_ray, self._settings.address)
        except Exception as error:
            raise RunnerStartError(f"ray.address: no Ray cluster could be reached: {error}") from error
        self._actor_class = self._ray.remote(num_cpus=0, max_restarts=0)(RayChild)
        host, _, port = self._settings.listen.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Newcomer(self._admit), host.strip("[]"), int(port))
        except OSError as error:
            raise RunnerStartError(f"ray.listen: {self._settings.listen} cannot be had: {error}") from error
        self._address = (self._settings.advertised_host or host.strip("[]"), _port_of(self._server))
        self._known_nodes = None
        self._watcher = loop.create_task(self._watch_nodes())

    async def _close(self) -> None:
        """Ends every actor. The connection to the cluster stays: others of this process may use it."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        children = [*self._children]
        for child in children:
            child.kill("the server is ending")
        ending = [*[child.watch for child in children], *self._unwanted]
        if ending:
            await asyncio.wait(ending)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    # Starting

    async def launch(self, key: RunnerKey, settings: RunnerSettings) -> RayActor:
        try:
            return await self._launch(key, settings)
        except RunnerStartError:
            # A permit that waits for a node that is gone is to hear that, and not that nothing can be started there.
            await self._look_at_nodes()
            raise

    async def _launch(self, key: RunnerKey, settings: RunnerSettings) -> RayActor:
        node, gpu_ids = key
        node_id = await self._node_id(node) if node else None
        arrived: _Arrived = asyncio.get_running_loop().create_future()
        secret = self._expected.issue(arrived)
        variables = actor_environment(os.environ, gpu_ids, settings)
        starting = asyncio.ensure_future(asyncio.to_thread(self._start_actor, node_id, secret, variables))
        try:
            # Ray starts the actor even if nobody waits for it any more.
            actor, ended = await asyncio.shield(starting)
            over = told(ended)
            await asyncio.wait([arrived, over], return_when=asyncio.FIRST_COMPLETED)
            if not arrived.done():
                raise RunnerStartError(f"the actor ended before it had connected: {how_it_ended(over)}")
            protocol, pid = arrived.result()
        except BaseException:
            unwanted = asyncio.ensure_future(self._end_unwanted(starting, arrived))
            self._unwanted.add(unwanted)
            unwanted.add_done_callback(self._unwanted.discard)
            if starting.done():
                await asyncio.wait([unwanted], timeout=END_SECONDS)
            raise
        finally:
            self._expected.revoke(secret)
        child = RayActor(self._ray, actor, over, protocol, pid, node)
        self._children.add(child)
        child.watch.add_done_callback(lambda _: self._children.discard(child))
        return child

    async def _end_unwanted(self, starting: asyncio.Future[tuple[Any, Any]], arrived: _Arrived) -> None:
        """Ends an actor that nobody waits for any more, as soon as there is one."""
        await asyncio.wait([starting])
        if arrived.done():
            arrived.result()[0].close()
        if starting.exception() is not None:
            return
        actor, ended = starting.result()
        kill(self._ray, actor)
        await asyncio.wait([told(ended)])

    def _start_actor(self, node_id: str | None, secret: str, variables: dict[str, str]) -> tuple[Any, Any]:
        """In a thread: the actor, and a future of its end."""
        options: dict[str, Any] = {}
        if node_id is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = self._actor_class.options(**options).remote()
        return actor, actor.serve.remote(*self._address, secret, variables).future()

    def _admit(self, protocol: FrameProtocol, hello: Hello) -> bool:
        """Whether this is an actor that somebody waits for."""
        arrived = self._expected.find(hello.secret)
        if arrived is None or arrived.done():
            return False
        arrived.set_result((protocol, hello.pid))
        return True

    # Nodes

    async def _node_id(self, node: str) -> str:
        nodes = await self.nodes()
        if node not in nodes:
            known = ", ".join(nodes) or "none"
            raise RunnerStartError(
                f"no live Ray node is called {node!r} (there are: {known}): name nodes in the cluster layout by their "
                f"address, or start them with the label {self._settings.node_label}={node}"
            )
        return nodes[node]

    async def nodes(self) -> dict[str, str]:
        """The Ray ids of the live nodes, by the name that the cluster layout has for them."""
        found: Iterable[Mapping[str, Any]] = await asyncio.to_thread(self._ray.nodes)
        label = self._settings.node_label
        return {
            str(node.get("Labels", {}).get(label) or node["NodeManagerAddress"]): str(node["NodeID"])
            for node in found
            if node["Alive"]
        }

    async def _watch_nodes(self) -> None:
        """Asks Ray again and again, which tells nobody when a node goes."""
        while True:
            await self._look_at_nodes()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _look_at_nodes(self) -> None:
        async with self._looking:  # An older answer must not come after a newer one.
            try:
                now = set(await self.nodes())
            except Exception as error:  # noqa: BLE001 -- whatever Ray raises, it may answer the next time
                _log.warning("Ray does not say which nodes it has: %s", error)
                return
            known, self._known_nodes = self._known_nodes, now
            self._nodes_are(now, now if known is None else known)

    def _nodes_are(self, now: set[str], known: set[str]) -> None:
        for node in sorted(known - now):
            _log.warning("Ray node %s is gone", node)
            for child in [child for child in self._children if child.node == node]:
                child.kill(f"its node {node} is gone")
            self.node_changed(node, False)
        for node in sorted(now - known):
            _log.info("Ray node %s is there", node)
            self.node_changed(node, True)


def actor_environment(
    environment: Mapping[str, str], gpu_ids: tuple[int, ...] | None, settings: RunnerSettings
) -> dict[str, str]:
    """What an actor gets beside its node's own environment: the listed names without those that belong to a machine,
    and its GPUs.
    """
    said = {
        name: environment[name]
        for name in settings.environment
        if name in environment and name not in DEFAULT_ENVIRONMENT and not is_forbidden(name)
    }
    if gpu_ids is not None:
        said["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    return said


def _connected_ray(address: str) -> Any:
    """In a thread. Raises what Ray raises, ImportError included."""
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(address=address or None, log_to_driver=False, configure_logging=False)
    return ray


def _port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
