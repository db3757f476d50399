"""Servers that a trainer names, and weights that it pushes itself, over real channels."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
import msgspec
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2_grpc
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.adapters.with_examples import WithExamplesBackend, WorkedExample
from py_scheduler.api.server import ApiServer
from py_scheduler.client import BlockingGenerationClient, GenerationClient, SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import EndpointsSet, WeightsChanged
from py_scheduler.domain.generation import (
    STUDENT,
    TEACHER,
    ChatMessage,
    EndpointState,
    EndpointView,
    PauseMode,
    SamplingParams,
)
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.results import AgentResult, Outcome, Reward, SampleDone
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from tests.support.fake_clock import FakeClock
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of, versions
from tests.support.models.fleets import CONTINUE, NAME, PAUSE, Controlled, fleet_of, holding
from tests.support.models.scripted_model import ScriptedModel
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.ports import GenerationBackend

JUDGE = "judge"
BUDGET = 8


class Talking(BaseAgent):
    """One turn of the role that its prompt names."""

    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", "q")])
        await episode.generate(role=episode.sample.task.prompt or STUDENT)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Here(msgspec.Struct):
    """A scheduler whose student has no server yet, and its address."""

    fleet: SglangFleet
    address: str

    async def samples(self, role: str, count: int = 2) -> list[SampleDone]:
        async with SchedulerClient.connect(self.address) as client:
            events = client.rollout([task_of(role, repeat_times=count)], batch_id=0)
            return [event async for event in events if isinstance(event, SampleDone)]

    def client(self) -> GenerationClient:
        return GenerationClient.connect(self.address, reconnect_seconds=0.0)


@asynccontextmanager
async def served() -> AsyncIterator[Here]:
    fleet = fleet_of([], FakeClock(), no_endpoint_seconds=0.05)
    teacher = WithExamplesBackend(fleet, examples=[WorkedExample(prompt="p", answer="a")])
    backends: dict[str, GenerationBackend] = {STUDENT: fleet, TEACHER: teacher, JUDGE: ScriptedModel("yes")}
    for backend in backends.values():
        await backend.start()
    try:
        spec = spec_of(Talking(), default_sampling=SamplingParams(max_new_tokens=BUDGET))
        async with running_engine(spec, generation_backends=backends) as harness:
            server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
            address = server.bind()
            await server.start()
            try:
                yield Here(fleet, address)
            finally:
                await server.stop()
    finally:
        await fleet.close()


async def until_up(client: GenerationClient, count: int) -> tuple[EndpointView, ...]:
    async def are_up() -> bool:
        return [view.state for view in (await client.endpoints())[STUDENT]] == [EndpointState.UP] * count

    await eventually(are_up)
    return (await client.endpoints())[STUDENT]


async def watched(address: str, kind: EventKind) -> list[object]:
    """What a watcher from the start is told of it until now."""
    async with SchedulerClient(address) as watcher, aclosing(watcher.watch(kinds=[kind])) as frames:
        return [record.event for record in (await anext(frames)).records]


@pytest.mark.parametrize("role", [STUDENT, TEACHER])
async def test_samples_wait_for_the_servers_that_a_trainer_names_later(role: str) -> None:
    """Those of a role that rests on the named one, too, although its examples could not be learnt at the start."""
    async with served() as here, here.client() as client, Controlled() as first, Controlled() as second:
        rollout = asyncio.create_task(here.samples(role))
        await asyncio.wait([rollout], timeout=0.3)
        assert not rollout.done(), "no_endpoint_seconds is long over"
        assert await client.endpoints() == {STUDENT: (), TEACHER: ()}
        said = await client.set_endpoints(role, [first.base_url, second.base_url])
        assert [view.url for view in said] == [first.base_url, second.base_url]
        assert [sample.outcome for sample in await rollout] == [Outcome.SOLVED] * 2
        assert await client.endpoints() == dict.fromkeys((STUDENT, TEACHER), await until_up(client, 2))


async def test_one_that_is_removed_drains_and_the_list_may_be_sent_again() -> None:
    async with served() as here, here.client() as client, Controlled() as first, Controlled() as second:
        await client.set_endpoints(STUDENT, [first.base_url])
        await until_up(client, 1)
        gate = holding(first, 1)
        rollout = asyncio.create_task(here.samples(STUDENT, 1))
        await first.until(lambda: len(first.running) == 1)
        for _ in range(2):
            views = await client.set_endpoints(STUDENT, [second.base_url])
            assert (views[0].state, views[0].in_flight) == (EndpointState.DRAINING, 1)
        gate.set()
        assert [sample.outcome for sample in await rollout] == [Outcome.SOLVED]
        assert [view.url for view in await until_up(client, 1)] == [second.base_url]


async def test_what_cannot_be_set_says_the_way_out_and_changes_nothing() -> None:
    async with served() as here, here.client() as client, Controlled() as first:
        await client.set_endpoints(STUDENT, [first.base_url])
        before = await until_up(client, 1)
        with pytest.raises(NotFoundError, match="configured: student, teacher, judge"):
            await client.set_endpoints("nobody", [first.base_url])
        with pytest.raises(
            FailedPreconditionError, match=r'\[generation.judge\] kind = "sglang" or "vllm" and base_urls'
        ):
            await client.set_endpoints(JUDGE, [first.base_url])
        with pytest.raises(InvalidArgumentError, match=r"urls\[1\]: 'http://b' is named already, by urls\[0\]"):
            await client.set_endpoints(STUDENT, ["http://b", "http://b"])
        with pytest.raises(InvalidArgumentError, match="give a list"):
            await client.set_endpoints(STUDENT, first.base_url)
        assert (await client.endpoints())[STUDENT] == before
    async with served() as here, grpc.aio.insecure_channel(here.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        both = service.SetEndpointsRequest(role="student", urls=["http://a"], configured=True)
        for call, fields in (
            (stub.SetEndpoints(service.SetEndpointsRequest(urls=["a"])), ("role", "urls[0]")),
            (stub.SetEndpoints(both), ("configured",)),
            (stub.ReportWeights(service.ReportWeightsRequest()), ("role", "weight_version")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for field in fields:
                assert f"{field}: " in (caught.value.details() or "")


async def test_watchers_hear_that_servers_changed_and_not_where_they_are() -> None:
    async with served() as here, here.client() as client, Controlled() as first:
        for _ in range(2):
            await client.set_endpoints(STUDENT, [first.base_url])
        await client.set_endpoints(STUDENT, None)
        events = await watched(here.address, EventKind.ENDPOINTS_SET)
        assert [(event.roles, event.endpoints) for event in events if isinstance(event, EndpointsSet)] == [
            ((STUDENT, TEACHER), None)
        ] * 2, "the same again is no event"
        assert (await client.endpoints())[STUDENT] == ()


# -- weights that the trainer pushes itself


async def test_pushed_weights_raise_the_epoch_by_one_and_samples_are_of_them() -> None:
    async with served() as here, here.client() as client, Controlled() as first, Controlled() as second:
        await client.set_endpoints(STUDENT, [first.base_url, second.base_url])
        await until_up(client, 2)
        (before,) = await here.samples(STUDENT, 1)
        async with client.paused(PauseMode.RETRACT):
            first.weight_version = "step-1"  # as a push that names them does; the other one's does not
            for _ in range(2):
                state = await client.weights_changed("step-1")
                assert (state.weight_version, state.weight_epoch) == ("step-1", 1)
        after = await here.samples(STUDENT, 2)
        assert (before.weight_epoch, {sample.weight_epoch for sample in after}) == (0, {1})
        assert {version for sample in after for version, *_ in versions(sample)} == {"step-1"}
        assert (await client.states())[STUDENT].weight_epoch == 1, "what is generated with them is no news"
        events = await watched(here.address, EventKind.WEIGHTS_CHANGED)
        changes = [event for event in events if isinstance(event, WeightsChanged) and STUDENT in event.roles]
        assert [(event.weight_version, event.epoch) for event in changes] == [
            ("default", 0),
            ("step-1", 1),
        ]


async def test_outside_a_pause_and_without_servers_nothing_was_pushed() -> None:
    async with served() as here, here.client() as client, Controlled() as first:
        with pytest.raises(FailedPreconditionError, match="py-scheduler endpoints student URL"):
            await client.weights_changed("1")
        with pytest.raises(FailedPreconditionError, match="py-scheduler endpoints student URL"):
            await client.update_weights("/weights/1", "1")
        await client.set_endpoints(STUDENT, [first.base_url])
        with pytest.raises(FailedPreconditionError, match=r"with client.paused\(\)"):
            await client.weights_changed("1")
        with pytest.raises(FailedPreconditionError, match='kind = "sglang"'):
            await client.weights_changed("1", role=JUDGE)
        assert first.weight_version == "default"


class Hidden(Controlled):
    """Does not say which model it serves before `may_be_met` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_be_met = asyncio.Event()

    async def _model_info(self, request: web.Request) -> web.Response:
        await self.may_be_met.wait()
        return await super()._model_info(request)


