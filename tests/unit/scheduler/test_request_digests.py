"""A call that is sent again is known by its content, however its client writes that down."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.requests import Delivery, SubmitRequest
from py_scheduler.domain.task import BatchId, SubmissionKey, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.scheduler.ledger.state import digesting, request_digest
from py_scheduler.scheduler.slices import at_once
from tests.support.strategies import batch_ids, iterations, json_objects, tasks


def request_of(*some: Task, **changes: Any) -> SubmitRequest:
    fields: dict[str, Any] = {"request_id": "r", "key": SubmissionKey(7), "tasks": some}
    return SubmitRequest(**(fields | changes))


def shuffled(value: Any, data: st.DataObject) -> Any:
    """The same JSON value with the keys of every object in it in some other order."""
    if isinstance(value, list):
        return [shuffled(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    keys = data.draw(st.permutations(list(value)))
    return {key: shuffled(value[key], data) for key in keys}


def shuffled_task(task: Task, data: st.DataObject) -> Task:
    return Task(
        config=task.config,
        prompt=task.prompt,
        data=task.data,
        metadata=shuffled(task.metadata, data),
        client_key=task.client_key,
    )


@given(some=st.lists(tasks, min_size=1, max_size=3), iteration=st.none() | iterations, data=st.data())
def test_the_order_of_keys_in_metadata_says_nothing(
    some: list[Task], iteration: IterationContext | None, data: st.DataObject
) -> None:
    again = [shuffled_task(task, data) for task in some]
    one, other = request_of(*some, iteration=iteration), request_of(*again, iteration=iteration)
    assert request_digest(one) == request_digest(other)


@given(one=json_objects, other=json_objects)
def test_other_metadata_are_another_request(one: dict[str, Any], other: dict[str, Any]) -> None:
    config = TaskConfig(task_type="a")
    digests = {request_digest(request_of(Task(config=config, metadata=metadata))) for metadata in (one, other)}
    assert len(digests) == (1 if repr(shuffled_to_one(one)) == repr(shuffled_to_one(other)) else 2)


def shuffled_to_one(value: Any) -> Any:
    """Its one writing: keys in order. Compared as text, for to Python 1, 1.0 and True are the same."""
    if isinstance(value, list):
        return [shuffled_to_one(item) for item in value]
    return {key: shuffled_to_one(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def test_everything_else_of_a_request_counts() -> None:
    task = Task(config=TaskConfig(task_type="a"), metadata={"b": {"d": 1, "c": 2}, "a": 3})
    requests = [
        request_of(task),
        request_of(task, task),
        request_of(Task(config=TaskConfig(task_type="a", repeat_times=2), metadata=task.metadata)),
        request_of(task, key=SubmissionKey("7")),
        request_of(task, key=SubmissionKey(7, "other")),
        request_of(task, delivery=Delivery.COLLECT),
        request_of(task, iteration=IterationContext(rollout_id=7)),
    ]
    assert len({request_digest(request) for request in requests}) == len(requests)
    assert request_digest(request_of(task)) == request_digest(request_of(task, request_id="other"))


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": 1 << 64}, {1: "a"}])
def test_what_is_no_json_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="only JSON values"):
        request_digest(request_of(Task(config=TaskConfig(task_type="a"), metadata=metadata)))


@given(
    some=st.lists(tasks, min_size=1, max_size=3),
    times=st.sampled_from([0, 1, 5, 6, 16, 17, 257]),
    batch_id=batch_ids,
    iteration=st.none() | iterations,
    delivery=st.sampled_from(Delivery),
)
def test_a_digest_that_is_made_in_slices_is_the_same(
    some: list[Task], times: int, batch_id: BatchId, iteration: IterationContext | None, delivery: Delivery
) -> None:
    request = request_of(*some * times, key=SubmissionKey(batch_id, "ns"), iteration=iteration, delivery=delivery)
    assert at_once(digesting(request, [])) == request_digest(request)


@pytest.mark.parametrize("count", [65_535, 65_536])
def test_so_is_that_of_a_list_whose_length_takes_more_bytes(count: int) -> None:
    request = request_of(*[Task(config=TaskConfig(task_type="a"))] * count)
    assert at_once(digesting(request, [])) == request_digest(request)


def test_what_cannot_be_stored_is_refused_in_slices_too() -> None:
    unwritable = request_of(Task(config=TaskConfig(task_type="a"), metadata={"a": 1 << 70}))
    with pytest.raises(InvalidArgumentError, match="only JSON values"):
        at_once(digesting(unwritable, []))
    faulty = Task(config=TaskConfig(task_type="a", repeat_times=0), metadata={"a": 1 << 70})
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        at_once(digesting(request_of(faulty), []))
