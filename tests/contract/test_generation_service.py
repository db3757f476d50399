"""Pauses and weights over real channels: a trainer changes the weights of a server that episodes generate with."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
import msgspec
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2_grpc
from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.api.server import GENERATION_SERVICE, ApiServer
from py_scheduler.client import BlockingGenerationClient, GenerationClient, SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, TEACHER, GenerationState, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import AgentResult, Reward, SampleDone
from py_scheduler.errors import (
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from tests.contract.conftest import whole_server
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of, versions
from tests.support.models.controlled_sglang import ControlledSglang
from tests.support.models.scripted_model import ScriptedModel
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.ports import GenerationBackend

BUDGET = 10
SAMPLES = 4
SETTINGS = SglangSettings(retry=RetrySettings(attempts=2, base_seconds=0.001, max_seconds=0.002))
CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.handlers:SolvingAgent"
on_weight_update = "resume"
mask_off_policy_prefix = true
[evaluator.resource]
concurrency = 1
"""


class TwoTurns(BaseAgent):
    """Generates, waits for a tool, and generates again."""

    def __init__(self) -> None:
        self.tool = asyncio.Event()

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0, 1, 2])
        await episode.generate()
        await self.tool.wait()
        episode.observe([13])
        await episode.generate()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Training(msgspec.Struct):
    """A scheduler on an SGLang server, and its address."""

    sglang: ControlledSglang
    agent: TwoTurns
    address: str

    def client(self) -> GenerationClient:
        return GenerationClient.connect(self.address, reconnect_seconds=0.0)


@asynccontextmanager
async def training(policy: OnWeightUpdate = OnWeightUpdate.RESTART) -> AsyncIterator[Training]:
    agent = TwoTurns()
    spec = spec_of(agent, default_sampling=SamplingParams(max_new_tokens=BUDGET), on_weight_update=policy)
    async with ControlledSglang() as sglang:
        student = SglangBackend(sglang.base_url, settings=SETTINGS)
        await student.start()
        engines: dict[str, GenerationBackend] = {STUDENT: student, TEACHER: ScriptedModel("yes")}
        try:
            async with running_engine(spec, generation_backends=engines) as harness:
                server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
                address = server.bind()
                await server.start()
                try:
                    yield Training(sglang, agent, address)
                finally:
                    await server.stop()
        finally:
            await student.close()


async def samples_of(address: str) -> list[SampleDone]:
    async with SchedulerClient.connect(address) as client:
        events = client.rollout([task_of(repeat_times=SAMPLES)], batch_id=0)
        return [event async for event in events if isinstance(event, SampleDone)]


@pytest.mark.parametrize(
    ("mode", "policy", "first_turn"),
    [
        (PauseMode.ABORT, OnWeightUpdate.RESTART, [("v1", 3, 13)]),
        (PauseMode.ABORT, OnWeightUpdate.RESUME, [("default", 3, 7), ("v1", 7, 13)]),
        (PauseMode.RETRACT, OnWeightUpdate.RESTART, [("default", 3, 7), ("v1", 7, 13)]),
        (PauseMode.IN_PLACE, OnWeightUpdate.RESTART, [("default", 3, 7), ("v1", 7, 13)]),
    ],
)
async def test_pause_update_continue_around_a_step(
    mode: PauseMode, policy: OnWeightUpdate, first_turn: list[tuple[str, int, int]]
) -> None:
    async with training(policy) as here, here.client() as client:
        rollout = asyncio.create_task(samples_of(here.address))
        await here.sglang.until(lambda: len(here.sglang.running) == SAMPLES)
        await here.sglang.step(4)
        state = await client.pause(mode)
        assert (state.pause_mode, state.weight_version, state.weight_epoch) == (mode, "default", 0)
        state = await client.update_weights("/weights/1", "v1")
        assert (state.pause_mode, state.weight_version, state.weight_epoch) == (mode, "v1", 1)
        await client.resume()
        await here.sglang.until(lambda: len(here.sglang.running) == SAMPLES)
        await here.sglang.step(BUDGET)
        await here.sglang.until(lambda: not here.sglang.running)
        # Now all are in their tools; what comes out of there is held.
        async with client.paused(PauseMode.RETRACT) as state:
            assert (state.running, state.held) == (0, 0)
            here.agent.tool.set()

            async def all_are_held() -> bool:
                return (await client.states())[STUDENT].held == SAMPLES

            await eventually(all_are_held)
            assert here.sglang.waiting == 0
            await client.update_weights("/weights/2", "v2")
        await here.sglang.until(lambda: len(here.sglang.running) == SAMPLES)
        await here.sglang.step(BUDGET)
        samples = await rollout
        assert (await client.states())[STUDENT] == GenerationState(
            role=STUDENT, pause_mode=None, weight_version="v2", weight_epoch=2, running=0, held=0
        )
    assert [versions(sample) for sample in samples] == [[*first_turn, ("v2", 14, 24)]] * SAMPLES
    for sample in samples:
        assert sample.trajectory.token_ids.tolist() == list(range(24))
        assert sample.trajectory.generated_tokens == 2 * BUDGET


