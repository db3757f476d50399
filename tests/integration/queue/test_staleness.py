"""Staleness through the whole engine: what is held back before the queue, what lets it go, what a restart knows."""

from __future__ import annotations

from typing import Any

import pytest

from py_scheduler.domain.events import WeightsChanged
from py_scheduler.domain.explanations import TaskPhase
from py_scheduler.domain.generation import STUDENT, TEACHER, OnWeightUpdate, PauseMode, WeightUpdate
from py_scheduler.domain.requests import AbortRequest, EventFilter, EventKind
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.task import RetryPolicy
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal
from tests.support.models.controlled_model import ControlledModel
from tests.support.models.gateway_asking import Based
from tests.support.trainers.training import STEP, Generates, training


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_after_a_resume_at_version_100_no_more_begins_than_at_a_start(max_staleness: int) -> None:
    """Case 15 of the faults: nothing accepted, so (staleness + 1) steps and not a burst of 100."""
    async with training(max_staleness) as here:
        epochs = [await here.update(str(version)) for version in range(1, 101)]
        assert epochs[-1] == 100
        await here.submit(120 * STEP)
        assert await here.running() == (max_staleness + 1) * STEP


async def test_an_update_lets_one_step_through_and_a_sample_that_ends_none() -> None:
    async with training() as here:
        replies = [await here.submit(STEP, step) for step in range(6)]
        assert await here.running() == 2 * STEP
        await here.finish()
        assert await here.running() == 0
        for version in ("1", "2", "3"):
            await here.update(version)
            assert await here.running() == STEP
            await here.finish()
        views = [here.engine.submission(here.harness.selector(reply)) for reply in replies]
        assert [view.succeeded_tasks for view in views] == [STEP] * 5 + [0], "in the order of their batch ids"
        for version in ("4", "5", "6"):
            await here.update(version)
        await here.finish()
        await here.harness.done(replies[5])


async def test_samples_that_cannot_be_trained_on_make_room_for_others() -> None:
    async with training(max_staleness=0) as here:
        await here.harness.submit([task_of("breaks"), task_of("breaks"), task_of(), task_of()], 0)
        waiting = await here.submit(STEP, 1)
        assert await here.running() == STEP
        await here.finish()
        assert await here.running() == 2
        (reason,) = here.reasons(waiting)
        assert reason == (
            f"held back: {STEP} samples are accepted or running at weight_epoch 0 (2 and 2, counted from epoch 0), "
            f"max_staleness 0 allows {STEP} (step_size {STEP}): it waits for the next update of the weights"
        )


async def test_evals_and_other_namespaces_are_never_held() -> None:
    async with training(max_staleness=0) as here:
        await here.submit(3 * STEP)
        assert await here.running() == STEP
        await here.submit(STEP, "0/gsm8k", is_eval=True)
        assert await here.running() == 2 * STEP
        await here.harness.submit([task_of() for _ in range(STEP)], namespace="free")
        assert await here.running() == 3 * STEP
        await here.finish()
        assert await here.running() == 0, "evals make no room for training, and nothing was updated"


@pytest.mark.parametrize("eval_weight", [1.0, 0, "by_batch_id"])
async def test_what_is_held_stands_in_nobodys_way(eval_weight: float | str) -> None:
    async with training(max_staleness=0, eval_weight=eval_weight, max_bypass=0, max_running_samples=STEP + 1) as here:
        await here.submit(3 * STEP)
        await here.submit(1, "9/gsm8k", is_eval=True)
        assert await here.running() == STEP + 1


async def test_a_retry_does_not_pass_the_gate_again() -> None:
    """Its place is its own: it would wait for an update that waits for it."""
    async with training(max_staleness=0) as here:
        retry = RetryPolicy(max_failure_retries=1)
        first = await here.harness.submit([task_of("breaks", retry=retry) for _ in range(STEP)], 5)
        assert await here.running() == STEP
        await here.submit(STEP, 1)
        await here.finish()
        assert here.engine.submission(here.harness.selector(first)).running_attempts == STEP
        await here.finish()
        assert {event.outcomes[Outcome.INFRA_OTHER] for event in (await here.harness.done(first)).values()} == {1}
        assert await here.running() == STEP, "what failed for good makes room"


