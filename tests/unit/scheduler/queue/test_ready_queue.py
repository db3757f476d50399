"""Order of service, blocked shapes and the bound on overtaking."""

from __future__ import annotations

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import BatchId
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.ledger.records import sort_batch_id
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyEntry
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of
from tests.support.rooms import OneKindOfRoom

SPECS = {name: spec_of(SolvingAgent(), name) for name in ("small", "large")}


def attempts(name: str, count: int = 1, batch_id: BatchId = 0) -> list[PlannedAttempt]:
    return [
        PlannedAttempt(
            ref=AttemptRef(name, number, 1),
            task=task_of(name),
            first_sample_no=number,
            sample_count=1,
            submission_id=f"s {batch_id}",
            namespace="default",
            batch_key=sort_batch_id(batch_id),
            queued_at=0.0,
        )
        for number in range(count)
    ]


def push(queue: ReadyQueue, name: str, *, spec: str = "small", count: int = 1, batch_id: BatchId = 0) -> None:
    queue.push(SPECS[spec], attempts(name, count, batch_id), 0.0)


def name_of(entry: ReadyEntry | None) -> str | None:
    return entry.attempts[0].ref.task_id if isinstance(entry, ReadyBatch) else None


def admit_all(queue: ReadyQueue) -> list[str | None]:
    names = []
    while (entry := queue.offer(0.0)) is not None:
        queue.admit(entry, 0.0)
        names.append(name_of(entry))
    return names


def test_batch_ids_in_their_order_then_arrival() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    for batch_id in ("other", 2, "1/eval", 1, 10, "1/a"):
        push(queue, str(batch_id), batch_id=batch_id, count=1 + len(str(batch_id)))
    assert admit_all(queue) == ["1", "1/eval", "1/a", "2", "10", "other"]


def test_what_joins_a_batch_that_waits_stands_before_equal_batches_that_came_later() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    batch_ids: list[BatchId] = ["1/b", "1/a", "1/b", 1, "1/a", "1/b"]
    for number, batch_id in enumerate(batch_ids):
        push(queue, f"{batch_id} {number}", batch_id=batch_id)
    assert admit_all(queue) == ["1 3", "1/b 0", "1/b 2", "1/b 5", "1/a 1", "1/a 4"]
    push(queue, "1/a 6", batch_id="1/a")
    push(queue, "1/b 7", batch_id="1/b")
    assert admit_all(queue) == ["1/a 6", "1/b 7"], "nothing of either waited"


def test_batches_of_one_submission_that_want_the_same_hold_it_once() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    for number in range(100):
        push(queue, str(number))
    assert len({(id(entry.flow), id(entry.shape)) for entry in queue.entries()}) == 1


def test_leases_too_go_by_the_whole_of_their_batch_ids() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    batch_ids: list[BatchId] = ["1/eval", 2, 1, "other", "0/eval"]
    leases: dict[int, BatchId] = {}
    for batch_id in batch_ids:
        demand = PlacementDemand(per_sample=Resource(gpu=1), max_tokens=1)
        entry = queue.push_lease(sort_batch_id(batch_id), demand, 1, lambda _: None, 0.0, "default")
        leases[id(entry)] = batch_id
    served = []
    while (offered := queue.offer(0.0)) is not None:
        queue.admit(offered, 0.0)
        served.append(leases[id(offered)])
    assert served == ["0/eval", 1, "1/eval", 2, "other"]


def test_a_refused_shape_is_passed_over_until_something_is_released() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    push(queue, "blocked", spec="large", count=4)
    push(queue, "as large", spec="large", count=4)
    push(queue, "larger", spec="large", count=9)
    push(queue, "smaller", spec="large", count=2)
    push(queue, "other")
    entry = queue.offer(0.0)
    assert entry is not None
    queue.refuse(entry)
    assert queue.is_blocked(entry)
    assert admit_all(queue) == ["smaller", "other"]
    queue.unblock()
    assert admit_all(queue) == ["blocked", "as large", "larger"]


def test_overtaking_is_bounded() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=3)
    push(queue, "blocked", spec="large", count=4)
    for number in range(10):
        push(queue, f"small-{number}")
    entry = queue.offer(0.0)
    assert entry is not None
    queue.refuse(entry)
    assert admit_all(queue) == ["small-0", "small-1", "small-2"]
    assert entry.bypassed == 3
    queue.unblock()
    assert name_of(queue.offer(0.0)) == "blocked", "nothing behind it is offered, itself it is"
    queue.refuse(entry)
    assert queue.offer(0.0) is None
    queue.unblock()
    assert admit_all(queue)[:2] == ["blocked", "small-3"]


def test_a_dropped_entry_is_gone_and_counts_against_nobody() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8)
    push(queue, "blocked", spec="large", count=4)
    push(queue, "ended", count=2)
    push(queue, "last")
    blocked = queue.offer(0.0)
    assert blocked is not None
    queue.refuse(blocked)
    ended = queue.offer(0.0)
    assert name_of(ended) == "ended"
    assert ended is not None
    queue.drop(ended, 0.0)
    assert (len(queue), blocked.bypassed) == (2, 0)
    assert [name_of(entry) for entry in queue.batches.of_submission("s 0")] == ["blocked", "last"]
    assert admit_all(queue) == ["last"]
    queue.unblock()
    assert admit_all(queue) == ["blocked"]
    assert list(queue.batches.of_submission("s")) == []


def test_the_foremost_32_heads_are_protected_and_the_next_one_once_one_of_them_has_gone() -> None:
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=2)
    for number in range(34):
        push(queue, f"head {number}", spec="large", count=2 + number)
    for number in range(4):
        push(queue, f"small {number}")
    heads = {name_of(entry): entry for entry in queue.entries()}
    refused = queue.offer(0.0)
    assert refused is not None
    queue.refuse(refused)
    for _ in range(2):
        overtaking = queue.offer(0.0)
        assert overtaking is not None
        queue.admit(overtaking, 0.0)
    assert queue.offer(0.0) is None, "the heads were overtaken often enough"
    counts = [heads[f"head {number}"].bypassed for number in range(34)]
    assert counts == [2] * 32 + [0] * 2
    queue.unblock()
    assert admit_all(queue)[:3] == ["head 0", "head 1", "head 2"]
