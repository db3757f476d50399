"""Handlers that do what a test tells them to."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.placement import PlacementPool
from tests.support.fake_clock import settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from py_scheduler.domain.evaluator import Episode


class SolvingAgent(BaseAgent):
    """Solves everything at once."""

    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult(answer=episode.sample.task.prompt)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class GatedAgent(BaseAgent):
    """Stays in `run` until the gate opens; counts how many are inside, and how often each prompt was begun."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.inside = 0
        self.peak = 0
        self.begun: defaultdict[str, int] = defaultdict(int)
        self.order: list[str] = []

    async def run(self, episode: Episode) -> AgentResult:
        prompt = episode.sample.task.prompt
        self.begun[prompt] += 1
        self.order.append(prompt)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class ScriptedAgent(BaseAgent):
    """Runs the behaviour that is registered for the sample's prompt; what has none solves."""

    def __init__(self, **behaviours: Callable[[Episode], Awaitable[AgentResult]]) -> None:
        self.behaviours = behaviours
        self.begun: defaultdict[str, int] = defaultdict(int)

    async def run(self, episode: Episode) -> AgentResult:
        prompt = episode.sample.task.prompt
        self.begun[prompt] += 1
        behaviour = self.behaviours.get(prompt)
        return await behaviour(episode) if behaviour is not None else AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class StubbornAgent(ScriptedAgent):
    """For the prompt "stubborn" it ignores every cancellation until it is set free."""

    def __init__(self, **behaviours: Callable[[Episode], Awaitable[AgentResult]]) -> None:
        super().__init__(stubborn=self._stay, **behaviours)
        self.started = asyncio.Event()
        self.free = asyncio.Event()

    async def _stay(self, _: Episode) -> AgentResult:
        self.started.set()
        while not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                continue
        return AgentResult()


def spec_of(handler: BaseAgent, evaluator_id: str = "agent", **changes: Any) -> EvaluatorSpec:
    """A spec without demands: one sample runs at once for each of 64 permits."""
    values: dict[str, Any] = {
        "evaluator_id": evaluator_id,
        "handler": handler,
        "resource": Resource(concurrency=64),
        "run_resource": Resource(),
        "eval_resource": Resource(),
        **changes,
    }
    return EvaluatorSpec(**values)


def gpu_spec(handler: BaseAgent, share: float, budget_gpus: float = 16, **changes: Any) -> EvaluatorSpec:
    sample = Resource(gpu=share, cpu=0.1)
    budget = Resource(gpu=budget_gpus, cpu=128, concurrency=128)
    return spec_of(handler, resource=budget, run_resource=sample, eval_resource=sample, batch_size=None, **changes)


def two_nodes(gpus: int = 8) -> PlacementPool:
    return PlacementPool(
        [NodeResource(node_ip=f"10.0.0.{n}", gpus=list(range(gpus)), cpu=64, memory_gb=256) for n in (1, 2)]
    )


async def raises(_: Episode) -> AgentResult:
    raise ValueError("the handler is broken")


async def hangs(_: Episode) -> AgentResult:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


class SteppingAgent(BaseAgent):
    """Lets one sample after the other end; `order` says who began when, by the first word of its prompt, `inside_of`
    how many of each are at it.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.may_end = asyncio.Semaphore(0)
        self.inside_of: Counter[str] = Counter()
        self.peak = 0

    @property
    def inside(self) -> int:
        return self.inside_of.total()

    async def run(self, episode: Episode) -> AgentResult:
        who = episode.sample.task.prompt.partition(" ")[0]
        self.order.append(who)
        self.inside_of[who] += 1
        self.peak = max(self.peak, self.inside)
        await self.may_end.acquire()
        self.inside_of[who] -= 1
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)

    async def end(self, count: int) -> None:
        for _ in range(count):
            self.may_end.release()
            await settle()
