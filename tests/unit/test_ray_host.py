"""What RayHost does when Ray is slow or says nothing, with a Ray that a test plays."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters import ray_runner
from py_scheduler.adapters.ray_runner import RayHost
from py_scheduler.domain.runners import RaySettings, RunnerSettings
from tests.support.fake_clock import settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FakeActor:
    def __init__(self) -> None:
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.play = self

    def remote(self, *_: Any) -> FakeActor:
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
    monkeypatch.setattr(ray_runner, "_connected_ray", lambda _address: fake)
    return fake


@pytest.fixture
async def host(ray: FakeRay) -> AsyncIterator[RayHost]:
    made = RayHost(RaySettings())
    await made.open()
    yield made
    ray.gate.set()
    await made.close()


async def until_killed(ray: FakeRay, count: int) -> None:
    """Threads tell nobody here."""
    async with asyncio.timeout(10):
        while len(ray.killed) < count:  # noqa: ASYNC110 -- as said
            await asyncio.sleep(0.001)


async def test_an_actor_that_comes_after_its_start_was_given_up_is_ended(host: RayHost, ray: FakeRay) -> None:
    launching = asyncio.create_task(host.launch(("", None), RunnerSettings()))
    await settle()
    launching.cancel()
    await asyncio.wait([launching])
    assert launching.cancelled(), "who gives up does not wait for Ray"
    assert host._expected == {}, "its secret opens nothing any more"
    ray.gate.set()
    await until_killed(ray, 1)
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
    async with asyncio.timeout(10):
        while not ray.actors:  # noqa: ASYNC110 -- a thread tells nobody here
            await asyncio.sleep(0.001)
    await settle()
    launching.cancel()
    await asyncio.wait([launching])
    await until_killed(ray, 1)
    assert host._expected == {}


async def test_a_ray_that_says_nothing_at_first_is_asked_again(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runner, "_WATCH_SECONDS", 0.0)
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
