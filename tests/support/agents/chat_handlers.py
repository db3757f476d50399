"""Handlers whose agents speak OpenAI's API, and one that says the same token by token."""

from __future__ import annotations

import asyncio
import os
import sys

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.generation import ChatMessage
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.integrations.chat_turns import observe_reply
from tests.support.agents.chat_client import ChatClient, converse

SYSTEM = "Be brief."
QUESTIONS = ["What is 2 + 3?", "Are you sure?", "Why?"]


class TokenAgent(BaseAgent):
    """Talks to the model as handlers do that need no API."""

    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("system", SYSTEM), ChatMessage("user", QUESTIONS[0])])
        answers = [(await episode.generate()).text]
        for question in QUESTIONS[1:]:
            await observe_reply(episode, question)
            answers.append((await episode.generate()).text)
        return AgentResult(answer="|".join(answers))

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={"answer": result.answer})


class InlineAgent(TokenAgent):
    """The same conversation over the API."""

    async def run(self, episode: Episode) -> AgentResult:
        async with ChatClient.of(episode) as client:
            return AgentResult(answer="|".join(await converse(client, SYSTEM, QUESTIONS)))


class ChildAgent(TokenAgent):
    """The same conversation over the API, from a child process."""

    async def run(self, episode: Episode) -> AgentResult:
        place = {
            "OPENAI_BASE_URL": episode.api_base_url,
            "OPENAI_API_KEY": episode.api_key,
            "OPENAI_SOCKET": episode.api_socket,
        }
        command = [sys.executable, "-m", "tests.support.agents.chat_child", SYSTEM, *QUESTIONS]
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | place, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, complained = await process.communicate()
        assert process.returncode == 0, complained.decode()
        return AgentResult(answer=said.decode())


class LendingAgent(BaseAgent):
    """Lends its episode to the test and waits, in vain if need be.

    fails: what it raises when it is let go. is_deaf: it ignores every stop until then.
    """

    def __init__(self, fails: Exception | None = None, *, is_deaf: bool = False) -> None:
        self.lent: asyncio.Queue[Episode] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self._fails = fails
        self._is_deaf = is_deaf

    async def run(self, episode: Episode) -> AgentResult:
        _ = episode.api_key
        self.lent.put_nowait(episode)
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                if not self._is_deaf:
                    raise
        if self._fails is not None:
            raise self._fails
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)
