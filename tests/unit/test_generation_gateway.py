"""The gateway: who is held and for how long, what a pause makes of a generation, and which weights are at work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
    SamplingParams,
    WeightSpan,
    WeightUpdate,
)
from py_scheduler.errors import (
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    GenerationError,
    NotFoundError,
)
from py_scheduler.execution.generation_gateway import GenerationGateway
from tests.support.controlled_model import ControlledModel
from tests.support.fake_clock import settle
from tests.support.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from py_scheduler.domain.generation import GenerationState
    from py_scheduler.domain.ports import GenerationEngine

STUDENT, TEACHER = "student", "teacher"
PROMPT = (0, 1, 2)
ALL_MODES = list(PauseMode)


class StoppedTime:
    """A phase's clock that counts its stops."""

    def __init__(self) -> None:
        self.stands_still = False
        self.stops = 0

    def stop_clock(self) -> None:
        self.stops += not self.stands_still
        self.stands_still = True

    def start_clock(self) -> None:
        self.stands_still = False


class Based:
    """An engine that asks another one."""

    def __init__(self, base: ControlledModel) -> None:
        self.base = base

    def __getattr__(self, name: str) -> object:
        if name in {"pause", "resume", "update_weights", "weight_version"}:
            raise AttributeError(name)
        return getattr(self.base, name)


def request(rid: str = "r", max_new_tokens: int | None = 10, min_new_tokens: int | None = None) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    return GenerationRequest(rid=rid, token_ids=PROMPT, sampling=params)


def update(version: str) -> WeightUpdate:
    return WeightUpdate(model_path=f"/weights/{version}", weight_version=version)


def spans(generation: Generation) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.weight_spans]


class Asking:
    """A gateway over one controlled model, and generations that a test has asked for."""

    def __init__(self, model: ControlledModel | None = None, limit: int | None = None) -> None:
        self.model = model or ControlledModel()
        self.gateway = GenerationGateway({STUDENT: self.model}, {STUDENT: limit} if limit else None)

    async def ask(
        self, rid: str = "r", *, resumes: bool = False, clock: StoppedTime | None = None, **sampling: int | None
    ) -> asyncio.Task[Generation]:
        asked = request(rid, **sampling)
        task = asyncio.create_task(self.gateway.generate(STUDENT, asked, resumes=resumes, clock=clock))
        await settle()
        return task

    async def state(self) -> GenerationState:
        (state,) = await self.gateway.states(STUDENT)
        return state

    async def counts(self) -> tuple[int, int]:
        state = await self.state()
        return state.running, state.held

    async def change_weights(self, version: str, mode: PauseMode = PauseMode.ABORT) -> None:
        await self.gateway.pause(STUDENT, mode)
        await settle()
        await self.gateway.update_weights(STUDENT, update(version))
        await self.gateway.resume(STUDENT)
        await settle()


# Holds and caps


@pytest.mark.parametrize("mode", ALL_MODES)
async def test_a_paused_role_holds_new_generations_in_the_order_they_came(mode: PauseMode) -> None:
    asking = Asking()
    state = await asking.gateway.pause(STUDENT, mode)
    assert (state.pause_mode, asking.model.mode) == (mode, mode)
    tasks = [await asking.ask(rid) for rid in "abc"]
    assert await asking.counts() == (0, 3)
    assert asking.model.requests == []
    state = await asking.gateway.resume(STUDENT)
    assert (state.pause_mode, state.running, state.held) == (None, 3, 0)
    await asking.model.step(10)
    assert [len((await task).token_ids) for task in tasks] == [10, 10, 10]
    assert [asked.rid for asked in asking.model.requests] == ["a", "b", "c"]
    assert await asking.counts() == (0, 0)


async def test_a_cap_lets_so_many_run_and_the_next_when_one_ends() -> None:
    asking = Asking(limit=2)
    tasks = [await asking.ask(rid) for rid in "abcd"]
    assert await asking.counts() == (2, 2)
    await asking.model.end("b", FinishReason.STOP)
    assert list(asking.model.flights) == ["a", "c"]
    await asking.model.end("a", FinishReason.STOP)
    await asking.model.end("c", FinishReason.STOP)
    assert list(asking.model.flights) == ["d"]
    assert await asking.counts() == (1, 0)
    await asking.model.end("d", FinishReason.STOP)
    await asyncio.gather(*tasks)


