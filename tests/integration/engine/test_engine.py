"""The engine as a whole, in one process: admission, order, limits, and what watchers see of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.events import AttemptStarted, TaskDone, TasksAccepted
from py_scheduler.domain.requests import AbortRequest, EventFilter, SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import Outcome, TaskState
from py_scheduler.domain.task import Batch, Task
from py_scheduler.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SchedulerError,
    UnplaceableError,
)
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import (
    GatedAgent,
    ScriptedAgent,
    SolvingAgent,
    gpu_spec,
    hangs,
    raises,
    spec_of,
    two_nodes,
)
from tests.support.harness import running_engine, samples_in, task_of

if TYPE_CHECKING:
    from py_scheduler.domain.events import EventRecord


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
    assert {index: (event.state, event.reason.partition(" (handlers.py")[0]) for index, event in wrong.items()} == {
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


async def test_ten_thousand_samples_leave_no_slot_and_no_room_behind() -> None:
    pool = two_nodes()
    async with running_engine(gpu_spec(SolvingAgent(), 0.25, budget_gpus=4), pool=pool) as harness:
        reply = await harness.submit([task_of(repeat_times=10) for _ in range(1_000)])
        records = await harness.records_until_done(reply)
        assert len(samples_in(records)) == 10_000
        await settle()
        assert harness.engine._admission.room.permits_out == 0
    assert pool.free_tokens_for(Resource(gpu=0.25)) == 64
