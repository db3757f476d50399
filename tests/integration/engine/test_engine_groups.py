"""Groups that are scored as a whole: on the real engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.explanations import TaskPhase
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, Outcome, Reward, SampleDone, TaskState
from py_scheduler.execution.run_sample import InlineRunner
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.ranking import RankingAgent, one_done
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import SolvingAgent, gpu_spec, raises, spec_of, two_nodes
from tests.support.harness import running_engine, samples_in, task_of
from tests.support.journal.journal_store import SurvivingJournal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.requests import SubmitReply
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.task import Task
    from tests.support.harness import Harness


async def until_asked(agent: RankingAgent, count: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(agent.asked) < count:
            agent.more.clear()
            await agent.more.wait()


async def test_a_group_is_scored_once_after_its_last_sample_and_holds_no_room() -> None:
    pool, agent = two_nodes(), RankingAgent(is_open=False)
    async with running_engine(gpu_spec(agent, 1.0), pool=pool) as harness:
        reply = await harness.submit([task_of("sum", repeat_times=5)])
        await until_asked(agent)
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 16
        view = harness.engine.submission(harness.selector(reply))
        assert (view.open_tasks, view.running_attempts) == (1, 0)
        assert (await harness.engine.explain_task(reply.task_ids[0], "default")).phase is TaskPhase.SCORING
        agent.gate.set()
        records = await harness.records_until_done(reply)
    assert agent.asked == [("sum", [0, 1, 2, 3, 4])]
    assert [type(record.event) for record in records][-2:] == [AttemptEnded, TaskDone]
    done = records[-1].event
    assert isinstance(done, TaskDone)
    assert done.state is TaskState.SUCCEEDED
    assert [reward.score for reward in done.rewards] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert done.outcomes == {Outcome.WRONG_ANSWER: 5}
    assert {sample.reward.score for sample in samples_in(records)} == {1.0}, "a sample keeps its own in its record"


async def test_the_evaluators_threshold_says_what_the_groups_score_solves() -> None:
    spec = msgspec.structs.replace(spec_of(RankingAgent()), solve_threshold=0.5)
    async with running_engine(spec) as harness:
        done = await one_done(harness, await harness.submit([task_of("sum", repeat_times=3)]))
    assert done.group_outcomes == (Outcome.WRONG_ANSWER, Outcome.WRONG_ANSWER, Outcome.SOLVED)


async def test_a_group_with_failures_is_scored_whole_and_one_of_failures_only_is_not_scored() -> None:
    async def second_fails(episode: Episode) -> AgentResult:
        if episode.sample.sample_no == 1:
            raise ValueError("broken")
        return AgentResult()

    agent = RankingAgent(mixed=second_fails, raises=raises)
    async with running_engine(spec_of(agent)) as harness:
        mixed = await harness.submit([task_of("mixed", repeat_times=3)])
        broken = await harness.submit([task_of("raises", repeat_times=3)], 1)
        done = await one_done(harness, mixed)
        assert (done.state, len(done.rewards)) == (TaskState.PARTIAL, 3)
        assert (await one_done(harness, broken)).state is TaskState.FAILED
    assert agent.asked == [("mixed", [0, 1, 2])]
    assert agent.outcomes == [[Outcome.SOLVED, Outcome.INFRA_OTHER, Outcome.SOLVED]]


class BrokenRanker(SolvingAgent):
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned  # type: ignore[no-any-return]


ONE = Reward(score=1.0)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (ValueError("no judge"), "ValueError: no judge"),
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(2), "SystemExit: 2"),
        (None, "returned NoneType, not a list of Reward"),
        ([ONE], "returned 1 rewards for 2 samples"),
        ([ONE, ONE, ONE], "returned 3 rewards for 2 samples"),
        ([ONE, 1.0], "returned float, not Reward"),
        ([ONE, Reward(score=float("nan"))], "gave the score nan"),
        ([ONE, Reward(score=float("inf"))], "gave the score inf"),
        ([ONE, Reward(score=None)], "a Reward that is not one"),  # type: ignore[arg-type]
        ([ONE, Reward(score=1.0, details={"x": "y" * (2 << 20)})], "bytes of details"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_group_that_cannot_be_scored_fails_with_its_reason_and_nobody_else(returned: Any, reason: str) -> None:
    async with running_engine(spec_of(BrokenRanker(returned)), spec_of(SolvingAgent(), "fine")) as harness:
        reply = await harness.submit([task_of(repeat_times=2), task_of(task_type="fine")])
        done = await harness.done(reply)
        assert harness.engine.submission(harness.selector(reply)).failed_tasks == 1
    broken = done[reply.task_ids[0]]
    assert (broken.state, broken.rewards, broken.outcomes) == (TaskState.FAILED, (), {Outcome.SOLVED: 2})
    assert "eval_group" in broken.reason
    assert reason in broken.reason
    assert done[reply.task_ids[1]].state is TaskState.SUCCEEDED


async def test_a_group_score_has_the_eval_timeout() -> None:
    clock, agent = FakeClock(), RankingAgent(is_open=False)
    async with running_engine(spec_of(agent, eval_timeout_seconds=20.0), clock=clock) as harness:
        reply = await harness.submit([task_of(repeat_times=2)])
        await until_asked(agent)
        await clock.advance(21)
        done = await one_done(harness, reply)
        assert (done.state, done.reason) == (TaskState.FAILED, "eval_timeout_seconds (20) passed in eval_group")
        await settle()
    assert agent.cancelled == 1
    assert clock.live_timers == 0


@pytest.mark.parametrize(("by_deadline", "state"), [(False, TaskState.ABORTED), (True, TaskState.FAILED)])
async def test_a_stop_between_the_last_sample_and_the_score_cancels_it(by_deadline: bool, state: TaskState) -> None:
    clock, agent = FakeClock(), RankingAgent(is_open=False)
    async with running_engine(spec_of(agent), clock=clock) as harness:
        reply = await harness.submit([task_of(repeat_times=2, task_deadline_seconds=60.0)])
        await until_asked(agent)
        if by_deadline:
            await clock.advance(61)
        else:
            answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
            assert (answer.aborted_tasks, answer.still_stopping) == (1, ())
        done = await one_done(harness, reply)
        assert (done.state, done.rewards) == (state, ())
        assert agent.cancelled == 1
        agent.gate.set()
        await settle()
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 0
        later = await harness.submit([task_of(repeat_times=2)], 1)
        assert (await one_done(harness, later)).state is TaskState.SUCCEEDED


async def test_a_scorer_that_ignores_its_stop_is_given_up_and_listed() -> None:
    clock, free = FakeClock(), asyncio.Event()

    class DeafRanker(RankingAgent):
        async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
            self.asked.append((task.prompt, []))
            self.more.set()
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue
            return [ONE for _ in samples]

    agent = DeafRanker()
    async with running_engine(spec_of(agent, eval_timeout_seconds=10.0), clock=clock) as harness:
        reply = await harness.submit([task_of()])
        await until_asked(agent)
        await clock.advance(11)
        assert (await one_done(harness, reply)).state is TaskState.FAILED
        await clock.advance(6)
        abort = AbortRequest(selector=harness.selector(reply), wait=True)
        assert (await harness.engine.abort(abort)).still_stopping == reply.task_ids
        free.set()
        await settle()
        assert (await harness.engine.abort(abort)).still_stopping == ()
        assert (await one_done(harness, await harness.submit([task_of()], 1))).rewards == (ONE,)


async def test_no_more_groups_are_scored_at_once_than_samples_may_run() -> None:
    agent = RankingAgent(is_open=False)
    async with running_engine(spec_of(agent), max_running_samples=3) as harness:
        reply = await harness.submit([task_of(str(number)) for number in range(10)])
        await until_asked(agent, 3)
        await settle()
        assert len(agent.asked) == 3
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), task_ids=reply.task_ids[5:6]))
        agent.gate.set()
        done = await harness.done(reply)
    assert [done[task_id].state for task_id in reply.task_ids].count(TaskState.SUCCEEDED) == 9
    assert len(agent.asked) == 9, "one was stopped before its turn came"


async def test_a_group_that_was_not_scored_is_scored_after_a_restart() -> None:
    journal, first = SurvivingJournal(), RankingAgent(is_open=False)
    async with running_engine(spec_of(first), journal=journal) as harness:
        reply = await harness.submit([task_of("sum", repeat_times=3), task_of("other", repeat_times=2)])
        await until_asked(first, 2)
    second = RankingAgent()
    async with running_engine(spec_of(second), journal=journal) as harness:
        done = await harness.done(reply)
    assert sorted(second.asked) == [("other", [0, 1]), ("sum", [0, 1, 2])]
    assert [reward.score for reward in done[reply.task_ids[1]].rewards] == [0.0, 0.5]
    assert second.begun == {}, "no sample is rolled out again"


async def test_after_a_restart_without_group_scores_the_samples_keep_their_own() -> None:
    journal, first = SurvivingJournal(), RankingAgent(is_open=False)
    async with running_engine(spec_of(first), journal=journal) as harness:
        reply = await harness.submit([task_of("sum", repeat_times=3)])
        await until_asked(first)
    async with running_engine(spec_of(SolvingAgent()), journal=journal) as harness:
        done = await one_done(harness, reply)
    assert (done.state, done.rewards) == (TaskState.SUCCEEDED, ())


async def test_a_drain_scores_the_groups_that_are_there_and_aborts_what_takes_too_long() -> None:
    agent = RankingAgent(is_open=False)
    async with running_engine(spec_of(agent)) as harness:
        reply = await harness.submit([task_of()])
        await until_asked(agent)
        draining = asyncio.ensure_future(harness.engine.drain(60.0))
        await settle()
        agent.gate.set()
        await draining
        assert (await one_done(harness, reply)).state is TaskState.SUCCEEDED
    stuck = RankingAgent(is_open=False)
    async with running_engine(spec_of(stuck)) as harness:
        reply = await harness.submit([task_of()])
        await until_asked(stuck)
        await harness.engine.drain(0.01)
        assert (await one_done(harness, reply)).state is TaskState.ABORTED


async def test_a_group_that_is_complete_as_the_engine_closes_is_left_to_the_next_one() -> None:
    begun = asyncio.Event()

    async def returns_when_stopped(_: Episode) -> AgentResult:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return AgentResult()

    journal, first, second = SurvivingJournal(), RankingAgent(late=returns_when_stopped), RankingAgent()
    async with running_engine(spec_of(first), journal=journal) as harness:
        reply = await harness.submit([task_of("late")])
        await begun.wait()
    assert first.asked == []
    async with running_engine(spec_of(second), journal=journal) as harness:
        assert (await one_done(harness, reply)).state is TaskState.SUCCEEDED
    assert second.asked == [("late", [0])]


async def test_a_crashed_scorer_ends_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def crashes(*_: Any) -> Any:
        raise RuntimeError("a fault of the scheduler itself")

    monkeypatch.setattr("py_scheduler.execution.run_sample.score_group", crashes)
    async with running_engine(spec_of(RankingAgent())) as harness:
        done = await one_done(harness, await harness.submit([task_of()]))
    assert done.state is TaskState.FAILED
    assert "its worker crashed: RuntimeError" in done.reason


class SparseRunner(InlineRunner):
    """Its one handle waits for the gate. `waits`: how many want it."""

    standing_handle = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = 0

    async def take_handle(self, _token: PlacementToken | None) -> InlineRunner:
        self.waits += 1
        try:
            await self.gate.wait()
        finally:
            self.waits -= 1
        return self


async def a_group_that_waits_for_a_runner(harness: Harness, runner: SparseRunner, agent: RankingAgent) -> SubmitReply:
    begun, played = asyncio.Event(), asyncio.Event()

    async def last(_: Episode) -> AgentResult:
        begun.set()
        await played.wait()
        return AgentResult()

    agent.behaviours["last"] = last
    reply = await harness.submit([task_of("last")])
    await begun.wait()
    runner.gate.clear()
    played.set()
    await settle()
    assert runner.waits == 1
    return reply


async def test_a_group_that_waits_for_a_runner_stops_at_once_and_its_worker_scores_the_next_one() -> None:
    runner, agent = SparseRunner(), RankingAgent()
    one_worker = EngineSettings(max_running_samples=1)
    async with running_engine(spec_of(agent), runners={"agent": runner}, settings=one_worker) as harness:
        reply = await a_group_that_waits_for_a_runner(harness, runner, agent)
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert (answer.aborted_tasks, answer.still_stopping, runner.waits) == (1, (), 0)
        assert (await one_done(harness, reply)).state is TaskState.ABORTED
        runner.gate.set()
        later = await harness.submit([task_of("sum")], 1)
        assert (await one_done(harness, later)).state is TaskState.SUCCEEDED
    assert agent.asked == [("sum", [0])]


async def test_the_eval_timeout_of_a_group_counts_from_its_runner_on() -> None:
    runner, agent, clock = SparseRunner(), RankingAgent(is_open=False), FakeClock()
    spec = spec_of(agent, eval_timeout_seconds=20.0)
    async with running_engine(spec, runners={"agent": runner}, clock=clock) as harness:
        reply = await a_group_that_waits_for_a_runner(harness, runner, agent)
        await clock.advance(60)
        runner.gate.set()
        await until_asked(agent)
        await clock.advance(19)
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1
        await clock.advance(2)
        assert "eval_timeout_seconds (20)" in (await one_done(harness, reply)).reason
