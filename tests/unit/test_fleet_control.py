"""Pauses and weight updates of several SGLang servers at once, with one that misses some."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from py_scheduler.domain.generation import PauseMode, WeightUpdate
from py_scheduler.domain.ports import GenerationControl
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError
from tests.support.fleets import MAX_BACKOFF_SECONDS, eventually, fleet_on, request
from tests.support.scripted_sglang import ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.adapters.sglang_fleet import SglangFleet
    from tests.support.fake_clock import FakeClock

PAUSE, CONTINUE, UPDATE = "/pause_generation", "/continue_generation", "/update_weights_from_disk"


class Controlled(ScriptedSglang):
    """Takes control calls, or answers `control_status`."""

    def __init__(self) -> None:
        super().__init__()
        self.control_status = 200
        self.calls: list[str] = []

    def _add_calls(self, app: web.Application) -> None:
        super()._add_calls(app)
        for path in (PAUSE, CONTINUE, UPDATE):
            app.router.add_post(path, self._control)

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        if self.control_status == 200 and request.path == UPDATE:
            self.weight_version = body["weight_version"]
        elif self.control_status == 200:
            self.is_paused = request.path == PAUSE
        return web.json_response({"message": "scripted"}, status=self.control_status)


@asynccontextmanager
async def controlled() -> AsyncIterator[tuple[SglangFleet, FakeClock, Controlled, Controlled]]:
    async with Controlled() as first, Controlled() as second, fleet_on(first, second) as (fleet, clock):
        yield fleet, clock, first, second


def weights(version: str) -> WeightUpdate:
    return WeightUpdate(model_path="/weights/1", weight_version=version)


def up(fleet: SglangFleet) -> list[bool]:
    return [endpoint.is_up for endpoint in fleet._endpoints]


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
            await fleet.resume()
