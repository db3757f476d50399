"""Pauses and weight updates of several SGLang servers at once, with one that misses some."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.generation import PauseMode
from py_scheduler.domain.ports import GenerationControl
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError
from tests.support.models.fleets import (
    CONTINUE,
    MAX_BACKOFF_SECONDS,
    PAUSE,
    UPDATE,
    controlled,
    request,
    up,
    weights,
)
from tests.support.waiting import eventually


async def test_every_endpoint_is_paused_updated_and_resumed() -> None:
    async with controlled() as (fleet, _, first, second):
        assert isinstance(fleet, GenerationControl)
        await fleet.pause(PauseMode.RETRACT)
        assert (first.is_paused, second.is_paused) == (True, True)
        await fleet.update_weights(weights("1"))
        assert await fleet.weight_version() == "1"
        assert (await fleet.model_info()).weight_version == "1"
        await fleet.resume()
        assert (first.is_paused, second.is_paused) == (False, False)
        assert first.calls == second.calls == [PAUSE, UPDATE, CONTINUE]


async def test_versions_that_differ_are_no_version() -> None:
    async with controlled() as (fleet, _, first, _second):
        first.weight_version = "other"
        assert await fleet.weight_version() == ""


async def test_one_that_does_not_say_its_version_stops_no_update() -> None:
    async with controlled() as (fleet, _, first, second):
        first.nonsense["/model_info"] = 500, b""
        assert await fleet.weight_version() == "default"
        second.nonsense["/model_info"] = 500, b""
        with pytest.raises(EngineUnavailableError, match="answered 500"):
            await fleet.weight_version()


async def test_an_endpoint_that_missed_an_update_gets_it_before_any_traffic() -> None:
    async with controlled() as (fleet, clock, first, second):
        first.control_status = 500
        await fleet.update_weights(weights("1"))
        assert up(fleet) == [False, True]
        assert (first.weight_version, second.weight_version) == ("default", "1")
        await clock.advance(1.0)
        await eventually(lambda: first.calls == [UPDATE, UPDATE] and fleet._endpoints[0]._looking is None)
        assert up(fleet) == [False, True], "it still fails"
        first.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert first.weight_version == "1"
        assert await fleet.weight_version() == "1"


async def test_an_endpoint_that_missed_the_end_of_a_pause_is_told_of_it() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.IN_PLACE)
        first.control_status = 500
        await fleet.resume()
        assert (first.is_paused, second.is_paused) == (True, False)
        assert up(fleet) == [False, True]
        first.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert not first.is_paused
        assert len((await fleet.generate(request())).token_ids) == 8


async def test_weights_that_are_refused_are_not_asked_for_again() -> None:
    async with controlled() as (fleet, clock, first, second):
        first.control_status = second.control_status = 400
        with pytest.raises(EngineRejectedError, match="scripted"):
            await fleet.update_weights(weights("1"))
        assert up(fleet) == [True, True]
        fleet._endpoints[0].failed("scripted")
        await clock.advance(1.0)
        await eventually(lambda: up(fleet) == [True, True])
        assert first.weight_version == "default"


async def test_a_call_that_no_endpoint_obeys_fails() -> None:
    async with controlled() as (fleet, _, first, second):
        first.control_status = second.control_status = 500
        with pytest.raises(EngineUnavailableError, match="answered 500"):
            await fleet.pause(PauseMode.ABORT)
        with pytest.raises(EngineUnavailableError, match="no endpoint is up"):
            await fleet.update_weights(weights("1"))


async def test_a_pause_that_one_endpoint_refuses_leaves_none_paused() -> None:
    async with controlled() as (fleet, _, first, second):
        second.control_status = 400
        with pytest.raises(EngineRejectedError):
            await fleet.pause(PauseMode.RETRACT)
        assert not first.is_paused
        assert up(fleet) == [True, False], "nobody knows whether one that refuses everything is paused"
        assert len((await fleet.generate(request())).token_ids) == 8


async def test_what_obeyed_a_pause_that_failed_goes_on_before_it_is_up_again() -> None:
    async with controlled() as (fleet, clock, first, second):
        first.control_status = second.control_status = 500
        with pytest.raises(EngineUnavailableError):
            await fleet.pause(PauseMode.RETRACT)
        first.is_paused = second.is_paused = True  # all but their answers
        first.control_status = second.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert (first.is_paused, second.is_paused) == (False, False)


async def test_a_pause_ends_also_when_nobody_is_there_to_hear_of_it() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        for endpoint in fleet._endpoints:
            endpoint.failed("scripted")
        await fleet.resume()
        assert (first.is_paused, second.is_paused) == (True, True)
        await clock.advance(1.0)
        await eventually(lambda: up(fleet) == [True, True])
        assert (first.is_paused, second.is_paused) == (False, False)


async def test_a_pause_that_ends_while_an_endpoint_is_coming_up_ends_there_too() -> None:
    async with controlled() as (fleet, clock, first, _):
        await fleet.pause(PauseMode.IN_PLACE)
        fleet._endpoints[0].failed("scripted")
        first.load_gate = asyncio.Event()
        questions = first.load_questions
        await clock.advance(1.0)
        await first.until(lambda: first.load_questions > questions)
        # It was asked what it has missed already, and is not up yet.
        await fleet.resume()
        assert first.is_paused
        first.load_gate.set()
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert not first.is_paused


async def test_an_update_that_its_caller_gives_up_is_not_left_half_done() -> None:
    async with controlled() as (fleet, clock, first, second):
        second.control_gate = asyncio.Event()
        updating = asyncio.create_task(fleet.update_weights(weights("1")))
        await second.until(lambda: second.calls == [UPDATE])
        await first.until(lambda: first.calls == [UPDATE])
        updating.cancel()
        await asyncio.wait([updating])
        assert updating.cancelled()
        assert up(fleet) == [False, False], "nobody knows what they have"
        second.control_gate.set()
        await clock.advance(1.0)
        await eventually(lambda: up(fleet) == [True, True])
        assert (first.weight_version, second.weight_version) == ("1", "1")
        assert first.calls == [UPDATE], "it has it already"
