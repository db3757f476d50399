"""The engine as a whole, in one process: admission, episodes, stops, deadlines, and what watchers see of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone, TasksAccepted
from py_scheduler.domain.requests import AbortRequest, EventFilter, SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, AttemptState, Outcome, Reward, TaskState
from py_scheduler.domain.task import Batch, RetryPolicy, Task
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SchedulerError,
    UnplaceableError,
)
from py_scheduler.execution.play import play_sample
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, spec_of
from tests.support.harness import running_engine, samples_in, task_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode, EvaluatorSpec
    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.episode import HandlerEpisode


def two_nodes(gpus: int = 8) -> PlacementPool:
    return PlacementPool(
        [NodeResource(node_ip=f"10.0.0.{n}", gpus=list(range(gpus)), cpu=64, memory_gb=256) for n in (1, 2)]
    )


def gpu_spec(handler: BaseAgent, share: float, budget_gpus: float = 16, **changes: Any) -> EvaluatorSpec:
    sample = Resource(gpu=share, cpu=0.1)
    budget = Resource(gpu=budget_gpus, cpu=128, concurrency=128)
    return spec_of(handler, resource=budget, run_resource=sample, eval_resource=sample, batch_size=None, **changes)


async def raises(_: Episode) -> AgentResult:
    raise ValueError("the handler is broken")


async def hangs(_: Episode) -> AgentResult:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_five_hundred_tasks_of_which_three_go_wrong() -> None:
    clock = FakeClock()
    agent = ScriptedAgent(raises=raises, hangs=hangs, aborted=hangs)
    spec = spec_of(agent, run_timeout_seconds=30.0, resource=Resource(concurrency=1))
    tasks = [task_of("fine") for _ in range(500)]
    tasks[100], tasks[200], tasks[300] = task_of("raises"), task_of("hangs"), task_of("aborted")
    async with running_engine(spec, clock=clock) as harness:
        reply = await harness.submit(tasks)
        await harness.until_started(reply, 500)
        await harness.engine.abort(
            AbortRequest(selector=harness.selector(reply), task_ids=(reply.task_ids[300],), wait=True)
        )
        await clock.advance(31)
        done = await harness.done(reply)
    assert len(done) == 500
    wrong = {index: done[reply.task_ids[index]] for index in (100, 200, 300)}
    assert sum(event.state is TaskState.SUCCEEDED for event in done.values()) == 497
    assert {index: (event.state, event.reason.partition(" (test_engine")[0]) for index, event in wrong.items()} == {
        100: (TaskState.FAILED, "ValueError: the handler is broken"),
        200: (TaskState.FAILED, "run_timeout_seconds (30) passed"),
        300: (TaskState.ABORTED, "aborted on request"),
    }
    assert [list(event.outcomes) for event in wrong.values()] == [
        [Outcome.INFRA_OTHER],
        [Outcome.AGENT_TIMEOUT],
        [Outcome.ABORTED],
    ]


async def test_eighty_shares_of_018_run_at_once_on_two_nodes_of_eight() -> None:
    agent = GatedAgent()
    async with running_engine(gpu_spec(agent, 0.18), pool=two_nodes()) as harness:
        reply = await harness.submit([task_of(str(n)) for n in range(80)])
        await harness.until_started(reply, 80)
        assert agent.inside == 80
        agent.gate.set()
        samples = await harness.samples(reply)
    per_gpu: dict[tuple[str, int], int] = {}
    for sample in samples:
        (gpu,) = sample.gpu_ids
        per_gpu[sample.node_ip, gpu] = per_gpu.get((sample.node_ip, gpu), 0) + 1
    assert per_gpu == {(f"10.0.0.{node}", gpu): 5 for node in (1, 2) for gpu in range(8)}


async def test_a_batch_that_can_never_fit_fails_at_submit_with_the_way_out() -> None:
    agent = SolvingAgent()
    async with running_engine(gpu_spec(agent, 1.0, budget_gpus=32), pool=two_nodes()) as harness:
        with pytest.raises(UnplaceableError, match=r"'agent' needs 17 .* 16") as raised:
            await harness.submit([task_of() for _ in range(17)])
        assert "add nodes" in str(raised.value)
        with pytest.raises(NotFoundError):
            harness.engine.submission(SubmissionSelector(batch_id=0))
        reply = await harness.submit([task_of() for _ in range(16)])
        assert len(await harness.done(reply)) == 16


async def test_a_spec_of_which_no_sample_can_ever_fit_fails_at_the_start() -> None:
    with pytest.raises(UnplaceableError, match="'agent'"):
        async with running_engine(gpu_spec(SolvingAgent(), 9.0), pool=two_nodes()):
            pass
    with pytest.raises(UnplaceableError, match="'agent'"):
        async with running_engine(gpu_spec(SolvingAgent(), 2.0, budget_gpus=1)):
            pass


async def test_a_batch_that_does_not_fit_now_waits_with_a_reason_and_starts_when_room_returns() -> None:
    agent = GatedAgent()
    async with running_engine(gpu_spec(agent, 1.0), pool=two_nodes()) as harness:
        first = await harness.submit([task_of(f"a{n}") for n in range(12)], 1)
        await harness.until_started(first, 12)
        second = await harness.submit([task_of(f"b{n}") for n in range(8)], 2)
        await settle()
        view = harness.engine.submission(harness.selector(second))
        assert (view.queued_attempts, view.running_attempts, view.open_tasks) == (8, 0, 8)
        (waiting,) = view.waiting
        assert set(waiting.task_ids) == set(second.task_ids)
        assert "gpu" in waiting.reason.lower()
        assert agent.inside == 12
        agent.gate.set()
        assert len(await harness.done(second)) == 8


async def test_a_token_goes_back_as_soon_as_its_batch_cannot_use_it() -> None:
    """A straggler holds one token, not its batch's whole lease."""
    agent = ScriptedAgent(straggler=hangs)
    pool = two_nodes(gpus=4)
    async with running_engine(gpu_spec(agent, 1.0, budget_gpus=8), pool=pool) as harness:
        first = await harness.submit([task_of("straggler"), *(task_of("fast") for _ in range(7))], 1)
        second = await harness.submit([task_of("fast") for _ in range(7)], 2)
        assert len(await harness.done(second)) == 7
        assert harness.engine.submission(harness.selector(first)).running_attempts == 1
        await harness.engine.abort(AbortRequest(selector=harness.selector(first), wait=True))
    assert pool.free_tokens_for(Resource(gpu=1.0)) == 8


