"""A handler that does what its prompt says, in whatever process it runs."""

from __future__ import annotations

import asyncio

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.results import AgentResult, Reward

NAP_SECONDS = 0.01


class Prompted(BaseAgent):
    """ "solve", "nap", "hang", "fail", or "fail first": every run of a first attempt but its first fails."""

    async def run(self, episode: Episode) -> AgentResult:
        prompt = episode.sample.task.prompt
        if prompt == "nap":
            await asyncio.sleep(NAP_SECONDS)
        if prompt == "hang":
            await asyncio.Event().wait()
        if prompt == "fail" or (prompt == "fail first" and episode.attempt_no == 1 and episode.sample.sample_no):
            raise RuntimeError(f"{prompt}, as it was told")
        return AgentResult(metrics={"reward": float(episode.sample.sample_no), "runs:sum": 1.0})

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)
