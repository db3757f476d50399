"""What a training loop says of its step, and what it hears back: over a real channel, on the real engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc, task_pb2
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, SampleDone, TaskState
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from tests.contract.conftest import whole_server
from tests.support.servers.grpc_calls import failure_of, violations_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.client import RolloutEvent

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "step"
handler = "tests.support.agents.app_handlers:StepTeller"
resource = { concurrency = 8 }
"""
STEP = IterationContext(rollout_id=4, beta=0.25, t_max=11)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with whole_server(CONFIG) as bound:
        yield bound


def tasks(prompt: str = "", **config: object) -> list[Task]:
    return [Task(config=TaskConfig(task_type="step", **config), prompt=prompt)]  # type: ignore[arg-type]


def told(events: list[RolloutEvent]) -> tuple[list[SampleDone], TaskDone]:
    samples = [event for event in events if isinstance(event, SampleDone)]
    (done,) = (event for event in events if isinstance(event, TaskDone))
    return sorted(samples, key=lambda sample: sample.sample_no), done


async def test_an_iteration_reaches_every_episode_and_group_rewards_come_back(client: SchedulerClient) -> None:
    before = time.time()
    rollout = client.rollout(tasks(repeat_times=3, is_eval=True), batch_id="4/gsm8k", iteration=STEP)
    samples, done = told([event async for event in rollout])
    for sample in samples:
        assert sample.reward.details == {"rollout_id": 4, "beta": 0.25, "t_max": 11, "is_eval": True}
        assert before - 1 < sample.started_unix_seconds < time.time() + 1
    assert [(reward.score, reward.details) for reward in done.rewards] == [
        (0.0, {"of": 3}),
        (1.0, {"of": 3}),
        (2.0, {"of": 3}),
    ]


async def test_nothing_said_of_the_step(client: SchedulerClient) -> None:
    samples, done = told([event async for event in client.rollout(tasks(), batch_id=1)])
    assert samples[0].reward.details == {"is_eval": False}
    assert done.rewards[0].score == 0.0


async def test_the_blocking_client_says_the_same(address: str) -> None:
    def trainer() -> tuple[list[SampleDone], TaskDone]:
        with BlockingSchedulerClient(address) as client:
            client.submit(tasks(), 8, request_id="r", iteration=STEP)
            with pytest.raises(AlreadyExistsError):
                client.submit(tasks(), 8, request_id="r")
            return told(list(client.rollout(tasks(), batch_id=7, iteration=STEP)))

    samples, _ = await asyncio.to_thread(trainer)
    assert samples[0].reward.details["rollout_id"] == 4


async def test_refills_and_a_group_that_cannot_be_scored_over_the_wire(client: SchedulerClient) -> None:
    refilled = tasks("unlucky", repeat_times=2, retry=RetryPolicy(max_infra_refills=1))
    samples, done = told([event async for event in client.rollout(refilled, batch_id=1)])
    assert [(sample.sample_no, sample.attempt_no, sample.outcome) for sample in samples] == [
        (0, 2, Outcome.SOLVED),
        (1, 2, Outcome.SOLVED),
    ]
    assert done.state is TaskState.SUCCEEDED
    samples, done = told([event async for event in client.rollout(tasks("unscorable"), batch_id=2)])
    assert (done.state, done.rewards) == (TaskState.FAILED, ())
    assert "ValueError: no judge" in done.reason
    assert len(samples) == 1


@pytest.mark.parametrize(
    ("iteration", "field"),
    [
        (task_pb2.IterationContext(rollout_id=-3), "iteration.rollout_id"),
        (task_pb2.IterationContext(beta=1.5), "iteration.beta"),
        (task_pb2.IterationContext(beta=float("nan")), "iteration.beta"),
        (task_pb2.IterationContext(t_max=-1), "iteration.t_max"),
    ],
)
async def test_a_faulty_iteration_is_named(address: str, iteration: task_pb2.IterationContext, field: str) -> None:
    request = service.SubmitTasksRequest(
        request_id="r",
        batch_id=task_pb2.BatchId(step=1),
        default_config=task_pb2.TaskConfig(task_type="step"),
        tasks=[task_pb2.Task()],
        iteration=iteration,
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        code, status = await failure_of(stub.SubmitTasks(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations_of(status)) == [field]


async def test_the_client_refuses_it_before_it_is_sent(client: SchedulerClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"iteration\.beta"):
        await client.submit(tasks(), 1, iteration=IterationContext(rollout_id=0, beta=2.0))
