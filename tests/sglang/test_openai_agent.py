"""The agent of examples/openai_agent under the real client of OpenAI, against a real server."""

from __future__ import annotations

import asyncio
import runpy
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.api.generation_http import GenerationHttp
from py_scheduler.config import GatewaySettings
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, ChatMessage, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.integrations.chat_turns import observe_reply
from tests.sglang.asking import FIRST_VERSION, TRAINED_VERSION, RealSglang, assert_exact
from tests.sglang.conftest import PYTHON, TRAINED_MODEL
from tests.sglang.training import training
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from tests.sglang.asking import Reference

EXAMPLE = Path(__file__).parents[2] / "examples/openai_agent"
TEMPERATURES = (1.0, 0.5)
"""Of the agent's two turns."""
FIRST_PROMPT_TOKENS = 60
SLOW_SECONDS = 0.03
TASK = Task(config=TaskConfig(task_type="agent"), prompt="What is 2 + 3?", metadata={"answer": 5})


class TokenAgent(BaseAgent):
    """Says what the example's agent says, token by token."""

    async def run(self, episode: Episode) -> AgentResult:
        system = ChatMessage("system", "Give the result as a number and nothing else.")
        await episode.observe_chat([system, ChatMessage("user", episode.sample.task.prompt)])
        await episode.generate(max_new_tokens=64)
        await observe_reply(episode, "Are you sure? Say it again.")
        generation = await episode.generate(max_new_tokens=64)
        return AgentResult(answer=generation.text)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


@asynccontextmanager
async def rollout(real: RealSglang, agent: BaseAgent) -> AsyncIterator[Harness]:
    # The best token, whatever the temperature that the agent asks for.
    sampling = SamplingParams(top_k=1)
    async with real.engine() as student:
        engines = {"student": student}
        front = GenerationHttp(GatewaySettings(listen="127.0.0.1:0"), engines, LoopClock())
        spec = spec_of(agent, default_sampling=sampling)
        async with front, running_engine(spec, generation_backends=engines, api_front=front) as harness:
            yield harness


async def test_the_real_client_in_a_child_process_leaves_the_record_of_a_token_level_agent(real: RealSglang) -> None:
    agent = runpy.run_path(str(EXAMPLE / "agent_handler.py"))["OpenAIAgent"](python=PYTHON)
    samples = []
    for each in (TokenAgent(), agent):
        async with rollout(real, each) as harness:
            samples += await harness.samples(await harness.submit([TASK]))
    expected, found = (sample.trajectory for sample in samples)
    assert samples[1].outcome in {Outcome.SOLVED, Outcome.WRONG_ANSWER}, samples[1].error
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    assert [turn.text for turn in found.turns] == [turn.text for turn in expected.turns]
    assert [turn.source for turn in found.turns] == ["environment", "student"] * 2
    # Of the first turn also the log-probs, whose temperature is the same; the second turn's is the agent's own choice.
    first = slice(found.turns[1].start, found.turns[1].end)
    assert abs(found.log_probs[first] - expected.log_probs[first]).max() < 1e-4
    assert samples[1].reward.details["said"] == found.turns[-1].text.strip()


@pytest.mark.parametrize(
    ("mode", "policy"), [(PauseMode.ABORT, OnWeightUpdate.RESUME), (PauseMode.RETRACT, OnWeightUpdate.RESTART)]
)
async def test_the_real_client_is_held_while_a_trainer_changes_the_weights(
    real: RealSglang, reference: Reference, mode: PauseMode, policy: OnWeightUpdate
) -> None:
    """It notices nothing but the time that it takes; the record tells the two weights apart, to the digit."""
    agent = runpy.run_path(str(EXAMPLE / "agent_handler.py"))["OpenAIAgent"](python=PYTHON)
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as student:
        front = GenerationHttp(GatewaySettings(listen="127.0.0.1:0"), {STUDENT: student}, LoopClock())
        sampling = SamplingParams(ignore_eos=True)
        async with front, training(student, agent, sampling, policy, api_front=front) as here:
            rollout = asyncio.create_task(here.rollout(TASK))
            await real.until_running(1, tokens=FIRST_PROMPT_TOKENS + 10)
            async with here.trainer.paused(mode):
                assert not rollout.done()
                await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
            (sample,) = await rollout
    assert sample.outcome in {Outcome.SOLVED, Outcome.WRONG_ANSWER}, sample.error
    trajectory = sample.trajectory
    assert [turn.source for turn in trajectory.turns] == ["environment", "student"] * 2
    first, second = trajectory.turns[1], trajectory.turns[3]
    versions = list(dict.fromkeys(span.version for span in trajectory.weight_spans))
    assert versions == [FIRST_VERSION, TRAINED_VERSION]
    begun = next(span.start for span in trajectory.weight_spans if span.version == TRAINED_VERSION)
    assert first.start < begun < first.end <= second.start
    assert sample.reward.details["said"] == second.text.strip()
    assert_exact(sample, reference, *TEMPERATURES)
