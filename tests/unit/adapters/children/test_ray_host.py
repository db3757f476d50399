"""What RayHost does when Ray is slow or says nothing, with a Ray that a test plays."""

from __future__ import annotations

import asyncio
import concurrent.futures
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.children import ray_actor, ray_host
from py_scheduler.adapters.children.ray_host import RayHost
from py_scheduler.domain.runners.frames import PROTOCOL, Hello, encode
from py_scheduler.domain.runners.runner import HandlerPlan, RaySettings, RunnerSettings
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children.session import ChildSession
from tests.support.fake_clock import settle
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.adapters.children.ray_actor import RayActor


class FakeActor:
    def __init__(self) -> None:
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.serve = self
        self.secret = ""

    def remote(self, _host: str, _port: int, secret: str, _variables: dict[str, str]) -> FakeActor:
        self.secret = secret
        return self

    def future(self) -> concurrent.futures.Future[None]:
        return self.ended


class FakeRay:
    """`gate` holds up the thread that starts an actor. `answers`: what `nodes` says next, the last one for ever."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.actors: list[FakeActor] = []
        self.killed: list[FakeActor] = []
        self.answers: list[list[str] | Exception] = [[]]
        self.asked = 0

    def remote(self, **_: Any) -> Any:
        return lambda _class: self

    def options(self, **_: Any) -> Any:
        ray = self

        class Starting:
            def remote(self) -> FakeActor:
                ray.gate.wait(60)
                ray.actors.append(FakeActor())
                return ray.actors[-1]

        return Starting()

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)
        if not actor.ended.done():
            actor.ended.set_exception(RuntimeError("the actor died"))

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [{"NodeManagerAddress": name, "NodeID": name, "Alive": True} for name in answer]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_host, "_connected_ray", lambda _address: fake)
    return fake


@pytest.fixture
async def host(ray: FakeRay) -> AsyncIterator[RayHost]:
    made = RayHost(RaySettings())
    await made.open()
    yield made
    ray.gate.set()
    await made.close()


async def test_an_actor_that_comes_after_its_start_was_given_up_is_ended(host: RayHost, ray: FakeRay) -> None:
    launching = asyncio.create_task(host.launch(("", None), RunnerSettings()))
    await settle()
    launching.cancel()
    await asyncio.wait([launching])
    assert launching.cancelled(), "who gives up does not wait for Ray"
    assert len(host._expected) == 0, "its secret opens nothing any more"
    ray.gate.set()
    await eventually(lambda: ray.killed, pause_seconds=0.001)
    assert ray.killed == ray.actors


async def test_a_host_that_closes_waits_for_actors_that_nobody_wants(ray: FakeRay) -> None:
    host = RayHost(RaySettings())
    await host.open()
    launching = asyncio.create_task(host.launch(("", None), RunnerSettings()))
    await settle()
    launching.cancel()
    await asyncio.wait([launching])
    closing = asyncio.create_task(host.close())
    await settle()
    ray.gate.set()
    await closing
    assert ray.killed == ray.actors
    assert len(ray.actors) == 1


async def test_an_actor_that_does_not_connect_in_time_is_ended(host: RayHost, ray: FakeRay) -> None:
    ray.gate.set()
    launching = asyncio.create_task(host.launch(("", None), RunnerSettings()))
    await eventually(lambda: ray.actors, pause_seconds=0.001)
    await settle()
    launching.cancel()
    await asyncio.wait([launching])
    await eventually(lambda: ray.killed, pause_seconds=0.001)
    assert len(host._expected) == 0


async def connected(host: RayHost, ray: FakeRay, **hello: Any) -> tuple[RayActor, asyncio.StreamWriter]:
    """An actor that was launched and has said its secret."""
    ray.gate.set()
    launching = asyncio.create_task(host.launch(("", None), RunnerSettings()))
    await eventually(lambda: ray.actors and ray.actors[-1].secret, pause_seconds=0.001)
    _reader, writer = await asyncio.open_connection(*host._address)
    said = encode(Hello(pid=7, secret=ray.actors[-1].secret, **hello))
    writer.write(struct.pack(">I", len(said)) + said)
    return await launching, writer


async def test_an_actor_of_another_version_is_told_so_and_ended(host: RayHost, ray: FakeRay) -> None:
    actor, writer = await connected(host, ray, protocol=PROTOCOL + 1)
    session = ChildSession(actor, lambda _: {}, lambda _: None)
    with pytest.raises(RunnerStartError, match=r"it speaks protocol \d+, not \d+: install the same version"):
        await session.prepare(HandlerPlan(name="m:C"), ())
    assert ray.killed == ray.actors
    writer.close()


async def test_an_actor_that_ray_cannot_kill_ends_with_its_connection(
    host: RayHost, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "END_SECONDS", 0.01)
    actor, writer = await connected(host, ray)

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Ray was shut down")

    monkeypatch.setattr(ray, "kill", gone)
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    actor.listen(lambda _: None, over.set_result)
    actor.kill("it is replaced")
    actor.kill("the server is ending")
    assert await over == "it is replaced (its connection broke)"
    assert not actor.is_alive
    writer.close()


async def test_a_start_that_fails_because_its_node_is_gone_says_so_before_it_fails(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise who waits there would hear that nothing can be started, and lose an attempt with it."""
    monkeypatch.setattr(ray_host, "_WATCH_SECONDS", 3600.0)
    ray.answers = [["a", "b"], ["b"]]
    told: list[tuple[str, bool]] = []
    host = RayHost(RaySettings())
    host.node_changed = lambda node, is_there: told.append((node, is_there))
    await host.open()
    await eventually(lambda: ray.asked, pause_seconds=0.001)
    with pytest.raises(RunnerStartError, match="no live Ray node is called 'a'"):
        await host.launch(("a", ()), RunnerSettings())
    assert told == [("a", False)]
    await host.close()


async def test_a_secret_opens_one_connection_once(host: RayHost, ray: FakeRay) -> None:
    actor, writer = await connected(host, ray)
    reader, second = await asyncio.open_connection(*host._address)
    said = encode(Hello(pid=8, secret=ray.actors[-1].secret))
    second.write(struct.pack(">I", len(said)) + said)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    assert actor.is_alive
    second.close()
    writer.close()


async def test_a_ray_that_says_nothing_at_first_is_asked_again(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "_WATCH_SECONDS", 0.0)
    ray.answers = [RuntimeError("not yet"), ["a"], RuntimeError("busy"), ["a", "b"], ["b"]]
    told: list[tuple[str, bool]] = []
    both = asyncio.Event()

    def changed(node: str, is_there: bool) -> None:
        told.append((node, is_there))
        if len(told) == 2:
            both.set()

    host = RayHost(RaySettings())
    host.node_changed = changed
    await host.open()
    async with asyncio.timeout(10):
        await both.wait()
    await host.close()
    assert told == [("b", True), ("a", False)]
