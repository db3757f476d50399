"""Random and broken messages to every call of every service of a real server, over a real channel.

FUZZ_CALLS and FUZZ_SEED: how many, and which. What fails says the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from py_scheduler._generated.rollout_scheduler.v1 import (
    generation_service_pb2,
    placement_service_pb2,
    resource_pb2,
    scheduler_service_pb2,
    task_pb2,
)
from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import Task, TaskConfig
from tests.faults.messages import MessageMaker, methods, path_of, services
from tests.support.models.scripted_sglang import ScriptedSglang
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from pathlib import Path

    from google.protobuf.descriptor import MethodDescriptor

    from py_scheduler.client import Submission
    from py_scheduler.domain.leases import LeaseView

CALLS = int(os.environ.get("FUZZ_CALLS", "2500"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
AT_ONCE = 32
STREAM_SECONDS = 0.3
CONFIG = """
[server]
listen = "127.0.0.1:0"
max_message_bytes = 1048576
drain_seconds = 0.0
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1], cpu = 16, memory_gb = 16 }}
[generation.student]
kind = "sglang"
base_url = "{base_url}"
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
resource = {{ gpu = 1.0, concurrency = 8 }}
run_resource = {{ gpu = 0.125 }}
[rollout]
groups_per_step = 2
artifact_dir = "artifacts"
[[dataset]]
name = "train"
path = "rows.jsonl"
task_type = "echo"
[[eval_dataset]]
name = "test"
path = "rows.jsonl"
task_type = "echo"
"""
LEAKS = re.compile(
    r"Traceback|File \"|\.py\b|py_scheduler\.|/site-packages|/home/|/root/|/tmp/|0x[0-9a-f]{6,}"
    r"|\b[A-Z][A-Za-z]*(Error|Exception)\b|<[a-z_.]+ object"
)
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


async def answered(channel: Any, method: MethodDescriptor, raw: bytes) -> grpc.aio.AioRpcError | None:
    """How one call ended; None for well, or for a stream that was broken off because it goes on."""
    call: Any
    if method.client_streaming:
        call = channel.stream_stream(path_of(method))([raw])
    elif method.server_streaming:
        call = channel.unary_stream(path_of(method))(raw)
    else:
        call = channel.unary_unary(path_of(method))(raw, timeout=5.0)
    try:
        if not method.server_streaming:
            await call
            return None
        async with asyncio.timeout(STREAM_SECONDS):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error
    except TimeoutError:
        call.cancel()
    return None


def leaks(error: grpc.aio.AioRpcError, sent: bytes) -> list[str]:
    """What it says of the server's inside; what the client itself had sent may come back."""
    said = [error.details() or ""]
    for _, value in error.trailing_metadata() or ():
        said.append(value.decode(errors="replace") if isinstance(value, bytes) else str(value))
    return [found[0] for text in said for found in LEAKS.finditer(text) if found[0].encode() not in sent]


def good_requests(submission: Submission, lease: LeaseView) -> dict[str, Any]:
    """Of calls that refuse most of what comes by chance: what they take, to be varied."""
    task = task_pb2.Task(config=task_pb2.TaskConfig(task_type="echo", repeat_times=2), prompt="0")
    batch_id = task_pb2.BatchId(step=7)
    demand = resource_pb2.Resource(gpu=0.125, cpu=1.0, memory_gb=1.0)
    event_filter = scheduler_service_pb2.EventFilter(submission_id=submission.submission_id)
    cursor = submission.cursor
    return {
        "SubmitTasks": scheduler_service_pb2.SubmitTasksRequest(request_id="r", batch_id=batch_id, tasks=[task, task]),
        "WatchEvents": scheduler_service_pb2.WatchEventsRequest(filter=event_filter, cursor=cursor),
        "AckEvents": scheduler_service_pb2.AckEventsRequest(filter=event_filter, cursor=cursor),
        "GetSubmission": scheduler_service_pb2.GetSubmissionRequest(batch_id=batch_id),
        "AbortSubmission": scheduler_service_pb2.AbortSubmissionRequest(batch_id=batch_id, reason="fuzz", wait=True),
        "ExplainTask": scheduler_service_pb2.ExplainTaskRequest(task_id=submission.task_ids[0]),
        "AcquireLease": placement_service_pb2.AcquireLeaseRequest(
            request_id="r", batch_id=batch_id, per_sample=demand, max_tokens=2, ttl_seconds=1.0
        ),
        "RenewLease": placement_service_pb2.RenewLeaseRequest(
            lease_id=lease.lease_id, fencing_token=lease.fencing_token
        ),
        "ReleaseLease": placement_service_pb2.ReleaseLeaseRequest(
            request_id="r", lease_id=lease.lease_id, fencing_token=lease.fencing_token, token_nos=[0]
        ),
        "ExplainPlacement": placement_service_pb2.ExplainPlacementRequest(per_sample=demand, max_tokens=3),
        "PauseGeneration": generation_service_pb2.PauseGenerationRequest(role="student"),
        "ContinueGeneration": generation_service_pb2.ContinueGenerationRequest(role="student"),
        "UpdateWeights": generation_service_pb2.UpdateWeightsRequest(
            role="student", model_path="/models/next", weight_version="next"
        ),
        "ReportWeights": generation_service_pb2.ReportWeightsRequest(role="student", weight_version="pushed"),
        "SetEndpoints": generation_service_pb2.SetEndpointsRequest(role="student", urls=["http://127.0.0.1:9"]),
    }