async def test_a_resume_lets_no_more_begin_than_the_cap() -> None:
    asking = Asking(limit=2)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    tasks = [await asking.ask(rid) for rid in "abcde"]
    await asking.gateway.resume(STUDENT)
    assert await asking.counts() == (2, 3)
    for _ in range(3):
        await asking.model.step(10)
    assert [len((await task).token_ids) for task in tasks] == [10] * 5


async def test_one_that_is_cancelled_leaves_the_queue_and_its_place_to_others() -> None:
    asking = Asking(limit=1)
    first, second, third = [await asking.ask(rid) for rid in "abc"]
    second.cancel()
    # Cancelled in the same turn in which the place before it is left.
    asking.model.flights["a"].end(FinishReason.STOP)
    await settle()
    assert list(asking.model.flights) == ["c"]
    await asking.model.end("c", FinishReason.STOP)
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert await asking.counts() == (0, 0)


async def test_one_that_was_woken_and_then_cancelled_gives_its_place_back() -> None:
    asking = Asking(limit=1)
    first, second, third = [await asking.ask(rid) for rid in "abc"]
    asking.gateway._roles[STUDENT].leave()  # as the end of the first does, before the second one has its turn
    second.cancel()
    await settle()
    assert list(asking.model.flights) == ["a", "c"]
    asking.gateway._roles[STUDENT].running += 1
    await asking.model.end("c", FinishReason.STOP)
    await asking.model.end("a", FinishReason.STOP)
    await asyncio.gather(first, third)
    assert await asking.counts() == (0, 0)


# Rids and aborts


async def test_an_abort_reaches_what_is_held_and_what_runs() -> None:
    asking = Asking(limit=1)
    running, held = await asking.ask("a"), await asking.ask("b")
    await asking.model.step(3)
    await asking.gateway.abort("b")
    assert (await held).token_ids == []
    assert (await held).finish_reason is FinishReason.ABORT
    await asking.gateway.abort("a")
    assert ((await running).finish_reason, (await running).token_ids) == (FinishReason.ABORT, [3, 4, 5])
    await asking.gateway.abort("a")
    assert [asked.rid for asked in asking.model.requests] == ["a"]


async def test_an_abort_in_the_turn_in_which_it_was_to_begin_leaves_the_place_to_others() -> None:
    asking = Asking(limit=1)
    first, second, third = [await asking.ask(rid) for rid in "abc"]
    asking.gateway._roles[STUDENT].leave()  # as the end of the first does, before the second one has its turn
    await asking.gateway.abort("b")
    assert (await second).finish_reason is FinishReason.ABORT
    await settle()
    assert list(asking.model.flights) == ["a", "c"]
    asking.gateway._roles[STUDENT].running += 1
    await asking.model.step(10)
    await asyncio.gather(first, third)
    assert await asking.counts() == (0, 0)


async def test_a_rid_in_use_and_a_role_without_engine_are_refused() -> None:
    asking = Asking()
    task = await asking.ask("a")
    with pytest.raises(EngineRejectedError, match="rid 'a' is in use"):
        await asking.gateway.generate(STUDENT, request("a"))
    with pytest.raises(FailedPreconditionError, match=r"add \[generation.teacher\]"):
        await asking.gateway.generate(TEACHER, request("b"))
    await asking.model.step(10)
    await task


async def test_an_abort_by_somebody_else_at_the_engine_is_passed_on() -> None:
    asking = Asking()
    task = await asking.ask(resumes=True)
    await asking.model.step(2)
    await asking.model.end("r", FinishReason.ABORT)
    assert ((await task).finish_reason, (await task).token_ids) == (FinishReason.ABORT, [3, 4])


# Clocks


@pytest.mark.parametrize("mode", ALL_MODES)
async def test_the_clock_stands_still_exactly_while_its_generation_is_paused(mode: PauseMode) -> None:
    asking = Asking()
    before, after, over = StoppedTime(), StoppedTime(), StoppedTime()
    done = await asking.ask("over", clock=over)
    await asking.model.end("over", FinishReason.STOP)
    await done
    running = await asking.ask("running", clock=before)
    stood_still = [(before.stands_still, after.stands_still)]
    await asking.gateway.pause(STUDENT, mode)
    held = await asking.ask("held", clock=after)
    stood_still.append((before.stands_still, after.stands_still))
    await asking.gateway.resume(STUDENT)
    stood_still.append((before.stands_still, after.stands_still))
    assert stood_still == [(False, False), (True, True), (False, False)]
    await asking.model.step(10)
    await asyncio.gather(running, held)
    assert (before.stops, after.stops, over.stops) == (1, 1, 0)