async def test_every_call_may_be_repeated() -> None:
    async with training() as here, here.client() as client:
        for _ in range(2):
            await client.pause(PauseMode.RETRACT)
        updated = [await client.update_weights("/weights/1", "v1") for _ in range(2)]
        assert updated[0] == updated[1]
        assert updated[0].weight_epoch == 1
        resumed = [await client.resume() for _ in range(2)]
        assert [state.pause_mode for state in resumed] == [None, None]
        assert [name for name, _ in here.sglang.calls].count("update_weights_from_disk") == 1


async def test_the_blocking_client_changes_weights_in_a_plain_loop() -> None:
    def step(address: str) -> list[GenerationState]:
        with BlockingGenerationClient(address) as client:
            with client.paused(PauseMode.IN_PLACE) as state:
                states = [state, client.update_weights("/weights/1", "v1")]
            return [*states, client.states()[STUDENT]]

    async with training() as here:
        paused, updated, over = await asyncio.to_thread(step, here.address)
    assert (paused.pause_mode, paused.weight_epoch) == (PauseMode.IN_PLACE, 0)
    assert (updated.pause_mode, updated.weight_version) == (PauseMode.IN_PLACE, "v1")
    assert (over.pause_mode, over.weight_version, over.weight_epoch) == (None, "v1", 1)


async def test_refusals_come_back_as_they_were_raised() -> None:
    async with training() as here, here.client() as client:
        with pytest.raises(NotFoundError, match="'judge'"):
            await client.pause(role="judge")
        for call in (client.pause(role=TEACHER), client.resume(role=TEACHER)):
            with pytest.raises(FailedPreconditionError, match='kind = "sglang"'):
                await call
        with pytest.raises(FailedPreconditionError):
            await client.update_weights("/weights/1", "v1", role=TEACHER)
        with pytest.raises(EngineRejectedError, match="Failed to find any weights"):
            await client.update_weights("/nowhere", "v1")
        await client.pause(PauseMode.IN_PLACE)
        with pytest.raises(FailedPreconditionError, match="continue first"):
            async with client.paused(PauseMode.ABORT):
                raise AssertionError("a pause in another mode was taken")
        # Somebody else's pause is not ended by a block that was refused.
        assert (await client.states())[STUDENT].pause_mode is PauseMode.IN_PLACE


async def test_an_engine_that_is_gone_is_named_by_its_role_and_nothing_stays_held() -> None:
    async with training() as here, here.client() as client:
        await here.sglang._runner.cleanup()
        with pytest.raises(EngineUnavailableError) as caught:
            await client.pause()
        assert str(caught.value) == "the engine in role 'student' did not pause: the log says why"
        assert (await client.states())[STUDENT].pause_mode is None


async def test_the_door_names_every_fault_at_once() -> None:
    async with training() as here, grpc.aio.insecure_channel(here.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        for call, fields in (
            (stub.PauseGeneration(service.PauseGenerationRequest()), ("role", "mode")),
            (stub.PauseGeneration(service.PauseGenerationRequest(role="student", mode=9)), ("mode",)),  # type: ignore[arg-type]
            (stub.ContinueGeneration(service.ContinueGenerationRequest()), ("role",)),
            (stub.UpdateWeights(service.UpdateWeightsRequest()), ("role", "model_path", "weight_version")),
            (
                stub.UpdateWeights(
                    service.UpdateWeightsRequest(role="student", model_path="some/hub-model", weight_version="1")
                ),
                ("model_path",),
            ),
            (stub.GetGenerationState(service.GetGenerationStateRequest(role="\n")), ("role",)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            for field in fields:
                assert f"{field}: " in (caught.value.details() or "")
        assert here.sglang.calls == []
    with pytest.raises(InvalidArgumentError):
        async with training() as here, here.client() as client:
            await client.update_weights("weights/1", "v1")


async def test_a_whole_server_serves_it_also_without_engines() -> None:
    async with whole_server(CONFIG) as address, GenerationClient.connect(address) as client:
        assert await client.states() == {}
        with pytest.raises(NotFoundError, match="configured: none"):
            await client.pause()
        assert GENERATION_SERVICE == "rollout_scheduler.v1.GenerationService"


def test_what_the_client_takes_by_default() -> None:
    """A pause aborts unless told otherwise, as SGLang's does; weights may take minutes."""
    assert GenerationClient.pause.__defaults__ == (PauseMode.ABORT,)
    assert GenerationClient.update_weights.__kwdefaults__ == {"role": STUDENT, "timeout_seconds": 600.0}
