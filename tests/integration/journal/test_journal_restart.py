"""Engines one after the other on the same files: what one leaves the next one goes on from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import AttemptEnded, TaskDone, TasksAccepted
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.results import AgentResult, AttemptState, Reward, TaskState
from py_scheduler.errors import CursorExpiredError, JournalError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task

SMALL = JournalLimits(retained_events=300, checkpoint_bytes=1 << 16, ballast_bytes=0)


async def test_tasks_requests_cursors_and_numbers_survive(tmp_path: Path) -> None:
    first = GatedAgent()
    async with running_engine(spec_of(first), journal=SqliteJournal(tmp_path), max_running_samples=2) as harness:
        epoch = harness.engine.store_epoch
        reply = await harness.submit([task_of(str(n)) for n in range(10)], request_id="once", batch_id="7/eval")
        await harness.until_started(reply, 2)
        seen = harness.engine.last_sequence
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path)) as harness:
        assert harness.engine.store_epoch == epoch
        again = await harness.submit([task_of(str(n)) for n in range(10)], request_id="once", batch_id="7/eval")
        assert again == reply
        done = await harness.done(reply)
        assert {event.state for event in done.values()} == {TaskState.SUCCEEDED}
        after = [record async for record in _records(harness.engine.watch(EventFilter(), seen), 10)]
        assert after[0].sequence == seen + 1, "a cursor of before goes on without a gap"
        lost = [r.event for r in after if isinstance(r.event, AttemptEnded) and r.event.state is AttemptState.LOST]
        assert [(event.next_attempt_no, event.is_counted) for event in lost] == [(2, False)] * 2


async def _records(frames, tasks: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    async for frame in frames:
        for record in frame.records:
            yield record
            tasks -= isinstance(record.event, TaskDone)
            if not tasks:
                return


async def test_a_hundred_restarts_lose_nothing_and_leave_a_small_store(tmp_path: Path) -> None:
    replies = []
    limits = JournalLimits(retained_events=200, checkpoint_bytes=1 << 16, ballast_bytes=0)
    tokens = []
    for number in range(100):
        async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path, limits)) as harness:
            replies.append(await harness.submit([task_of(str(number))], request_id=f"r{number}", batch_id=number))
            assert (await harness.done(replies[-1])).keys() == set(replies[-1].task_ids)
            tokens.append(harness.engine._journal.first_fencing_token)
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path, limits)) as harness:
        for number, reply in enumerate(replies):
            again = await harness.submit([task_of(str(number))], request_id=f"r{number}", batch_id=number)
            assert again == reply
            assert harness.engine.submission(harness.selector(reply)).succeeded_tasks == 1
        assert harness.engine.last_sequence == 400
    assert tokens == sorted(set(tokens))


async def test_a_checkpoint_carries_what_lives_and_history_goes(tmp_path: Path) -> None:
    gated = GatedAgent()
    specs = [spec_of(gated, "gated"), spec_of(SolvingAgent())]
    settings = EngineSettings(retained_submissions=5)
    async with running_engine(*specs, journal=SqliteJournal(tmp_path, SMALL), settings=settings) as harness:
        live = await harness.submit(
            [task_of(f"live{n}", task_type="gated") for n in range(3)], batch_id="live", request_id="live"
        )
        await harness.until_started(live, 3)
        for number in range(60):
            await harness.done(await harness.submit([task_of() for _ in range(10)], batch_id=number))
        assert harness.engine.oldest_sequence > 300
        watched = harness.engine.watch(EventFilter(), 10)
        with pytest.raises(CursorExpiredError) as raised:
            await anext(watched)
        assert raised.value.oldest_sequence == harness.engine.oldest_sequence
        last = harness.engine.last_sequence
    async with running_engine(*specs, journal=SqliteJournal(tmp_path, SMALL), settings=settings) as harness:
        assert harness.engine.last_sequence >= last
        again = await harness.submit(
            [task_of(f"live{n}", task_type="gated") for n in range(3)], batch_id="live", request_id="live"
        )
        assert again == live
        gated.gate.set()
        view = harness.engine.submission(harness.selector(live))
        assert view.open_tasks + view.succeeded_tasks == 3
        await _until_open(harness.engine, harness.selector(live), 0)
        assert harness.engine.submission(harness.selector(live)).succeeded_tasks == 3


async def _until_open(engine, selector, count: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    frames = engine.watch(EventFilter(), engine.last_sequence)
    while engine.submission(selector).open_tasks > count:
        await anext(frames)
    await frames.aclose()


async def test_watchers_read_on_without_a_hole_while_checkpoints_drop_what_is_behind_them(tmp_path: Path) -> None:
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path, SMALL)) as harness:

        async def follow() -> int:
            """The sequences that were read; told of a gap, it goes on from what there is."""
            read, position = 0, 0
            while position < 2_900:
                try:
                    async for frame in harness.engine.watch(EventFilter(), position):
                        assert frame.after_sequence == position
                        assert [r.sequence for r in frame.records] == list(
                            range(position + 1, frame.through_sequence + 1)
                        )
                        read, position = read + len(frame.records), frame.through_sequence
                        if position >= 2_900:
                            break
                except CursorExpiredError as error:
                    position = error.oldest_sequence - 1
            return read

        following = [asyncio.create_task(follow()) for _ in range(4)]
        for number in range(100):
            await harness.done(await harness.submit([task_of() for _ in range(10)], batch_id=number))
        read = await asyncio.gather(*following)
    assert min(read) > 0


class Scoring(BaseAgent):
    """Scores groups, once it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.seen: list[list[int]] = []

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([1, 2, 3, episode.sample.sample_no])
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=0.0)

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        await self.gate.wait()
        self.seen = [sample.trajectory.token_ids.tolist() for sample in samples]
        return [Reward(score=1.0) for _ in samples]


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_a_group_is_scored_after_a_restart_with_all_its_tokens(tmp_path: Path, *, checkpoint: bool) -> None:
    async with running_engine(spec_of(Scoring()), journal=SqliteJournal(tmp_path)) as harness:
        reply = await harness.submit([task_of(repeat_times=3)])
        ended = 0
        async for frame in harness.engine.watch(EventFilter(), 0):
            ended += sum(isinstance(record.event, AttemptEnded) for record in frame.records)
            if ended == 3:
                break
        if checkpoint:
            await harness.engine._checkpoints.take()
    agent = Scoring()
    agent.gate.set()
    async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path)) as harness:
        (done,) = (await harness.done(reply)).values()
    assert [reward.score for reward in done.rewards] == [1.0] * 3
    assert sorted(agent.seen) == [[1, 2, 3, 0], [1, 2, 3, 1], [1, 2, 3, 2]]