async def test_the_clock_goes_on_when_a_held_generation_is_given_up() -> None:
    asking, clock = Asking(), StoppedTime()
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    task = await asking.ask(clock=clock)
    await asking.gateway.abort("r")
    await task
    assert (clock.stops, clock.stands_still) == (1, False)


async def test_a_wait_for_a_place_takes_time() -> None:
    asking, clock = Asking(limit=1), StoppedTime()
    tasks = [await asking.ask("a"), await asking.ask("b", clock=clock)]
    await asking.model.step(10)
    await asking.model.step(10)
    await asyncio.gather(*tasks)
    assert clock.stops == 0


# Weights


async def test_the_epoch_counts_confirmed_and_observed_changes_once_each() -> None:
    asking = Asking()
    assert ((await asking.state()).weight_version, (await asking.state()).weight_epoch) == ("v0", 0)
    await asking.change_weights("v1")
    assert ((await asking.state()).weight_version, (await asking.state()).weight_epoch) == ("v1", 1)
    task = await asking.ask()
    await asking.model.step(10)
    await task
    assert (await asking.state()).weight_epoch == 1
    asking.model.version = "v2"  # somebody else changed them
    task = await asking.ask()
    await asking.model.step(10)
    await task
    assert ((await asking.state()).weight_version, (await asking.state()).weight_epoch) == ("v2", 2)


async def test_an_answer_of_the_weights_before_is_no_change() -> None:
    asking = Asking()
    late = await asking.ask("late")
    await asking.model.step(5)
    asking.model.flights["late"].end(FinishReason.STOP)
    await asking.gateway.update_weights(STUDENT, update("v1"))
    assert spans(await late) == [("v0", 0, 5)]
    assert ((await asking.state()).weight_version, (await asking.state()).weight_epoch) == ("v1", 1)


async def test_the_same_update_again_loads_nothing_unless_the_engine_has_lost_it() -> None:
    asking = Asking()
    for _ in range(2):
        await asking.gateway.update_weights(STUDENT, update("v1"))
    assert [loaded.weight_version for loaded in asking.model.loaded] == ["v1"]
    asking.model.version = "v0"  # as after a restart of its server
    await asking.gateway.update_weights(STUDENT, update("v1"))
    assert [loaded.weight_version for loaded in asking.model.loaded] == ["v1", "v1"]
    assert (await asking.state()).weight_epoch == 1
    await asking.gateway.update_weights(STUDENT, update("v0"))
    assert ((await asking.state()).weight_version, (await asking.state()).weight_epoch) == ("v0", 2)


async def test_servers_that_have_different_weights_are_all_given_the_new_ones() -> None:
    asking = Asking()
    await asking.gateway.update_weights(STUDENT, update("v1"))
    asking.model.version = ""  # as a fleet says of which one server came back with other weights
    state = await asking.gateway.update_weights(STUDENT, update("v1"))
    assert [loaded.weight_version for loaded in asking.model.loaded] == ["v1", "v1"]
    assert (state.weight_version, state.weight_epoch) == ("v1", 1)


async def test_an_update_that_failed_is_loaded_again_whatever_version_the_engine_names() -> None:
    asking = Asking()
    asking.model.fail_with = EngineRejectedError("there is no such folder")
    with pytest.raises(EngineRejectedError):
        await asking.gateway.update_weights(STUDENT, update("v1"))
    assert (await asking.state()).weight_epoch == 0
    asking.model.version = "v1"
    state = await asking.gateway.update_weights(STUDENT, update("v1"))
    assert [loaded.weight_version for loaded in asking.model.loaded] == ["v1"]
    assert (state.weight_version, state.weight_epoch) == ("v1", 1)


# Control