async def test_more_samples_than_tokens_share_them() -> None:
    agent = GatedAgent()
    pool = two_nodes()
    async with running_engine(gpu_spec(agent, 1.0, budget_gpus=4), pool=pool) as harness:
        reply = await harness.submit([task_of(repeat_times=10)])
        await harness.until_started(reply, 4)
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 12
        agent.gate.set()
        samples = await harness.samples(reply)
    assert sorted(sample.sample_no for sample in samples) == list(range(10))
    assert agent.peak == 4
    assert pool.free_tokens_for(Resource(gpu=1.0)) == 16


async def test_five_hundred_submits_under_one_request_id_run_once() -> None:
    agent = ScriptedAgent()
    async with running_engine(spec_of(agent)) as harness:
        tasks = [task_of("once")]
        replies = await asyncio.gather(*(harness.submit(tasks, request_id="the same") for _ in range(500)))
        assert len({reply.task_ids for reply in replies}) == 1
        await harness.done(replies[0])
        assert agent.begun == {"once": 1}
        again = await harness.submit(tasks, request_id="the same")
        assert again == replies[0]
        with pytest.raises(AlreadyExistsError, match="request_id"):
            await harness.submit([task_of("other")], request_id="the same")


async def test_an_abort_right_after_a_submit_never_runs() -> None:
    agent = ScriptedAgent()
    async with running_engine(spec_of(agent)) as harness:
        reply = await harness.submit([task_of("never", repeat_times=8)])
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), reason="too late"))
        done = await harness.done(reply)
        assert answer.aborted_tasks == 1
        assert [(event.state, event.reason) for event in done.values()] == [(TaskState.ABORTED, "too late")]
        await settle()
    assert agent.begun == {}