def test_every_service_s_calls_are_known() -> None:
    names = {method.full_name for method in methods()}
    assert "rollout_scheduler.v1.SchedulerService.SubmitTasks" in names
    assert "grpc.health.v1.Health.Check" in names
    assert len(names) > 20


@pytest.mark.slow
@pytest.mark.timeout(max(120, CALLS // 10))
async def test_no_message_gets_more_than_a_status_and_the_server_stays_well(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = tmp_path / "scheduler.toml"
    chance = random.Random(SEED)
    codes: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    async with ScriptedSglang() as sglang:
        config.write_text(CONFIG.format(base_url=sglang.base_url))
        async with served_process(config) as served, grpc.aio.insecure_channel(served.address) as channel:
            database = await asyncio.to_thread(served_names, served.address)
            assert {service.full_name for service in services()} >= database, "a service that the fuzzing does not know"
            async with SchedulerClient(served.address) as client, PlacementClient(served.address) as placement:
                submission = await client.submit([echo("0")], 7)
                lease = await placement.acquire(Resource(gpu=0.125), ttl_seconds=600.0)
            known = [submission.submission_id, *submission.task_ids, lease.lease_id]
            maker = MessageMaker(chance, known)
            good = good_requests(submission, lease)

            async def call(method: MethodDescriptor) -> None:
                likely = good.get(method.name)
                if likely is not None and chance.random() < 0.6:
                    made = maker.varied(likely)
                    if hasattr(made, "request_id") and chance.random() < 0.8:
                        made.request_id = f"fuzz-{chance.getrandbits(64)}"
                else:
                    made = maker.message(method.input_type)
                raw = made.SerializeToString()
                if chance.random() < 0.3:
                    raw = maker.broken(raw)
                error = await answered(channel, method, raw)
                code = grpc.StatusCode.OK if error is None else error.code()
                codes[method.name, code.name] += 1
                if error is not None and (code in NEVER or leaks(error, raw)):
                    faults.append(f"{method.name}({raw.hex()}): {code.name} {error.details()} {leaks(error, raw)}")

            every = methods()
            for start in range(0, CALLS, AT_ONCE):
                await asyncio.gather(*[call(every[(start + n) % len(every)]) for n in range(AT_ONCE)])
                assert served.process.returncode is None, f"FUZZ_SEED={SEED}: the server died, call {start}"
            await stays_well(served.address)
    print(*[f"{count:6d} {name} {code}" for (name, code), count in sorted(codes.items())], sep="\n")
    assert not faults, f"FUZZ_SEED={SEED}: {len(faults)} faults\n" + "\n".join(fault[:700] for fault in faults[:10])
    log = config.with_suffix(".log").read_text()
    assert "failed unexpectedly" not in log, log[log.index("failed unexpectedly") - 200 :][:3_000]
    assert {name for name, _ in codes} == {method.name for method in every}


def served_names(address: str) -> set[str]:
    """What the server itself says it serves; the database of reflection blocks."""
    with grpc.insecure_channel(address) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


def echo(prompt: str) -> Task:
    return Task(config=TaskConfig(task_type="echo"), prompt=prompt)


async def stays_well(address: str) -> None:
    """Health says so, and a task of a namespace of its own is rolled out."""
    async with (
        grpc.aio.insecure_channel(address) as channel,
        SchedulerClient(address, namespace="afterwards") as client,
        asyncio.timeout(60),
    ):
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        done = [event async for event in client.rollout([echo("well")], batch_id=1) if isinstance(event, TaskDone)]
        assert len(done) == 1