async def test_roles_on_one_engine_are_paused_together_and_share_its_weights() -> None:
    model, other = ControlledModel(), ControlledModel()
    engines: dict[str, GenerationEngine] = {STUDENT: model, TEACHER: Based(model), "judge": other}  # type: ignore[dict-item]
    gateway = GenerationGateway(engines)
    await gateway.pause(TEACHER, PauseMode.RETRACT)
    held = asyncio.create_task(gateway.generate(STUDENT, request("s")))
    free = asyncio.create_task(gateway.generate("judge", request("j")))
    await settle()
    assert [state.pause_mode for state in await gateway.states()] == [PauseMode.RETRACT, PauseMode.RETRACT, None]
    assert list(other.flights) == ["j"]
    await gateway.update_weights(STUDENT, update("v1"))
    assert [state.weight_epoch for state in await gateway.states()] == [1, 1, 0]
    await gateway.resume(STUDENT)
    await model.step(10)
    await other.step(10)
    await asyncio.gather(held, free)
    assert model.control_calls == ["pause retract", "update v1", "resume"]


async def test_what_cannot_be_controlled_says_so_and_an_unknown_role_too() -> None:
    gateway = GenerationGateway({STUDENT: ScriptedModel("yes")})
    for call in (
        gateway.pause(STUDENT, PauseMode.ABORT),
        gateway.resume(STUDENT),
        gateway.update_weights(STUDENT, update("v1")),
    ):
        with pytest.raises(FailedPreconditionError, match='kind = "sglang"'):
            await call
    with pytest.raises(NotFoundError, match=r"'teacher' \(configured: student\)"):
        await gateway.pause(TEACHER, PauseMode.ABORT)
    with pytest.raises(NotFoundError):
        await gateway.states(TEACHER)
    (state,) = await gateway.states()
    assert (state.weight_version, state.weight_epoch, state.pause_mode) == ("v1", 0, None)


async def test_a_pause_that_fails_holds_nothing() -> None:
    asking = Asking()
    asking.model.fail_with = EngineUnavailableError("http://10.0.0.1:30000 is silent")
    with pytest.raises(EngineUnavailableError) as caught:
        await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    assert str(caught.value) == "the engine in role 'student' did not pause: the log says why"
    task = await asking.ask()
    await asking.model.step(10)
    assert len((await task).token_ids) == 10


async def test_a_resume_that_fails_leaves_everything_held() -> None:
    asking = Asking()
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    task = await asking.ask()
    asking.model.fail_with = EngineUnavailableError("silent")
    with pytest.raises(GenerationError):
        await asking.gateway.resume(STUDENT)
    assert await asking.counts() == (0, 1)
    await asking.gateway.resume(STUDENT)
    await asking.model.step(10)
    await task


async def test_pauses_and_resumes_may_be_repeated_but_the_mode_may_not_change() -> None:
    asking = Asking()
    await asking.gateway.resume(STUDENT)
    for _ in range(2):
        await asking.gateway.pause(STUDENT, PauseMode.IN_PLACE)
    with pytest.raises(FailedPreconditionError, match="paused in mode in_place: continue first"):
        await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    states = [await asking.gateway.resume(STUDENT) for _ in range(2)]
    assert [state.pause_mode for state in states] == [None, None]


# What a pause makes of a generation


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_what_stands_still_goes_on_at_the_engine(mode: PauseMode) -> None:
    asking = Asking()
    task = await asking.ask()
    await asking.model.step(4)
    await asking.change_weights("v1", mode)
    await asking.model.step(10)
    assert spans(await task) == [("v0", 0, 4), ("v1", 4, 10)]
    assert len(asking.model.requests) == 1


