"""Calls that change something, sent again by a client that did not hear the answer: in the same run of the server, in
the next one on its store, and when what they named means something else by then.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.domain.events import TrainingResumed
from py_scheduler.domain.generation import STUDENT, PauseMode, WeightUpdate
from py_scheduler.domain.leases import AcquireRequest, LeaseTerms, PlacementDemand, ReleaseRequest
from py_scheduler.domain.requests import AbortRequest, EventFilter, SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.errors import AlreadyExistsError, LeaseError
from py_scheduler.placement import PlacementPool
from tests.support.handlers import GatedAgent, SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.models.controlled_model import ControlledModel
from tests.support.trainers.collecting import collect, schedule, view

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.scheduler.engine import Engine
    from tests.support.harness import Harness

LIMITS = JournalLimits(ballast_bytes=0, checkpoint_bytes=1 << 16)


class Runs:
    """Engines on one store, one after the other."""

    def __init__(self, folder: Path, stack: AsyncExitStack, **parts: object) -> None:
        self._folder = folder
        self._stack = stack
        self._parts = parts
        self.harness: Harness

    async def start(self) -> Harness:
        running = running_engine(
            spec_of(GatedAgent()),
            spec_of(SolvingAgent(), "quick"),
            journal=SqliteJournal(self._folder, LIMITS),
            pool=PlacementPool([NodeResource(node_ip="n1", gpus=[0], cpu=8.0, memory_gb=8.0)]),
            **self._parts,  # type: ignore[arg-type]
        )
        self.harness = await self._stack.enter_async_context(running)
        return self.harness

    async def after(self, what: str) -> Harness:
        if "checkpoint" in what:
            await self.harness.engine._checkpoints.take()
        return await self.restart() if "restart" in what else self.harness

    async def restart(self) -> Harness:
        await self._stack.pop_all().aclose()
        return await self.start()


def abort_of(batch_id: int, request_id: str, **fields: object) -> AbortRequest:
    return AbortRequest(selector=SubmissionSelector(batch_id=batch_id), request_id=request_id, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("between", ["nothing", "a restart", "a checkpoint and a restart"])
async def test_an_abort_sent_again_leaves_alone_what_was_submitted_under_the_same_batch_id_since(
    tmp_path: Path, between: str
) -> None:
    """Into the same submission, which is still known; and into a new one, once the first was collected."""
    async with AsyncExitStack() as stack:
        runs = Runs(tmp_path, stack)
        harness = await runs.start()
        await harness.submit([task_of() for _ in range(3)], 1)
        await schedule(harness.engine, [task_of() for _ in range(2)], 2)
        firsts = [await harness.engine.abort(abort_of(n, f"abort {n}", wait=True)) for n in (1, 2)]
        assert [reply.aborted_tasks for reply in firsts] == [3, 2]
        found_nothing = await harness.engine.abort(abort_of(1, "found nothing", wait=True))
        assert found_nothing.aborted_tasks == 0
        await harness.submit([task_of() for _ in range(4)], 1)
        again = await schedule(harness.engine, [task_of()], 2)
        harness = await runs.after(between)
        for n, first in zip((1, 2), firsts, strict=True):
            async with asyncio.timeout(5):
                assert await harness.engine.abort(abort_of(n, f"abort {n}", wait=True)) == first
        assert await harness.engine.abort(abort_of(1, "found nothing", wait=True)) == found_nothing
        assert view(harness.engine, 1).open_tasks == 4
        assert view(harness.engine, 2).submission_id == again.submission_id
        assert view(harness.engine, 2).open_tasks == 1
        assert (await harness.engine.abort(abort_of(1, "another"))).aborted_tasks == 4
        with pytest.raises(AlreadyExistsError, match="'abort 1'"):
            await harness.engine.abort(abort_of(2, "abort 1"))
        with pytest.raises(AlreadyExistsError):
            await harness.submit([task_of()], 3, request_id="abort 1")


async def test_an_abort_waits_for_the_tasks_that_were_there_alone(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        harness = await Runs(tmp_path, stack).start()
        reply = await harness.submit([task_of()], 1)
        await harness.until_started(reply, 1)
        aborting = asyncio.create_task(harness.engine.abort(abort_of(1, "a", wait=True)))
        await asyncio.sleep(0)
        later = await harness.submit([task_of()], 1)
        assert later.submission_id == reply.submission_id
        async with asyncio.timeout(5):
            assert (await aborting).aborted_tasks == 1
        assert view(harness.engine, 1).open_tasks == 1


@pytest.mark.parametrize("between", ["nothing", "a restart", "a checkpoint and a restart"])
async def test_a_discard_sent_again_leaves_what_came_since(tmp_path: Path, between: str) -> None:
    async with AsyncExitStack() as stack:
        runs = Runs(tmp_path, stack)
        harness = await runs.start()
        await schedule(harness.engine, [task_of(task_type="quick")], 1)
        await until_collectable(harness.engine, 1)
        await harness.engine.results.discard(SubmissionSelector(batch_id=1), "discard")
        assert not view(harness.engine, 1).collectable_tasks
        await schedule(harness.engine, [task_of(task_type="quick") for _ in range(2)], 1)
        await until_collectable(harness.engine, 2)
        harness = await runs.after(between)
        await harness.engine.results.discard(SubmissionSelector(batch_id=1), "discard")
        assert len((await collect(harness.engine, 1)).results) == 2


async def until_collectable(engine: Engine, count: int) -> None:
    async for _ in engine.watch(EventFilter(), None):
        if view(engine, 1).collectable_tasks == count:
            return


async def test_pauses_updates_and_continues_mean_the_same_in_the_next_run(tmp_path: Path) -> None:
    """The engine outlives the server: what it has it has, and no epoch is counted twice."""
    model = ControlledModel()
    update = WeightUpdate(model_path="/w/1", weight_version="v1")
    async with AsyncExitStack() as stack:
        runs = Runs(tmp_path, stack, generation_backends={STUDENT: model})
        gateway = (await runs.start()).engine.generation
        for _ in range(2):
            assert (await gateway.pause(STUDENT, PauseMode.RETRACT)).pause_mode is PauseMode.RETRACT
        states = [await gateway.update_weights(STUDENT, update) for _ in range(2)]
        assert [state.weight_epoch for state in states] == [1, 1]
        gateway = (await runs.restart()).engine.generation
        for _ in range(2):
            assert (await gateway.update_weights(STUDENT, update)).weight_epoch == 1
            assert (await gateway.pause(STUDENT, PauseMode.RETRACT)).weight_epoch == 1
        states = [await gateway.resume(STUDENT) for _ in range(2)]
        assert states[0] == states[1]
        state = states[0]
        assert (state.pause_mode, state.weight_version, state.weight_epoch) == (None, "v1", 1)


async def test_training_that_resumes_again_counts_from_the_same_epoch(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        runs = Runs(tmp_path, stack, generation_backends={STUDENT: ControlledModel()})
        harness = await runs.start()
        await harness.engine.generation.update_weights(STUDENT, WeightUpdate(model_path="/w/1", weight_version="v1"))
        epochs = [await harness.engine.resume_training("default") for _ in range(2)]
        harness = await runs.restart()
        epochs.append(await harness.engine.resume_training("default"))
        assert epochs == [1, 1, 1]
        frame = await anext(harness.engine.watch(EventFilter(), None))
        assert sum(isinstance(record.event, TrainingResumed) for record in frame.records) == 3


async def test_a_lease_released_again_frees_nothing_of_others_and_dies_with_its_server(tmp_path: Path) -> None:
    terms = LeaseTerms(batch_id=0, demand=PlacementDemand(per_sample=Resource(gpu=1), max_tokens=1), ttl_seconds=60.0)
    async with AsyncExitStack() as stack:
        runs = Runs(tmp_path, stack)
        manager = (await runs.start()).engine.leases
        lease = await manager.acquire(AcquireRequest(request_id="mine", terms=terms))
        release = ReleaseRequest(request_id="free", lease_id=lease.lease_id, fencing_token=lease.fencing_token)
        first = manager.release(release)
        other = await manager.acquire(AcquireRequest(request_id="theirs", terms=terms))
        assert manager.release(release) == first
        assert manager.capacity(Resource(gpu=1)).free_tokens == 0, "the other one holds it"
        manager = (await runs.restart()).engine.leases
        assert manager.capacity(Resource(gpu=1)).free_tokens == 1
        with pytest.raises(LeaseError, match="not known"):
            manager.release(release)
        anew = await manager.acquire(AcquireRequest(request_id="mine", terms=terms))
        assert anew.lease_id != lease.lease_id
        assert anew.fencing_token > other.fencing_token
