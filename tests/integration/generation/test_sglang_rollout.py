"""A rollout through the engine and the SGLang adapter against a scripted HTTP server: what each fault becomes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, Outcome, Reward, TaskState
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.wire.results import encode_sample
from tests.support.buffers import forbid_lists
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.models.scripted_sglang import FIRST_TOKEN, Script, ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode

PROMPT = [1, 2, 3]
NEW_TOKENS = 32


class OneTurnAgent(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(PROMPT)
        generation = await episode.generate()
        return AgentResult(answer=generation.text)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


@asynccontextmanager
async def rollout(
    *scripts: Script, agent: BaseAgent | None = None, idle_read_timeout_seconds: float = 0.5
) -> AsyncIterator[tuple[Harness, ScriptedSglang]]:
    settings = SglangSettings(
        retry=RetrySettings(attempts=3, base_seconds=0.001, max_seconds=0.01),
        idle_read_timeout_seconds=idle_read_timeout_seconds,
        stream_interval=1,
    )
    async with ScriptedSglang() as server:
        server.scripts.extend(scripts)
        student = SglangBackend(server.base_url, settings=settings)
        await student.start()
        try:
            async with running_engine(
                spec_of(agent or OneTurnAgent(), default_sampling=SamplingParams(max_new_tokens=NEW_TOKENS)),
                generation_backends={"student": student},
            ) as harness:
                yield harness, server
                await server.until(lambda: not server.running)
        finally:
            await student.close()


async def test_samples_carry_ids_log_probs_mask_and_version() -> None:
    async with rollout() as (harness, _):
        samples = await harness.samples(await harness.submit([task_of(repeat_times=8)]))
    assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 8
    for sample in samples:
        trajectory = sample.trajectory
        assert trajectory.token_ids[: len(PROMPT)].tolist() == PROMPT
        assert trajectory.token_ids[len(PROMPT)] == FIRST_TOKEN
        assert trajectory.loss_mask.tolist() == [0] * len(PROMPT) + [1] * NEW_TOKENS
        expected = [0.0] * len(PROMPT) + [-position / 128 for position in range(NEW_TOKENS)]
        assert trajectory.log_probs.tolist() == pytest.approx(expected)
        assert [(span.start, span.end) for span in trajectory.weight_spans] == [(3, 3 + NEW_TOKENS)]


async def test_tokens_stay_buffers_from_the_server_to_the_frame_that_a_watcher_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of a generation's ids or log-probs is for a handler that reads one; the scheduler itself makes none."""
    forbid_lists(monkeypatch)
    async with rollout() as (harness, _):
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    message = task_pb2.SampleDone()
    encode_sample(sample, message)
    assert message.trajectory.token_ids == sample.trajectory.token_id_bytes
    assert (sample.outcome, len(sample.trajectory)) == (Outcome.SOLVED, len(PROMPT) + NEW_TOKENS)


class ImpatientAgent(OneTurnAgent):
    """Adds to the context while the model continues it, which the model never sees."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(PROMPT)
        generating = asyncio.ensure_future(episode.generate())
        await asyncio.sleep(0)
        refused = []
        for add in (lambda: episode.observe([7, 8]), episode.generate):
            try:
                await (added if (added := add()) is not None else asyncio.sleep(0))
            except FailedPreconditionError as error:
                refused.append(str(error))
        await generating
        return AgentResult(answer="; ".join(refused))

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=result.answer.count("is generating"))


async def test_a_context_grows_by_one_turn_at_a_time() -> None:
    async with rollout(agent=ImpatientAgent()) as (harness, server):
        (sample,) = await harness.samples(await harness.submit([task_of()]))
        assert len(server.bodies) == 1
    assert sample.reward.score == 2
    assert len(sample.trajectory) == len(PROMPT) + NEW_TOKENS


async def test_an_abort_keeps_the_tokens_that_were_generated() -> None:
    async with rollout(Script(stall_after=20)) as (harness, server):
        reply = await harness.submit([task_of()])
        await harness.until_started(reply, 1)
        await server.until(lambda: server.streamed == 20)
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert answer.still_stopping == ()
        (sample,) = await harness.samples(reply)
    assert sample.outcome is Outcome.ABORTED
    assert sample.trajectory.generated_tokens == 20
    assert sample.trajectory.turns[-1].finish_reason == "abort"
    assert sample.trajectory.turns[-1].text
    assert server.aborts


async def test_an_engine_that_is_deaf_to_the_abort_costs_no_tokens_that_have_arrived() -> None:
    async with rollout(Script(stall_after=20, deaf=True), idle_read_timeout_seconds=60.0) as (harness, server):
        reply = await harness.submit([task_of()])
        await harness.until_started(reply, 1)
        await server.until(lambda: server.streamed == 20)
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        (sample,) = await harness.samples(reply)
    assert sample.outcome is Outcome.ABORTED
    assert sample.trajectory.generated_tokens > 0


async def test_a_context_that_is_too_long_is_the_models_matter_and_not_retried() -> None:
    message = "Requested token count exceeds the model's maximum context length"
    async with rollout(Script(status=400, message=message)) as (harness, server):
        (sample,) = await harness.samples(await harness.submit([task_of()]))
        assert len(server.bodies) == 1
    assert sample.outcome is Outcome.CONTEXT_OVERFLOW
    assert sample.trajectory.token_ids.tolist() == PROMPT


async def test_a_busy_server_is_asked_again() -> None:
    async with rollout(Script(status=503), Script(status=503)) as (harness, server):
        reply = await harness.submit([task_of()])
        assert [event.state for event in (await harness.done(reply)).values()] == [TaskState.SUCCEEDED]
        assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("script", "requests", "outcome", "generated"),
    [
        (Script(disconnect_before=True), 2, Outcome.SOLVED, NEW_TOKENS),
        (Script(disconnect_after=5), 1, Outcome.INFRA_CONN, 5),
        (Script(stall_after=5), 1, Outcome.INFRA_CONN, 5),
    ],
    ids=["before any byte", "after five tokens", "silent after five tokens"],
)
async def test_a_disconnect_is_retried_only_if_nothing_was_received(
    script: Script, requests: int, outcome: Outcome, generated: int
) -> None:
    async with rollout(script) as (harness, server):
        (sample,) = await harness.samples(await harness.submit([task_of()]))
        assert len(server.bodies) == requests
    assert sample.outcome is outcome
    assert sample.trajectory.generated_tokens == generated
    assert sample.reward.score == (1.0 if outcome is Outcome.SOLVED else 0.0)