async def test_acknowledged_events_go_and_the_rest_stays(tmp_path: Path) -> None:
    limits = JournalLimits(retained_bytes=1 << 20, ballast_bytes=0)
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path, limits)) as harness:
        kept = 0
        for number in range(70):
            reply = await harness.submit([task_of(f"{number}" * 3_000)], batch_id=number)
            await harness.done(reply)
            kept = reply.before_sequence
        harness.engine.acknowledge(EventFilter(), kept)
        await harness.done(await harness.submit([task_of()], batch_id=1_000))
        await harness.done(await harness.submit([task_of()], batch_id=1_001))
        await harness.done(await harness.submit([task_of()], batch_id=1_002))
        assert harness.engine.oldest_sequence == kept + 1
        frame = await anext(harness.engine.watch(EventFilter(), None))
        assert frame.records[0].sequence == kept + 1
        assert isinstance(frame.records[0].event, TasksAccepted)


async def test_a_store_in_use_ends_the_second_engine_before_it_has_begun(tmp_path: Path) -> None:
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path)):
        with pytest.raises(JournalError, match="in use by process"):
            async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path)):
                pass
    async with running_engine(spec_of(ScriptedAgent()), journal=SqliteJournal(tmp_path)) as harness:
        assert len(await harness.done(await harness.submit([task_of()]))) == 1
