"""Two real servers behind one engine, and agents that generate there."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from py_scheduler.adapters.fleet.settings import FleetSettings
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward
from tests.sglang.asking import PROMPT, SETTINGS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode

FLEET = FleetSettings(load_interval_seconds=0.2, set_aside_base_seconds=0.2, set_aside_max_seconds=1.0)


class TalkingAgent(BaseAgent):
    """Some turns of so many tokens each."""

    def __init__(self, turns: int, turn_tokens: int) -> None:
        self.turns = turns
        self.turn_tokens = turn_tokens

    async def run(self, episode: Episode) -> AgentResult:
        for turn in range(self.turns):
            episode.observe([*PROMPT, 5 + turn])
            await episode.generate(max_new_tokens=self.turn_tokens)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


@asynccontextmanager
async def fleet_on(*base_urls: str) -> AsyncIterator[SglangFleet]:
    fleet = SglangFleet(base_urls, settings=SETTINGS, fleet=FLEET)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()
        assert not any(endpoint.in_flight for endpoint in fleet._endpoints)


def up(fleet: SglangFleet) -> list[bool]:
    return [endpoint.is_up for endpoint in fleet._endpoints]
