"""Handlers that the tests of the command name in configurations."""

from __future__ import annotations

import asyncio
import time

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.results import AgentResult, Reward


class Echo(BaseAgent):
    """Answers its prompt, after `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def run(self, episode: Episode) -> AgentResult:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return AgentResult(answer=episode.sample.task.prompt)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={"answer": result.answer})


class Deaf(Echo):
    """Ignores every cancel."""

    async def run(self, episode: Episode) -> AgentResult:
        while True:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                continue


class Stubborn(Echo):
    """Ignores every cancel until it is let go."""

    _may_end = False

    @classmethod
    def let_go(cls) -> None:
        cls._may_end = True

    async def run(self, episode: Episode) -> AgentResult:
        while not self._may_end:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return AgentResult()


class Blocking(Echo):
    """Holds the whole event loop."""

    async def run(self, episode: Episode) -> AgentResult:
        time.sleep(3_600)  # noqa: ASYNC251 - what this handler is for
        return AgentResult()


class Broken(Echo):
    def __init__(self) -> None:
        message = "no licence"
        raise RuntimeError(message)


NOT_A_CLASS = 7


class NoAgent:
    pass
