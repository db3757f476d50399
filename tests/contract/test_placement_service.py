"""Leases over real channels: an engine with a pool, clients that race, vanish, renew and lose."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2_grpc
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.api.server import ApiServer
from py_scheduler.client import BlockingPlacementClient, PlacementClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.leases import LeaseState, Shortage
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseError,
    ResourceExhaustedError,
    UnplaceableError,
)
from tests.support.fake_clock import FakeClock
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine
from tests.support.trainers.leases import GPU, gpu_pool
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from py_scheduler.domain.leases import LeaseView
    from py_scheduler.domain.ports import Clock
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.engine import Engine

RACERS = 4
CYCLES = 300


class Leasing(msgspec.Struct):
    engine: Engine
    pool: PlacementPool | None
    server: ApiServer
    address: str

    @property
    def free(self) -> int:
        assert self.pool is not None
        return self.pool.free_tokens_for(GPU)


@asynccontextmanager
async def leasing(*gpus: int, clock: Clock | None = None) -> AsyncIterator[Leasing]:
    pool = gpu_pool(*gpus) if gpus else None
    async with running_engine(spec_of(SolvingAgent()), pool=pool, clock=clock or LoopClock()) as harness:
        server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        try:
            yield Leasing(harness.engine, pool, server, address)
        finally:
            await server.stop()


def client_of(server: Leasing, **settings: Any) -> PlacementClient:
    return PlacementClient.connect(server.address, reconnect_seconds=0.0, **settings)


# Calls


async def test_a_lease_from_its_grant_to_its_end() -> None:
    async with leasing(2, 1) as server, client_of(server) as client:
        lease = await client.acquire(GPU, 2, request_id="a", ttl_seconds=20)
        assert lease.state is LeaseState.GRANTED
        assert [(token.node_ip, token.gpu_ids) for token in lease.tokens] == [("10.0.0.0", (0,)), ("10.0.0.0", (1,))]
        assert await client.renew(lease) == 20
        capacity = await client.capacity(GPU)
        assert (capacity.max_tokens, capacity.free_tokens) == (3, 1)
        assert capacity.nodes == server.engine.leases.capacity(GPU).nodes
        placement = await client.explain(GPU, 2)
        assert (placement.wanted_tokens, placement.free_tokens, placement.max_tokens) == (2, 1, 3)
        assert [node.short for node in placement.nodes] == [(Shortage.GPU,), (Shortage.GPU,)]
        assert [node.short for node in (await client.explain(GPU)).nodes] == [(Shortage.GPU,), ()]
        pending = await client.acquire(GPU, 3, request_id="b", wait=False)
        assert (pending.state, pending.reason) == (
            LeaseState.PENDING,
            "needs 3 tokens at once, 1 are free; short of gpu on 2 nodes",
        )
        reply = await client.release(lease, 0, request_id="r")
        assert (reply.released_tokens, reply.held_tokens) == (1, 1)
        assert await client.release(lease, 0, request_id="r") == reply
        await client.release(lease)
        again = await client.acquire(GPU, 3, request_id="b", wait=True)
        assert (again.state, again.lease_id) == (LeaseState.GRANTED, pending.lease_id)


async def test_a_call_that_waits_is_answered_pending_before_its_deadline() -> None:
    async with leasing(1) as server, client_of(server) as client:
        await client.acquire(GPU)
        view = await client.acquire(GPU, timeout_seconds=0.4)
        assert view.state is LeaseState.PENDING


async def test_refusals_come_back_as_they_were_raised() -> None:
    async with leasing(1) as server, client_of(server) as client:
        lease = await client.acquire(GPU, request_id="a")
        with pytest.raises(AlreadyExistsError):
            await client.acquire(GPU, request_id="a", batch_id=1)
        with pytest.raises(UnplaceableError, match="the pool can give 1"):
            await client.acquire(GPU, 2)
        with pytest.raises(InvalidArgumentError) as caught:
            await client.acquire(Resource(), 0, ttl_seconds=-1)
        assert [v.field for v in caught.value.violations] == ["ttl_seconds", "max_tokens", "per_sample"]
        with pytest.raises(InvalidArgumentError, match=r"per_sample\.gpu"):
            await client.acquire(Resource(gpu=-1))
        with pytest.raises(LeaseError, match="another fencing token"):
            await client.renew(msgspec.structs.replace(lease, fencing_token=1))
        with pytest.raises(LeaseError, match="not known"):
            await client.release(msgspec.structs.replace(lease, lease_id="l0"))


async def test_the_door_names_every_fault_at_once() -> None:
    async with leasing(1) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = placement_service_pb2_grpc.PlacementServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.AcquireLease(service.AcquireLeaseRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for field in ("batch_id", "request_id", "ttl_seconds", "max_tokens", "per_sample"):
            assert field in (caught.value.details() or "")
        for refused in (stub.RenewLease(service.RenewLeaseRequest()), stub.ReleaseLease(service.ReleaseLeaseRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_a_pool_the_server_says_how_to_get_one() -> None:
    async with leasing() as server, client_of(server) as client:
        with pytest.raises(FailedPreconditionError, match="--env-cluster-layout"):
            await client.acquire(GPU)
        with pytest.raises(FailedPreconditionError, match="--env-cluster-layout"):
            await client.capacity(GPU)


# Races


async def test_racing_clients_never_overbook() -> None:
    """Racers note what they were granted and strike it out before they give it back: no GPU may be noted twice."""
    noted: dict[tuple[str, tuple[int, ...]], str] = {}
    fencing_tokens: list[int] = []

    async def race(client: PlacementClient, name: str, randomly: random.Random) -> None:
        for number in range(CYCLES):
            lease = await client.acquire(GPU, randomly.randint(1, 3), request_id=f"{name}{number}")
            assert lease.state is LeaseState.GRANTED
            places = [(token.node_ip, token.gpu_ids) for token in lease.tokens]
            for place in places:
                assert place not in noted, f"{place} of {name} is {noted[place]}'s"
                noted[place] = name
            fencing_tokens.append(lease.fencing_token)
            await asyncio.sleep(0)
            for place in places:
                del noted[place]
            await client.release(lease)

    # Debugging the loop takes most of the time of thousands of calls.
    asyncio.get_running_loop().set_debug(False)
    async with leasing(2, 1) as server, client_of(server) as one, client_of(server) as two:
        async with asyncio.TaskGroup() as racers:
            for number in range(RACERS):
                racers.create_task(race(one, f"one{number}/", random.Random(number)))
                racers.create_task(race(two, f"two{number}/", random.Random(-number)))
        assert server.free == 3
    assert len(set(fencing_tokens)) == 2 * RACERS * CYCLES


async def test_room_of_a_client_that_vanished_returns_after_its_ttl() -> None:
    clock = FakeClock()
    async with leasing(2, clock=clock) as server, client_of(server) as survivor:
        async with client_of(server) as client:
            await client.acquire(GPU, 2, ttl_seconds=30)
        waiting = asyncio.create_task(survivor.acquire(GPU, 2))
        await eventually(lambda: bool(server.engine.leases._pending))
        await clock.advance(29)
        assert (server.free, waiting.done()) == (0, False)
        await clock.advance(1)
        assert (await waiting).state is LeaseState.GRANTED


async def test_a_client_that_vanished_while_it_waited_is_dropped_after_its_ttl() -> None:
    clock = FakeClock()
    async with leasing(1, clock=clock) as server, client_of(server) as survivor:
        held = await survivor.acquire(GPU, ttl_seconds=3_600)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(client_of(server))
            waiting = asyncio.create_task(client.acquire(GPU, request_id="a", ttl_seconds=30))
            await eventually(lambda: bool(server.engine.leases._pending))
        (record,) = server.engine.leases._pending
        await asyncio.wait([waiting])
        await eventually(lambda: not record.waiters)
        await clock.advance(30)
        assert record.state is LeaseState.ENDED
        await survivor.release(held)
        assert server.free == 1


# Leases that keep themselves


async def test_a_block_holds_its_lease_and_gives_back_what_is_left() -> None:
    async with leasing(3) as server, client_of(server) as client:
        async with client.lease(GPU, 3) as lease:
            assert (len(lease.tokens), server.free) == (3, 0)
            await lease.release(lease.tokens[1])
            assert ([token.token_no for token in lease.tokens], server.free) == ([0, 2], 1)
        assert server.free == 3
        with pytest.raises(ZeroDivisionError):
            async with client.lease(GPU, 3):
                raise ZeroDivisionError
        assert server.free == 3


async def test_it_renews_in_the_background() -> None:
    clock = FakeClock()
    async with leasing(1, clock=clock) as server, client_of(server) as client:
        async with client.lease(GPU, ttl_seconds=0.6):
            (record,) = server.engine.leases._records.values()
            for _ in range(3):
                clock.now += 0.5
                await eventually(lambda: record.expires_at == clock.now + 0.6)
                assert server.free == 0
        assert server.free == 1


async def own(client: PlacementClient, then: Callable[[], Awaitable[object]], ttl_seconds: float = 0.6) -> None:
    """Holds a lease for ever."""
    async with client.lease(GPU, ttl_seconds=ttl_seconds):
        await then()
        await asyncio.Event().wait()


async def test_the_owner_is_stopped_when_the_lease_is_lost() -> None:
    clock = FakeClock()
    async with leasing(1, clock=clock) as server, client_of(server) as client:
        with pytest.raises(LeaseError, match="expired: nobody renewed it"):
            await own(client, lambda: clock.advance(0.6))
        assert server.free == 1


async def test_an_owner_may_be_told_instead_of_stopped() -> None:
    clock = FakeClock()
    told = []

    async def listen(client: PlacementClient) -> None:
        async with client.lease(GPU, ttl_seconds=0.6, cancel_on_loss=False) as lease:
            await clock.advance(0.6)
            await lease.lost.wait()
            told.append(lease.loss)

    async with leasing(1, clock=clock) as server, client_of(server) as client:
        with pytest.raises(LeaseError, match="expired") as caught:
            await listen(client)
        assert told == [caught.value]


async def test_a_server_that_is_gone_for_a_ttl_loses_the_lease() -> None:
    async with leasing(1) as server, client_of(server) as client:
        with pytest.raises(LeaseError, match="could not be renewed within its ttl"):
            await own(client, server.server.stop)


async def test_a_closed_client_loses_its_lease() -> None:
    async with leasing(1) as server, client_of(server) as client:
        with pytest.raises(LeaseError, match=r"its client was closed|could not be renewed"):
            await own(client, client.close)


async def test_a_cancelled_owner_gives_back_and_stays_cancelled() -> None:
    async with leasing(1) as server, client_of(server) as client:
        holding = asyncio.Barrier(2)
        owner = asyncio.create_task(own(client, holding.wait))
        await holding.wait()
        assert server.free == 0
        owner.cancel()
        await asyncio.wait([owner])
        assert owner.cancelled()
        assert server.free == 1


async def test_waiting_for_a_block_ends_with_its_time_and_leaves_no_request() -> None:
    async with leasing(1) as server, client_of(server) as client:
        async with client.lease(GPU):
            with pytest.raises(ResourceExhaustedError, match=r"no room within 0\.3 s: needs 1 tokens"):
                async with client.lease(GPU, timeout_seconds=0.3):
                    pass
            assert not server.engine.leases._pending
            waiting = asyncio.create_task(client.lease(GPU).__aenter__())
            await eventually(lambda: bool(server.engine.leases._pending))
            waiting.cancel()
            await asyncio.wait([waiting])
            assert not server.engine.leases._pending
        assert server.free == 1


# The blocking twin


def test_it_has_every_public_method_of_the_asyncio_client() -> None:
    lifecycle = {"open", "close", "connect", "lease"}
    for name, method in inspect.getmembers(PlacementClient, inspect.isfunction):
        if not name.startswith("_") and name not in lifecycle:
            twin = inspect.signature(getattr(BlockingPlacementClient, name))
            assert list(twin.parameters) == list(inspect.signature(method).parameters), name


async def test_the_blocking_twin_does_the_same() -> None:
    clock = FakeClock()

    def work(address: str) -> LeaseView:
        with BlockingPlacementClient(address, reconnect_seconds=0.0) as client:
            with client.lease(GPU, 2) as lease:
                assert len(lease.tokens) == 2
                lease.release(lease.tokens[0])
                assert client.capacity(GPU).free_tokens == 1
            held = client.acquire(GPU)
            assert client.renew(held) == 30
            client.release(held)
            assert client.explain(GPU, 2).free_tokens == 2
            return client.acquire(GPU, 2, request_id="last")

    async with leasing(2, clock=clock) as server:
        last = await asyncio.to_thread(work, server.address)
        assert (last.state, server.free) == (LeaseState.GRANTED, 0)


async def test_a_thread_hears_of_a_lost_lease_at_the_end_of_its_block() -> None:
    clock = FakeClock()

    def work(address: str, loop: asyncio.AbstractEventLoop) -> None:
        with BlockingPlacementClient(address) as client, client.lease(GPU, ttl_seconds=0.6) as lease:
            asyncio.run_coroutine_threadsafe(clock.advance(0.6), loop).result()
            while not lease.is_lost:
                time.sleep(0.01)

    async with leasing(1, clock=clock) as server:
        with pytest.raises(LeaseError, match="expired"):
            await asyncio.to_thread(work, server.address, asyncio.get_running_loop())