async def test_abort_with_wait_returns_when_the_work_has_stopped() -> None:
    stopping, may_stop = asyncio.Event(), asyncio.Event()

    async def stops_slowly(_: Episode) -> AgentResult:
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            await may_stop.wait()
        raise AssertionError("unreachable")

    async with running_engine(spec_of(ScriptedAgent(slow=stops_slowly))) as harness:
        reply = await harness.submit([task_of("slow")])
        await harness.until_started(reply, 1)
        selector = harness.selector(reply)
        at_once = await harness.engine.abort(AbortRequest(selector=selector, wait=True, timeout_seconds=0.01))
        assert at_once.still_stopping == reply.task_ids
        waiting = asyncio.ensure_future(harness.engine.abort(AbortRequest(selector=selector, wait=True)))
        await stopping.wait()
        await settle()
        assert not waiting.done()
        may_stop.set()
        assert (await waiting).still_stopping == ()
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.ABORTED


async def test_events_stream_while_the_rollout_runs_and_a_second_watcher_sees_the_same() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent, resource=Resource(concurrency=2), batch_size=None)) as harness:
        reply = await harness.submit([task_of(str(n)) for n in range(20)])
        frames = harness.engine.watch(EventFilter(), None)
        seen: list[EventRecord] = []
        async for frame in frames:
            seen.extend(frame.records)
            if any(isinstance(record.event, AttemptStarted) for record in seen):
                break
        assert harness.engine.submission(harness.selector(reply)).leased_attempts == 18
        agent.gate.set()
        first = await harness.records_until_done(reply)
        second = await harness.records_until_done(reply)
    assert [r.sequence for r in first] == [r.sequence for r in second] == list(range(1, len(first) + 1))
    assert all(left is right for left, right in zip(first, second, strict=True))
    kinds = [type(record.event) for record in first]
    assert kinds[0] is TasksAccepted
    assert kinds.index(TaskDone) < len(kinds) - 1 - kinds[::-1].index(AttemptStarted)


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


async def test_a_handler_that_ignores_its_stop_is_given_up_and_its_room_stays_out() -> None:
    clock, free, started = FakeClock(), asyncio.Event(), asyncio.Event()

    async def stubborn(_: Episode) -> AgentResult:
        started.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return AgentResult()

    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0, 1], cpu=8, memory_gb=8)])
    spec = gpu_spec(ScriptedAgent(stubborn=stubborn), 1.0, budget_gpus=1, run_timeout_seconds=10.0)
    async with running_engine(spec, pool=pool, clock=clock) as harness:
        reply = await harness.submit([task_of("stubborn"), task_of("fine")])
        await started.wait()
        await clock.advance(11)
        view = harness.engine.submission(harness.selector(reply))
        assert (view.running_attempts, view.leased_attempts) == (1, 1)
        await clock.advance(6)
        done = await harness.done(reply)
        assert "did not stop within 5 s" in done[reply.task_ids[0]].reason
        assert done[reply.task_ids[0]].outcomes == {Outcome.AGENT_TIMEOUT: 1}
        (sample,) = [s for s in await harness.samples(reply) if s.task_id == reply.task_ids[0]]
        assert (sample.node_ip, sample.phase, len(sample.gpu_ids)) == ("n", "run", 1), "it says where it ran"
        again = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert again.still_stopping == (reply.task_ids[0],), "nobody has seen it stop"
        assert done[reply.task_ids[1]].state is TaskState.SUCCEEDED, "what waited behind it runs elsewhere"
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 1
        free.set()
        await settle()
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 2


async def test_room_that_is_stranded_holds_nobody_else_back() -> None:
    clock, started, free = FakeClock(), asyncio.Event(), asyncio.Event()

    async def stubborn(_: Episode) -> AgentResult:
        started.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return AgentResult()

    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0, 1], cpu=8, memory_gb=8)])
    spec = gpu_spec(ScriptedAgent(stubborn=stubborn), 1.0, budget_gpus=2, run_timeout_seconds=10.0)
    settings = EngineSettings(max_bypass=1)
    async with running_engine(spec, pool=pool, clock=clock, settings=settings) as harness:
        await harness.submit([task_of("stubborn")], 1)
        await started.wait()
        await clock.advance(20)
        large = await harness.submit([task_of("large"), task_of("large")], 2)
        small = [await harness.submit([task_of("small")], 3) for _ in range(20)]
        for reply in small:
            await harness.done(reply)
        (waiting,) = harness.engine.submission(harness.selector(large)).waiting
        assert "1 tokens are held by handlers that do not stop" in waiting.reason
        free.set()
        await harness.done(large)


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


