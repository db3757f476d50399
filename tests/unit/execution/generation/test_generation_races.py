"""The gateway where things get in one another's way: pauses behind resumes, two trainers, cancels, half an update."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.generation import FinishReason, PauseMode, WeightUpdate
from py_scheduler.errors import EngineUnavailableError, FailedPreconditionError, ResourceExhaustedError
from py_scheduler.execution.generation.gateway import GenerationGateway
from py_scheduler.execution.generation.known_backend import ForgetfulBackendLog
from tests.support.fake_clock import settle
from tests.support.models.controlled_model import ControlledModel
from tests.support.models.gateway_asking import ALL_MODES, STUDENT, Asking, StoppedTime, spans, update


class SlowControl(ControlledModel):
    """Its control calls return when a test opens the door."""

    def __init__(self) -> None:
        super().__init__()
        self.door = asyncio.Event()
        self.door.set()

    async def pause(self, mode: PauseMode) -> None:
        await self.door.wait()
        await super().pause(mode)

    async def update_weights(self, update: WeightUpdate) -> None:
        await self.door.wait()
        await super().update_weights(update)

    async def resume(self) -> None:
        await self.door.wait()
        await super().resume()


# A pause right behind a resume


@pytest.mark.parametrize("mode", ALL_MODES)
async def test_a_pause_right_behind_a_resume_takes_back_what_was_woken(mode: PauseMode) -> None:
    asking = Asking()
    await asking.gateway.pause(STUDENT, mode)
    clock = StoppedTime()
    tasks = [await asking.ask(rid, clock=clock) for rid in "abc"]
    await asking.gateway.resume(STUDENT)
    await asking.gateway.pause(STUDENT, mode)  # in the same turn of the loop
    assert await asking.counts() == (0, 3)
    await settle()
    assert asking.model.requests == [], "none begins while the role is paused"
    assert await asking.counts() == (0, 3)
    assert clock.stands_still
    await asking.gateway.resume(STUDENT)
    await settle()
    assert [request.rid for request in asking.model.requests] == ["a", "b", "c"], "in the order in which they were held"
    await asking.model.step(10)
    for task in tasks:
        assert len((await task).token_ids) == 10


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("mode", ALL_MODES)
async def test_a_pause_while_a_place_changes_hands_aborts_nobody(mode: PauseMode, turns: int) -> None:
    """At whatever turn of the loop it comes: whoever is given the place begins, or waits for it again."""
    asking = Asking(limit=1)
    first, second, third = [await asking.ask(rid, resumes=True) for rid in "abc"]
    asking.model.flights["a"].end(FinishReason.STOP)
    for _ in range(turns):
        await asyncio.sleep(0)
    await asking.gateway.pause(STUDENT, mode)
    begun = len(asking.model.requests)
    await settle()
    assert len(asking.model.requests) == begun
    await asking.gateway.resume(STUDENT)
    await settle()
    for _ in range(2):
        await asking.model.step(10)
    assert (await first).finish_reason is FinishReason.STOP
    for task in (second, third):
        assert ((await task).finish_reason, len((await task).token_ids)) == (FinishReason.LENGTH, 10)
    assert await asking.counts() == (0, 0)


# Two trainers


async def test_two_trainers_pause_and_the_first_to_continue_ends_it_for_both() -> None:
    """A pause is a state and not a count: trainers that share an engine agree on who pauses it."""
    asking = Asking()
    await asyncio.gather(*(asking.gateway.pause(STUDENT, PauseMode.RETRACT) for _ in range(2)))
    task = await asking.ask()
    assert await asking.counts() == (0, 1)
    with pytest.raises(FailedPreconditionError, match="continue first"):
        await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    await asyncio.gather(*(asking.gateway.resume(STUDENT) for _ in range(2)))
    await asking.model.step(10)
    assert len((await task).token_ids) == 10


async def test_calls_of_two_trainers_reach_the_engine_one_after_the_other() -> None:
    model = SlowControl()
    asking = Asking(model)
    model.door.clear()
    calls = [
        asyncio.create_task(call)
        for call in (
            asking.gateway.pause(STUDENT, PauseMode.ABORT),
            asking.gateway.update_weights(STUDENT, update("v1")),
            asking.gateway.resume(STUDENT),
            asking.gateway.pause(STUDENT, PauseMode.IN_PLACE),
            asking.gateway.update_weights(STUDENT, update("v2")),
        )
    ]
    await settle()
    held = await asking.ask()
    assert model.control_calls == []
    assert await asking.counts() == (0, 1), "what comes while the first of them is under way is held"
    model.door.set()
    await asyncio.gather(*calls)
    assert model.control_calls == ["pause abort", "update v1", "resume", "pause in_place", "update v2"]
    assert ((await asking.state()).pause_mode, (await asking.state()).weight_epoch) == (PauseMode.IN_PLACE, 2)
    await asking.gateway.resume(STUDENT)
    await asking.model.step(10)
    assert spans(await held)[-1] == ("v2", 0, 10)


# Cancels


async def test_a_cancel_while_it_is_held_leaves_the_queue_to_the_others() -> None:
    asking = Asking(limit=1)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    tasks = [await asking.ask(rid) for rid in "abc"]
    tasks[0].cancel()
    await settle()
    assert await asking.counts() == (0, 2)
    await asking.gateway.resume(STUDENT)
    for _ in range(2):
        await asking.model.step(10)
    assert [len((await task).token_ids) for task in tasks[1:]] == [10, 10]
    assert tasks[0].cancelled()
    assert await asking.counts() == (0, 0)


async def test_a_cancel_between_the_wake_and_the_turn_gives_the_place_on() -> None:
    asking = Asking(limit=1)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    tasks = [await asking.ask(rid) for rid in "ab"]
    await asking.gateway.resume(STUDENT)
    tasks[0].cancel()
    await settle()
    assert list(asking.model.flights) == ["b"]
    await asking.model.step(10)
    assert len((await tasks[1]).token_ids) == 10
    assert await asking.counts() == (0, 0)


async def test_a_cancel_of_one_that_was_taken_back_leaves_no_trace() -> None:
    asking = Asking()
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    tasks = [await asking.ask(rid) for rid in "ab"]
    await asking.gateway.resume(STUDENT)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    tasks[0].cancel()
    await settle()
    assert await asking.counts() == (0, 1)
    await asking.gateway.abort("b")
    assert ((await tasks[1]).finish_reason, (await tasks[1]).token_ids) == (FinishReason.ABORT, [])
    assert await asking.counts() == (0, 0)


async def test_one_that_was_aborted_after_its_wake_is_not_taken_back() -> None:
    asking = Asking()
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    task = await asking.ask()
    await asking.gateway.resume(STUDENT)
    await asking.gateway.abort("r")
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    await settle()
    assert task.done()
    assert (await task).finish_reason is FinishReason.ABORT
    assert await asking.counts() == (0, 0)


async def test_a_trainer_that_goes_away_in_the_middle_of_its_call_can_be_followed_by_another() -> None:
    model = SlowControl()
    asking = Asking(model)
    running = await asking.ask("running", resumes=True)
    for call, left in (
        (asking.gateway.pause(STUDENT, PauseMode.ABORT), PauseMode.ABORT),
        (asking.gateway.update_weights(STUDENT, update("v1")), PauseMode.ABORT),
        (asking.gateway.resume(STUDENT), PauseMode.ABORT),
    ):
        model.door.clear()
        gone = asyncio.create_task(call)
        await settle()
        gone.cancel()
        await settle()
        # What the engine made of it nobody knows: everything stays held until somebody continues.
        assert (await asking.state()).pause_mode is left
    model.door.set()
    await asking.change_weights("v1")
    await model.step(10)
    assert spans(await running) == [("v1", 0, 10)]
    assert (await asking.state()).weight_epoch == 1


# Half an update


class Pair(ControlledModel):
    """Two engines as one: the second one's updates fail as long as a test says so. Generations alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.second = ControlledModel()
        self.second_fails = True

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.gather(super().pause(mode), self.second.pause(mode))

    async def resume(self) -> None:
        await asyncio.gather(super().resume(), self.second.resume())

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        if self.second_fails:
            raise EngineUnavailableError("the second engine is silent")
        await self.second.update_weights(update)

    async def weight_version(self) -> str:
        return self.version if self.version == self.second.version else ""


