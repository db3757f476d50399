"""Who may do how much, of a served process: over restarts, and while the tokens change under open streams."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from py_scheduler.client import ClientTls, SchedulerClient
from py_scheduler.commands.token import new_token
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import NotFoundError, PermissionDeniedError, ResourceExhaustedError, UnauthenticatedError
from tests.support.servers.certificates import Certificates
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from py_scheduler.domain.requests import WatchedFrame
    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

CONFIG = """
[server]
listen = "{listen}"
{server}
[journal]
state_dir = "state"
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.app_handlers:Gated"
handler_args = {{ gate = "{folder}/gate" }}
resource = {{ concurrency = 8 }}
"""
QUOTAS = {"alice": "max_queued_tasks = 5", "bob": "max_queued_tasks = 50, max_running_samples = 2"}


class Guarded:
    """A configuration with tokens for the namespaces "a" and "b", each with quotas."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "scheduler.toml"
        self.tokens = folder / "tokens.toml"
        self.listen = f"unix:{folder}/s.sock"
        self.gate = folder / "gate"
        self.secrets: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        for name, namespace in (("alice", "a"), ("bob", "b")):
            self.secrets[name], line = new_token(name, [namespace])
            self.lines[name] = line.replace(" }", f", {QUOTAS[name]} }}")
        self.write()
        self.config.write_text(
            CONFIG.format(listen=self.listen, server=f'tokens_file = "{self.tokens}"', folder=folder)
        )

    def write(self) -> None:
        fresh = self.tokens.with_suffix(".new")
        fresh.write_text("\n".join(self.lines.values()) + "\n")
        fresh.rename(self.tokens)

    def client(self, name: str, namespace: str, **settings: Any) -> SchedulerClient:
        return SchedulerClient(self.listen, token=self.secrets[name], namespace=namespace, **settings)


def tasks(count: int) -> list[Task]:
    return [Task(config=TaskConfig(task_type="agent")) for _ in range(count)]


async def kill(served: ServedProcess) -> None:
    served.process.kill()
    await served.process.wait()


async def test_quotas_tokens_and_namespaces_hold_after_a_restart_for_what_was_there_before(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    async with guarded.client("alice", "a") as alice, guarded.client("bob", "b") as bob, asyncio.timeout(60):
        async with served_process(guarded.config) as served:
            theirs = await alice.submit(tasks(5), 1)
            mine = await bob.submit(tasks(10), 1)
            cursor = (await anext(bob.watch())).cursor
            await kill(served)
        async with served_process(guarded.config):
            with pytest.raises(ResourceExhaustedError, match=r"max_queued_tasks \(5\)") as refused:
                await alice.submit(tasks(1), 2)
            assert refused.value.retry_after_seconds
            async with guarded.client("bob", "a") as stranger:
                with pytest.raises(PermissionDeniedError):
                    await stranger.get_submission(submission_id=theirs.submission_id)
            with pytest.raises(NotFoundError):
                await bob.get_submission(submission_id=theirs.submission_id)
            assert (await alice.get_submission(1)).open_tasks == 5, "the same batch_id in two namespaces"
            view = await bob.get_submission(1)
            assert (view.running_attempts, view.open_tasks) == (2, 10), "max_running_samples"
            assert "max_running_samples" in view.waiting[0].reason
            guarded.gate.touch()
            done: list[TaskDone] = []
            async with aclosing(bob.watch(cursor=cursor)) as frames:
                while len(done) < 10:
                    events = [record.event for record in (await anext(frames)).records]
                    assert {event.submission_id for event in events if isinstance(event, TaskDone)} <= {
                        mine.submission_id
                    }
                    done += [event for event in events if isinstance(event, TaskDone)]
            assert {event.state for event in done} == {TaskState.SUCCEEDED}


async def read_out(frames: AsyncIterator[WatchedFrame]) -> None:
    """Raises what it ends with."""
    async for _ in frames:
        pass


@pytest.mark.parametrize("is_signalled", [True, False])
async def test_a_token_that_is_taken_back_ends_its_open_streams_and_no_other_s(
    tmp_path: Path, *, is_signalled: bool
) -> None:
    """Although nothing is to be sent on it: by the signal, or with the next call of anybody."""
    guarded = Guarded(tmp_path)
    async with (
        served_process(guarded.config) as served,
        guarded.client("alice", "a", reconnect_seconds=30.0) as alice,
        guarded.client("bob", "b") as bob,
        asyncio.timeout(60),
    ):
        await alice.submit(tasks(1), 1)
        await bob.submit(tasks(1), 1)
        ended, going_on = alice.watch(), bob.watch()
        await anext(ended)
        seen = (await anext(going_on)).through_sequence
        del guarded.lines["alice"]
        guarded.write()
        if is_signalled:
            served.process.send_signal(signal.SIGHUP)
        else:
            await bob.server_info()
        with pytest.raises(UnauthenticatedError, match="taken back"):
            await read_out(ended)
        with pytest.raises(UnauthenticatedError):
            await alice.submit(tasks(1), 2)
        guarded.gate.touch()
        frame = await anext(going_on)
        assert frame.after_sequence >= seen, "bob's goes on"
        await going_on.aclose()
        # What alice has handed in is not thrown away: another token of her namespace finds it.
        guarded.secrets["alice"], guarded.lines["alice"] = new_token("alice", ["a"])
        guarded.write()
        async with guarded.client("alice", "a") as again:
            assert (await again.get_submission(1)).scheduled_tasks == 1


async def unsent() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """Requests that a call goes without."""
    await asyncio.Event().wait()
    yield reflection_pb2.ServerReflectionRequest()


@pytest.mark.parametrize(("is_asked_for", "is_there"), [(None, False), (True, True)])
async def test_off_loopback_nobody_is_told_which_calls_there_are_unless_it_was_asked_for(
    tmp_path: Path, is_asked_for: bool | None, is_there: bool
) -> None:
    """Not even who has a token."""
    certificates = Certificates(tmp_path)
    secret, line = new_token("alice", ["default"])
    (tmp_path / "tokens.toml").write_text(line)
    server = (
        f'tokens_file = "{tmp_path}/tokens.toml"\n'
        f'tls = {{ certificate = "{certificates.certificate}", key = "{certificates.key}" }}\n'
    )
    if is_asked_for:
        server += "reflection = true\n"
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG.format(listen="0.0.0.0:0", server=server, folder=tmp_path))
    async with served_process(config) as served:
        address = f"127.0.0.1:{served.address.rpartition(':')[2]}"
        tls = ClientTls(ca=str(certificates.ca))
        async with SchedulerClient(address, token=secret, tls=tls) as client:
            await client.server_info()
        async with grpc.aio.secure_channel(address, tls.credentials()) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
            for metadata, code in (
                ((), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {secret}"),), None if is_there else grpc.StatusCode.UNIMPLEMENTED),
            ):
                # What is sent on a call that has been refused meanwhile fails here, as INTERNAL.
                call = stub.ServerReflectionInfo(iter(asked) if code is None else unsent(), metadata=metadata)
                if code is None:
                    assert (await call.read()).list_services_response.service
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is code


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_off_loopback_without_tls_and_tokens_nothing_is_served(tmp_path: Path, listen: str) -> None:
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG.format(listen=listen, server="", folder=tmp_path))
    with pytest.raises(AssertionError, match=r"server\.listen.*loopback"):
        async with served_process(config):
            pass
