"""Handlers of servers that generate: one writes, one watches how late their loop is, one gives memory back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

PROMPT = range(5, 69)
_BEAT_SECONDS = 0.005


class WritingAgent(BaseAgent):
    """One turn, of as many tokens as the task's sampling says."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(PROMPT)
        await episode.generate()
        return AgentResult(termination_reason="answered")

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002
        return Reward(score=1.0)


class LagAgent(BaseAgent):
    """Watches the loop for as many seconds as its prompt says; its metrics are what it saw."""

    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult(metrics=await loop_lag(float(episode.sample.task.prompt)))

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002
        return Reward(score=1.0)


class TrimmingAgent(BaseAgent):
    """Has the allocator give back what nobody holds."""

    async def run(self, episode: Episode) -> AgentResult:  # noqa: ARG002
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002
        return Reward(score=1.0)


async def loop_lag(seconds: float) -> dict[str, float]:
    """How late callbacks run that are due every 5 ms: milliseconds, by quantile. "own": of that what the loop's thread
    computed meanwhile, in processor time; the rest is the machine's, which ran something else.

    A loop that computes for 50 ms makes ten of them late, by 50 ms down to 5.
    """
    late: list[float] = []
    own: list[float] = []
    computed = 0.0
    # Not the loop's own clock: uvloop's stands still for the length of a turn.
    due = time.monotonic()
    end = due + seconds
    while due < end:
        due += _BEAT_SECONDS
        if (wait := due - time.monotonic()) > 0:
            before = time.thread_time()
            await asyncio.sleep(wait)
            computed = time.thread_time() - before
        late.append(max(0.0, time.monotonic() - due))
        own.append(min(late[-1], computed))
    return _quantiles("", late) | _quantiles("own ", own)


def _quantiles(what: str, values: list[float]) -> dict[str, float]:
    values.sort()
    return {f"{what}p{100 * q:g}": 1e3 * values[int(q * (len(values) - 1))] for q in (0.5, 0.9, 0.99, 0.999, 1.0)}
