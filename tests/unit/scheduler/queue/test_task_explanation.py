"""What a waiting task is told, entry by entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.leases import PlacementDemand, Shortage
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.ledger.records import submission_and_number, task_id_of
from py_scheduler.scheduler.queue.explanations import TaskExplainer
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.looks import at_once

if TYPE_CHECKING:
    from collections.abc import Generator

    from py_scheduler.domain.explanations import TaskWait
    from py_scheduler.scheduler.ledger.state import LedgerState

SAMPLE = Resource(gpu=0.5)


def attempts_of(task_id: str, count: int, step: float) -> list[PlannedAttempt]:
    task = Task(config=TaskConfig(task_type="agent", repeat_times=count))
    return [
        PlannedAttempt(
            ref=AttemptRef(task_id, number, 1),
            task=task,
            first_sample_no=number,
            sample_count=1,
            submission_id="s",
            namespace="default",
            batch_key=(step, 0),
            queued_at=0.0,
        )
        for number in range(count)
    ]


def queue_of(pool: PlacementPool | None = None) -> ReadyQueue:
    return ReadyQueue(Rivalry(Room(pool, max_permits=5)), max_bypass=5)


def waits(queue: ReadyQueue, task_id: str, ended: str = "") -> tuple[TaskWait, ...]:
    """`ended`: a task whose attempts no longer wait, of which the queue was not told yet."""
    return at_once(look(queue, task_id, ended))


def look(queue: ReadyQueue, task_id: str, ended: str = "") -> Generator[None, None, tuple[TaskWait, ...]]:
    submission = SimpleNamespace(key=SubmissionKey("7/eval"))
    ledger = SimpleNamespace(submission=lambda _: submission, is_waiting=lambda ref: ref.task_id != ended)
    explainer = TaskExplainer(
        queue, cast("LedgerState", ledger), now=10.0, reason_of=lambda _, ahead: f"{ahead.in_all} ahead"
    )
    return explainer.waits_of("s", task_id, 1_000)


def test_a_lease_request_is_ahead_and_the_budget_bounds_what_is_needed() -> None:
    pool = PlacementPool([NodeResource(node_ip="small", gpus=[], cpu=4, memory_gb=4)])
    pool.add_node(NodeResource(node_ip="large", gpus=[0], cpu=4, memory_gb=4))
    queue = queue_of(pool)
    demand = PlacementDemand(budget=Resource(gpu=8, concurrency=3), per_sample=SAMPLE, max_tokens=3)
    queue.push_lease((1.0, 0), demand, 3, lambda _: None, 4.0, "default")
    spec = spec_of(
        SolvingAgent(),
        resource=Resource(gpu=1, concurrency=8),
        run_resource=SAMPLE,
        eval_resource=SAMPLE,
        batch_size=None,
    )
    queue.push(spec, attempts_of("s-0", 6, step=2.0), 7.0)
    (wait,) = waits(queue, "s-0")
    assert (wait.attempts, wait.wanted_tokens, wait.free_tokens, wait.waiting_seconds) == (6, 2, 2, 3.0)
    assert [(node.node_ip, node.free_tokens, node.short) for node in wait.nodes] == [
        ("large", 2, ()),
        ("small", 0, (Shortage.GPU,)),
    ]
    (ahead,) = wait.ahead
    assert (ahead.batch_id, ahead.tasks, ahead.tokens, ahead.waiting_seconds) == (None, 0, 3, 6.0)
    assert wait.reason == "1 ahead"


def test_attempts_that_are_tried_again_wait_on_their_own() -> None:
    queue = queue_of()
    spec = spec_of(SolvingAgent(), batch_size=None)
    queue.push(spec, attempts_of("s-0", 2, step=3.0), 1.0)
    queue.push(spec, attempts_of("s-0", 1, step=3.0), 2.0)
    first, second = waits(queue, "s-0")
    assert (first.attempts, first.ahead_in_all, second.attempts) == (2, 0, 1)
    assert (second.nodes, second.max_tokens, second.ahead_in_all) == ((), 0, 1)
    assert (second.ahead[0].batch_id, second.ahead[0].tasks, second.ahead[0].tokens) == ("7/eval", 1, 2)


def test_what_has_ended_in_the_queue_counts_for_nothing_and_the_servers_limit_bounds_the_tokens() -> None:
    queue = queue_of()
    spec = spec_of(SolvingAgent(), batch_size=None)
    queue.push(spec, attempts_of("s-0", 2, step=1.0), 1.0)
    queue.push(spec, [*attempts_of("s-1", 9, step=1.0), *attempts_of("s-0", 3, step=1.0)], 2.0)
    (wait,) = waits(queue, "s-1", ended="s-0")
    assert (wait.tasks, wait.attempts, wait.wanted_tokens, wait.ahead_in_all) == (1, 9, 5, 0)
    assert waits(queue, "s-0", ended="s-0") == ()
    (wait,) = waits(queue, "s-1")
    assert (wait.tasks, wait.attempts, wait.ahead_in_all) == (2, 12, 1)


@pytest.mark.parametrize("turns", [0, 1])
def test_what_is_let_in_while_somebody_looks_waits_for_nothing_and_is_ahead_of_nobody(turns: int) -> None:
    queue = queue_of()
    spec = spec_of(SolvingAgent(), batch_size=1)
    for task in range(3):
        queue.push(spec, attempts_of(f"s-{task}", 1, step=1.0), 1.0)
    first, last = look(queue, "s-0"), look(queue, "s-2")
    for _ in range(turns):
        next(first, None)
        next(last, None)
    entry = queue.offer(2.0)
    assert entry is not None
    queue.admit(entry, 2.0)
    assert at_once(first) == ()
    (wait,) = at_once(last)
    assert len(wait.ahead) == 1
    assert wait.ahead_in_all in {1, 2}, "as it was when it was counted"


@pytest.mark.parametrize("strange", ["", "s", "s-", "s-x", "s-01", "s-\u0661", "s-" + "9" * 5_000])
def test_what_is_no_id_of_a_task(strange: str) -> None:
    assert submission_and_number(strange)[1] == -1
    assert submission_and_number(task_id_of("a-b", 17)) == ("a-b", 17)
