"""An evaluator's life: which spec, which settings, what its samples hold and for how long. Seed 1, sections 2 to 4."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import UnplaceableError
from py_scheduler.placement import PlacementPool
from tests.support.fake_clock import settle
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, gpu_spec, raises, spec_of, two_nodes
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

GPU = Resource(gpu=1)


async def test_an_unknown_task_type_is_logged_once_and_warned_of_in_every_reply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "py_scheduler.scheduler.intake")
    async with running_engine(spec_of(SolvingAgent(), "first"), spec_of(SolvingAgent(), "second")) as harness:
        for batch_id in range(3):
            reply = await harness.submit([task_of(task_type="third"), task_of(task_type="third")], batch_id)
            assert len(reply.warnings) == 1
        await harness.submit([task_of(task_type="fourth")], 9)
    assert [record.message.split("'")[1] for record in caplog.records] == ["third", "fourth"]


async def test_an_episode_gets_each_setting_from_the_most_specific_level() -> None:
    seen: list[tuple[SamplingParams, StoppingCriteria]] = []

    async def look(episode: Episode) -> AgentResult:
        seen.append((episode.sampling, episode.stopping))
        return AgentResult()

    dataset = {"name": "gsm8k", "sampling": {"temperature": 0.1}, "stopping": {"max_turns": 1}}
    config = TaskConfig(
        task_type="agent",
        sampling=SamplingParams(temperature=0.2, top_p=0.2),
        stopping=StoppingCriteria(max_turns=2, max_context_len=2),
    )
    spec = spec_of(
        ScriptedAgent(look=look),
        default_sampling=SamplingParams(temperature=0.3, top_p=0.3, top_k=3),
        default_stopping=StoppingCriteria(max_turns=3),
    )
    async with running_engine(
        spec, default_sampling=SamplingParams(temperature=0.4, top_p=0.4, top_k=4, min_p=0.4)
    ) as harness:
        tasks = [Task(config=config, prompt="look", metadata={"_dataset_cfg": dataset}), task_of("look")]
        for number, task in enumerate(tasks):
            await harness.done(await harness.submit([task], number))
    assert seen == [
        (
            SamplingParams(temperature=0.1, top_p=0.2, top_k=3, min_p=0.4),
            StoppingCriteria(max_turns=1, max_context_len=2),
        ),
        (SamplingParams(temperature=0.3, top_p=0.3, top_k=3, min_p=0.4), StoppingCriteria(max_turns=3)),
    ]


async def test_three_samples_share_a_gpu_at_a_third_each() -> None:
    agent = GatedAgent()
    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0, 1], cpu=64, memory_gb=64)])
    async with running_engine(gpu_spec(agent, 0.33, budget_gpus=2), pool=pool) as harness:
        reply = await harness.submit([task_of(repeat_times=6)])
        await harness.until_started(reply, 6)
        assert agent.inside == 6
        assert pool.free_tokens_for(Resource(gpu=0.33)) == 0
        agent.gate.set()
        samples = await harness.samples(reply)
    assert sorted(gpu for sample in samples for gpu in sample.gpu_ids) == [0, 0, 0, 1, 1, 1]


async def test_without_gpus_cpu_and_memory_alone_decide() -> None:
    """The shape of the SWE recipe: 4 CPUs and 16 GB a sample; the second node is short of memory."""
    agent = GatedAgent()
    nodes = [
        NodeResource(node_ip="a", gpus=[0, 1], cpu=16, memory_gb=256),
        NodeResource(node_ip="b", gpus=[], cpu=96, memory_gb=40),
    ]
    sample = Resource(cpu=4, memory_gb=16)
    spec = spec_of(
        agent,
        resource=Resource(cpu=96, memory_gb=320, concurrency=64),
        run_resource=sample,
        eval_resource=sample,
        batch_size=1,
    )
    async with running_engine(spec, pool=PlacementPool(nodes)) as harness:
        reply = await harness.submit([task_of(str(number)) for number in range(9)])
        await harness.until_started(reply, 6)
        await settle()
        assert agent.inside == 6, "four beside each other on a, two on b"
        waiting = (await harness.engine.explain_task(reply.task_ids[-1], "default")).waits[0]
        assert {node.node_ip: node.short for node in waiting.nodes} == {"a": ("cpu",), "b": ("memory",)}
        agent.gate.set()
        assert len(await harness.done(reply)) == 9


@pytest.mark.parametrize(
    ("budget", "batch", "needed"),
    [(Resource(gpu=24, concurrency=64), 20, 20), (Resource(gpu=24, concurrency=64), 64, 24)],
)
async def test_the_deadlock_guard_looks_at_the_largest_batch_and_the_budget(
    budget: Resource, batch: int, needed: int
) -> None:
    spec = spec_of(SolvingAgent(), "swe", resource=budget, run_resource=GPU, batch_size=None)
    async with running_engine(spec, pool=two_nodes()) as harness:
        with pytest.raises(UnplaceableError) as raised:
            await harness.submit([task_of(task_type="swe") for _ in range(batch)])
        assert all(part in str(raised.value) for part in ("'swe'", str(needed), "16"))
        assert harness.engine.last_sequence == 0
        assert len(await harness.done(await harness.submit([task_of(task_type="swe") for _ in range(16)]))) == 16


class TwoPhases(GatedAgent):
    """Waits at a gate of its own in eval too."""

    def __init__(self) -> None:
        super().__init__()
        self.eval_gate = asyncio.Event()
        self.evaluating = asyncio.Event()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        self.evaluating.set()
        await self.eval_gate.wait()
        if episode.sample.task.prompt == "unscorable":
            raise ValueError("no verdict")
        return Reward(score=1.0)


@pytest.mark.parametrize("prompt", ["fine", "unscorable"])
async def test_a_token_of_the_larger_phase_is_held_from_run_through_eval(prompt: str) -> None:
    agent, pool = TwoPhases(), two_nodes(gpus=4)
    spec = spec_of(
        agent,
        resource=Resource(gpu=8, cpu=64, concurrency=8),
        run_resource=Resource(gpu=0.25, cpu=4),
        eval_resource=Resource(gpu=1, cpu=1),
    )
    assert spec.sample_resource == Resource(gpu=1, cpu=4)
    async with running_engine(spec, pool=pool) as harness:
        reply = await harness.submit([task_of(prompt)])
        await harness.until_started(reply, 1)
        assert pool.free_tokens_for(GPU) == 7
        agent.gate.set()
        await agent.evaluating.wait()
        assert pool.free_tokens_for(GPU) == 7
        agent.eval_gate.set()
        await harness.done(reply)
        await settle()
        assert pool.free_tokens_for(GPU) == 8


async def test_room_comes_back_whatever_ended_the_sample() -> None:
    agent, pool = ScriptedAgent(raises=raises), two_nodes()
    async with running_engine(gpu_spec(agent, 1.0, run_timeout_seconds=60.0), pool=pool) as harness:
        for batch_id, prompt in enumerate(("raises", "fine")):
            await harness.done(await harness.submit([task_of(prompt, repeat_times=8)], batch_id))
        hanging = await harness.submit([task_of("fine")], 9)
        await harness.engine.abort(AbortRequest(selector=harness.selector(hanging), wait=True))
        await settle()
        assert pool.free_tokens_for(GPU) == 16


async def test_without_a_pool_batches_are_not_gated_and_concurrency_still_holds() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=Resource(gpu=99, concurrency=3), run_resource=Resource(gpu=8), batch_size=None)
    async with running_engine(spec) as harness:
        first = await harness.submit([task_of("a", repeat_times=6)], 1)
        second = await harness.submit([task_of("b", repeat_times=6)], 2)
        await harness.until_started(first, 3)
        await harness.until_started(second, 3)
        await settle()
        assert agent.inside == 6, "three of each batch"
        agent.gate.set()
        samples = [*await harness.samples(first), *await harness.samples(second)]
    assert {(sample.node_ip, sample.gpu_ids) for sample in samples} == {("", ())}
