"""The gateway: which weights are at work, who can be controlled, and what a pause makes of a generation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    PauseMode,
    WeightSpan,
)
from py_scheduler.errors import (
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    GenerationError,
    NotFoundError,
)
from py_scheduler.execution.generation.gateway import GenerationGateway
from tests.support.fake_clock import settle
from tests.support.models.controlled_model import ControlledModel
from tests.support.models.gateway_asking import (
    STUDENT,
    TEACHER,
    Asking,
    Based,
    request,
    spans,
    update,
)
from tests.support.models.scripted_model import ScriptedModel

if TYPE_CHECKING:
    from py_scheduler.domain.ports import GenerationBackend


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
    engines: dict[str, GenerationBackend] = {STUDENT: model, TEACHER: Based(model), "judge": other}  # type: ignore[dict-item]
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
    assert generation.log_probs == [-token_id / 128 for token_id in range(3, 13)]
    assert generation.text == "".join(f"<{token_id}>" for token_id in range(3, 13))
    assert (generation.finish_reason, generation.prompt_tokens) == (FinishReason.LENGTH, 3)
    assert spans(generation) == [("v0", 0, 4), ("v1", 4, 7), ("v2", 7, 10)]
    asked = asking.model.requests
    assert [(len(r.token_ids), r.sampling.max_new_tokens, r.sampling.min_new_tokens) for r in asked] == [
        (3, 10, 5),
        (7, 6, 1),
        (10, 3, 0),
    ]
    assert list(asked[2].token_ids) == list(range(10))


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
