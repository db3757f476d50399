"""Tasks on the wire: what goes out comes back, and every fault is found at the door."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.limits import MAX_NAME_LENGTH, MAX_REPEAT_TIMES, MAX_VIOLATIONS
from py_scheduler.domain.requests import SubmitRequest
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.requests import decode_submit_request
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.support import strategies

if TYPE_CHECKING:
    from py_scheduler.domain.task import BatchId

MAX_TASKS = 1_000


def travel(tasks: list[Task], batch_id: BatchId = 1, max_tasks: int = 10, max_bytes: int = 1 << 20) -> SubmitRequest:
    """Through the wire in chunks, and put together again."""
    key = SubmissionKey(batch_id, "team")
    requests = [
        decode_submit_request(service.SubmitTasksRequest.FromString(chunk.request.SerializeToString()), MAX_TASKS)
        for chunk in encode_submission_chunks(tasks, key, "r", max_tasks, max_bytes)
    ]
    assert all(request.key == key for request in requests)
    assert len({request.request_id for request in requests}) == len(requests)
    return SubmitRequest(
        request_id=requests[0].request_id, key=key, tasks=tuple(task for request in requests for task in request.tasks)
    )


@given(st.lists(strategies.tasks, min_size=1, max_size=6), strategies.batch_ids, st.integers(1, 3), st.integers(1, 200))
def test_tasks_travel_unchanged(tasks: list[Task], batch_id: BatchId, max_tasks: int, max_bytes: int) -> None:
    assert travel(tasks, batch_id, max_tasks, max_bytes).tasks == tuple(tasks)


@given(strategies.iterations)
def test_an_iteration_travels_unchanged_with_every_chunk(iteration: IterationContext) -> None:
    tasks = [Task(config=TaskConfig(task_type="a"))] * 5
    chunks = list(encode_submission_chunks(tasks, SubmissionKey(1), "r", 2, 1 << 20, iteration))
    decoded = [
        decode_submit_request(service.SubmitTasksRequest.FromString(chunk.request.SerializeToString()), MAX_TASKS)
        for chunk in chunks
    ]
    assert [request.iteration for request in decoded] == [iteration] * 3
    assert [request.request_id for request in decoded] == ["r", "r/1", "r/2"]


def test_nothing_said_of_the_step_is_not_step_0() -> None:
    assert decode_submit_request(request(), MAX_TASKS).iteration is None
    said = decode_submit_request(request(iteration=task_pb2.IterationContext()), MAX_TASKS)
    assert said.iteration == IterationContext(rollout_id=0)


@pytest.mark.parametrize(
    ("iteration", "field"),
    [
        (IterationContext(rollout_id=-1), "iteration.rollout_id"),
        (IterationContext(rollout_id=0, beta=1.01), "iteration.beta"),
        (IterationContext(rollout_id=0, beta=math.inf), "iteration.beta"),
        (IterationContext(rollout_id=0, t_max=-1), "iteration.t_max"),
    ],
)
def test_an_iteration_that_cannot_be_is_refused_at_both_ends(iteration: IterationContext, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        list(
            encode_submission_chunks([Task(config=TaskConfig(task_type="a"))], SubmissionKey(1), "r", 2, 99, iteration)
        )
    assert [violation.field for violation in raised.value.violations] == [field]
    sent = task_pb2.IterationContext(rollout_id=iteration.rollout_id, beta=iteration.beta, t_max=iteration.t_max)
    assert list(faults_of(request(iteration=sent))) == [field]


def test_no_stops_at_all_is_not_the_same_as_nothing_said() -> None:
    silenced = TaskConfig(task_type="a", sampling=SamplingParams(stop=(), stop_token_ids=()))
    (silent, quiet) = travel([Task(config=silenced), Task(config=TaskConfig(task_type="a"))]).tasks
    assert silent.config.sampling == SamplingParams(stop=(), stop_token_ids=())
    assert quiet.config.sampling == SamplingParams()


def test_a_config_is_sent_and_decoded_once() -> None:
    config, other = TaskConfig(task_type="a"), TaskConfig(task_type="b")
    tasks = [Task(config=config), Task(config=other), Task(config=config), Task(config=other)]
    (chunk,) = encode_submission_chunks(tasks, SubmissionKey(1), "r", 10, 1 << 20)
    assert [task.HasField("config") for task in chunk.request.tasks] == [False, True, False, True]
    decoded = decode_submit_request(chunk.request, MAX_TASKS).tasks
    assert decoded[0].config is decoded[2].config
    assert decoded[1].config is decoded[3].config


def test_chunks_are_bounded_by_count_and_by_bytes() -> None:
    config = TaskConfig(task_type="a")

    def sizes(tasks: list[Task], max_tasks: int, max_bytes: int) -> list[tuple[int, int]]:
        chunks = encode_submission_chunks(tasks, SubmissionKey(1), "r", max_tasks, max_bytes)
        return [(chunk.first_task, len(chunk.request.tasks)) for chunk in chunks]

    assert sizes([Task(config=config)] * 5, 2, 1 << 20) == [(0, 2), (2, 2), (4, 1)]
    assert sizes([Task(config=config, data=bytes(600))] * 5, 100, 1_000) == [(0, 2), (2, 2), (4, 1)]
    assert sizes([Task(config=config)] * 4, 2, 1 << 20) == [(0, 2), (2, 2)]


def test_chunks_are_made_one_by_one() -> None:
    taken = []

    def endless() -> Any:
        while True:
            taken.append(1)
            yield Task(config=TaskConfig(task_type="a"))

    chunks = encode_submission_chunks(endless(), SubmissionKey(1), "r", 3, 1 << 20)
    next(chunks)
    assert len(taken) == 3


# The door


def request(**changes: Any) -> service.SubmitTasksRequest:
    good: dict[str, Any] = {
        "request_id": "r",
        "batch_id": task_pb2.BatchId(step=1),
        "default_config": task_pb2.TaskConfig(task_type="a"),
        "tasks": [task_pb2.Task()],
    }
    return service.SubmitTasksRequest(**(good | changes))


def faults_of(message: service.SubmitTasksRequest, max_tasks: int = MAX_TASKS) -> dict[str, str]:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_submit_request(message, max_tasks)
    return {violation.field: violation.description for violation in caught.value.violations}


def config_with(**fields: Any) -> service.SubmitTasksRequest:
    return request(default_config=task_pb2.TaskConfig(**({"task_type": "a"} | fields)))


def sampling_with(**fields: Any) -> service.SubmitTasksRequest:
    return config_with(sampling=task_pb2.SamplingParams(**fields))


def metadata_with(text: str | bytes, dataset: str = "") -> service.SubmitTasksRequest:
    raw = text.encode() if isinstance(text, str) else text
    config = task_pb2.TaskConfig(task_type="a", dataset=dataset)
    return request(default_config=config, tasks=[task_pb2.Task(metadata_json=raw)])


def dataset_config(value: Any, dataset: str = "") -> service.SubmitTasksRequest:
    return metadata_with(json.dumps({"_dataset_cfg": value}), dataset)


def test_defaults_are_filled_in() -> None:
    (task,) = decode_submit_request(request(), MAX_TASKS).tasks
    assert task == Task(config=TaskConfig(task_type="a", repeat_times=1, retry=RetryPolicy(max_loss_retries=2)))
    assert decode_submit_request(request(), MAX_TASKS).key == SubmissionKey(1, "default")


@pytest.mark.parametrize(
    ("message", "field", "description"),
    [
        (request(request_id=""), "request_id", "empty"),
        (request(request_id="x" * (MAX_NAME_LENGTH + 1)), "request_id", "513 characters, at most 512"),
        (request(request_id="a\0b"), "request_id", "cannot be printed"),
        (request(namespace="a\n"), "namespace", "cannot be printed"),
        (request(batch_id=None), "batch_id", "absent"),
        (request(batch_id=task_pb2.BatchId(step=-1)), "batch_id.step", "-1, must be 0 or more"),
        (request(batch_id=task_pb2.BatchId(label="")), "batch_id.label", "empty"),
        (request(tasks=[]), "tasks", "at least 1"),
        (request(tasks=[task_pb2.Task()] * (MAX_TASKS + 1)), "tasks", "1001.*at most 1000"),
        (request(default_config=None), "tasks[0].config", "absent"),
        (request(tasks=[task_pb2.Task(client_key="a\tb")]), "tasks[0].client_key", "cannot be printed"),
        (config_with(task_type=""), "default_config.task_type", "empty"),
        (config_with(dataset="\x01"), "default_config.dataset", "cannot be printed"),
        (config_with(repeat_times=0), "default_config.repeat_times", "is 0, must be at least 1"),
        (config_with(repeat_times=2**32 - 1), "default_config.repeat_times", f"at most {MAX_REPEAT_TIMES}"),
        (config_with(task_deadline_seconds=0), "default_config.task_deadline_seconds", "above 0"),
        (config_with(task_deadline_seconds=-1), "default_config.task_deadline_seconds", "above 0"),
        (config_with(task_deadline_seconds=math.nan), "default_config.task_deadline_seconds", "is nan"),
        (config_with(task_deadline_seconds=math.inf), "default_config.task_deadline_seconds", "is inf"),
        (config_with(task_deadline_seconds=1e300), "default_config.task_deadline_seconds", "at most"),
        (
            config_with(retry=task_pb2.RetryPolicy(max_failure_retries=2**32 - 1)),
            "default_config.retry.max_failure_retries",
            "at most",
        ),
        (
            config_with(stopping=task_pb2.StoppingCriteria(max_turns=0)),
            "default_config.stopping.max_turns",
            "at least 1",
        ),
        (
            config_with(stopping=task_pb2.StoppingCriteria(max_context_len=-5)),
            "default_config.stopping.max_context_len",
            "at least 1",
        ),
        (sampling_with(temperature=math.nan), "default_config.sampling.temperature", "is nan"),
        (sampling_with(temperature=-0.5), "default_config.sampling.temperature", "at least 0"),
        (sampling_with(temperature=math.inf), "default_config.sampling.temperature", "is inf"),
        (sampling_with(top_p=0), "default_config.sampling.top_p", "above 0"),
        (sampling_with(top_p=1.1), "default_config.sampling.top_p", "at most 1"),
        (sampling_with(top_k=0), "default_config.sampling.top_k", "or -1"),
        (sampling_with(top_k=-2), "default_config.sampling.top_k", "or -1"),
        (sampling_with(min_p=2), "default_config.sampling.min_p", "at most 1"),
        (sampling_with(max_new_tokens=0), "default_config.sampling.max_new_tokens", "at least 1"),
        (sampling_with(max_new_tokens=1, min_new_tokens=2), "default_config.sampling.min_new_tokens", "not exceed"),
        (sampling_with(frequency_penalty=-3), "default_config.sampling.frequency_penalty", "at least -2"),
        (sampling_with(presence_penalty=3), "default_config.sampling.presence_penalty", "at most 2"),
        (sampling_with(repetition_penalty=0), "default_config.sampling.repetition_penalty", "above 0"),
        (sampling_with(stop={"values": [""]}), "default_config.sampling.stop", "none of them empty"),
        (sampling_with(stop={"values": ["x"] * 65}), "default_config.sampling.stop", "at most 64"),
        (sampling_with(stop_token_ids={"values": [-1]}), "default_config.sampling.stop_token_ids", "negative"),
        (metadata_with("{"), "tasks[0].metadata_json", "not JSON"),
        (metadata_with(b'{"a": "\xff"}'), "tasks[0].metadata_json", "not JSON"),
        (metadata_with("NaN"), "tasks[0].metadata_json", "not JSON"),
        (metadata_with("[1]"), "tasks[0].metadata_json", "must be a JSON object, not list"),
        (metadata_with("null"), "tasks[0].metadata_json", "must be a JSON object"),
        (metadata_with("[" * 100_000), "tasks[0].metadata_json", "nested too deeply"),
        (dataset_config(7), "tasks[0].metadata._dataset_cfg", "data set"),
        (
            dataset_config({"name": "gsm8k", "sampling": {"temprature": 1}}),
            "tasks[0].metadata._dataset_cfg",
            "data set 'gsm8k'.*`temprature`",
        ),
        (dataset_config({"name": "gsm8k", "smpling": {}}), "tasks[0].metadata._dataset_cfg", "'gsm8k'.*`smpling`"),
        (
            dataset_config({"name": "gsm8k", "stopping": {"max_turns": "3"}}),
            "tasks[0].metadata._dataset_cfg",
            "Expected `int",
        ),
        (
            dataset_config({"sampling": {"top_p": 3}}, dataset="math"),
            "tasks[0].metadata._dataset_cfg.sampling.top_p",
            "data set 'math': is 3.0",
        ),
    ],
)
def test_a_fault_is_found_and_named(message: service.SubmitTasksRequest, field: str, description: str) -> None:
    faults = faults_of(message)
    assert list(faults) == [field]
    assert re.search(description, faults[field]), faults[field]


def test_all_faults_are_told_up_to_a_bound() -> None:
    faults = faults_of(request(tasks=[task_pb2.Task(metadata_json=b"x")] * 100))
    assert len(faults) == MAX_VIOLATIONS + 1
    assert faults[""] == "and more"


def test_dataset_settings_in_order_pass() -> None:
    cfg = {"name": "gsm8k", "sampling": {"temperature": 0.5}, "stopping": {"max_turns": 3}}
    (task,) = decode_submit_request(dataset_config(cfg), MAX_TASKS).tasks
    assert task.metadata == {"_dataset_cfg": cfg}


# What a client cannot even send


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (Task(config=TaskConfig(task_type="")), "tasks[1].config.task_type"),
        (Task(config=TaskConfig(task_type="a", repeat_times=-1)), "tasks[1].config.repeat_times"),
        (Task(config=TaskConfig(task_type="a", repeat_times=2**40)), "tasks[1].config.repeat_times"),
        (
            Task(config=TaskConfig(task_type="a", sampling=SamplingParams(top_p=math.nan))),
            "tasks[1].config.sampling.top_p",
        ),
        (Task(config=TaskConfig(task_type="a"), metadata={"f": object()}), "tasks[1].metadata"),
        (Task(config=TaskConfig(task_type="a"), prompt="\ud800"), "tasks[1].prompt"),
        (Task(config=TaskConfig(task_type="a"), client_key="\ud800"), "tasks[1].client_key"),
        (Task(config=TaskConfig(task_type="a"), prompt=7), "tasks[1].prompt"),  # type: ignore[arg-type]
        (Task(config=TaskConfig(task_type="a"), data="text"), "tasks[1].data"),  # type: ignore[arg-type]
    ],
)
def test_the_client_names_what_it_cannot_send(task: Task, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        travel([Task(config=TaskConfig(task_type="a")), task])
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("step", [-1, 2**63])
def test_steps_out_of_range(step: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"batch_id\.step"):
        travel([Task(config=TaskConfig(task_type="a"))], step)
