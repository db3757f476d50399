"""Handlers in actors of a real Ray cluster, on the nodes that PlacementPool chose, one of which fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.children import ray_actor
from py_scheduler.adapters.children.ray_host import RayHost
from py_scheduler.app.runners import NodesOfRay
from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.generation import STUDENT
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.runners.frames import Hello, Pong, encode
from py_scheduler.domain.runners.runner import RaySettings
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.placement import PlacementPool
from tests.support.fake_clock import FakeClock
from tests.support.harness import samples_in, task_of
from tests.support.models.scripted_model import ScriptedModel
from tests.support.runners.children import Children, Pipe, children, is_there, quick, runner_settings
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.ray.conftest import LocalCluster

pytestmark = pytest.mark.usefixtures("cluster")


def node(name: str) -> NodeResource:
    return NodeResource(node_ip=name, gpus=[4, 5], cpu=2.0, memory_gb=1)


class OnRay(Children):
    host: RayHost
    pool: PlacementPool


@asynccontextmanager
async def on_ray(*names: str, gpu: float = 0.0, **changes: Any) -> AsyncIterator[OnRay]:
    """An engine whose pool follows the cluster's nodes, as a server's does."""
    host, pool = RayHost(RaySettings()), PlacementPool([node(name) for name in names])
    spec = {
        "run_resource": Resource(cpu=1.0, gpu=gpu),
        "resource": Resource(cpu=4.0, gpu=4 * gpu, concurrency=4),
        "batch_size": None,
    }
    settings = runner_settings(max_runners=8, min_runners=0)
    agent = "tests.support.agents.child_handlers:RayAgent"
    async with children(agent, host=host, pool=pool, spec=spec, settings=settings, **changes) as harness:
        host.node_changed = NodesOfRay(pool, [node(name) for name in names], [harness.runner], harness.engine).changed
        made = OnRay(harness, harness.runner)
        made.host, made.pool = host, pool
        yield made
    assert [usage.tokens for usage in pool.nodes()] == [0 for _ in pool.nodes()], "no room is left behind"


async def test_an_actor_runs_where_its_token_says_and_stays(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with on_ray("node-a", "node-b") as harness:
        # All four tokens are taken at once, so both nodes have actors.
        waiting = await harness.submit([task_of(f"wait {pipe}") for _ in range(4)])
        assert len({await pipe.told() for _ in range(4)}) == 4
        busy = [view for view in harness.runner.views() if view.state == "busy"]
        assert sorted(view.node_ip for view in busy) == ["node-a", "node-a", "node-b", "node-b"]
        await harness.engine.abort(AbortRequest(selector=harness.selector(waiting), wait=True))
        pids = harness.pids
        samples = await harness.samples(await harness.submit([task_of("where") for _ in range(12)], batch_id=1))
        assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 12, samples
        for sample in samples:
            assert json.loads(sample.termination_reason) == {"node": sample.node_ip, "gpus": ""}
        assert {sample.reward.details["pid"] for sample in samples} <= set(pids), "who obeyed a stop goes on"


async def test_an_actor_sees_the_gpus_of_its_token() -> None:
    """Which Ray knows nothing of: it would hide them all."""
    async with on_ray("node-a", gpu=1.0) as harness:
        samples = await harness.samples(await harness.submit([task_of("where") for _ in range(2)]))
    for sample in samples:
        assert json.loads(sample.termination_reason)["gpus"] == ",".join(map(str, sample.gpu_ids)) != ""


async def test_an_actor_generates_through_the_gateway_alone() -> None:
    async with on_ray("node-a", generation_backends={STUDENT: ScriptedModel("one", "two")}) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("generate 2")]))
    assert sample.outcome is Outcome.SOLVED, sample.error
    assert sample.trajectory.written_text == "one\ntwo"
    assert sample.termination_reason.startswith(f"{len(sample.trajectory)} tokens")


@pytest.mark.parametrize(("prompt", "how"), [("exit 1", "exit status 1"), ("die", "ActorDiedError")])
async def test_an_actor_that_dies_costs_an_attempt_each_time_and_no_other_task(prompt: str, how: str) -> None:
    async with on_ray("node-a") as harness:
        reply = await harness.submit([task_of(prompt, retry=RetryPolicy(max_loss_retries=1)), task_of("fine")])
        records = await harness.records_until_done(reply)
        ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
        poison = [event for event in ended if event.task_id == reply.task_ids[0]]
        assert [event.state for event in poison] == [AttemptState.LOST] * 2
        assert how in poison[0].message
        assert poison[-1].samples[0].outcome is Outcome.INFRA_OTHER, "never the model's failure"
        (fine,) = [event for event in ended if event.task_id != reply.task_ids[0]]
        assert fine.state is AttemptState.SUCCEEDED


async def test_an_actor_that_ignores_a_stop_is_killed(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with on_ray("node-a") as harness:
        reply = await harness.submit([task_of(f"block {pipe}")])
        await pipe.told()
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert answer.still_stopping == ()
        assert harness.pool.free_tokens_for(Resource(cpu=1.0)) == 2


class CutOff:
    """Ray, as whoever asks it to kill finds it when the network is parted: it does nothing."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def kill(self, actor: Any, *, no_restart: bool) -> None: ...


