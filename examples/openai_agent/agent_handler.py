"""Plays the agent beside it, which was not written for this: in the server itself, or in a process of its own.

All that makes it a handler is whose address and key it gets: those of the episode. What the model reads and writes is
recorded there, token for token.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from py_scheduler import AgentResult, BaseAgent, Episode, Reward

_AGENT = Path(__file__).with_name("question_agent.py")
_NUMBER = re.compile(r"-?\d+")


class OpenAIAgent(BaseAgent):
    """Tasks bring the question as their prompt and the right answer as metadata["answer"]."""

    def __init__(self, python: str = "") -> None:
        """python: the interpreter of the agent's own environment; empty: the server's, which then needs `openai`."""
        self._python = python

    async def run(self, episode: Episode) -> AgentResult:
        play = self._play_in_child if self._python else self._play
        return AgentResult(answer=await play(episode))

    async def _play(self, episode: Episode) -> str:
        from openai import AsyncOpenAI  # noqa: PLC0415 - only this way of playing needs them
        from question_agent import solve  # noqa: PLC0415

        async with AsyncOpenAI(base_url=episode.api_base_url, api_key=episode.api_key) as client:
            return str(await solve(client, "student", episode.sample.task.prompt))

    async def _play_in_child(self, episode: Episode) -> str:
        place = {"OPENAI_BASE_URL": episode.api_base_url, "OPENAI_API_KEY": episode.api_key}
        command = (self._python, str(_AGENT), "student", episode.sample.task.prompt)
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | place, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            said, complaint = await process.communicate()
        finally:
            # Stopped, timed out or over: nobody is left to hear what it would still say.
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"the agent ended with code {process.returncode}: {complaint.decode()[-2000:]}")
        return said.decode().strip()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        number = _NUMBER.search(result.answer)
        expected = episode.sample.task.metadata["answer"]
        is_right = number is not None and int(number[0]) == expected
        return Reward(score=float(is_right), details={"said": result.answer, "expected": expected})