async def test_a_resumed_generation_goes_on_with_the_rest_of_its_budget() -> None:
    asking = Asking()
    task = await asking.ask(resumes=True, min_new_tokens=5)
    await asking.model.step(4)
    await asking.change_weights("v1")
    await asking.model.step(3)
    await asking.change_weights("v2")
    await asking.model.step(10)
    generation = await task
    assert generation.token_ids == list(range(3, 13))
    assert generation.log_probs == [-token_id / 100 for token_id in range(3, 13)]
    assert generation.text == "".join(f"<{token_id}>" for token_id in range(3, 13))
    assert (generation.finish_reason, generation.prompt_tokens) == (FinishReason.LENGTH, 3)
    assert spans(generation) == [("v0", 0, 4), ("v1", 4, 7), ("v2", 7, 10)]
    asked = asking.model.requests
    assert [(len(r.token_ids), r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in asked] == [
        (3, 10, 5),
        (7, 6, 1),
        (10, 3, 0),
    ]
    assert asked[2].token_ids == list(range(10))


async def test_a_restarted_generation_is_of_the_new_weights_alone() -> None:
    """Case 11 of the faults: versions 2, 4, 6, and no sample that mixes them unknowingly."""
    asking = Asking()
    asking.model.version = "2"
    tasks = [await asking.ask(rid) for rid in "abc"]
    await asking.model.step(4)
    await asking.change_weights("4")
    await asking.model.step(4)
    await asking.change_weights("6")
    await asking.model.step(10)
    for task in tasks:
        generation = await task
        assert generation.token_ids == list(range(3, 13))
        assert spans(generation) == [("6", 0, 10)]
    assert {(len(r.token_ids), r.sampling.max_new_tokens) for r in asking.model.requests} == {(3, 10)}
    assert (await asking.state()).weight_epoch == 2


async def test_a_pause_without_an_update_joins_the_parts_into_one_span() -> None:
    asking = Asking()
    task = await asking.ask(resumes=True)
    await asking.model.step(4)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    await asking.gateway.resume(STUDENT)
    await asking.model.step(10)
    assert spans(await task) == [("v0", 0, 10)]


async def test_one_that_has_its_whole_budget_when_it_is_aborted_is_done() -> None:
    asking = Asking()
    task = await asking.ask(resumes=True)
    asking.model.flights["r"].versions = ["v0"] * 10
    await asking.change_weights("v1")
    assert ((await task).finish_reason, len((await task).token_ids)) == (FinishReason.LENGTH, 10)
    assert len(asking.model.requests) == 1


async def test_the_engines_own_budget_counts_where_a_request_names_none() -> None:
    asking = Asking(ControlledModel(default_max_new_tokens=6))
    task = await asking.ask(resumes=True, max_new_tokens=None)
    await asking.model.step(4)
    await asking.change_weights("v1")
    await asking.model.step(10)
    assert len((await task).token_ids) == 6
    assert asking.model.requests[1].sampling.max_new_tokens == 2


async def test_without_a_known_budget_it_begins_anew() -> None:
    asking = Asking(ControlledModel(default_max_new_tokens=None))
    task = await asking.ask(resumes=True, max_new_tokens=None)
    await asking.model.step(4)
    await asking.change_weights("v1")
    await asking.model.step(2)
    await asking.model.end("r", FinishReason.STOP)
    assert spans(await task) == [("v1", 0, 2)]


async def test_one_that_is_stopped_while_it_waits_to_go_on_keeps_its_tokens() -> None:
    asking = Asking()
    resumed, restarted = await asking.ask("a", resumes=True), await asking.ask("b")
    await asking.model.step(4)
    await asking.gateway.pause(STUDENT, PauseMode.ABORT)
    await settle()
    assert await asking.counts() == (0, 2)
    for rid in "ab":
        await asking.gateway.abort(rid)
    assert ((await resumed).token_ids, (await resumed).finish_reason) == ([3, 4, 5, 6], FinishReason.ABORT)
    assert ((await restarted).token_ids, (await restarted).finish_reason) == ([], FinishReason.ABORT)
    assert await asking.counts() == (0, 0)


async def test_an_engine_that_fails_later_leaves_what_was_made_before() -> None:
    asking = Asking()
    task = await asking.ask(resumes=True)
    await asking.model.step(4)
    await asking.change_weights("v1")
    await asking.model.step(2)
    await asking.model.break_down()
    with pytest.raises(EngineUnavailableError) as caught:
        await task
    assert isinstance(caught.value.partial, Generation)
    assert caught.value.partial.token_ids == [3, 4, 5, 6, 7, 8]
    assert caught.value.partial.weight_spans == (WeightSpan("v0", 0, 4), WeightSpan("v1", 4, 6))


async def test_a_second_abort_of_the_same_pause_is_somebody_elses() -> None:
    """After the pause the generation is as good as new: only another pause of ours makes it go on once more."""
    asking = Asking()
    task = await asking.ask(resumes=True)
    await asking.model.step(4)
    await asking.change_weights("v1")
    await asking.model.step(1)
    await asking.model.end("r", FinishReason.ABORT)
    assert ((await task).finish_reason, (await task).token_ids) == (FinishReason.ABORT, [3, 4, 5, 6, 7])