async def test_the_queue_is_limited_by_samples_too() -> None:
    async with running_engine(spec_of(GatedAgent()), settings=EngineSettings(max_queued_samples=100)) as harness:
        await harness.submit([task_of(repeat_times=60)])
        with pytest.raises(ResourceExhaustedError, match="max_queued_samples"):
            await harness.submit([task_of(repeat_times=50)])
        with pytest.raises(InvalidArgumentError, match="split them"):
            await harness.submit([task_of(repeat_times=60_000) for _ in range(10)])
        await harness.submit([task_of(repeat_times=40)])


async def test_numbers_that_cannot_be_stored_are_refused_by_name() -> None:
    async with running_engine(spec_of(SolvingAgent())) as harness:
        task = Task(config=task_of().config, metadata={"answer": 2**70})
        with pytest.raises(InvalidArgumentError, match="64 bits"):
            await harness.submit([task])


async def test_nothing_is_tried_again_beside_a_handler_that_ignores_its_stop() -> None:
    clock, free, started = FakeClock(), asyncio.Event(), asyncio.Event()
    begun: list[int] = []

    async def stubborn(episode: Episode) -> AgentResult:
        begun.append(episode.attempt_no)
        started.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return AgentResult()

    async with running_engine(
        spec_of(ScriptedAgent(stubborn=stubborn), run_timeout_seconds=10.0), clock=clock
    ) as harness:
        reply = await harness.submit([task_of("stubborn", retry=RetryPolicy(max_failure_retries=2))])
        await started.wait()
        await clock.advance(20)
        assert [event.state for event in (await harness.done(reply)).values()] == [TaskState.FAILED]
        free.set()
        await settle()
    assert begun == [1]


async def test_an_abort_of_all_waits_for_what_an_earlier_abort_is_still_stopping() -> None:
    may_stop, stopping = asyncio.Event(), asyncio.Event()

    async def stops_slowly(_: Episode) -> AgentResult:
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            await may_stop.wait()
        raise AssertionError("unreachable")

    async with running_engine(spec_of(ScriptedAgent(slow=stops_slowly, other=hangs))) as harness:
        reply = await harness.submit([task_of("slow"), task_of("other")])
        await harness.until_started(reply, 2)
        selector = harness.selector(reply)
        await harness.engine.abort(AbortRequest(selector=selector, task_ids=(reply.task_ids[0],)))
        await stopping.wait()
        waiting = asyncio.ensure_future(harness.engine.abort(AbortRequest(selector=selector, wait=True)))
        await settle()
        assert not waiting.done()
        may_stop.set()
        assert (await waiting).still_stopping == ()
        with pytest.raises(NotFoundError, match="no task"):
            await harness.engine.abort(AbortRequest(selector=selector, task_ids=("nobody",)))


async def test_a_thousand_deadlines_in_one_moment_end_a_thousand_tasks() -> None:
    clock, agent = FakeClock(), GatedAgent()
    async with running_engine(
        spec_of(agent, resource=Resource(concurrency=1), batch_size=None), clock=clock
    ) as harness:
        reply = await harness.submit([task_of(str(n), task_deadline_seconds=60.0) for n in range(1_000)])
        await harness.until_started(reply, 1)
        await clock.advance(61)
        done = await harness.done(reply)
        assert {event.reason for event in done.values()} == {"task_deadline_seconds (60) passed"}
        later = await harness.submit([task_of("later")], 1)
        agent.gate.set()
        assert [event.state for event in (await harness.done(later)).values()] == [TaskState.SUCCEEDED]
    assert set(agent.begun) == {"0", "later"}


async def test_aborted_batches_hold_nothing_back() -> None:
    agent = GatedAgent()
    async with running_engine(gpu_spec(agent, 1.0), pool=two_nodes(), settings=EngineSettings(max_bypass=0)) as harness:
        running = await harness.submit([task_of("running") for _ in range(10)], 1)
        await harness.until_started(running, 10)
        large = await harness.submit([task_of("large") for _ in range(16)], 2)
        small = await harness.submit([task_of("small")], 3)
        await settle()
        assert agent.begun["small"] == 0, "it may not overtake"
        await harness.engine.abort(AbortRequest(selector=harness.selector(large)))
        await harness.until_started(small, 1)
        agent.gate.set()