async def test_an_actor_that_reports_after_its_attempt_was_given_up_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stood still, could not be killed, and wakes up while attempt 2 is played by another."""
    monkeypatch.setattr(ray_actor, "END_SECONDS", 0.1)
    pipe, clock = Pipe(tmp_path / "pipe"), FakeClock()
    leaves = [tmp_path / "first", tmp_path / "second"]
    at_once = quick(retry_backoff_seconds=0.0)
    async with on_ray("node-a", clock=clock, engine_settings=at_once) as harness:
        # Both are there by then, so that it stands still for a moment only: Ray kills what does not answer it for long.
        waiting = await harness.submit([task_of(f"wait {pipe}") for _ in range(2)], batch_id=1)
        pids = {await pipe.told() for _ in range(2)}
        await harness.engine.abort(AbortRequest(selector=harness.selector(waiting), wait=True))
        retry = RetryPolicy(max_failure_retries=1)
        task = task_of(f"return_when_let {pipe} {leaves[0]} {leaves[1]}", retry=retry, attempt_timeout_seconds=1.0)
        reply = await harness.submit([task])
        pid = await pipe.told()
        os.kill(pid, signal.SIGSTOP)
        ray = harness.host._ray
        harness.host._ray = CutOff(ray)
        (actor,) = [child for child in harness.host._children if child.pid == pid]
        monkeypatch.setattr(actor, "_ray", harness.host._ray)
        await clock.advance(1.0)
        await clock.advance(0.5)
        assert {pid, await pipe.told()} == pids
        assert is_there(pid)
        leaves[0].touch()
        os.kill(pid, signal.SIGCONT)
        await eventually(lambda: not is_there(pid), pause_seconds=0.01)
        harness.host._ray = ray
        leaves[1].touch()
        records = await harness.records_until_done(reply)
        ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
        assert [(e.attempt_no, e.state) for e in ended] == [(1, AttemptState.TIMED_OUT), (2, AttemptState.SUCCEEDED)]
        (sample,) = samples_in(records)
        assert (sample.attempt_no, sample.termination_reason) == (2, "attempt 2")
        assert ended[-1].payload == b"attempt 2"


async def test_a_node_that_fails_in_mid_run_costs_attempts_and_no_task(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.add("node-c")
    pipe = Pipe(tmp_path / "pipe")
    async with on_ray("node-b", "node-c") as harness:
        tasks = [task_of(f"wait_first {pipe}") for _ in range(4)] + [task_of("fine") for _ in range(8)]
        reply = await harness.submit(tasks)
        for _ in range(4):
            await pipe.told()
        there = {view.runner_id: view.node_ip for view in harness.runner.views() if view.state == "busy"}
        assert sorted(there.values()) == ["node-b", "node-b", "node-c", "node-c"]
        await asyncio.to_thread(cluster.remove, "node-c")
        await eventually(lambda: [usage.node_ip for usage in harness.pool.nodes()] == ["node-b"], pause_seconds=0.01)
        # The two on the node that is left are let go by hand.
        for view in harness.runner.views():
            if view.node_ip == "node-b" and view.state == "busy":
                os.kill(view.pid, signal.SIGKILL)
        records = await harness.records_until_done(reply)
        ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
        assert sorted(event.state for event in ended) == [AttemptState.LOST] * 4 + [AttemptState.SUCCEEDED] * 12
        assert {sample.node_ip for sample in samples_in(records) if sample.attempt_no > 1} == {"node-b"}
        done = await harness.done(reply)
        assert {task.state for task in done.values()} == {TaskState.SUCCEEDED}


async def test_without_a_node_a_task_waits_and_says_so_and_runs_when_one_is_back(cluster: LocalCluster) -> None:
    cluster.add("node-d")
    async with on_ray("node-d", engine_settings=quick(has_fixed_nodes=False)) as harness:
        await asyncio.to_thread(cluster.remove, "node-d")
        await eventually(lambda: not harness.pool.nodes(), pause_seconds=0.01)
        reply = await harness.submit([task_of("fine")])
        await asyncio.sleep(0)
        (waiting,) = harness.engine.submission(harness.selector(reply)).waiting
        assert waiting.reason == "no node is left in the pool: it waits until one is back"
        cluster.add("node-d")
        (sample,) = await harness.samples(reply)
        assert (sample.outcome, sample.node_ip) == (Outcome.SOLVED, "node-d")


async def test_a_stranger_at_the_runners_port_is_cut_off() -> None:
    host = RayHost(RaySettings())
    await host.open()
    try:
        told = [
            encode(Hello(pid=1, secret="guess")),
            encode(Hello(pid=1, secret="")),
            encode(Pong(order_no=1, resident_mib=1.0)),
            b"GET / HTTP/1.1",
        ]
        for said in (*[struct.pack(">I", len(data)) + data for data in told], struct.pack(">I", 1 << 20)):
            reader, writer = await asyncio.open_connection(*host._address)
            writer.write(said)
            async with asyncio.timeout(5):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            writer.close()
    finally:
        await host.close()
