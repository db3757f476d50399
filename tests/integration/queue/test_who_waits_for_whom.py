"""On the real engine: whom a batch that waits may hold back, and who overtakes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.quotas import NamespaceSettings, Quota
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, SolvingAgent, SteppingAgent, StubbornAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.trainers.leases import acquire_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.requests import SubmitReply, WaitingBatch
    from tests.support.harness import Harness

GPU, CPU = Resource(gpu=1), Resource(cpu=1)
MAX_BYPASS = 4


def of(agent: BaseAgent, name: str, one: Resource, at_once: int = 1, **changes: Any) -> EvaluatorSpec:
    budget = Resource(
        gpu=at_once * one.gpu,
        cpu=at_once * one.cpu,
        named={key: at_once * amount for key, amount in one.named.items()},
        concurrency=at_once,
    )
    return spec_of(agent, name, resource=budget, run_resource=one, eval_resource=one, **changes)


def node(name: str = "n", gpus: int = 8, cpu: float = 64, **extras: Any) -> NodeResource:
    return NodeResource(node_ip=name, gpus=list(range(gpus)), cpu=cpu, memory_gb=64, **extras)


def still_open(harness: Harness, reply: SubmitReply, namespace: str = "default") -> int:
    selector = SubmissionSelector(submission_id=reply.submission_id, namespace=namespace)
    return harness.engine.submission(selector).open_tasks


def first_waiting(harness: Harness, reply: SubmitReply) -> WaitingBatch:
    return harness.engine.submission(harness.selector(reply)).waiting[0]


@pytest.mark.parametrize("gpu_sample", [GPU, Resource(gpu=1, cpu=4)])
async def test_cpu_work_goes_on_beside_a_batch_that_waits_for_gpus(gpu_sample: Resource) -> None:
    """Also when that wants CPUs too, of which there are plenty."""
    training = GatedAgent()
    specs = [of(training, "gpu", gpu_sample), of(SolvingAgent(), "cpu", CPU)]
    settings = EngineSettings(max_bypass=MAX_BYPASS)
    async with running_engine(*specs, pool=PlacementPool([node(gpus=1)]), settings=settings) as harness:
        waits = await harness.submit([task_of(task_type="gpu")] * 2, 0)
        for _ in range(4):
            await harness.done(await harness.submit([task_of(task_type="cpu")] * 50, 1))
        assert first_waiting(harness, waits).bypassed == 0, "they took nothing that it could have used"
        training.gate.set()
        await harness.done(waits)


async def test_cpu_work_leaves_what_a_batch_that_waits_for_gpus_and_cpus_needs() -> None:
    """8 CPUs, of which a batch that waits for a GPU needs 4: 4 short samples go at once, then as many as may overtake
    it take of its own 4, and no more.
    """
    training, short = GatedAgent(), GatedAgent()
    specs = [of(training, "gpu", GPU), of(training, "both", Resource(gpu=1, cpu=4)), of(short, "cpu", CPU)]
    settings = EngineSettings(max_bypass=2)
    async with running_engine(*specs, pool=PlacementPool([node(gpus=1, cpu=8)]), settings=settings) as harness:
        await harness.until_started(await harness.submit([task_of(task_type="gpu")], 0), 1)
        waits = await harness.submit([task_of(task_type="both")], 1)
        await harness.submit([task_of(task_type="cpu")] * 20, 2)
        await settle()
        assert short.inside == 4 + 2
        assert first_waiting(harness, waits).bypassed == 2


async def test_what_other_nodes_can_hold_does_not_wait_for_a_batch_that_is_bound_to_its_own() -> None:
    """The pool by itself would place it on the node with most GPUs free, of which the batch needs all."""
    bound, free = GatedAgent(), GatedAgent()
    specs = [
        of(bound, "bound", Resource(gpu=1, required_labels={"zone": "a"}), at_once=4),
        of(free, "free", GPU),
    ]
    nodes = [node("a", gpus=4, labels={"zone": "a"}), node("b", gpus=2, labels={"zone": "b"})]
    settings = EngineSettings(max_bypass=0)
    async with running_engine(*specs, pool=PlacementPool(nodes), settings=settings) as harness:
        first = await harness.submit([task_of(task_type="bound")], 0)
        await harness.until_started(first, 1)
        await harness.submit([task_of(task_type="bound", repeat_times=4)], 1)
        await harness.submit([task_of(task_type="free")] * 10, 2)
        await settle()
        assert free.inside == 2
        assert bound.inside == 1
        bound.gate.set()
        await settle()
        assert bound.begun[""] == 5


async def test_one_stranded_token_of_other_room_leaves_the_bound_on_overtaking_in_force() -> None:
    clock, stuck, small, big = FakeClock(), StubbornAgent(), SteppingAgent(), GatedAgent()
    specs = [of(stuck, "stuck", CPU), of(small, "small", GPU), of(big, "big", GPU, at_once=8)]
    settings = EngineSettings(stop_grace_seconds=1.0, max_bypass=MAX_BYPASS)
    async with running_engine(*specs, pool=PlacementPool([node()]), clock=clock, settings=settings) as harness:
        stranded = await harness.submit([task_of("stubborn", "stuck")], 9)
        await stuck.started.wait()
        await harness.engine.abort(AbortRequest(selector=harness.selector(stranded)))
        await clock.advance(2)
        await harness.submit([task_of("small", "small")] * 100, 1)
        await settle()
        await harness.submit([task_of(task_type="big", repeat_times=8)], 0)
        await small.end(MAX_BYPASS + 8)
        assert small.order == ["small"] * (8 + MAX_BYPASS)
        assert big.inside == 8
        stuck.free.set()
        big.gate.set()
        await small.end(100)


async def test_a_batch_beyond_what_its_quota_has_left_is_overtaken_by_its_own_namespace_and_only_so_often() -> None:
    """A quota of 4 of which 1 is held: samples that want 1 pass a batch that wants 4, `max_bypass` times."""
    hold = GatedAgent()
    specs = [of(hold, "hold", GPU), of(SolvingAgent(), "big", GPU, at_once=4), of(SolvingAgent(), "small", GPU)]
    quota = {"default": NamespaceSettings(max_running_samples=4)}
    settings = EngineSettings(max_bypass=MAX_BYPASS)
    async with running_engine(
        *specs, pool=PlacementPool([node()]), namespaces=quota, settings=settings, clock=FakeClock()
    ) as harness:
        await harness.until_started(await harness.submit([task_of(task_type="hold")], 0), 1)
        big = await harness.submit([task_of(task_type="big", repeat_times=4)], 1)
        small = await harness.submit([task_of(task_type="small")] * 50, 2)
        elsewhere = await harness.submit([task_of(task_type="small")] * 50, 3, namespace="another")
        await settle()
        assert still_open(harness, elsewhere, "another") == 0, "a quota is nobody else's room"
        assert still_open(harness, small) == 50 - MAX_BYPASS
        assert first_waiting(harness, big).bypassed == MAX_BYPASS
        hold.gate.set()
        await harness.done(big)
        await harness.done(small)


async def test_a_lease_request_beyond_a_quota_that_was_lowered_holds_nobody_back() -> None:
    """It can never be granted, so nobody waits for it."""
    agent = SolvingAgent()
    quota = {"default": NamespaceSettings(max_running_samples=4)}
    settings = EngineSettings(max_bypass=0)
    async with running_engine(
        of(agent, "agent", GPU), pool=PlacementPool([node()]), namespaces=quota, settings=settings, clock=FakeClock()
    ) as harness:
        held = await harness.engine.leases.acquire(acquire_of("held", 1, per_sample=GPU))
        assert held.tokens
        await harness.engine.leases.acquire(acquire_of("large", 4, per_sample=GPU))
        harness.engine.limit_namespaces({"*": Quota(max_running_samples=2)})
        assert len(await harness.done(await harness.submit([task_of()] * 20, 1))) == 20