async def test_a_batch_that_begins_below_the_limit_goes_whole() -> None:
    async with training(max_staleness=0, spec={"batch_size": 3}) as here:
        await here.submit(9)
        assert await here.running() == 6


async def test_what_is_held_can_be_aborted_and_explained() -> None:
    async with training(max_staleness=0) as here:
        await here.submit(STEP)
        held = await here.submit(STEP, 1)
        await here.running()
        explanation = await here.engine.explain_task(held.task_ids[1], "default")
        (wait,) = explanation.waits
        assert explanation.phase is TaskPhase.QUEUED
        assert wait.reason.startswith(f"held back: {STEP} samples are accepted or running at weight_epoch 0")
        assert (wait.ahead_in_all, [ahead.batch_id for ahead in wait.ahead]) == (1, [1])
        answer = await here.engine.abort(AbortRequest(selector=here.harness.selector(held), wait=True))
        assert (answer.aborted_tasks, answer.still_stopping) == (STEP, ())
        assert here.reasons(held) == set()
        assert (await here.engine.explain_task(held.task_ids[1], "default")).phase is TaskPhase.DONE
        await here.finish()
        await here.update("1")
        assert await here.running() == 0


async def test_a_drain_says_so_and_lets_nothing_go() -> None:
    journal = SurvivingJournal()
    async with training(max_staleness=0, journal=journal) as here:
        await here.submit(STEP)
        held = await here.submit(STEP, 1)
        await here.running()
        await here.engine.drain(0)
        await here.update("1")
        assert here.reasons(held) == {"the server is shutting down and admits nothing"}
        assert await here.running() == STEP


# What a restart knows


async def test_a_restart_goes_on_counting() -> None:
    journal = SurvivingJournal()
    async with training(journal=journal) as here:
        await here.submit(3 * STEP)
        await here.running()
        await here.finish()
        assert await here.update("1") == 1
        assert await here.running() == STEP
    model = ControlledModel()
    model.version = "1"
    async with training(journal=journal, model=model) as here:
        assert await here.running() == STEP, "what was running is, and nothing beside"
        more = await here.submit(3 * STEP, 1)
        assert await here.running() == STEP
        await here.finish()
        assert await here.update("2") == 2
        assert await here.running() == STEP
        assert here.engine.submission(here.harness.selector(more)).running_attempts == STEP


async def test_a_restart_at_version_100_with_nothing_accepted_is_no_burst() -> None:
    journal = SurvivingJournal()
    async with training(journal=journal) as here:
        for version in range(1, 101):
            await here.update(str(version))
    model = ControlledModel()
    model.version = "100"
    async with training(journal=journal, model=model) as here:
        (state,) = await here.engine.generation.states(STUDENT)
        assert (state.weight_version, state.weight_epoch) == ("100", 100)
        await here.submit(120 * STEP)
        assert await here.running() == 2 * STEP


async def test_weights_that_changed_while_the_server_was_away_are_noticed() -> None:
    journal = SurvivingJournal()
    async with training(journal=journal) as here:
        await here.update("1")
    model = ControlledModel()
    model.version = "7"
    async with training(journal=journal, model=model) as here:
        (state,) = await here.engine.generation.states()
        assert (state.weight_version, state.weight_epoch) == ("7", 2)
    model.version = "1"  # seen before: as if a late answer came
    async with training(journal=journal, model=model) as here:
        (state,) = await here.engine.generation.states()
        assert (state.weight_version, state.weight_epoch) == ("7", 2)
        assert await here.update("1") == 3


async def test_a_change_behind_the_schedulers_back_is_noticed_by_whoever_asks() -> None:
    """Else a gate that has let nothing run would wait for an epoch that only a generation could show."""
    async with training(max_staleness=0) as here:
        await here.submit(2 * STEP)
        await here.running()
        await here.finish()
        assert await here.running() == 0
        here.model.version = "by other means"
        (state,) = await here.engine.generation.states()
        assert (state.weight_version, state.weight_epoch) == ("by other means", 1)
        assert await here.running() == STEP


