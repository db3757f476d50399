"""The handler that stands for all others in a simulation: it takes as long as its workload says, or fails."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.simulation.workload import SimulatedTask

_SOLVED = Reward(score=1.0)
_NOTHING = AgentResult()


class SimulatedAgent(BaseAgent):
    """tasks: by client_key, all that are open. infra_rate: the probability that the infrastructure fails an attempt, at
    a moment of its run that is drawn too; the same seed fails the same attempts, whatever order they run in.
    """

    def __init__(self, tasks: Mapping[str, SimulatedTask], *, infra_rate: float = 0.0, seed: int = 0) -> None:
        self._tasks = tasks
        self._infra_rate = infra_rate
        self._seed = seed
        self._lost: set[str] = set()
        self._on_node: dict[str, dict[asyncio.Future[None], None]] = {}

    async def run(self, episode: Episode) -> AgentResult:
        sample = episode.sample
        key = sample.task.client_key
        seconds = self._tasks[key].run_seconds[sample.sample_no]
        if self._infra_rate:
            drawn = random.Random(f"{self._seed}/{key}/{sample.sample_no}/{episode.attempt_no}")
            if drawn.random() < self._infra_rate:
                await self._hold(episode, seconds * drawn.random())
                raise EngineUnavailableError("the simulated infrastructure failed")
        await self._hold(episode, seconds)
        return _NOTHING

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        del result
        sample = episode.sample
        task = self._tasks[sample.task.client_key]
        if task.eval_seconds:
            await self._hold(episode, task.eval_seconds[sample.sample_no])
        return _SOLVED

    def lose_node(self, node_ip: str) -> None:
        """Fails all that runs on it, or begins on it with a token that it had."""
        self._lost.add(node_ip)
        for held in self._on_node.pop(node_ip, {}):
            if not held.done():
                held.set_exception(_lost(node_ip))

    async def _hold(self, episode: Episode, seconds: float) -> None:
        """Takes its time on its node."""
        node_ip = episode.token.node_ip if episode.token is not None else ""
        if node_ip in self._lost:
            raise _lost(node_ip)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _end, over)
        here = self._on_node.setdefault(node_ip, {})
        here[over] = None
        try:
            await over
        finally:
            timer.cancel()
            here.pop(over, None)


def _lost(node_ip: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"the simulated node {node_ip} is lost")


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
