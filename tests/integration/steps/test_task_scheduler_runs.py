"""TaskScheduler.run_all and run_each over the real engine: order, windows, back-pressure, aborts, what is run once."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, Outcome, Reward, TaskState
from py_scheduler.domain.task import Batch
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import AlreadyExistsError, UnplaceableError
from py_scheduler.interfaces.task_run import WINDOW_SAMPLES
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, gpu_spec, raises, spec_of, two_nodes
from tests.support.harness import task_of
from tests.support.steps.task_schedulers import engine_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.task import Task
    from py_scheduler.rollout.groups import Group


async def test_groups_come_in_the_order_of_their_tasks_whatever_order_they_finish_in() -> None:
    told: list[str] = []

    async def slow(episode: Episode) -> AgentResult:
        for _ in range(20):
            await asyncio.sleep(0)
        return AgentResult()

    agent = ScriptedAgent(first=slow)
    async with TaskScheduler(engine_of(spec_of(agent)), on_task_done=lambda g: told.append(g.task.prompt)) as scheduler:
        groups = await scheduler.run_all([task_of(p, repeat_times=3) for p in ("first", "second", "third")])
    assert [group.task.prompt for group in groups] == ["first", "second", "third"]
    assert [sample.sample_no for sample in groups[0].samples] == [0, 1, 2]
    assert groups[0].scores == (1.0, 1.0, 1.0)
    assert told[-1] == "first"
    assert sorted(told) == ["first", "second", "third"]


async def test_a_running_engine_stays_running_and_one_of_its_own_is_ended() -> None:
    async with engine_of(spec_of(SolvingAgent())) as engine:
        async with TaskScheduler(engine) as scheduler:
            assert len(await scheduler.run_all([task_of()])) == 1
        assert engine.is_running
    own = engine_of(spec_of(SolvingAgent()))
    async with TaskScheduler(own) as scheduler:
        assert own.is_running
    assert not own.is_running


async def test_a_handler_fault_ends_its_sample_and_no_run() -> None:
    agent = ScriptedAgent(bad=raises)
    async with TaskScheduler(engine_of(spec_of(agent))) as scheduler:
        bad, good = await scheduler.run_all([task_of("bad"), task_of("good")])
    assert bad.done.state is TaskState.FAILED
    assert bad.samples[0].outcome is Outcome.INFRA_OTHER
    assert "the handler is broken" in bad.samples[0].error
    assert good.done.state is TaskState.SUCCEEDED


async def test_an_async_callback_is_awaited_and_its_fault_ends_the_run_and_its_tasks() -> None:
    agent = GatedAgent()

    async def on_task_done(group: Group) -> None:
        await asyncio.sleep(0)
        raise LookupError(group.task.prompt)

    async with TaskScheduler(engine_of(spec_of(agent)), on_task_done=on_task_done) as scheduler:
        running = asyncio.create_task(scheduler.run_all([task_of("a"), task_of("b", task_deadline_seconds=1e-6)]))
        with pytest.raises(LookupError, match="b"):
            await running
        assert agent.inside == 0, "the other task was aborted"


async def test_few_tasks_are_open_at_a_time() -> None:
    drawn = 0

    def endless() -> Iterator[Task]:
        nonlocal drawn
        for number in itertools.count():
            drawn = number + 1
            yield task_of(str(number))

    engine = engine_of(spec_of(SolvingAgent()), max_running_samples=8)
    async with TaskScheduler(engine) as scheduler, aclosing(scheduler.run_each(endless(), batch_id=1)) as groups:
        seen = 0
        async for _group in groups:
            seen += 1
            assert drawn - seen <= 4 * WINDOW_SAMPLES
            view = engine.submission(SubmissionSelector(batch_id=1))
            assert view.open_tasks <= 3 * WINDOW_SAMPLES
            if seen == 5 * WINDOW_SAMPLES:
                break
    assert engine.submission(SubmissionSelector(batch_id=1)).open_tasks == 0


async def test_cancelling_a_run_aborts_its_tasks() -> None:
    agent = GatedAgent()
    engine = engine_of(spec_of(agent))
    async with TaskScheduler(engine) as scheduler:
        running = asyncio.create_task(scheduler.run_all([task_of(str(n)) for n in range(100)], batch_id=3))
        await eventually(lambda: agent.inside == 64)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert agent.inside == 0
        view = engine.submission(SubmissionSelector(batch_id=3))
        assert (view.open_tasks, view.aborted_tasks) == (0, 100)


async def test_cancelling_a_run_in_its_first_submit_aborts_what_was_taken_in() -> None:
    agent = GatedAgent()
    engine = engine_of(spec_of(agent))
    async with TaskScheduler(engine) as scheduler:
        running = asyncio.create_task(scheduler.run_all([task_of("a")], batch_id=3))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine._ledger.open_tasks == 0


async def test_the_same_call_again_runs_nothing_and_gives_the_same() -> None:
    agent = ScriptedAgent()
    tasks = [task_of(str(number), repeat_times=2) for number in range(3 * WINDOW_SAMPLES)]
    async with TaskScheduler(engine_of(spec_of(agent))) as scheduler:
        first = await scheduler.run_all(tasks, batch_id=7)
        begun = sum(agent.begun.values())
        again = await scheduler.run_all(tasks, batch_id=7)
        assert [group.task_id for group in again] == [group.task_id for group in first]
        assert [group.samples for group in again] == [group.samples for group in first]
        assert sum(agent.begun.values()) == begun == 2 * len(tasks)
        with pytest.raises(AlreadyExistsError, match="round_no"):
            await scheduler.run_all(tasks[1:], batch_id=7)
        assert len(await scheduler.run_all(tasks[1:], batch_id=7, round_no=1)) == len(tasks) - 1


async def test_a_list_is_guarded_before_anything_is_launched() -> None:
    agent = ScriptedAgent()
    # Each batch is one task; the last one alone needs more tokens than two nodes of 8 GPUs have.
    spec = gpu_spec(agent, 0.5, budget_gpus=128)
    spec = spec_of(agent, resource=spec.resource, run_resource=spec.run_resource, eval_resource=spec.eval_resource)
    tasks = [task_of("small") for _ in range(WINDOW_SAMPLES)] + [task_of("large", repeat_times=100)]
    async with TaskScheduler(engine_of(spec, pool=two_nodes())) as scheduler:
        with pytest.raises(UnplaceableError, match="needs 100 tokens for its largest batch, the pool can give 32"):
            await scheduler.run_all(tasks)
        assert not agent.begun


async def test_the_strategy_sees_a_list_whole_and_a_subclass_may_override_it() -> None:
    class Pairs(TaskScheduler):
        def batch(self, tasks: Any) -> list[Batch]:
            asked.append(len(tasks))
            return [Batch("agent", list(tasks[n : n + 2])) for n in range(0, len(tasks), 2)]

    asked: list[int] = []
    count = WINDOW_SAMPLES + 10
    async with Pairs(engine_of(spec_of(SolvingAgent()))) as scheduler:
        groups = await scheduler.run_all([task_of(str(number)) for number in range(count)])
        assert [group.task.prompt for group in groups] == [str(number) for number in range(count)]
        assert asked == [count]
        await scheduler.run_all(task_of(str(number)) for number in range(count))
        assert asked == [count, WINDOW_SAMPLES, 10]


async def test_a_full_queue_makes_a_run_wait_and_not_fail() -> None:
    agent = GatedAgent()
    engine = engine_of(spec_of(agent), max_queued_samples=WINDOW_SAMPLES)
    async with TaskScheduler(engine) as scheduler:
        running = asyncio.create_task(scheduler.run_all([task_of(str(n)) for n in range(2 * WINDOW_SAMPLES)]))
        await eventually(lambda: agent.inside == 64)
        agent.gate.set()
        assert len(await running) == 2 * WINDOW_SAMPLES


async def test_the_iteration_reaches_the_episodes() -> None:
    class Reading(BaseAgent):
        async def run(self, episode: Episode) -> AgentResult:
            assert episode.iteration is not None
            return AgentResult(answer=f"{episode.iteration.rollout_id} {episode.iteration.beta}")

        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            return Reward(score=1.0, details={"answer": result.answer})

    async with TaskScheduler(engine_of(spec_of(Reading()))) as scheduler:
        (group,) = await scheduler.run_all([task_of()], iteration=IterationContext(rollout_id=3, beta=0.5))
    assert group.rewards[0].details == {"answer": "3 0.5"}


async def test_a_run_on_a_surviving_journal_goes_on_where_it_was() -> None:
    """What a restart finds: the journal of a process that ended in the middle of a run."""
    journal = MemoryJournal()
    agent = GatedAgent()
    tasks = [task_of(str(number)) for number in range(3 * WINDOW_SAMPLES)]
    scheduler = TaskScheduler(engine_of(spec_of(agent), journal=journal, max_running_samples=64))
    async with scheduler:
        running = asyncio.create_task(scheduler.run_all(tasks, batch_id=5))
        await eventually(lambda: agent.inside == 64)
        scheduler.leaves_tasks = True
        running.cancel()
        await asyncio.wait([running])
    kept = MemoryJournal()
    kept._records, kept._store_epoch = list(journal._records), journal.store_epoch
    agent = GatedAgent()
    agent.gate.set()
    async with TaskScheduler(engine_of(spec_of(agent), journal=kept, max_running_samples=64)) as scheduler:
        groups = await scheduler.run_all(tasks, batch_id=5)
    assert [group.task.prompt for group in groups] == [task.prompt for task in tasks]
    assert {group.done.state for group in groups} == {TaskState.SUCCEEDED}
    assert len({group.task_id for group in groups}) == len(tasks)


async def test_a_short_memory_of_events_keeps_fewer_samples_open() -> None:
    """Handlers that never wait make events faster than anybody reads them."""
    engine = engine_of(spec_of(SolvingAgent()), journal=MemoryJournal(retained_events=1_024), retained_events=1_024)
    async with TaskScheduler(engine) as scheduler:
        groups = await scheduler.run_all(task_of(str(number)) for number in range(10 * WINDOW_SAMPLES))
    assert len(groups) == 10 * WINDOW_SAMPLES


async def test_a_batch_larger_than_a_window_is_one_window() -> None:
    agent = GatedAgent()
    agent.gate.set()
    spec = spec_of(agent, resource=Resource(concurrency=7), batch_size=None)
    async with TaskScheduler(engine_of(spec, max_running_samples=8)) as scheduler:
        groups = await scheduler.run_all([task_of(str(n), repeat_times=3) for n in range(WINDOW_SAMPLES)])
    assert len(groups) == WINDOW_SAMPLES
    assert agent.peak <= 7
