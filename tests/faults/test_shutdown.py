"""SIGTERM, SIGHUP and starts that fail, of a served process in the middle of everything at once."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import GenerationClient, PlacementClient, SchedulerClient
from py_scheduler.commands.token import new_token
from py_scheduler.domain.collecting import CollectReply
from py_scheduler.domain.generation import PauseMode
from py_scheduler.domain.requests import Delivery, EventKind
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import SchedulerError, UnauthenticatedError
from tests.support.models.controlled_sglang import ControlledSglang
from tests.support.runners.children import Pipe, is_there
from tests.support.servers.served_process import served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow]

DRAIN_SECONDS, GRACE_SECONDS, REST_SECONDS = 1.0, 0.5, 8.0
CONFIG = """
[server]
listen = "127.0.0.1:0"
drain_seconds = {drain}
{server}
[journal]
enabled = {journal}
state_dir = "state"
[scheduler]
stop_grace_seconds = {grace}
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1, 2, 3], cpu = 16, memory_gb = 16 }}
[[evaluator]]
evaluator_id = "deaf"
handler = "tests.support.agents.app_handlers:Deaf"
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
[[evaluator]]
evaluator_id = "sleepy"
handler = "tests.support.agents.app_handlers:Echo"
handler_args = {{ seconds = 3600 }}
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
[[evaluator]]
evaluator_id = "generating"
handler = "tests.support.agents.app_handlers:Generating"
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
[[evaluator]]
evaluator_id = "child"
handler = "tests.support.agents.child_handlers:OddAgent"
resource = {{ gpu = 1.0, concurrency = 1 }}
run_resource = {{ gpu = 1.0 }}
runner = "process"
"""

GATED_CHILD = """
[[evaluator]]
evaluator_id = "gated_child"
handler = "tests.support.agents.app_handlers:Gated"
handler_args = {{ gate = "{gate}" }}
resource = {{ gpu = 1.0, concurrency = 1 }}
run_resource = {{ gpu = 1.0 }}
runner = "process"
runner_settings = {{ max_runners = 2 }}
"""


def config_of(folder: Path, server: str = "", more: str = "", *, journal: bool = True) -> Path:
    file = folder / "server.toml"
    text = CONFIG.format(drain=DRAIN_SECONDS, grace=GRACE_SECONDS, server=server, journal=str(journal).lower())
    file.write_text(text + more)
    return file


def tasks(kind: str, count: int = 1, prompt: str = "") -> list[Task]:
    return [Task(config=TaskConfig(task_type=kind), prompt=prompt) for _ in range(count)]


async def one_is_held(generation: GenerationClient) -> bool:
    return (await generation.states())["student"].held == 1


@pytest.mark.parametrize("journal", [True, False])
async def test_a_server_with_everything_open_ends_in_time_and_tells_everybody(tmp_path: Path, *, journal: bool) -> None:
    """Streams, read and unread, calls that wait for results, for a lease and for an abort, leases, a blocked child,
    a handler that is deaf, and a generation behind a paused engine.
    """
    pipe = Pipe(tmp_path / "pipe")
    async with ControlledSglang() as sglang, AsyncExitStack() as stack:
        engine = f'[generation.student]\nkind = "sglang"\nbase_url = "{sglang.base_url}"\n'
        server = await stack.enter_async_context(served_process(config_of(tmp_path, "", engine, journal=journal)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        client = await stack.enter_async_context(SchedulerClient(server.address, reconnect_seconds=0.0))
        leases = await stack.enter_async_context(PlacementClient(server.address, reconnect_seconds=0.0))
        generation = await stack.enter_async_context(GenerationClient(server.address, reconnect_seconds=0.0))
        await generation.pause(PauseMode.RETRACT)
        await client.submit(tasks("generating"), 1)
        deaf = await client.submit(tasks("deaf"), 2)
        await client.submit(tasks("sleepy"), 3, delivery=Delivery.COLLECT)
        await client.submit(tasks("child", prompt=f"block {pipe}"), 4)
        child = await pipe.told()
        await eventually(lambda: one_is_held(generation), pause_seconds=0.01)
        await leases.acquire(Resource(gpu=1), 1)
        stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        read = [stub.WatchEvents(service.WatchEventsRequest()) for _ in range(20)]
        for stream in read:
            await stream.read()
        unread = [stub.WatchEvents(service.WatchEventsRequest()) for _ in range(20)]
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        waiting = await calls_that_wait(client, leases, deaf.submission_id)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(SchedulerError, match="shutting down"):
            await client.submit(tasks("sleepy"), 5)
        assert await server.process.wait() == 0
        assert time.monotonic() - begun < DRAIN_SECONDS + GRACE_SECONDS + REST_SECONDS
        for stream in read:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.create_task(to_the_end(stream))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "resume from the last cursor" in (caught.value.details() or "")
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        # Without a journal what is open ends, and who waits for results is given them.
        assert isinstance(ended[0], SchedulerError if journal else CollectReply), ended[0]
        assert isinstance(ended[1], SchedulerError), ended[1]
        for stream in unread:
            stream.cancel()
        await eventually(lambda: not is_there(child), pause_seconds=0.01)
        if journal:
            await check_after_a_restart(config_of(tmp_path, "", engine))


async def calls_that_wait(client: SchedulerClient, leases: PlacementClient, deaf: str) -> list[asyncio.Task[Any]]:
    """For results, for a lease, and for the end of a submission whose handler is deaf; the server has all three."""
    calls: list[asyncio.Task[Any]] = [
        asyncio.create_task(client.collect(3, timeout_seconds=600.0)),
        asyncio.create_task(leases.acquire(Resource(gpu=4), 1, wait=True, timeout_seconds=600.0)),
        asyncio.create_task(client.abort(submission_id=deaf, timeout_seconds=600.0)),
    ]
    # The abort has come when its event has, and with it what was sent before it on the same connection.
    async with aclosing(client.watch(submission_id=deaf, kinds=[EventKind.ABORT_REQUESTED])) as frames:
        while not (await anext(frames)).records:
            pass
    await leases.capacity(Resource(gpu=4))
    return calls


async def check_after_a_restart(config: Path) -> None:
    """What was open goes on, and what was aborted has ended."""
    async with served_process(config) as server, SchedulerClient(server.address) as client:
        assert [(await client.get_submission(batch_id)).open_tasks for batch_id in (1, 3, 4)] == [1, 1, 1]
        assert (await client.get_submission(2)).aborted_tasks == 1
        server.process.kill()


async def to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_a_hangup_with_a_broken_tokens_file_changes_nothing_and_one_with_a_good_one_counts(
    tmp_path: Path,
) -> None:
    secret, line = new_token("alice", ["default"])
    file = tmp_path / "tokens.toml"
    file.write_text(line)
    config = config_of(tmp_path, f'tokens_file = "{file}"')
    async with served_process(config) as server, SchedulerClient(server.address, token=secret) as client:
        for broken in ("alice = {", "", None):
            if broken is None:
                file.unlink()
            elif broken:
                file.write_text(broken)
            server.process.send_signal(signal.SIGHUP)
            await client.server_info()
        file.write_text(new_token("bob", ["default"])[1])
        server.process.send_signal(signal.SIGHUP)
        with pytest.raises(UnauthenticatedError):
            await client.server_info()
        server.process.terminate()
        assert await server.process.wait() == 0
    assert "the tokens stay as they were" in config.with_suffix(".log").read_text()


async def test_a_second_server_on_the_port_ends_at_once_and_the_first_does_not_notice(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with served_process(config_of(tmp_path)) as server, SchedulerClient(server.address) as client:
        await client.submit(tasks("sleepy"), 1)
        file = config_of(other)
        file.write_text(file.read_text().replace("127.0.0.1:0", server.address))
        begun = time.monotonic()
        with pytest.raises(AssertionError, match="the port is taken"):
            async with served_process(file):
                pass
        assert time.monotonic() - begun < 20
        assert (await client.get_submission(1)).open_tasks == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_who_collects_from_processes_gets_each_result_once_whichever_way_its_server_ends(
    tmp_path: Path, how: signal.Signals
) -> None:
    """A collect is under way through it all, and goes on at the next server. What finishes while this one drains is
    played once; what it was killed under is played again.
    """
    gate = tmp_path / "gate"
    config = config_of(tmp_path, more=GATED_CHILD.format(gate=gate))
    text = config.read_text().replace("127.0.0.1:0", f"unix:{tmp_path}/s.sock")
    config.write_text(text.replace(f"drain_seconds = {DRAIN_SECONDS}", "drain_seconds = 30.0"))
    async with SchedulerClient(f"unix:{tmp_path}/s.sock", reconnect_seconds=60.0) as client, asyncio.timeout(90):
        async with served_process(config) as server:
            submission = await client.submit(tasks("gated_child", 4, "x"), 1, delivery=Delivery.COLLECT)
            await eventually(lambda: all_run(client, 2), pause_seconds=0.01)
            children = [runner.pid for runner in await client.list_runners() if runner.pid]
            assert len(children) >= 2
            collecting = asyncio.create_task(client.collect(1, request_id="r", acknowledge=False))
            server.process.send_signal(how)
            if how is signal.SIGTERM:
                await eventually(lambda: is_said(config, "stopping: no new tasks"), pause_seconds=0.01)
            gate.touch()
            assert await server.process.wait() == (0 if how is signal.SIGTERM else -how)
            await eventually(lambda: not any(map(is_there, children)), pause_seconds=0.01)
        async with served_process(config):
            reply = await collecting
            assert sorted(result.task_id for result in reply.results) == sorted(submission.task_ids)
            attempts = sorted(sample.attempt_no for result in reply.results for sample in result.samples)
            assert attempts == ([1] * 4 if how is signal.SIGTERM else [1, 1, 2, 2])
            assert await client.collect(1, request_id="r") == reply, "the same set, until it is acknowledged"
            assert not await client.has_step(1)


async def all_run(client: SchedulerClient, count: int) -> bool:
    return (await client.get_submission(1)).running_attempts == count


def is_said(config: Path, words: str) -> bool:
    return words in config.with_suffix(".log").read_text()