async def test_changes_of_weights_are_events_of_every_namespace() -> None:
    model, journal = ControlledModel(), SurvivingJournal()
    engines: dict[str, Any] = {STUDENT: model, TEACHER: Based(model)}
    async with running_engine(spec_of(Generates()), generation_backends=engines, journal=journal) as harness:
        reply = await harness.submit([task_of()])
        for version in ("1", "1", "2"):
            update = WeightUpdate(model_path="/weights", weight_version=version)
            await harness.engine.generation.update_weights(TEACHER, update)
        assert harness.engine.last_sequence >= 4, "an epoch is committed before it is told"
        of_any = EventFilter(namespace="somebody's", kinds=frozenset({EventKind.WEIGHTS_CHANGED}))
        frame = await anext(harness.engine.watch(of_any, None))
        changes = [record.event for record in frame.records]
        of_one = EventFilter(submission_id=reply.submission_id)
        frame = await anext(harness.engine.watch(of_one, None))
        assert not any(isinstance(record.event, WeightsChanged) for record in frame.records)
    assert [
        (change.roles, change.weight_version, change.epoch) for change in changes if isinstance(change, WeightsChanged)
    ] == [((STUDENT, TEACHER), version, epoch) for version, epoch in (("v0", 0), ("1", 1), ("2", 2))]


async def test_a_trainer_that_starts_again_says_so_and_waits_for_nothing_it_has_lost() -> None:
    journal = SurvivingJournal()
    async with training(max_staleness=0, journal=journal) as here:
        await here.update("1")
        await here.submit(STEP)
        await here.running()
        await here.finish()
        await here.submit(2 * STEP, 1)
        assert await here.running() == 0
        assert await here.engine.resume_training("somebody's") == 1
        assert await here.running() == 0
        assert await here.engine.resume_training("default") == 1
        assert await here.running() == STEP
        await here.finish()
        assert await here.running() == 0
    async with training(max_staleness=0, journal=journal) as here:
        assert await here.running() == 0, "a restart is no resume"
        await here.engine.resume_training("default")
        assert await here.running() == STEP


# What a sample says


async def test_a_sample_tells_how_stale_it_was_when_it_ended() -> None:
    async with training(spec={"on_weight_update": OnWeightUpdate.RESUME}) as here:
        await here.update("1")
        reply = await here.submit(1)
        await here.running()
        await here.model.step(4)
        for version in ("2", "3"):
            await here.engine.generation.pause(STUDENT, PauseMode.ABORT)
            await here.update(version)
            await here.engine.generation.resume(STUDENT)
        await here.finish()
        (sample,) = await here.harness.samples(reply)
        fresh = await here.submit(1, 1)
        await here.running()
        await here.finish()
        (fresh_sample,) = await here.harness.samples(fresh)
    assert (sample.weight_epoch, sample.staleness, sample.staleness_at(5)) == (1, 2, 4)
    assert (fresh_sample.weight_epoch, fresh_sample.staleness) == (3, 0)


async def test_a_sample_without_tokens_has_no_staleness_and_one_that_began_anew_that_of_its_tokens() -> None:
    async with training() as here:
        aborted = await here.submit(1)
        await here.running()
        await here.engine.abort(AbortRequest(selector=here.harness.selector(aborted), wait=True))
        restarted = await here.submit(1, 1)
        await here.running()
        await here.model.step(4)
        await here.engine.generation.pause(STUDENT, PauseMode.ABORT)
        await here.update("1")
        await here.engine.generation.resume(STUDENT)
        await here.finish()
        (nothing,) = await here.harness.samples(aborted)
        (sample,) = await here.harness.samples(restarted)
    assert (nothing.weight_epoch, nothing.staleness, nothing.staleness_at(3)) == (None, 0, None)
    assert (sample.weight_epoch, sample.staleness) == (1, 0)