async def test_an_update_that_one_of_two_engines_did_not_get_is_told_and_made_good_by_the_next_try() -> None:
    pair = Pair()
    asking = Asking(pair)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    with pytest.raises(EngineUnavailableError, match="did not load the weights: the log says why"):
        await asking.gateway.update_weights(STUDENT, update("v1"))
    state = await asking.state()
    assert (state.pause_mode, state.weight_version, state.weight_epoch) == (PauseMode.ABORT, "v0", 0)
    await asking.gateway.resume(STUDENT)  # the trainer gives up for now
    mixed = await asking.ask("new")
    await pair.step(10)
    assert spans(await mixed) == [("v1", 0, 10)]
    assert (await asking.state()).weight_epoch == 1, "the new weights were seen"
    pair.version = "v0"  # as the engine says that missed them
    late = await asking.ask("old")
    await pair.step(10)
    assert spans(await late) == [("v0", 0, 10)]
    pair.version = "v1"
    history = asking.gateway.weights(STUDENT)
    assert (history.epoch, history.epoch_of("v0"), history.epoch_of("v1")) == (1, 0, 1)
    pair.second_fails = False
    state = await asking.gateway.update_weights(STUDENT, update("v1"))
    assert [loaded.weight_version for loaded in pair.second.loaded] == ["v1"]
    assert (state.weight_version, state.weight_epoch) == ("v1", 1)


def test_the_epoch_of_weights_that_are_forgotten_is_the_oldest_known() -> None:
    history = Asking(ControlledModel()).gateway.weights(STUDENT)
    assert history.epoch_of("") == history.epoch_of("never seen") == 0
    for number in range(100):
        version = f"v{number}"
        epoch = history.next_epoch(version, is_confirmed=False)
        assert epoch == number
        history.became(version, epoch)
    assert (history.epoch_of("v99"), history.epoch_of("v50"), history.epoch_of("v1")) == (99, 50, 36)
    assert history.next_epoch("v98", is_confirmed=False) is None
    assert history.next_epoch("v98", is_confirmed=True) == 100
    assert history.next_epoch("", is_confirmed=True) is None


class FullDisk(ForgetfulBackendLog):
    """Nothing can be written down as long as a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    async def committed(self) -> None:
        if self.is_full:
            raise ResourceExhaustedError("the journal cannot be written for now", 1.0)


async def test_an_epoch_is_told_only_when_it_is_written_down() -> None:
    model, log = ControlledModel(), FullDisk()
    gateway = GenerationGateway({STUDENT: model}, log=log)
    for _ in range(2):
        with pytest.raises(ResourceExhaustedError):
            await gateway.update_weights(STUDENT, update("v1"))
    log.is_full = False
    state = await gateway.update_weights(STUDENT, update("v1"))
    assert (state.weight_version, state.weight_epoch, len(model.loaded)) == ("v1", 1, 1)
