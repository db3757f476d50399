"""Hypothesis strategies for domain values that are in order, as they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from py_scheduler.domain.collecting import CollectReply, TaskResult, UnfinishedTask
from py_scheduler.domain.events import (
    AbortRequested,
    AttemptEnded,
    AttemptStarted,
    EndpointsSet,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    StopCause,
    TaskDone,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.generation import FinishReason, LogProbKind, SamplingParams, StoppingCriteria, WeightSpan
from py_scheduler.domain.limits import MAX_DEADLINE_SECONDS, MAX_REPEAT_TIMES, MAX_RETRIES
from py_scheduler.domain.requests import NodeView
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AttemptState, EpisodePhase, Outcome, Reward, SampleDone, TaskState, Timings
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.training.samples import SampleStatus, TrainingSample
from py_scheduler.domain.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MAX_INT32 = 2**31 - 1
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
resource_names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?", fullmatch=True)
optional_names = st.just("") | names
counts = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e9)
json_values: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts.filter(lambda key: key != "_dataset_cfg"), json_values, max_size=3)

amounts = st.floats(0, 1e6)
labels = st.dictionaries(resource_names, resource_names, max_size=3)
named = st.dictionaries(resource_names, st.integers(1, 2**32 - 1), max_size=3)
sample_resources = st.builds(
    Resource, gpu=st.floats(0.001, 1e6), cpu=amounts, memory_gb=amounts, named=named, required_labels=labels
)
budget_resources = st.builds(
    Resource,
    gpu=amounts,
    cpu=amounts,
    memory_gb=amounts,
    concurrency=st.integers(1, 2**31),
    named=st.dictionaries(resource_names, st.integers(1, 2**63 - 1), max_size=3),
)
node_views = st.builds(
    NodeView,
    node_ip=names,
    gpu_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    cpu=amounts,
    memory_gb=amounts,
    free_gpus=st.lists(amounts, max_size=3).map(tuple),
    free_cpu=amounts,
    free_memory_gb=amounts,
    named=named,
    free_named=st.dictionaries(resource_names, st.integers(0, 2**31), max_size=3),
    labels=labels,
)


def maybe(strategy: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_new_tokens = draw(maybe(st.integers(1, MAX_INT32)))
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=draw(maybe(st.integers(0, max_new_tokens or MAX_INT32))),
        temperature=draw(maybe(st.floats(0, 100))),
        top_p=draw(maybe(st.floats(0, 1, exclude_min=True))),
        top_k=draw(maybe(st.just(-1) | st.integers(1, MAX_INT32))),
        min_p=draw(maybe(st.floats(0, 1))),
        frequency_penalty=draw(maybe(st.floats(-2, 2))),
        presence_penalty=draw(maybe(st.floats(-2, 2))),
        repetition_penalty=draw(maybe(st.floats(0, 2, exclude_min=True))),
        stop=draw(maybe(st.lists(names, max_size=3).map(tuple))),
        stop_token_ids=draw(maybe(st.lists(st.integers(0, MAX_INT32), max_size=3).map(tuple))),
        ignore_eos=draw(maybe(st.booleans())),
        sampling_seed=draw(maybe(st.integers(-(2**63), 2**63 - 1))),
    )


stoppings = st.builds(
    StoppingCriteria, max_turns=maybe(st.integers(1, MAX_INT32)), max_context_len=maybe(st.integers(1, MAX_INT32))
)
configs = st.builds(
    TaskConfig,
    task_type=names,
    repeat_times=st.integers(1, MAX_REPEAT_TIMES),
    dataset=optional_names,
    sampling=samplings(),
    stopping=stoppings,
    task_deadline_seconds=maybe(st.floats(0, MAX_DEADLINE_SECONDS, exclude_min=True)),
    retry=st.builds(
        RetryPolicy,
        max_failure_retries=st.integers(0, MAX_RETRIES),
        max_loss_retries=st.integers(0, MAX_RETRIES),
        max_infra_refills=st.integers(0, MAX_RETRIES),
        max_retries=maybe(st.integers(0, MAX_RETRIES)),
    ),
    is_eval=st.booleans(),
    max_samples_per_subtask=maybe(st.integers(1, MAX_REPEAT_TIMES)),
    keeps_partial=st.booleans(),
    attempt_timeout_seconds=maybe(st.floats(0, MAX_DEADLINE_SECONDS, exclude_min=True)),
    has_dynamic_timeout=st.booleans(),
)
iterations = st.builds(
    IterationContext,
    rollout_id=st.integers(0, 2**63 - 1),
    beta=st.floats(0, 1),
    t_max=st.integers(0, 2**63 - 1),
)
tasks = st.builds(
    Task, config=configs, prompt=texts, data=st.binary(max_size=20), metadata=json_objects, client_key=optional_names
)
batch_ids = st.integers(0, 2**63 - 1) | names


measured = st.dictionaries(names, st.floats(allow_nan=False), max_size=3)
rewards = st.builds(Reward, score=st.floats(allow_nan=False), details=json_objects)
turns = st.builds(
    Turn,
    start=counts,
    end=counts,
    source=names,
    text=texts,
    finish_reason=maybe(st.sampled_from(FinishReason)),
    log_prob_kind=maybe(st.sampled_from(LogProbKind)),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 5))
    return Trajectory(
        token_id_bytes=draw(st.binary(min_size=4 * length, max_size=4 * length)),
        log_prob_bytes=draw(st.binary(min_size=4 * length, max_size=4 * length)),
        loss_mask_bytes=draw(st.binary(min_size=length, max_size=length)),
        turns=tuple(draw(st.lists(turns, max_size=2))),
        weight_spans=tuple(draw(st.lists(st.builds(WeightSpan, version=texts, start=counts, end=counts), max_size=2))),
    )


@st.composite
def samples(draw: st.DrawFn) -> SampleDone:
    node_ip = draw(optional_names)
    weight_epoch = draw(maybe(st.integers(0, 2**64 - 1)))
    return SampleDone(
        task_id=draw(names),
        sample_no=draw(counts),
        attempt_no=draw(counts),
        outcome=draw(st.sampled_from(Outcome)),
        reward=draw(rewards),
        trajectory=draw(trajectories()),
        termination_reason=draw(texts),
        error=draw(texts),
        phase=draw(st.just("") | st.sampled_from(EpisodePhase)),
        node_ip=node_ip,
        gpu_ids=tuple(draw(st.lists(counts, max_size=3))) if node_ip else (),
        timings=draw(
            st.builds(
                Timings, wait_seconds=seconds, run_seconds=seconds, generate_seconds=seconds, eval_seconds=seconds
            )
        ),
        started_unix_seconds=draw(seconds),
        weight_epoch=weight_epoch,
        staleness=0 if weight_epoch is None else draw(counts),
        metrics=draw(measured),
    )


@st.composite
def started(draw: st.DrawFn) -> AttemptStarted:
    node_ip = draw(optional_names)
    return AttemptStarted(
        submission_id=draw(names),
        task_id=draw(names),
        subtask_no=draw(counts),
        attempt_no=draw(counts),
        node_ip=node_ip,
        gpu_ids=tuple(draw(st.lists(counts, max_size=3))) if node_ip else (),
        unix_seconds=draw(seconds),
    )


ended = st.builds(
    AttemptEnded,
    submission_id=names,
    task_id=names,
    subtask_no=counts,
    attempt_no=counts,
    state=st.sampled_from(
        [
            AttemptState.SUCCEEDED,
            AttemptState.FAILED,
            AttemptState.TIMED_OUT,
            AttemptState.ABORTED,
            AttemptState.LOST,
        ]
    ),
    samples=st.lists(samples(), max_size=2).map(tuple),
    message=texts,
    next_attempt_no=counts,
    unix_seconds=seconds,
    payload=st.binary(max_size=20),
    running_seconds=seconds,
)
aborts = st.builds(
    AbortRequested,
    submission_id=names,
    task_ids=st.lists(names, max_size=3).map(tuple),
    cause=st.sampled_from(StopCause),
    reason=texts,
    unix_seconds=seconds,
    keeps_results=st.booleans(),
    restarts_runners=st.booleans(),
)
dones = st.builds(
    TaskDone,
    submission_id=names,
    task_id=names,
    client_key=optional_names,
    state=st.sampled_from(TaskState),
    planned_samples=counts,
    outcomes=st.dictionaries(st.sampled_from(Outcome), counts, max_size=4),
    reason=texts,
    unix_seconds=seconds,
    rewards=st.lists(rewards, max_size=3).map(tuple),
    group_outcomes=st.lists(st.sampled_from(Outcome), max_size=3).map(tuple),
)
weight_changes = st.builds(
    WeightsChanged,
    roles=st.lists(names, max_size=3).map(tuple),
    weight_version=texts,
    epoch=st.integers(0, 2**64 - 1),
    unix_seconds=seconds,
)
endpoints = st.builds(
    EndpointsSet, roles=st.lists(names, max_size=3).map(tuple), endpoints=st.none(), unix_seconds=seconds
)
resumes = st.builds(TrainingResumed, epoch=st.integers(0, 2**64 - 1), unix_seconds=seconds)
collected = st.builds(
    ResultsCollected,
    submission_id=names,
    request_id=names,
    task_ids=st.lists(names, max_size=3).map(tuple),
    unix_seconds=seconds,
    unfinished=st.just(()),
    warnings=st.just(()),
)
acknowledged = st.builds(ResultsAcknowledged, submission_id=names, request_id=names, unix_seconds=seconds)
discarded = st.builds(ResultsDiscarded, submission_id=names, unix_seconds=seconds)
EVENTS_THAT_TRAVEL_WHOLE: dict[type, SearchStrategy[Any]] = {
    AttemptStarted: started(),
    AttemptEnded: ended,
    AbortRequested: aborts,
    TaskDone: dones,
    ResultsCollected: collected,
    ResultsAcknowledged: acknowledged,
    ResultsDiscarded: discarded,
    WeightsChanged: weight_changes,
    TrainingResumed: resumes,
    EndpointsSet: endpoints,
}
events_that_travel_whole = st.one_of(*EVENTS_THAT_TRAVEL_WHOLE.values())


@st.composite
def task_results(draw: st.DrawFn) -> TaskResult:
    return TaskResult(
        task_id=draw(names),
        client_key=draw(optional_names),
        state=draw(st.sampled_from(TaskState)),
        succeeded_samples=draw(counts),
        planned_samples=draw(counts),
        is_eval=draw(st.booleans()),
        message=draw(texts),
        metrics=draw(measured),
        samples=tuple(draw(st.lists(samples(), max_size=2))),
        payloads=tuple(draw(st.lists(st.binary(min_size=1, max_size=50), max_size=2))),
    )


collect_replies = st.builds(
    CollectReply,
    submission_id=optional_names,
    results=st.lists(task_results(), max_size=3).map(tuple),
    unfinished=st.lists(
        st.builds(
            UnfinishedTask,
            task_id=names,
            client_key=optional_names,
            succeeded_samples=counts,
            planned_samples=counts,
            is_stopped=st.booleans(),
            reason=texts,
        ),
        max_size=2,
    ).map(tuple),
    is_timed_out=st.booleans(),
    warnings=st.lists(texts, max_size=2).map(tuple),
)


training_samples = st.builds(
    TrainingSample,
    task_id=texts,
    sample_no=st.integers(0, 2**31 - 1),
    dataset=texts,
    prompt=texts,
    reward=json_objects.map(lambda more: {**more, "score": 0.5}),
    status=st.sampled_from(SampleStatus),
    remove_sample=st.booleans(),
    metadata=json_objects,
    trajectory=trajectories(),
)


def some_of(strategy: SearchStrategy[Any]) -> list[Any]:
    """At least 50 values, the same at each call."""
    drawn: list[Any] = []

    @settings(derandomize=True, max_examples=50, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(strategy, min_size=1, max_size=3))
    def draw(values: list[Any]) -> None:
        drawn.extend(values)

    draw()
    return drawn