async def test_max_running_samples_takes_no_room_that_it_cannot_use() -> None:
    agent, pool = GatedAgent(), two_nodes()
    async with running_engine(
        gpu_spec(agent, 1.0), pool=pool, settings=EngineSettings(max_running_samples=4)
    ) as harness:
        reply = await harness.submit([task_of() for _ in range(16)])
        await harness.until_started(reply, 4)
        second = await harness.submit([task_of()], 1)
        await settle()
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 12
        assert "max_running_samples" in harness.engine.submission(harness.selector(second)).waiting[0].reason
        agent.gate.set()
        assert len(await harness.done(second)) == 1
    assert agent.peak == 4


async def test_watches_end_with_the_engine() -> None:
    async with running_engine(spec_of(SolvingAgent())) as harness:
        frames = harness.engine.watch(EventFilter(), None)
        await anext(frames)
    with pytest.raises(StopAsyncIteration):
        await anext(frames)


async def test_a_crashed_worker_loses_its_attempt_which_is_tried_again_and_then_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def crashes_on_poison(
        running: RunningAttempt, episode: HandlerEpisode, *others: Any
    ) -> tuple[AttemptState, SampleDone]:
        if episode.sample.task.prompt == "poison":
            raise RuntimeError("a fault of the scheduler itself")
        return await play_sample(running, episode, *others)

    monkeypatch.setattr("py_scheduler.execution.evaluator.play_sample", crashes_on_poison)
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


async def test_a_task_deadline_ends_what_waits_and_what_runs() -> None:
    clock, agent = FakeClock(), GatedAgent()
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec, clock=clock) as harness:
        reply = await harness.submit([task_of("slow", repeat_times=3, task_deadline_seconds=60.0)])
        await harness.until_started(reply, 1)
        await clock.advance(61)
        (done,) = (await harness.done(reply)).values()
    assert (done.state, done.reason) == (TaskState.FAILED, "task_deadline_seconds (60) passed")
    assert done.outcomes == {Outcome.AGENT_TIMEOUT: 3}


async def test_the_eval_phase_has_its_own_timeout() -> None:
    class SlowScorer(SolvingAgent):
        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            await asyncio.Event().wait()
            return Reward(score=1.0)

    clock = FakeClock()
    async with running_engine(
        spec_of(SlowScorer(), run_timeout_seconds=5.0, eval_timeout_seconds=20.0), clock=clock
    ) as harness:
        reply = await harness.submit([task_of()])
        await harness.until_started(reply, 1)
        await settle()
        await clock.advance(10)
        assert harness.engine.submission(harness.selector(reply)).running_attempts == 1
        await clock.advance(11)
        (sample,) = await harness.samples(reply)
    assert (sample.phase, sample.error) == ("eval", "eval_timeout_seconds (20) passed")


async def test_an_unknown_task_type_falls_back_with_a_warning() -> None:
    async with running_engine(spec_of(SolvingAgent(), "first"), spec_of(SolvingAgent(), "second")) as harness:
        reply = await harness.submit([task_of(task_type="third"), task_of(task_type="second")])
        assert reply.warnings == ("no evaluator is called 'third': its tasks run on 'first'",)
        assert len(await harness.done(reply)) == 2


async def test_a_step_comes_before_a_later_one_whatever_arrived_first() -> None:
    agent = GatedAgent()
    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0], cpu=8, memory_gb=8)])
    spec = gpu_spec(agent, 1.0, budget_gpus=1)
    async with running_engine(spec, pool=pool) as harness:
        first = await harness.submit([task_of("running")], 5)
        await harness.until_started(first, 1)
        replies = [await harness.submit([task_of(str(batch_id))], batch_id) for batch_id in (3, "2/eval", 2, "x")]
        agent.gate.set()
        for reply in replies:
            await harness.done(reply)
    assert agent.order == ["running", "2", "2/eval", "3", "x"]


