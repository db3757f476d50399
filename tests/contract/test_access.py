"""Who gets in: tokens, namespaces and what each call needs, over real channels."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler._generated.rollout_scheduler.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    placement_service_pb2,
    rollout_service_pb2,
    scheduler_service_pb2,
    scheduler_service_pb2_grpc,
)
from py_scheduler.api.access import NEEDS, Need
from py_scheduler.api.bearer_tokens import Caller
from py_scheduler.api.scheduler_servicer import seen_by
from py_scheduler.api.server import HEALTH_SERVICE
from py_scheduler.client import SchedulerClient
from py_scheduler.commands.token import new_token
from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.errors import ConfigError, InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from tests.contract.conftest import serve
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import WATCH, failure_of, tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.contract.conftest import Served


SHA256 = f'sha256 = "{"0" * 64}"'


class Guarded:
    """A server with tokens for namespaces "a" and "b", one for all, and the file that they are in."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.secrets: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        for name, namespaces in (("alice", ["a"]), ("bob", ["b"]), ("root", ["*"])):
            self.secrets[name], self.lines[name] = new_token(name, namespaces, controls_engines=name == "root")
        self.write()
        self.served: Served

    def write(self) -> None:
        """As an operator's tool would: whole, under the name at once."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text("\n".join(self.lines.values()) + "\n")
        fresh.rename(self.file)

    def client(self, name: str, **settings: Any) -> SchedulerClient:
        settings = {"namespace": "a", "reconnect_seconds": 0.0, **settings}
        return SchedulerClient(self.served.address, token=self.secrets.get(name, ""), **settings)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    guarded = Guarded(tmp_path / "tokens.toml")
    guarded.served = await serve(FakeEngine(), tokens_file=str(guarded.file))
    yield guarded
    await guarded.served.server.stop()


def test_every_method_of_the_server_says_what_it_needs() -> None:
    services = [
        module.DESCRIPTOR.services_by_name
        for module in (scheduler_service_pb2, placement_service_pb2, rollout_service_pb2, generation_service_pb2)
    ]
    own = {f"/{s.full_name}/{m.name}": m for found in services for s in found.values() for m in s.methods}
    assert own.keys() <= NEEDS.keys()
    for name, method in own.items():
        fields = method.input_type.fields_by_name
        names_one = "namespace" in fields or (
            "filter" in fields and "namespace" in fields["filter"].message_type.fields_by_name
        )
        assert (NEEDS[name] is Need.NAMESPACE) == names_one, f"{name} is not asked for the namespace that it names"
    free = {name for name, need in NEEDS.items() if need is Need.NOTHING}
    assert free == {f"/{HEALTH_SERVICE}/Check", f"/{HEALTH_SERVICE}/Watch"}


async def test_a_token_lets_into_its_namespace(guarded: Guarded) -> None:
    async with guarded.client("alice") as client:
        submission = await client.submit(tasks(1), 7)
        async for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
            assert frame.records
            break
        await client.server_info()


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic YTpi", "bearer pyst_" + "x" * 43])
async def test_no_or_a_wrong_token_is_refused_before_the_message_is_read(guarded: Guarded, header: str | None) -> None:
    """What is sent is no message at all: whoever parsed it would say INVALID_ARGUMENT."""
    metadata = (("authorization", header),) if header is not None else None
    async with grpc.aio.insecure_channel(guarded.served.address) as channel:
        for method in ("/rollout_scheduler.v1.SchedulerService/SubmitTasks", "/no.such.Service/Method"):
            call: Any = channel.unary_unary(method)
            code, _ = await failure_of(call(b"\xff" * 1_000_000, metadata=metadata))
            assert code is grpc.StatusCode.UNAUTHENTICATED
        watch: Any = channel.unary_stream(WATCH)
        code, _ = await failure_of(watch(b"\xff", metadata=metadata).read())
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert not guarded.served.engine.submits


async def test_the_client_is_told_how_to_get_in(guarded: Guarded) -> None:
    async with guarded.client("nobody") as client:
        with pytest.raises(UnauthenticatedError, match="token="):
            await client.server_info()


CALLS: dict[str, Callable[[SchedulerClient], Awaitable[Any]]] = {
    "submit": lambda client: client.submit(tasks(1), 7),
    "get": lambda client: client.get_submission(7),
    "abort": lambda client: client.abort(7),
    "explain": lambda client: client.explain_task("s-7-0"),
    "watch": lambda client: anext(client.watch()),
}


@pytest.mark.parametrize("call", CALLS)
async def test_another_namespace_is_named_in_the_refusal(guarded: Guarded, call: str) -> None:
    async with guarded.client("alice", namespace="b") as client:
        with pytest.raises(PermissionDeniedError, match="'alice' is not for namespace 'b'"):
            await CALLS[call](client)
    assert not guarded.served.engine.submits
    assert not guarded.served.engine.aborts


async def test_the_default_namespace_is_one_like_any_other(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.served.address) as channel:
        stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        metadata = (("authorization", f"Bearer {guarded.secrets['alice']}"),)
        request = scheduler_service_pb2.GetSubmissionRequest(submission_id="s")
        code, status = await failure_of(stub.GetSubmission(request, metadata=metadata))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "'default'" in status.message


async def test_whole_steps_run_in_the_default_namespace_and_need_it(guarded: Guarded) -> None:
    async with guarded.client("alice") as client:
        with pytest.raises(PermissionDeniedError, match="namespace 'default'"):
            await anext(client.execute_rollout(0))
        with pytest.raises(PermissionDeniedError, match="namespace 'default'"):
            await anext(client.read_samples(0))


async def test_weights_are_changed_only_with_a_right_of_its_own(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.served.address) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        metadata = (("authorization", f"Bearer {guarded.secrets['alice']}"),)
        request = generation_service_pb2.UpdateWeightsRequest(role="student", model_path="/w", weight_version="1")
        code, status = await failure_of(stub.UpdateWeights(request, metadata=metadata))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "controls_engines = true" in status.message


def test_why_answers_do_not_tell_the_batch_ids_of_others() -> None:
    ahead = tuple(
        EntryAhead(tokens=1, waiting_seconds=1.0, bypassed=0, namespace=name, batch_id=f"{name}/secret")
        for name in "ab"
    )
    wait = TaskWait(
        evaluator_id="agent",
        tasks=1,
        attempts=1,
        reason="",
        waiting_seconds=0.0,
        bypassed=0,
        max_bypass=1,
        wanted_tokens=1,
        free_tokens=0,
        max_tokens=1,
        nodes=(),
        nodes_in_all=0,
        ahead=ahead,
        ahead_in_all=2,
    )
    told = TaskExplanation(task_id="t", submission_id="s", batch_id=1, phase=TaskPhase.QUEUED, waits=(wait,))
    seen = seen_by(Caller("alice", frozenset({"a"})), told).waits[0].ahead
    assert [(entry.namespace, entry.batch_id) for entry in seen] == [("a", "a/secret"), ("", None)]


async def test_health_needs_no_token(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.served.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_token_that_is_taken_back_ends_its_calls_and_its_open_streams(guarded: Guarded) -> None:
    engine = guarded.served.engine
    async with guarded.client("alice") as alice, guarded.client("root") as root, asyncio.timeout(20):
        watch = alice.watch()
        await anext(watch)
        del guarded.lines["alice"]
        guarded.write()
        await root.submit(tasks(1), 7)
        with pytest.raises(UnauthenticatedError, match="taken back"):
            await anext(watch)
        with pytest.raises(UnauthenticatedError):
            await alice.server_info()
        await engine.until(lambda: engine.open_watches == 0)


async def test_a_token_that_is_added_works_without_a_restart(guarded: Guarded) -> None:
    guarded.secrets["carol"], guarded.lines["carol"] = new_token("carol", ["c"])
    async with guarded.client("carol", namespace="c") as client:
        with pytest.raises(UnauthenticatedError):
            await client.server_info()
        guarded.write()
        await client.submit(tasks(1), 7)


async def test_a_file_that_is_broken_while_it_is_edited_changes_nothing(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded.client("alice") as client:
        guarded.file.write_text("alice = {")
        await client.submit(tasks(1), 7)
        assert "the tokens stay as they were" in caplog.text
        guarded.file.unlink()
        await client.submit(tasks(1), 8)


async def test_the_audit_log_says_who_was_refused_what_and_never_the_token(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "py_scheduler.audit"):
        async with guarded.client("alice", namespace="b") as client:
            with pytest.raises(PermissionDeniedError):
                await client.submit(tasks(1), 7)
        async with guarded.client("nobody") as client:
            with pytest.raises(UnauthenticatedError):
                await client.server_info()
        async with guarded.client("alice") as client:
            await client.submit(tasks(1), 7)
    lines = [record.getMessage() for record in caplog.records if record.name == "py_scheduler.audit"]
    assert len(lines) == 2, "a call that is let through is none of its matter"
    assert "caller=alice peer=ipv4:127.0.0.1:" in lines[0]
    assert "/SubmitTasks' code=PERMISSION_DENIED" in lines[0]
    assert "caller=- " in lines[1]
    assert "code=UNAUTHENTICATED" in lines[1]
    assert not any(secret in caplog.text for secret in guarded.secrets.values())


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('a = { sha256 = "00", namespaces = ["a"] }', "sha256.*64 hexadecimal"),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = [] }}', "namespaces.*is empty"),
        (
            f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"] }}\nb = {{ sha256 = "{"0" * 64}", namespaces = ["a"] }}',
            "'a' too",
        ),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"], max_queued_tasks = 0 }}', "max_queued_tasks"),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"], zzz = 1 }}', "zzz.*unknown key"),
        ("a = 1", "Expected|must be"),
        ("a =", "not TOML"),
    ],
)
async def test_a_faulty_file_is_an_error_at_the_start(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "tokens.toml").write_text(line)
    with pytest.raises(ConfigError, match=fault):
        await serve(FakeEngine(), tokens_file=str(tmp_path / "tokens.toml"))


async def test_a_file_that_anybody_may_write_is_refused(guarded: Guarded) -> None:
    guarded.file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        await serve(FakeEngine(), tokens_file=str(guarded.file))


def test_a_client_sends_no_token_for_everybody_to_read() -> None:
    with pytest.raises(InvalidArgumentError, match="everybody to read"):
        SchedulerClient("203.0.113.7:50051", token="pyst_x")
