"""Nodes that are drained and removed under a server at work: what runs there, what is leased there, what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.api.server import ApiServer
from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone
from py_scheduler.domain.leases import LeaseState, Shortage
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import Outcome, TaskState
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import LeaseError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock
from tests.support.handlers import GatedAgent, spec_of, two_nodes
from tests.support.harness import running_engine
from tests.support.watching import events_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.client import Submission
    from py_scheduler.domain.requests import WatchedEvent
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.engine import Engine

pytestmark = [pytest.mark.timeout(60)]

GPU = Resource(gpu=1.0)
LEAVING, STAYING = "10.0.0.1", "10.0.0.2"


class Cluster:
    """Two nodes of two GPUs each behind a server, whose samples need a GPU each and run until `agent.gate` opens."""

    def __init__(self, engine: Engine, pool: PlacementPool, clock: FakeClock, agent: GatedAgent, address: str) -> None:
        self.pool, self.clock, self.agent = pool, clock, agent
        self.nodes_have_changed = engine.nodes_have_changed
        self.client = SchedulerClient(address, reconnect_seconds=0.0)
        self.leases = PlacementClient(address, reconnect_seconds=0.0)

    async def nodes(self) -> dict[str, tuple[float, ...]]:
        """The free share of each GPU, as clients are told; none of it is ever negative."""
        found = {node.node_ip: node.free_gpus for node in (await self.client.server_info()).nodes}
        assert all(0 <= free <= 1 for gpus in found.values() for free in gpus)
        return found

    async def room(self) -> tuple[int, int]:
        """Free tokens, and those of the pool when it is empty."""
        capacity = await self.leases.capacity(GPU)
        assert 0 <= capacity.free_tokens <= capacity.max_tokens
        return capacity.free_tokens, capacity.max_tokens

    async def submit(self, count: int, batch_id: int, deadline_seconds: float | None = None) -> Submission:
        config = TaskConfig(task_type="agent", task_deadline_seconds=deadline_seconds)
        return await self.client.submit([Task(config=config, prompt=str(batch_id))] * count, batch_id)

    async def places(self, submission: Submission, count: int) -> list[str]:
        """Where so many attempts have started."""
        events = await events_until(self.client, submission, AttemptStarted, count)
        return sorted(event.node_ip for event in events if isinstance(event, AttemptStarted))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    pool, clock, agent = two_nodes(gpus=2), FakeClock(), GatedAgent()
    specs = [
        spec_of(
            agent,
            name,
            resource=Resource(gpu=float(count), concurrency=count),
            run_resource=GPU,
            eval_resource=GPU,
            batch_size=count,
        )
        for name, count in (("agent", 1), ("three", 3))
    ]
    settings = EngineSettings(has_fixed_nodes=False, max_bypass=4)
    async with running_engine(*specs, pool=pool, clock=clock, settings=settings) as harness:
        server = ApiServer(harness.engine, "1", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        made = Cluster(harness.engine, pool, clock, agent, address)
        async with made.client, made.leases:
            yield made
        agent.gate.set()
        await server.stop()


def ends(events: list[WatchedEvent]) -> list[AttemptEnded]:
    return [event for event in events if isinstance(event, AttemptEnded)]


async def test_what_runs_on_a_draining_node_finishes_there_and_nothing_more_begins_there(cluster: Cluster) -> None:
    running = await cluster.submit(4, 1)
    assert await cluster.places(running, 4) == [LEAVING, LEAVING, STAYING, STAYING]
    waiting = await cluster.submit(2, 2)
    cluster.pool.drain_node(LEAVING)
    cluster.nodes_have_changed()
    assert await cluster.room() == (0, 2)
    explained = await cluster.leases.explain(GPU)
    assert {node.node_ip: node.short for node in explained.nodes} == {
        LEAVING: (Shortage.DRAINING,),
        STAYING: (Shortage.GPU,),
    }
    assert "draining" in (await cluster.client.get_submission(2)).waiting[0].reason
    cluster.agent.gate.set()
    first = await events_until(cluster.client, running, TaskDone, 4)
    assert [(event.attempt_no, event.samples[0].outcome) for event in ends(first)] == [(1, Outcome.SOLVED)] * 4
    second = await events_until(cluster.client, waiting, TaskDone, 2)
    assert {event.samples[0].node_ip for event in ends(second)} == {STAYING}
    assert await cluster.nodes() == {LEAVING: (1.0, 1.0), STAYING: (1.0, 1.0)}
    assert await cluster.room() == (2, 2)
    cluster.pool.resume_node(LEAVING)
    cluster.nodes_have_changed()
    assert await cluster.room() == (4, 4)


async def test_a_lease_on_a_draining_node_lasts_while_it_is_renewed_and_then_gives_no_room_back(
    cluster: Cluster,
) -> None:
    kept = await cluster.leases.acquire(GPU, 2, ttl_seconds=20.0)
    lapsing = await cluster.leases.acquire(GPU, 2, ttl_seconds=20.0)
    assert {token.node_ip for lease in (kept, lapsing) for token in lease.tokens} == {LEAVING, STAYING}
    assert {token.node_ip for token in lapsing.tokens} == {LEAVING, STAYING}
    cluster.pool.drain_node(LEAVING)
    cluster.nodes_have_changed()
    await cluster.clock.advance(15.0)
    assert await cluster.leases.renew(kept) == 20.0
    assert await cluster.room() == (0, 2)
    await cluster.clock.advance(10.0)
    with pytest.raises(LeaseError):
        await cluster.leases.renew(lapsing)
    assert await cluster.room() == (1, 2), "what lapsed on the draining node is nobody's"
    assert sum((await cluster.nodes())[LEAVING]) == 1.0
    assert (await cluster.leases.release(kept)).held_tokens == 0
    assert await cluster.room() == (2, 2)


async def test_what_runs_on_a_draining_node_past_its_deadline_is_evicted(cluster: Cluster) -> None:
    running = await cluster.submit(4, 1, deadline_seconds=60.0)
    await cluster.places(running, 4)
    cluster.pool.remove_node(LEAVING)
    cluster.nodes_have_changed()
    assert set(await cluster.nodes()) == {LEAVING, STAYING}, "it leaves with what it holds"
    await cluster.clock.advance(61.0)
    done = [event for event in await events_until(cluster.client, running, TaskDone, 4) if isinstance(event, TaskDone)]
    assert {(event.state, event.reason) for event in done} == {(TaskState.FAILED, "task_deadline_seconds (60) passed")}
    assert await cluster.nodes() == {STAYING: (1.0, 1.0)}
    assert await cluster.room() == (2, 2)


async def test_a_node_that_is_removed_while_it_is_leased_goes_with_its_last_token(cluster: Cluster) -> None:
    lease = await cluster.leases.acquire(GPU, 3, ttl_seconds=1_000.0)
    held = [token for token in lease.tokens if token.node_ip == LEAVING]
    cluster.pool.remove_node(LEAVING)
    cluster.nodes_have_changed()
    pending = await cluster.leases.acquire(GPU, 3, request_id="more", ttl_seconds=1_000.0, wait=False)
    assert pending.state is LeaseState.PENDING, "for room that may come: nodes of this server come and go"
    for token in held:
        assert LEAVING in await cluster.nodes()
        await cluster.leases.release(lease, token.token_no)
    assert set(await cluster.nodes()) == {STAYING}
    cluster.pool.add_node(NodeResource(node_ip=LEAVING, gpus=[0, 1, 2], cpu=64, memory_gb=64))
    cluster.nodes_have_changed()
    granted = await cluster.leases.acquire(GPU, 3, request_id="more", ttl_seconds=1_000.0)
    assert granted.state is LeaseState.GRANTED
    assert await cluster.room() == (5 - 3 - (3 - len(held)), 5)
    await cluster.leases.release(granted)
    await cluster.leases.release(lease)
    assert await cluster.room() == (5, 5)


async def test_what_no_longer_fits_holds_nobody_back_until_its_node_returns(cluster: Cluster) -> None:
    """Case 23 of the faults: its node was lost after it was accepted, and more tasks pass it than `max_bypass`."""
    config = TaskConfig(task_type="three")
    cluster.agent.gate.set()
    blocker = await cluster.leases.acquire(GPU, 2, ttl_seconds=10_000.0)
    large = await cluster.client.submit([Task(config=config)] * 3, 0)
    cluster.pool.remove_node(LEAVING)
    cluster.nodes_have_changed()
    await cluster.leases.release(blocker)
    assert await cluster.room() == (2, 2)
    small = await cluster.submit(20, 1)
    assert len(ends(await events_until(cluster.client, small, TaskDone, 20))) == 20
    assert (await cluster.client.get_submission(0)).open_tasks == 3
    cluster.pool.add_node(NodeResource(node_ip=LEAVING, gpus=[0, 1], cpu=64, memory_gb=64))
    cluster.nodes_have_changed()
    assert len(ends(await events_until(cluster.client, large, TaskDone, 3))) == 3
