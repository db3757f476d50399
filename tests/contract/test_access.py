"""Who gets in: tokens, namespaces and what each call needs, over real channels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, closing
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
from py_scheduler.api.security.access import NEEDS, Need, log_refusal
from py_scheduler.api.security.bearer_tokens import Caller
from py_scheduler.api.server import HEALTH_SERVICE
from py_scheduler.api.servicers.scheduler import seen_by
from py_scheduler.client import (
    BlockingGenerationClient,
    BlockingPlacementClient,
    BlockingSchedulerClient,
    GenerationClient,
    PlacementClient,
    SchedulerClient,
)
from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.domain.leases import LeaseState, LeaseView
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.training.steps import StepKind, StepRequest
from py_scheduler.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    SchedulerError,
    UnauthenticatedError,
)
from tests.support.servers.grpc_calls import WATCH, failure_of, tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

from tests.support.servers.guarded import Guarded


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


LEASE = LeaseView(lease_id="lease", state=LeaseState.GRANTED, fencing_token=1)
Client = Any
"""Any client, asyncio or blocking: their methods have the same names."""
EVERY_CALL: dict[type, dict[str, Callable[[Client], Any]]] = {
    SchedulerClient: {
        "submit": lambda client: client.submit(tasks(1), 7),
        "schedule": lambda client: client.schedule(tasks(1), 8),
        "rollout": lambda client: client.rollout(tasks(1), batch_id=9),
        "rollout_batches": lambda client: client.rollout_batches(tasks(1), batch_id=10),
        "get_submission": lambda client: client.get_submission(7),
        "has_step": lambda client: client.has_step(7),
        "explain_task": lambda client: client.explain_task("s-7-0"),
        "abort": lambda client: client.abort(7),
        "abort_batch": lambda client: client.abort_batch(7),
        "resume_training": lambda client: client.resume_training(),
        "watch": lambda client: client.watch(),
        "ack": lambda client: client.ack(b"no cursor"),
        "server_info": lambda client: client.server_info(),
        "collect": lambda client: client.collect(7),
        "drain": lambda client: client.drain(7),
        "ack_results": lambda client: client.ack_results("r"),
        "discard": lambda client: client.discard(7),
        "get_payload_results": lambda client: client.get_payload_results(7),
        "get_statuses": lambda client: client.get_statuses(7),
        "drain_batch_payload_results": lambda client: client.drain_batch_payload_results(7),
        "discard_completed_results": lambda client: client.discard_completed_results(7),
        "list_runners": lambda client: client.list_runners(),
        "get_key_state": lambda client: client.get_key_state("key"),
        "get_runner_state": lambda client: client.get_runner_state("runner"),
        "get_all_state": lambda client: client.get_all_state(),
        "print_all_state": lambda client: client.print_all_state(),
        "execute_rollout": lambda client: client.execute_rollout(0),
        "execute_eval": lambda client: client.execute_eval(0),
        "step_frames": lambda client: client.step_frames(StepRequest(kind=StepKind.EVAL, rollout_id=0, request_id="r")),
        "read_samples": lambda client: client.read_samples(0),
    },
    PlacementClient: {
        "acquire": lambda client: client.acquire(Resource(gpu=1.0)),
        "renew": lambda client: client.renew(LEASE),
        "release": lambda client: client.release(LEASE),
        "capacity": lambda client: client.capacity(Resource(gpu=1.0)),
        "explain": lambda client: client.explain(Resource(gpu=1.0)),
        "lease": lambda client: client.lease(Resource(gpu=1.0)),
    },
    GenerationClient: {
        "pause": lambda client: client.pause(),
        "resume": lambda client: client.resume(),
        "update_weights": lambda client: client.update_weights("/weights", "1"),
        "weights_changed": lambda client: client.weights_changed("1"),
        "set_endpoints": lambda client: client.set_endpoints("student", ["http://a:1"]),
        "endpoints": lambda client: client.endpoints(),
        "states": lambda client: client.states(),
        "paused": lambda client: client.paused(),
    },
}
BLOCKING: dict[type, Any] = {
    SchedulerClient: BlockingSchedulerClient,
    PlacementClient: BlockingPlacementClient,
    GenerationClient: BlockingGenerationClient,
}
NO_CALLS = {"open", "close", "connect", "asyncio_class"}


@pytest.mark.parametrize("kind", EVERY_CALL)
def test_every_public_method_of_a_client_is_called_below(kind: type) -> None:
    for one in (kind, BLOCKING[kind]):
        methods = {name for name in dir(one) if not name.startswith("_") and callable(getattr(one, name))}
        assert methods - NO_CALLS == EVERY_CALL[kind].keys(), one


async def first_of(said: Any) -> None:
    """What a method of an asyncio client answers: all of it, or of a stream the first."""
    if isinstance(said, AbstractAsyncContextManager):
        async with said:
            return
    if isinstance(said, AsyncGenerator):
        async with aclosing(said):
            await anext(said, None)
    else:
        await said


def first_of_blocking(call: Callable[[Client], Any], client: Client) -> None:
    with client:
        said = call(client)
        if isinstance(said, AbstractContextManager):
            with said:
                return
        if isinstance(said, Generator):
            with closing(said):
                next(said, None)


@pytest.mark.parametrize("is_blocking", [False, True], ids=["asyncio", "blocking"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, calls in EVERY_CALL.items() for name in calls])
async def test_every_call_of_a_client_carries_its_token(
    guarded: Guarded, kind: type, name: str, is_blocking: bool
) -> None:
    guarded.served.engine._finish_at_once = True
    call = EVERY_CALL[kind][name]

    async def answer(token: str) -> None:
        made = BLOCKING[kind] if is_blocking else kind
        client = made(guarded.served.address, reconnect_seconds=0.0, token=token)
        if is_blocking:
            await asyncio.to_thread(first_of_blocking, call, client)
            return
        async with client:
            await first_of(call(client))

    async with asyncio.timeout(20):
        with pytest.raises(UnauthenticatedError):
            await answer("")
        try:
            await answer(guarded.secrets["root"])
        except (UnauthenticatedError, PermissionDeniedError):
            raise
        except SchedulerError:
            pass  # What it asks for is not there, which nobody without a token is told.


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


def test_a_refusal_is_one_line_whatever_is_in_it(caplog: pytest.LogCaptureFixture) -> None:
    odd = "a\nrefused: caller=root\r\x1b[31m\u2028\u202e" + "x" * 1_000
    log_refusal(None, "ipv4:127.0.0.1:1", f"/{odd}", "UNAUTHENTICATED", odd)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable()
    assert len(line) < 700


def test_a_client_sends_no_token_for_everybody_to_read() -> None:
    with pytest.raises(InvalidArgumentError, match="everybody to read"):
        SchedulerClient("203.0.113.7:50051", token="pyst_x")
