"""Handlers that do what a test tells them to."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, Reward

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
