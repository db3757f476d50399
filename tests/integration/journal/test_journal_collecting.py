"""What is kept for whoever collects it, what training came to and how far it ran ahead, over restarts on real files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw
import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.app.journal import compact, examine, export, recover
from py_scheduler.config import Config
from py_scheduler.domain.generation import STUDENT
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.results import AgentResult
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.app_handlers import Delivering
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.models.controlled_model import ControlledModel
from tests.support.trainers.collecting import collect, schedule, view
from tests.support.trainers.training import STEP, Training, training
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.evaluator import Episode

BETWEEN = ("kill", "checkpoint", "compact")


async def leave(harness: Harness | Training, between: str) -> None:
    if between == "checkpoint":
        await harness.engine._checkpoints.take()


def lie(folder: Path, between: str) -> None:
    """What happens to the store between two servers."""
    if between == "compact":
        compact(Config(), folder)


async def until(harness: Harness, condition: Any) -> None:
    """Looks after each commit."""
    frames = harness.engine.watch(EventFilter(), harness.engine.last_sequence)
    while not condition():
        await anext(frames)


@pytest.mark.parametrize("between", BETWEEN)
async def test_a_restart_gives_results_with_all_tokens_and_payloads(tmp_path: Path, between: str) -> None:
    """Of tasks that were done, that were collected and not acknowledged, and of one of which half was there."""
    spec = spec_of(Delivering(str(tmp_path / "gate")))
    state = tmp_path / "state"
    async with running_engine(spec, journal=SqliteJournal(state)) as harness:
        tasks = [task_of(f"quick {number}", repeat_times=2) for number in range(5)]
        slow = task_of("slow", repeat_times=2, max_samples_per_subtask=1)
        reply = await schedule(harness.engine, [*tasks, slow])
        await until(harness, lambda: len(view_kept(harness).collectable) == 5 and staged(harness) == 1)
        some: dict[str, Any] = {"min_num": 1, "clear_unfinished": False}
        await collect(harness.engine, request_id="gone", max_num=1, **some)
        told = await collect(harness.engine, request_id="told", max_num=2, acknowledge=False, **some)
        history = harness.engine.history
        kept_bytes = harness.engine.ledger.results.kept_bytes
        await leave(harness, between)
    lie(state, between)
    async with running_engine(spec, journal=SqliteJournal(state)) as harness:
        assert harness.engine.history == history
        assert harness.engine.ledger.results.kept_bytes == kept_bytes
        assert view(harness.engine).unacknowledged_tasks == view(harness.engine).collectable_tasks == 2
        assert await collect(harness.engine, request_id="told", acknowledge=False) == told
        (tmp_path / "gate").touch()
        rest = await collect(harness.engine)
        assert len(rest.results) == 3
        by_task = {result.task_id: result for result in (*told.results, *rest.results)}
        assert by_task.keys() < set(reply.task_ids)
        assert len(by_task) == 5
        for result in by_task.values():
            number = reply.task_ids.index(result.task_id)
            prompt = "slow" if number == 5 else f"quick {number}"
            assert [sample.trajectory.token_ids.tolist() for sample in result.samples] == [[1, 2, 3], [1, 2, 4]]
            assert b"".join(result.payloads) == f"{prompt} 0;{prompt} 1;".encode()
            assert result.ok
        await harness.engine.results.acknowledge("default", "told")
        assert harness.engine.ledger.results.kept_bytes == 0
        assert harness.engine.history.completed_steps == 1
        await leave(harness, between)
    lie(state, between)
    async with running_engine(spec, journal=SqliteJournal(state)) as harness:
        assert (await collect(harness.engine, request_id="told")).results == ()
        assert harness.engine.ledger.results.kept_bytes == 0
        assert harness.engine.history.completed_steps == 1
        again = await schedule(harness.engine, [task_of("quick")])
        assert again.submission_id != reply.submission_id, "a drained batch_id names a new submission"


def view_kept(harness: Harness) -> Any:
    (submission,) = harness.engine.ledger.submissions()
    return submission.kept


def staged(harness: Harness) -> int:
    """Samples that are there of open tasks."""
    (submission,) = harness.engine.ledger.submissions()
    return sum(len(task.staged.samples) for task in submission.open_tasks.values() if task.staged is not None)


@pytest.mark.parametrize("between", BETWEEN)
async def test_epochs_and_the_window_survive(tmp_path: Path, between: str) -> None:
    """What was accepted counts on although the samples are read without their tokens."""
    async with training(max_staleness=0, journal=SqliteJournal(tmp_path)) as here:
        await here.update("1")
        await here.submit(STEP)
        assert await here.running() == STEP
        await leave(here, between)
        reply = await here.submit(STEP, 1)
        await here.finish()
        await until(here.harness, lambda: window(here).accepted == STEP)
        assert here.reasons(reply)
        said = here.engine.ledger.service.windows["default"]
        await here.harness.engine._event_log.wait_committed(here.engine._ledger.last_sequence)
    lie(tmp_path, between)
    async with training(max_staleness=0, journal=SqliteJournal(tmp_path)) as here:
        assert window(here) == said
        assert here.engine.generation.weights(STUDENT).epoch == 1
        assert here.engine.generation.weights(STUDENT).epoch_of("v0") == 0
        assert await here.running() == 0, "a restart is no credit"
        await here.update("2")
        assert await here.running() == STEP
        assert here.engine.generation.weights(STUDENT).epoch == 2


def window(here: Training) -> Any:
    return here.engine.ledger.service.windows["default"]


async def test_a_limit_that_is_new_counts_from_then_on_and_one_that_changed_goes_on(tmp_path: Path) -> None:
    limits = [None, (0, 4), (1, 2), None, (1, 2)]
    seen = []
    for number, limit in enumerate(limits):
        staleness = {"default": StalenessSettings(max_staleness=limit[0], step_size=limit[1])} if limit else {}
        spec = spec_of(Delivering())
        settings = EngineSettings(staleness=staleness)
        model = ControlledModel()
        async with running_engine(
            spec, journal=SqliteJournal(tmp_path), settings=settings, generation_backends={STUDENT: model}
        ) as harness:
            await harness.done(await harness.submit([task_of()], number, request_id=f"r{number}"))
            found = harness.engine.ledger.service.windows.get("default")
            seen.append(found and (found.accepted, found.limit))
            await harness.engine._checkpoints.take()
        # Which rules hold, the store knows by itself.
        compact(Config(), tmp_path)
    assert seen == [None, (1, 4), (2, 4), None, (1, 4)]


class Large(Delivering):
    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult(payload=bytes(1 << 20))


async def test_the_room_of_results_comes_back_when_they_are_acknowledged(tmp_path: Path) -> None:
    """Although nothing else happens that would be worth a checkpoint."""
    limits = JournalLimits(ballast_bytes=0)
    async with running_engine(spec_of(Large()), journal=SqliteJournal(tmp_path, limits)) as harness:
        await schedule(harness.engine, [task_of() for _ in range(20)])
        await collect(harness.engine, request_id="told", acknowledge=False)
        await harness.engine._checkpoints.take()
        await harness.done(await harness.submit([task_of()], "wakes the journal"))
        assert await stored(tmp_path, lambda size: size > 20 << 20)
        await harness.engine.results.acknowledge("default", "told")
        assert await stored(tmp_path, lambda size: size < 1 << 20)


async def stored(folder: Path, condition: Any) -> bool:
    """Until the snapshots in the store have such a size."""
    database = apsw.Connection(str(folder / "journal.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        select = "SELECT coalesce(sum(length(content)), 0) FROM snapshot"
        await eventually(lambda: condition(database.execute(select).get), pause_seconds=0.02)
    finally:
        database.close()
    return True


async def test_the_commands_know_every_event(tmp_path: Path) -> None:
    """`export` says them all, `check` finds nothing, `recover` keeps what a checkpoint has."""
    async with training(max_staleness=0, journal=SqliteJournal(tmp_path)) as here:
        await here.update("1")
        await here.submit(STEP)
        assert await here.running() == STEP
        await here.finish()
        await here.engine.resume_training("default")
        engine = here.engine
    async with running_engine(spec_of(Delivering()), journal=SqliteJournal(tmp_path)) as harness:
        await schedule(harness.engine, [task_of("quick")], "collected")
        await collect(harness.engine, "collected")
        await schedule(harness.engine, [task_of("quick"), task_of("quick")], "discarded")
        some = await collect(
            harness.engine,
            "discarded",
            request_id="kept",
            min_num=1,
            max_num=1,
            clear_unfinished=False,
            acknowledge=False,
        )
        assert len(some.results) == 1
        await harness.engine._checkpoints.take()
        engine = harness.engine
        last = engine._ledger.last_sequence
        await engine._event_log.wait_committed(last)
        service = engine.ledger.service
    assert examine(tmp_path).is_sound
    exported = list(export(tmp_path))
    assert [event["sequence"] for event in exported] == list(range(1, last + 1))
    kinds = {event["event"] for event in exported}
    assert kinds >= {"WeightsChanged", "TrainingResumed", "ResultsCollected", "ResultsAcknowledged", "AttemptEnded"}
    assert recover(tmp_path) is None
    content = bytearray((tmp_path / "journal.db").read_bytes())
    content[content.index(b"WeightsChanged") + 3] ^= 1
    (tmp_path / "journal.db").write_bytes(content)
    assert not examine(tmp_path).is_sound
    recovery = recover(tmp_path)
    assert recovery is not None
    assert recovery.is_state_whole
    async with running_engine(spec_of(Delivering()), journal=SqliteJournal(tmp_path)) as harness:
        assert harness.engine.ledger.service.weights == service.weights
        assert harness.engine.history == service.history
        assert await collect(harness.engine, "discarded", request_id="kept") == some
