"""The gateway: who is held and for how long, what is aborted, and which clocks stand still."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.generation import (
    FinishReason,
    PauseMode,
)
from py_scheduler.errors import (
    EngineRejectedError,
    FailedPreconditionError,
)
from py_scheduler.execution.generation.gateway import GenerationGateway
from tests.support.fake_clock import settle
from tests.support.models.controlled_model import ControlledModel
from tests.support.models.gateway_asking import (
    ALL_MODES,
    STUDENT,
    TEACHER,
    Asking,
    StoppedTime,
    request,
)

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


def test_whether_anything_generates_is_what_the_engines_say_that_know() -> None:
    assert not GenerationGateway({}).any_is_up
    model = ControlledModel()
    gateway = GenerationGateway({"student": model, "teacher": model})
    assert gateway.any_is_up, "one that does not know counts"
    for is_up in (False, True):
        setattr(model, "is_up", is_up)  # noqa: B010 - it becomes an engine that knows
        assert gateway.any_is_up == is_up
