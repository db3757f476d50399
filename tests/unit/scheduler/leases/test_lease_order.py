"""Lease requests and rollout batches in one queue: the order of service, and the bound on overtaking, either way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.leases import LeaseState, LeaseView, RenewRequest
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError, LeaseError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.trainers.leases import GPU, acquire_of, gpu_pool, release_of

if TYPE_CHECKING:
    from py_scheduler.domain.leases import AcquireRequest
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.leases.manager import LeaseManager
    from tests.support.harness import Harness


async def waiting_lease(leases: LeaseManager, name: str, tokens: int, batch_id: int) -> asyncio.Task[LeaseView]:
    call = asyncio.create_task(leases.acquire(acquire_of(name, tokens, batch_id=batch_id, wait=True)))
    await settle()
    return call


async def test_batch_ids_order_leases_and_rollouts_alike() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=GPU, run_resource=GPU)
    async with running_engine(spec, pool=gpu_pool(1), clock=FakeClock()) as harness:
        leases = harness.engine.leases
        held = await leases.acquire(acquire_of("holder"))
        last = await waiting_lease(leases, "seven", 1, batch_id=7)
        await harness.submit([task_of("five")], 5)
        first = await waiting_lease(leases, "three", 1, batch_id=3)
        assert agent.inside == 0
        leases.release(release_of(held))
        await settle()
        assert (first.done(), agent.inside, last.done()) == (True, 0, False)
        leases.release(release_of(await first))
        await settle()
        assert (agent.inside, last.done()) == (1, False)
        agent.gate.set()
        assert (await last).state is LeaseState.GRANTED


async def test_rollouts_pass_a_blocked_lease_request_only_so_often() -> None:
    agent = GatedAgent()
    agent.gate.set()
    spec = spec_of(agent, resource=GPU, run_resource=GPU)
    limits = EngineSettings(max_bypass=3)
    async with running_engine(spec, pool=gpu_pool(4), clock=FakeClock(), settings=limits) as harness:
        leases = harness.engine.leases
        held = await leases.acquire(acquire_of("holder", 3))
        large = await waiting_lease(leases, "large", 4, batch_id=0)
        await harness.submit([task_of(f"{number}") for number in range(10)], 1)
        await settle()
        assert len(agent.order) == 3
        assert (await leases.acquire(acquire_of("large", 4))).bypassed == 3
        held_back = await leases.acquire(acquire_of("small", 1, batch_id=1))
        assert held_back.state is LeaseState.PENDING
        assert held_back.reason.endswith("are ahead of it")
        leases.release(release_of(held))
        assert (await large).bypassed == 3
        assert len(agent.order) == 3
        leases.release(release_of(await large))
        await settle()
        assert len(agent.order) == 10
        assert (await leases.acquire(acquire_of("small", 1, batch_id=1))).state is LeaseState.GRANTED


async def test_lease_requests_pass_a_blocked_rollout_only_so_often() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=Resource(gpu=4, concurrency=4), run_resource=GPU)
    limits = EngineSettings(max_bypass=3)
    async with running_engine(spec, pool=gpu_pool(4), clock=FakeClock(), settings=limits) as harness:
        leases = harness.engine.leases
        held = await leases.acquire(acquire_of("holder", 3))
        await harness.submit([task_of("large", repeat_times=4)], 0)
        await settle()
        states = []
        for number in range(6):
            lease = await leases.acquire(acquire_of(f"{number}", batch_id=1))
            states.append(lease.state)
            if lease.state is LeaseState.GRANTED:
                leases.release(release_of(lease))
                await settle()
        assert states == [LeaseState.GRANTED] * 3 + [LeaseState.PENDING] * 3
        leases.release(release_of(held))
        await settle()
        assert agent.inside == 4
        agent.gate.set()
        await settle()
        assert (await leases.acquire(acquire_of("5", batch_id=1))).state is LeaseState.GRANTED


async def test_leases_need_no_worker() -> None:
    agent = GatedAgent()
    limits = EngineSettings(max_running_samples=1)
    async with running_engine(
        spec_of(agent, resource=GPU, run_resource=GPU), pool=gpu_pool(4), clock=FakeClock(), settings=limits
    ) as harness:
        await harness.submit([task_of("a"), task_of("b")], 0)
        await settle()
        assert agent.inside == 1
        leases = harness.engine.leases
        assert (await leases.acquire(acquire_of("x", 3, batch_id=1))).state is LeaseState.GRANTED
        agent.gate.set()
        await settle()
        assert agent.order == ["a", "b"]


# Nothing is ever lost or held twice

NAMES = st.sampled_from("abcde")
MOVES = st.one_of(
    st.tuples(
        st.just("acquire"), NAMES, st.integers(1, 4), st.sampled_from((0.25, 0.5, 1.0)), st.sampled_from((1.0, 5.0))
    ),
    st.tuples(st.just("renew"), NAMES, st.integers(-1, 1)),
    st.tuples(st.just("release"), NAMES, st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2)),
    st.tuples(st.just("advance"), st.sampled_from((0.5, 1.0, 3.0))),
    st.tuples(st.just("rollout"), st.integers(0, 2)),
)


class Player:
    """Makes moves, and after each compares what leases and rollouts hold with what the pool has not got."""

    def __init__(self, harness: Harness, agent: GatedAgent, pool: PlacementPool, clock: FakeClock) -> None:
        self._harness, self._agent, self._pool, self._clock = harness, agent, pool, clock
        self._leases = harness.engine.leases
        self._requests: dict[str, AcquireRequest] = {}
        self._views: dict[str, LeaseView] = {}
        self._fencing_tokens: dict[int, str] = {}

    async def acquire(self, name: str, tokens: int, gpu: float, ttl_seconds: float) -> None:
        known = self._views.get(name)
        if known is None or known.state is LeaseState.ENDED:
            number = len(self._fencing_tokens) + int(self._clock.now * 10)
            self._requests[name] = acquire_of(
                f"{name}{number}", tokens, per_sample=Resource(gpu=gpu), ttl_seconds=ttl_seconds, batch_id=1
            )
        self._views[name] = await self._leases.acquire(self._requests[name])

    async def renew(self, name: str, off_by: int) -> None:
        view = self._views[name]
        with suppress(LeaseError):
            self._leases.renew(RenewRequest(lease_id=view.lease_id, fencing_token=view.fencing_token + off_by))

    async def release(self, name: str, token_nos: list[int], request_no: int) -> None:
        with suppress(LeaseError, AlreadyExistsError, InvalidArgumentError):
            self._leases.release(release_of(self._views[name], *token_nos, request_id=f"{request_no}"))

    async def advance(self, seconds: float) -> None:
        await self._clock.advance(seconds)

    async def rollout(self, batch_id: int) -> None:
        """Ends those that run and brings another one."""
        gate, self._agent.gate = self._agent.gate, asyncio.Event()
        gate.set()
        await self._harness.submit([task_of("rollout", repeat_times=2)], batch_id)

    async def play(self, script: list[tuple[Any, ...]]) -> None:
        for kind, *values in script:
            if kind not in {"renew", "release"} or values[0] in self._views:
                await getattr(self, kind)(*values)
            await settle()
            self.check()
        self._agent.gate.set()
        for _ in range(10):
            await self._clock.advance(10)
            self._agent.gate.set()
        assert self._free == 4

    @property
    def _free(self) -> float:
        return sum(share for node in self._pool.nodes() for share in node.gpu_free)

    def check(self) -> None:
        held = 0.5 * self._agent.inside
        for record in self._leases._records.values():
            assert (record.state is LeaseState.GRANTED) == bool(record.tokens)
            assert (record.state is LeaseState.PENDING) == (record.entry is not None)
            if record.fencing_token:
                owner = self._fencing_tokens.setdefault(record.fencing_token, record.lease_id)
                assert owner == record.lease_id
            held += sum(token.resource.gpu for token in record.tokens.values())
        assert self._free + held == pytest.approx(4)


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVES, max_size=40))
def test_free_and_held_are_the_total_at_every_step(script: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        agent, clock, pool = GatedAgent(), FakeClock(), gpu_pool(2, 2)
        spec = spec_of(agent, resource=Resource(gpu=1, concurrency=2), run_resource=Resource(gpu=0.5))
        limits = EngineSettings(max_bypass=2, retained_leases=8)
        async with running_engine(spec, pool=pool, clock=clock, settings=limits) as harness:
            await Player(harness, agent, pool, clock).play(script)

    asyncio.run(run())
