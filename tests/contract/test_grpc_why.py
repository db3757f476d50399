"""Why does a task wait? From the client, and the command, to the real engine and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.cli import main
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.domain.explanations import TaskPhase
from py_scheduler.domain.leases import NodeShortageView, Shortage
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError, NotFoundError
from tests.contract.conftest import whole_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.task import BatchId

# The first batch of pairs takes two of the three GPUs, so the next one never fits beside it.
CONFIG = """
[server]
listen = "127.0.0.1:0"
[scheduler]
max_bypass = 3
[cluster.layout]
n1 = { gpus = [0, 1, 2], cpu = 64, memory_gb = 64 }
n2 = { gpus = [], cpu = 64, memory_gb = 64 }
[[evaluator]]
evaluator_id = "pair"
handler = "tests.support.agents.app_handlers:Echo"
handler_args = { seconds = 3600 }
resource = { gpu = 2, concurrency = 2 }
run_resource = { gpu = 1 }
batch_size = 2
[[evaluator]]
evaluator_id = "quick"
handler = "tests.support.agents.app_handlers:Echo"
resource = { gpu = 1, concurrency = 8 }
run_resource = { gpu = 0.25 }
"""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with whole_server(CONFIG) as bound:
        yield bound


async def submit(client: SchedulerClient, batch_id: BatchId, count: int = 2) -> list[str]:
    tasks = [Task(config=TaskConfig(task_type="pair"), prompt=str(number)) for number in range(count)]
    return list((await client.submit(tasks, batch_id)).task_ids)


async def test_a_waiting_task_says_what_is_short_and_who_is_ahead(client: SchedulerClient) -> None:
    (running, _), (second, _) = await submit(client, 1), await submit(client, 2)
    third = (await submit(client, "3/eval"))[1]
    quick = [Task(config=TaskConfig(task_type="quick")) for _ in range(3)]
    bypassing = [event.task_id async for event in client.rollout(quick, batch_id=9)]
    assert (await client.explain_task(bypassing[-1])).phase is TaskPhase.DONE

    assert (await client.explain_task(running)).running_attempts == 1
    (wait,) = (await client.explain_task(second)).waits
    assert (wait.bypassed, wait.ahead, wait.ahead_in_all) == (3, (), 0)

    explanation = await client.explain_task(third)
    assert (explanation.phase, explanation.batch_id) == (TaskPhase.QUEUED, "3/eval")
    assert (explanation.queued_attempts, explanation.running_attempts) == (1, 0)
    (wait,) = explanation.waits
    assert (wait.evaluator_id, wait.tasks, wait.attempts) == ("pair", 2, 2)
    assert (wait.wanted_tokens, wait.free_tokens, wait.max_tokens) == (2, 1, 3)
    assert wait.nodes == (
        NodeShortageView(node_ip="n1", free_tokens=1, max_tokens=3, short=(Shortage.GPU,)),
        NodeShortageView(node_ip="n2", free_tokens=0, max_tokens=0, short=(Shortage.GPU,)),
    )
    (ahead,) = wait.ahead
    assert (ahead.batch_id, ahead.namespace, ahead.tasks, ahead.tokens, ahead.bypassed) == (2, "default", 2, 2, 3)
    assert 0 < wait.waiting_seconds < ahead.waiting_seconds < 60
    assert "short of gpu" in wait.reason


async def test_of_a_long_queue_the_first_are_told_and_all_are_counted(client: SchedulerClient) -> None:
    await submit(client, 1)
    waiting = await submit(client, 2, count=60)
    (wait,) = (await client.explain_task(waiting[-1])).waits
    assert (len(wait.ahead), wait.ahead_in_all) == (20, 29)


async def test_what_does_not_wait(client: SchedulerClient) -> None:
    (first, second) = await submit(client, 1)
    explanation = await client.explain_task(first)
    assert (explanation.phase, explanation.waits) == (TaskPhase.RUNNING, ())
    await client.abort(1)
    assert (await client.explain_task(second)).phase is TaskPhase.DONE


@pytest.mark.parametrize("strange", ["nobody", "nobody-0", "{submission}-2", "{submission}--1", "{submission}-01"])
async def test_an_unknown_task(client: SchedulerClient, strange: str) -> None:
    known = (await submit(client, 1))[0]
    with pytest.raises(NotFoundError, match="no task has the id"):
        await client.explain_task(strange.format(submission=known.rpartition("-")[0]))
    with pytest.raises(NotFoundError):
        await client.explain_task(known, namespace="another")
    with pytest.raises(InvalidArgumentError, match="task_id"):
        await client.explain_task("")


async def test_the_blocking_client_and_the_command(
    client: SchedulerClient, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(client, 1)
    await submit(client, 2)
    waiting = (await submit(client, 3))[0]

    def ask() -> str:
        with BlockingSchedulerClient(address) as blocking:
            return blocking.explain_task(waiting).phase

    assert await asyncio.to_thread(ask) == "queued"
    assert await asyncio.to_thread(main, ["why", waiting, "--target", address]) == 0
    shown = capsys.readouterr().out
    assert f"task {waiting} of batch_id 3" in shown
    assert "queued 1, leased 0, running 0" in shown
    assert "tokens: 2 needed at once, 1 free, 3 in the empty pool" in shown
    assert [line.split("|")[1:-1] for line in shown.splitlines() if "n1" in line] == [
        [" n1   ", " 1           ", " 3  ", " gpu      "]
    ]
    assert "ahead of it: 1" in shown
    assert "\x1b" not in shown
    assert await asyncio.to_thread(main, ["why", "nobody-0", "--target", address]) == 1
    assert "nobody-0" in capsys.readouterr().err