async def test_the_batching_strategy_can_be_replaced_and_is_checked() -> None:
    def pairs(tasks: object, specs: object) -> list[Batch]:
        listed = list(tasks)  # type: ignore[call-overload]
        return [Batch("agent", listed[at : at + 2]) for at in range(0, len(listed), 2)]

    def loses_one(tasks: object, specs: object) -> list[Batch]:
        return [Batch("agent", list(tasks)[1:])]  # type: ignore[call-overload]

    shared = task_of("the same object twice")
    async with running_engine(spec_of(SolvingAgent()), batching_strategy=pairs) as harness:
        reply = await harness.submit([shared, task_of(), shared])
        assert len(await harness.done(reply)) == 3
    async with running_engine(spec_of(SolvingAgent()), batching_strategy=loses_one) as harness:
        with pytest.raises(SchedulerError, match="exactly one batch"):
            await harness.submit([task_of(), task_of()])


async def test_bad_requests_name_every_field_and_leave_nothing_behind() -> None:
    async with running_engine(spec_of(SolvingAgent())) as harness:
        bad = task_of(repeat_times=0)
        worse = Task(config=task_of().config, metadata={"_dataset_cfg": {"name": "gsm8k", "temprature": 1}})
        with pytest.raises(InvalidArgumentError) as raised:
            await harness.submit([bad, worse])
        fields = {violation.field for violation in raised.value.violations}
        assert fields == {"tasks[0].config.repeat_times", "tasks[1].metadata._dataset_cfg"}
        assert "gsm8k" in str(raised.value)
        assert "temprature" in str(raised.value)
        with pytest.raises(InvalidArgumentError, match="tasks: is empty"):
            await harness.submit([])
        assert harness.engine.last_sequence == 0


async def test_the_queue_has_a_limit() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), settings=EngineSettings(max_queued_tasks=10)) as harness:
        reply = await harness.submit([task_of() for _ in range(8)])
        with pytest.raises(ResourceExhaustedError, match="max_queued_tasks") as raised:
            await harness.submit([task_of() for _ in range(3)])
        assert raised.value.retry_after_seconds is not None
        agent.gate.set()
        await harness.done(reply)
        await harness.submit([task_of() for _ in range(10)])


async def test_max_running_samples_holds_without_a_pool() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), settings=EngineSettings(max_running_samples=5)) as harness:
        reply = await harness.submit([task_of(str(n)) for n in range(50)])
        await harness.until_started(reply, 5)
        await settle()
        assert agent.inside == 5
        assert "max_running_samples" in harness.engine.submission(harness.selector(reply)).waiting[0].reason
        agent.gate.set()
        assert len(await harness.done(reply)) == 50
    assert agent.peak == 5


async def test_draining_lets_samples_finish_and_takes_nothing_new() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec) as harness:
        reply = await harness.submit([task_of("a"), task_of("waits")])
        await harness.until_started(reply, 1)
        draining = asyncio.ensure_future(harness.engine.drain(60.0))
        await settle()
        with pytest.raises(FailedPreconditionError, match="shutting down"):
            await harness.submit([task_of("late")])
        agent.gate.set()
        await draining
        states = [event.state for event in (await harness.done(reply)).values()]
        assert states == [TaskState.SUCCEEDED, TaskState.ABORTED], "what ran finishes, what waited ends too"
        assert agent.begun == {"a": 1}


async def test_draining_stops_what_does_not_finish() -> None:
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs))) as harness:
        reply = await harness.submit([task_of("hangs")])
        await harness.until_started(reply, 1)
        await harness.engine.drain(0.01)
        (done,) = (await harness.done(reply)).values()
    assert (done.state, done.reason) == (TaskState.ABORTED, "the server is shutting down")


async def test_ten_thousand_samples_leave_no_slot_and_no_room_behind() -> None:
    pool = two_nodes()
    async with running_engine(gpu_spec(SolvingAgent(), 0.25, budget_gpus=4), pool=pool) as harness:
        reply = await harness.submit([task_of(repeat_times=10) for _ in range(1_000)])
        records = await harness.records_until_done(reply)
        assert len(samples_in(records)) == 10_000
        await settle()
        assert harness.engine._admission._slots_out == 0
    assert pool.free_tokens_for(Resource(gpu=0.25)) == 64