async def test_a_trainer_in_a_plain_loop_pushes_to_a_server_that_the_scheduler_has_not_seen_yet() -> None:
    """It does not wait for that: it names its server, pauses, pushes and says so."""
    loop = asyncio.get_running_loop()

    def train(address: str, server: Hidden) -> int:
        with BlockingGenerationClient(address) as client:
            client.set_endpoints(STUDENT, [server.base_url])
            with client.paused(PauseMode.IN_PLACE):
                assert server.calls == []
                loop.call_soon_threadsafe(server.may_be_met.set)
                return client.weights_changed("1").weight_epoch

    async with served() as here, Hidden() as server:
        assert await asyncio.to_thread(train, here.address, server) == 1
        assert server.weight_version == "1"
        assert server.calls == [PAUSE, NAME, CONTINUE]


async def test_a_trainer_in_a_plain_loop_pushes_to_a_server_that_is_up() -> None:
    def train(address: str) -> int:
        with BlockingGenerationClient(address) as client, client.paused(PauseMode.IN_PLACE):
            return client.weights_changed("1").weight_epoch

    async with served() as here, here.client() as client, Controlled() as server:
        await client.set_endpoints(STUDENT, [server.base_url])
        await until_up(client, 1)
        assert await asyncio.to_thread(train, here.address) == 1
        assert server.weight_version == "1"
        assert server.calls == [PAUSE, NAME, CONTINUE]
