"""What handlers can do wrong, and that it stays within their own sample."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, AttemptState, Outcome, Reward, TaskState
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import (
    FailedPreconditionError,
)
from py_scheduler.execution.run_sample import run_sample
from tests.support.fake_clock import settle
from tests.support.handlers import (
    ScriptedAgent,
    SolvingAgent,
    gpu_spec,
    spec_of,
    two_nodes,
)
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.episode import HandlerEpisode
    from py_scheduler.execution.workers import Worker


async def test_a_failed_attempt_is_retried_within_its_budget() -> None:
    attempts: list[int] = []

    async def fails_twice(episode: Episode) -> AgentResult:
        attempts.append(episode.attempt_no)
        if episode.attempt_no < 3:
            raise ConnectionResetError("gone")
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(flaky=fails_twice))) as harness:
        reply = await harness.submit([task_of("flaky", retry=RetryPolicy(max_failure_retries=2))])
        records = await harness.records_until_done(reply)
    assert attempts == [1, 2, 3]
    ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
    assert [(e.state, e.next_attempt_no, len(e.samples)) for e in ended] == [
        (AttemptState.FAILED, 2, 0),
        (AttemptState.FAILED, 3, 0),
        (AttemptState.SUCCEEDED, 0, 1),
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError("no"), Outcome.INFRA_CONN),
        (TimeoutError(), Outcome.AGENT_TIMEOUT),
        (asyncio.CancelledError(), Outcome.INFRA_OTHER),
        (SystemExit(1), Outcome.INFRA_OTHER),
        (MemoryError(), Outcome.INFRA_OTHER),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
async def test_whatever_a_handler_raises_ends_its_own_sample_only(error: BaseException, outcome: Outcome) -> None:
    async def bad(_: Episode) -> AgentResult:
        raise error

    async with running_engine(spec_of(ScriptedAgent(bad=bad))) as harness:
        reply = await harness.submit([task_of("bad"), *(task_of("fine") for _ in range(63))])
        done = await harness.done(reply)
    assert done[reply.task_ids[0]].outcomes == {outcome: 1}
    assert type(error).__name__ in done[reply.task_ids[0]].reason
    assert [done[task_id].state for task_id in reply.task_ids[1:]] == [TaskState.SUCCEEDED] * 63


async def test_a_handler_that_cancels_its_own_task_ends_its_own_sample_only() -> None:
    async def cancels_itself(_: Episode) -> AgentResult:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError("unreachable")

    async with running_engine(spec_of(ScriptedAgent(bad=cancels_itself), run_timeout_seconds=60.0)) as harness:
        reply = await harness.submit([task_of("bad"), *(task_of("fine") for _ in range(5))])
        done = await harness.done(reply)
        assert harness.engine._supervisor._running == {}
    states = [done[task_id].state for task_id in reply.task_ids]
    assert states == [TaskState.FAILED, *[TaskState.SUCCEEDED] * 5]


@pytest.mark.parametrize(
    "result",
    [
        AgentResult(termination_reason=7),  # type: ignore[arg-type]
        AgentResult(answer=None),  # type: ignore[arg-type]
        AgentResult(reward_inputs=[1]),  # type: ignore[arg-type]
        "an answer",
        None,
    ],
    ids=repr,
)
async def test_a_result_that_is_none_is_the_handlers_fault(result: Any) -> None:
    async def odd(_: Episode) -> AgentResult:
        return result  # type: ignore[no-any-return]

    async with running_engine(spec_of(ScriptedAgent(odd=odd))) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("odd")]))
    assert (sample.outcome, sample.phase) == (Outcome.INFRA_OTHER, "run")
    assert "ScriptedAgent.run" in sample.error


class BadScorer(SolvingAgent):
    def __init__(self, returns: object) -> None:
        self.returns = returns

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return self.returns  # type: ignore[return-value]


@pytest.mark.parametrize(
    "returned",
    [None, 1.0, Reward(score=float("nan")), Reward(score="1"), Reward(score=True), Reward(score=1.0, details=[])],  # type: ignore[arg-type]
    ids=repr,
)
async def test_a_scorer_that_returns_nonsense_is_a_fault_of_its_own(returned: object) -> None:
    async with running_engine(spec_of(BadScorer(returned))) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    assert (sample.outcome, sample.phase, sample.reward.score) == (Outcome.INFRA_OTHER, "eval", 0.0)
    assert "BadScorer.eval" in sample.error


async def test_an_exception_that_cannot_be_printed_ends_its_own_sample_only() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise SystemError("even this")

    async def unspeakable(_: Episode) -> AgentResult:
        raise UnspeakableError

    async def endless(_: Episode) -> AgentResult:
        raise ValueError("x" * 1_000_000)

    async def interrupts(_: Episode) -> AgentResult:
        raise KeyboardInterrupt

    agent = ScriptedAgent(unspeakable=unspeakable, endless=endless, interrupts=interrupts)
    async with running_engine(spec_of(agent)) as harness:
        prompts = ("unspeakable", "endless", "interrupts", "fine")
        reply = await harness.submit([task_of(prompt) for prompt in prompts])
        done = await harness.done(reply)
    reasons = [done[task_id].reason for task_id in reply.task_ids]
    assert [reason.partition(" (")[0].partition(":")[0] for reason in reasons] == [
        "UnspeakableError",
        "ValueError",
        "KeyboardInterrupt",
        "",
    ]
    assert max(map(len, reasons)) < 5_000


async def test_a_cancellation_that_a_handler_leaves_behind_strikes_nobody_else() -> None:
    async def cancels_and_returns(_: Episode) -> AgentResult:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return AgentResult()

    async def waits(_: Episode) -> AgentResult:
        await asyncio.sleep(0)
        return AgentResult()

    agent = ScriptedAgent(bad=cancels_and_returns, waits=waits)
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec) as harness:
        reply = await harness.submit([task_of(prompt) for _ in range(10) for prompt in ("bad", "waits")])
        done = await harness.done(reply)
    assert [done[task_id].state for task_id in reply.task_ids[1::2]] == [TaskState.SUCCEEDED] * 10


async def test_an_episode_takes_nothing_after_its_end() -> None:
    leaked: list[Episode] = []

    async def leaks(episode: Episode) -> AgentResult:
        episode.observe([1])
        leaked.append(episode)
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(leaks=leaks))) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("leaks")]))
        with pytest.raises(FailedPreconditionError, match="over"):
            leaked[0].observe([2])
        with pytest.raises(FailedPreconditionError, match="over"):
            await leaked[0].generate()
    assert sample.trajectory.token_ids.tolist() == [1]


async def test_a_crashed_worker_loses_its_attempt_which_is_tried_again_and_then_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def crashes_on_poison(
        running: RunningAttempt, worker: Worker, episode: HandlerEpisode, *others: Any
    ) -> tuple[AttemptState, SampleDone]:
        if episode.sample.task.prompt == "poison":
            raise RuntimeError("a fault of the scheduler itself")
        return await run_sample(running, worker, episode, *others)

    monkeypatch.setattr("py_scheduler.execution.run_sample.run_sample", crashes_on_poison)
    pool = two_nodes()
    async with running_engine(gpu_spec(SolvingAgent(), 1.0, budget_gpus=2), pool=pool) as harness:
        reply = await harness.submit([task_of("poison"), *(task_of("fine") for _ in range(20))])
        records = await harness.records_until_done(reply)
        await settle()
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 16
    ended = [r.event for r in records if isinstance(r.event, AttemptEnded) and r.event.task_id == reply.task_ids[0]]
    assert [(event.state, event.next_attempt_no) for event in ended] == [
        (AttemptState.LOST, 2),
        (AttemptState.LOST, 3),
        (AttemptState.LOST, 0),
    ]
    done = [r.event for r in records if isinstance(r.event, TaskDone)]
    assert sum(event.state is TaskState.SUCCEEDED for event in done) == 20, "its siblings finish"
