"""Leases from outside, phase by phase, on a clock that stands still."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from py_scheduler.domain.leases import LeaseState, LeaseView, PlacementDemand, Shortage
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseError,
    ResourceExhaustedError,
    UnplaceableError,
)
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine
from tests.support.trainers.leases import GPU, TTL, acquire_of, manager_of, release_of, renew_of

# Granted, renewed, expired


async def test_what_fits_is_granted_at_once_and_comes_back_with_the_release() -> None:
    async with manager_of(2, 2) as manager:
        lease = await manager.leases.acquire(acquire_of("a", 3))
        assert lease.state is LeaseState.GRANTED
        assert len({(token.node_ip, token.gpu_ids) for token in lease.tokens}) == 3
        assert [token.token_no for token in lease.tokens] == [0, 1, 2]
        assert lease.expires_in_seconds == TTL
        assert manager.free == 1
        reply = manager.leases.release(release_of(lease))
        assert (reply.released_tokens, reply.held_tokens, manager.free) == (3, 0, 4)


async def test_a_budget_limits_the_tokens() -> None:
    async with manager_of(8) as manager:
        lease = await manager.leases.acquire(acquire_of("a", 8, budget=Resource(gpu=3, concurrency=8)))
        assert len(lease.tokens) == 3


async def test_it_expires_unless_it_is_renewed() -> None:
    async with manager_of(1) as manager:
        lease = await manager.leases.acquire(acquire_of("a"))
        await manager.clock.advance(TTL - 1)
        assert manager.leases.renew(renew_of(lease)) == TTL
        await manager.clock.advance(TTL - 1)
        assert manager.free == 0
        await manager.clock.advance(1)
        assert manager.free == 1
        with pytest.raises(LeaseError, match="expired: nobody renewed it for ttl_seconds"):
            manager.leases.renew(renew_of(lease))
        with pytest.raises(LeaseError, match="expired"):
            manager.leases.release(release_of(lease))


async def test_a_late_timer_gives_no_time() -> None:
    async with manager_of(1) as manager:
        lease = await manager.leases.acquire(acquire_of("a"))
        manager.clock.now += TTL
        with pytest.raises(LeaseError, match="expired"):
            manager.leases.renew(renew_of(lease))
        assert manager.free == 1


async def test_room_of_an_expired_lease_goes_to_who_waits() -> None:
    async with manager_of(1) as manager:
        await manager.leases.acquire(acquire_of("a"))
        waiting = asyncio.create_task(manager.leases.acquire(acquire_of("b", wait=True)))
        await manager.clock.advance(TTL)
        assert (await waiting).state is LeaseState.GRANTED


async def test_fencing_tokens_rise_and_a_wrong_one_changes_nothing() -> None:
    async with manager_of(1) as manager:
        fencing_tokens = []
        for number in range(10):
            lease = await manager.leases.acquire(acquire_of(f"{number}"))
            fencing_tokens.append(lease.fencing_token)
            for wrong in (0, lease.fencing_token - 1, lease.fencing_token + 1):
                with pytest.raises(LeaseError, match="another fencing token"):
                    manager.leases.renew(renew_of(lease, wrong))
                with pytest.raises(LeaseError, match="another fencing token"):
                    manager.leases.release(msgspec.structs.replace(release_of(lease), fencing_token=wrong))
            assert manager.free == 0
            manager.leases.release(release_of(lease))
        assert fencing_tokens == sorted(set(fencing_tokens))
        assert fencing_tokens[0] > 0


async def test_a_wrong_token_does_not_renew() -> None:
    async with manager_of(1) as manager:
        lease = await manager.leases.acquire(acquire_of("a"))
        await manager.clock.advance(TTL - 1)
        with pytest.raises(LeaseError):
            manager.leases.renew(renew_of(lease, lease.fencing_token + 1))
        await manager.clock.advance(1)
        assert manager.free == 1


# One request id, one lease


async def test_the_same_request_gives_the_same_in_every_phase() -> None:
    async with manager_of(1) as manager:
        holder = await manager.leases.acquire(acquire_of("holder"))
        pending = await manager.leases.acquire(acquire_of("a"))
        again = await manager.leases.acquire(acquire_of("a"))
        assert (pending.state, again.lease_id) == (LeaseState.PENDING, pending.lease_id)
        joined = [asyncio.create_task(manager.leases.acquire(acquire_of("a", wait=True))) for _ in range(3)]
        await settle()
        manager.leases.release(release_of(holder))
        granted = await manager.leases.acquire(acquire_of("a"))
        views = [await call for call in joined]
        granted = await manager.leases.acquire(acquire_of("a"))
        for view in views:
            assert (view.lease_id, view.fencing_token) == (pending.lease_id, granted.fencing_token)
            assert (view.state, view.tokens) == (LeaseState.GRANTED, granted.tokens)
        manager.leases.release(release_of(granted))
        ended = await manager.leases.acquire(acquire_of("a", wait=True))
        assert (ended.state, ended.lease_id, ended.tokens) == (LeaseState.ENDED, pending.lease_id, ())
        assert ended.reason == "released by its owner"
        assert manager.free == 1, "nothing was granted anew"


@pytest.mark.parametrize("phase", LeaseState)
async def test_other_content_under_the_same_id_is_refused(phase: LeaseState) -> None:
    async with manager_of(2) as manager:
        if phase is LeaseState.PENDING:
            await manager.leases.acquire(acquire_of("holder", 2))
        lease = await manager.leases.acquire(acquire_of("a"))
        if phase is LeaseState.ENDED:
            manager.leases.release(release_of(lease))
        for other in (
            acquire_of("a", 2),
            acquire_of("a", batch_id=1),
            acquire_of("a", ttl_seconds=31),
            acquire_of("a", per_sample=Resource(gpu=0.5)),
            acquire_of("a", budget=GPU),
        ):
            with pytest.raises(AlreadyExistsError, match="fresh one"):
                await manager.leases.acquire(other)
        assert (await manager.leases.acquire(acquire_of("a"))).state is phase


async def test_namespaces_have_request_ids_and_leases_of_their_own() -> None:
    async with manager_of(2) as manager:
        one = await manager.leases.acquire(acquire_of("a", namespace="one"))
        two = await manager.leases.acquire(acquire_of("a", namespace="two"))
        assert one.lease_id != two.lease_id
        with pytest.raises(LeaseError, match="not known"):
            manager.leases.release(release_of(one))


async def test_tokens_are_released_one_by_one_and_once_for_each_request_id() -> None:
    async with manager_of(3) as manager:
        lease = await manager.leases.acquire(acquire_of("a", 3))
        first = release_of(lease, 1, request_id="first")
        reply = manager.leases.release(first)
        assert (reply.released_tokens, reply.held_tokens, manager.free) == (1, 2, 1)
        assert manager.leases.release(first) == reply
        with pytest.raises(AlreadyExistsError):
            manager.leases.release(release_of(lease, 2, request_id="first"))
        with pytest.raises(LeaseError, match=r"token 1 .* given back already"):
            manager.leases.release(release_of(lease, 0, 1, request_id="second"))
        with pytest.raises(InvalidArgumentError, match="0 to 2"):
            manager.leases.release(release_of(lease, 3, request_id="second"))
        assert manager.free == 1, "refused releases change nothing"
        assert [token.token_no for token in (await manager.leases.acquire(acquire_of("a", 3))).tokens] == [0, 2]
        last = release_of(lease, request_id="last")
        assert manager.leases.release(last).released_tokens == 2
        assert manager.leases.release(last).released_tokens == 2, "also when the lease has ended"
        assert manager.leases.release(first) == reply
        with pytest.raises(LeaseError, match="released by its owner"):
            manager.leases.release(release_of(lease, request_id="another"))
        assert manager.free == 3


# Pending


async def test_a_waiting_call_is_answered_pending_with_the_reason_when_its_time_is_over() -> None:
    async with manager_of(2) as manager:
        await manager.leases.acquire(acquire_of("holder", 1, ttl_seconds=3_600))
        call = asyncio.create_task(manager.leases.acquire(acquire_of("a", 2, wait=True, timeout_seconds=5)))
        await settle()
        await manager.clock.advance(4)
        assert not call.done()
        await manager.clock.advance(1)
        view = await call
        assert view.state is LeaseState.PENDING
        assert view.reason == "needs 2 tokens at once, 1 are free; short of gpu on 1 node"
        assert (view.waiting_seconds, view.fencing_token, view.tokens) == (5, 0, ())


async def test_a_pending_lease_is_dropped_a_ttl_after_the_last_call_that_asked_for_it() -> None:
    async with manager_of(1) as manager:
        holder = await manager.leases.acquire(acquire_of("holder", ttl_seconds=3_600))
        call = asyncio.create_task(manager.leases.acquire(acquire_of("a", wait=True, timeout_seconds=100)))
        await settle()
        await manager.clock.advance(100)
        assert (await call).state is LeaseState.PENDING, "a call that waits keeps it"
        await manager.clock.advance(TTL - 1)
        assert (await manager.leases.acquire(acquire_of("a"))).state is LeaseState.PENDING
        await manager.clock.advance(TTL)
        dropped = await manager.leases.acquire(acquire_of("a"))
        assert (dropped.state, dropped.reason) == (
            LeaseState.ENDED,
            "dropped: nobody asked for it for ttl_seconds (30)",
        )
        manager.leases.release(release_of(holder))
        assert manager.free == 1


@pytest.mark.parametrize("how", [{}, {"wait": True, "timeout_seconds": 5}])
async def test_a_pending_lease_is_kept_while_its_owner_has_no_answer_and_a_ttl_from_then_on(
    how: dict[str, Any],
) -> None:
    """Looks at a long queue go one at a time, and an answer may come after more than a ttl."""
    async with manager_of(1) as manager:
        await manager.leases.acquire(acquire_of("holder", ttl_seconds=3_600))
        async with manager.engine._admission.reasons._one_at_a_time:
            call = asyncio.create_task(manager.leases.acquire(acquire_of("a", **how)))
            await settle()
            await manager.clock.advance(3 * TTL)
            assert not call.done()
        view = await call
        assert (view.state, view.expires_in_seconds) == (LeaseState.PENDING, TTL)
        await manager.clock.advance(TTL - 1)
        assert (await manager.leases.acquire(acquire_of("a"))).state is LeaseState.PENDING
        await manager.clock.advance(TTL)
        assert (await manager.leases.acquire(acquire_of("a"))).state is LeaseState.ENDED


async def test_what_is_granted_before_its_owner_has_an_answer_is_held_for_a_ttl_from_then_on() -> None:
    async with manager_of(1) as manager:
        holder = await manager.leases.acquire(acquire_of("holder", ttl_seconds=3_600))
        async with manager.engine._admission.reasons._one_at_a_time:
            call = asyncio.create_task(manager.leases.acquire(acquire_of("a")))
            await settle()
            manager.leases.release(release_of(holder))
            await manager.clock.advance(3 * TTL)
        view = await call
        assert (view.state, view.expires_in_seconds, view.reason) == (LeaseState.GRANTED, TTL, "")
        await manager.clock.advance(TTL - 1)
        assert manager.free == 0
        await manager.clock.advance(1)
        assert manager.free == 1


async def test_a_caller_that_goes_away_leaves_its_request_for_a_ttl() -> None:
    async with manager_of(1) as manager:
        await manager.leases.acquire(acquire_of("holder", ttl_seconds=3_600))
        call = asyncio.create_task(manager.leases.acquire(acquire_of("a", wait=True)))
        await settle()
        await manager.clock.advance(100)
        call.cancel()
        await settle()
        await manager.clock.advance(TTL - 1)
        view = await manager.leases.acquire(acquire_of("b"))
        assert view.reason.startswith("needs 1 tokens")
        assert manager.engine._admission._queue.pending_leases == 2
        await manager.clock.advance(1)
        assert manager.engine._admission._queue.pending_leases == 1


async def test_a_pending_lease_can_be_taken_back() -> None:
    async with manager_of(2) as manager:
        holder = await manager.leases.acquire(acquire_of("holder"))
        pending = await manager.leases.acquire(acquire_of("a", 2))
        behind = asyncio.create_task(manager.leases.acquire(acquire_of("b", 2, wait=True)))
        await settle()
        assert manager.leases.release(release_of(pending)).held_tokens == 0
        assert manager.leases.release(release_of(pending)).held_tokens == 0
        assert (await manager.leases.acquire(acquire_of("a", 2))).reason == "withdrawn by its owner"
        manager.leases.release(release_of(holder))
        assert (await behind).state is LeaseState.GRANTED


async def test_a_request_taken_back_no_longer_holds_others_back() -> None:
    async with manager_of(2, max_bypass=0) as manager:
        await manager.leases.acquire(acquire_of("holder", ttl_seconds=3_600))
        pending = await manager.leases.acquire(acquire_of("large", 2))
        behind = asyncio.create_task(manager.leases.acquire(acquire_of("small", wait=True)))
        await settle()
        assert not behind.done()
        manager.leases.release(release_of(pending))
        assert (await behind).state is LeaseState.GRANTED


# Refusals


async def test_what_can_never_fit_is_refused_with_the_way_out() -> None:
    async with manager_of(2) as manager:
        with pytest.raises(UnplaceableError, match=r"needs 3 tokens, the pool can give 2 .* lower max_tokens"):
            await manager.leases.acquire(acquire_of("a", 3))
        with pytest.raises(UnplaceableError, match="budget holds no sample"):
            await manager.leases.acquire(acquire_of("a", budget=Resource(gpu=0.5, concurrency=1)))
        assert (await manager.leases.acquire(acquire_of("a", 2))).state is LeaseState.GRANTED


async def test_every_fault_of_a_request_is_named() -> None:
    async with manager_of(1) as manager:
        with pytest.raises(InvalidArgumentError) as caught:
            await manager.leases.acquire(acquire_of("", 0, per_sample=Resource(), ttl_seconds=0))
        fields = [violation.field for violation in caught.value.violations]
        assert fields == ["request_id", "ttl_seconds", "max_tokens", "per_sample"]
        for amount in (float("nan"), -1.0, 1.5, 1e-9, 1e300):
            with pytest.raises((InvalidArgumentError, UnplaceableError)):
                await manager.leases.acquire(acquire_of("a", per_sample=Resource(gpu=amount)))
        assert (await manager.leases.acquire(acquire_of("a"))).state is LeaseState.GRANTED


async def test_without_a_pool_every_call_says_how_to_get_one() -> None:
    async with running_engine(spec_of(SolvingAgent()), clock=FakeClock()) as harness:
        leases = harness.engine.leases
        view = LeaseView(lease_id="l", state=LeaseState.GRANTED, fencing_token=1)
        with pytest.raises(FailedPreconditionError, match="--env-cluster-layout"):
            await leases.acquire(acquire_of("a"))
        for call in (
            lambda: leases.renew(renew_of(view)),
            lambda: leases.release(release_of(view)),
            lambda: leases.capacity(GPU),
            lambda: leases.explain(PlacementDemand(per_sample=GPU, max_tokens=1)),
        ):
            with pytest.raises(FailedPreconditionError, match="--env-cluster-layout"):
                call()


async def test_draining_ends_what_waits_and_leaves_what_is_held() -> None:
    async with manager_of(1) as manager:
        lease = await manager.leases.acquire(acquire_of("holder"))
        call = asyncio.create_task(manager.leases.acquire(acquire_of("a", wait=True)))
        await settle()
        await manager.engine.drain(0)
        with pytest.raises(FailedPreconditionError, match="shutting down"):
            await call
        for name in ("a", "new"):
            with pytest.raises(FailedPreconditionError, match="shutting down"):
                await manager.leases.acquire(acquire_of(name))
        assert (await manager.leases.acquire(acquire_of("holder"))).fencing_token == lease.fencing_token
        manager.leases.renew(renew_of(lease))
        manager.leases.release(release_of(lease))
        assert manager.free == 1


# Bounds


async def test_too_many_pending_leases_are_refused_for_now() -> None:
    async with manager_of(1, max_pending_leases=2) as manager:
        holder = await manager.leases.acquire(acquire_of("holder"))
        for name in ("a", "b"):
            await manager.leases.acquire(acquire_of(name))
        with pytest.raises(ResourceExhaustedError, match="max_pending_leases"):
            await manager.leases.acquire(acquire_of("c"))
        manager.leases.release(release_of(holder))
        await settle()
        assert (await manager.leases.acquire(acquire_of("c"))).state is LeaseState.PENDING


async def test_ended_claims_are_remembered_up_to_a_limit() -> None:
    async with manager_of(4, retained_leases=10) as manager:
        for number in range(100):
            lease = await manager.leases.acquire(acquire_of(f"{number}", 4))
            manager.leases.release(release_of(lease, 0, request_id="0"))
            manager.leases.release(release_of(lease, request_id="rest"))
        assert len(manager.leases._records) == len(manager.leases._by_request) == 3, (
            "one and its two releases count three"
        )
        assert len(manager.leases._deadlines._heap) <= 130
        assert (await manager.leases.acquire(acquire_of("99", 4))).state is LeaseState.ENDED
        assert (await manager.leases.acquire(acquire_of("0", 4))).state is LeaseState.GRANTED


async def test_renewing_for_ever_costs_no_memory() -> None:
    async with manager_of(1) as manager:
        lease = await manager.leases.acquire(acquire_of("a"))
        for _ in range(500):
            await manager.clock.advance(1)
            manager.leases.renew(renew_of(lease))
        assert len(manager.leases._deadlines._heap) == 1


async def test_refused_shapes_of_withdrawn_claims_are_forgotten() -> None:
    async with manager_of(1) as manager:
        await manager.leases.acquire(acquire_of("holder"))
        for number in range(1, 50):
            view = await manager.leases.acquire(acquire_of(f"{number}", per_sample=Resource(gpu=number / 100)))
            manager.leases.release(release_of(view))
        assert not manager.engine._admission._queue._blocked


# Questions


async def test_capacity_and_what_is_short_where() -> None:
    async with manager_of(2, 1) as manager:
        await manager.leases.acquire(acquire_of("a", 1, per_sample=Resource(gpu=1)))
        capacity = manager.leases.capacity(GPU)
        assert (capacity.max_tokens, capacity.free_tokens) == (3, 2)
        assert [node.free_gpus for node in capacity.nodes] == [(0.0, 1.0), (1.0,)]
        view = manager.leases.explain(PlacementDemand(per_sample=Resource(gpu=2), max_tokens=1))
        assert (view.wanted_tokens, view.free_tokens, view.max_tokens) == (1, 0, 1)
        assert [node.short for node in view.nodes] == [(Shortage.GPU,), (Shortage.GPU,)]
        with pytest.raises(UnplaceableError):
            manager.leases.explain(PlacementDemand(per_sample=GPU, max_tokens=1, budget=Resource(gpu=0.5)))
