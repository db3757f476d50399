"""Which numbers and names can be right at all: one set of rules for clients, the server's door and its configuration.

Each check yields FieldViolation with the field's path below the value that was given.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from py_scheduler.domain.episodes.cascade import DATASET_CONFIG_KEY, dataset_config
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from py_scheduler.domain.collecting import CollectRequest
    from py_scheduler.domain.generation import Endpoints, SamplingParams, StoppingCriteria, WeightUpdate
    from py_scheduler.domain.requests import SubmitRequest
    from py_scheduler.domain.task import Task, TaskConfig
    from py_scheduler.domain.training.iteration import IterationContext

MAX_NAME_LENGTH = 512
"""Characters of an id, label, namespace, task type or client key."""
MAX_PATH_LENGTH = 4_096
MAX_ENDPOINTS = 4_096
"""Servers of one role."""
ADDRESS_EXAMPLE = 'such as "http://127.0.0.1:30000"'
MAX_REPEAT_TIMES = 65_536
MAX_GROUPS_PER_STEP = 100_000
MAX_SAMPLES_PER_CALL = 500_000
"""Planned samples of all tasks of one SubmitTasks call: their records are all in memory at once."""
MAX_SAMPLES_PER_STEP = MAX_SAMPLES_PER_CALL
"""Of a rollout or an eval: their tasks and results are in memory at once."""
MAX_TASKS_PER_ABORT = 100_000
MAX_RETRIES = 1_000
MAX_DEADLINE_SECONDS = 366 * 86_400.0
MAX_STOPS = 64
MAX_MESSAGE_BYTES = 64 << 20
"""Of one message on the wire, unless a server or client is set to another limit."""
MAX_TASKS_PER_CALL = 100_000
MAX_TASKS_PER_SUBMISSION = 2**31 - 1
MAX_VIOLATIONS = 20
"""Told of one request. What a reply can carry is bounded, what can be wrong with 100 000 tasks is not."""
MAX_WAITING_SHOWN = 100
"""Waiting batches that one answer tells of."""
MAX_UNFINISHED_SHOWN = 1_000
"""Tasks that one collect was not answered with, and that it names."""
MAX_COLLECT_SECONDS = 366 * 86_400.0
_CHECKED_AT_ONCE = 256
"""Tasks of a submit, between two of its slices."""
_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


class Range(msgspec.Struct, frozen=True, gc=False):
    """Finite numbers from `low` to `high`, the ends included; low itself not when `above_low`."""

    low: float
    high: float
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        lower = f"above {self.low:g}" if self.above_low else f"at least {self.low:g}"
        return f"{lower} and at most {self.high:.16g}"


_SAMPLING_RANGES = {
    "max_new_tokens": Range(1, _MAX_INT32),
    "min_new_tokens": Range(0, _MAX_INT32),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above_low=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, above_low=True),
    "sampling_seed": Range(-_MAX_INT64 - 1, _MAX_INT64),
}
_STOPPING_RANGES = {"max_turns": Range(1, _MAX_INT32), "max_context_len": Range(1, _MAX_INT32)}
_ITERATION_RANGES = {
    "rollout_id": Range(0, _MAX_INT64),
    "beta": Range(0, 1),
    "t_max": Range(0, _MAX_INT64),
}
_DEADLINE = Range(0, MAX_DEADLINE_SECONDS, above_low=True)
_COLLECT_RANGES = {
    "min_num": Range(0, MAX_TASKS_PER_SUBMISSION),
    "max_num": Range(1, MAX_TASKS_PER_SUBMISSION),
    "timeout_seconds": Range(0, MAX_COLLECT_SECONDS),
    "wait_after_min_seconds": Range(0, MAX_COLLECT_SECONDS),
}


def name_fault(name: str, *, required: bool = True) -> str | None:
    """What is wrong with an id, label or key; None when nothing is."""
    if not name:
        return "must not be empty" if required else None
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters, at most {MAX_NAME_LENGTH} are taken"
    return None if name.isprintable() else "has characters that cannot be printed"


def check_batch_id(batch_id: object) -> Iterator[FieldViolation]:
    """A step that is none, or a label that nobody could read."""
    if isinstance(batch_id, str):
        if fault := name_fault(batch_id):
            yield FieldViolation("label", fault)
    elif not isinstance(batch_id, int) or isinstance(batch_id, bool):
        yield FieldViolation("step", f'is {type(batch_id).__name__}, must be a step (7) or a label ("7/gsm8k")')
    elif not 0 <= batch_id <= _MAX_INT64:
        yield FieldViolation("step", f"is {batch_id}, must be 0 or more and fit 64 bits")


def check_iteration(iteration: IterationContext) -> Iterator[FieldViolation]:
    """A step before the first, or a probability that is none."""
    yield from _outside(iteration, _ITERATION_RANGES)


def check_collect(request: CollectRequest) -> Iterator[FieldViolation]:
    """Everything that can be said of a collect without knowing the submission."""
    for field, name in (("request_id", request.request_id), ("namespace", request.namespace)):
        if fault := name_fault(name):
            yield FieldViolation(field, fault)
    if (request.batch_id is None) != bool(request.submission_id):
        yield FieldViolation("submission_id", "name the submission by exactly one of submission_id and batch_id")
    elif request.batch_id is None:
        if fault := name_fault(request.submission_id):
            yield FieldViolation("submission_id", fault)
    else:
        for violation in check_batch_id(request.batch_id):
            yield FieldViolation(f"batch_id.{violation.field}", violation.description)
    yield from _outside(request, _COLLECT_RANGES)
    if request.min_num is not None and request.max_num is not None and request.min_num > request.max_num:
        yield FieldViolation("max_num", f"is {request.max_num}, must be at least min_num ({request.min_num})")


def check_step_samples(samples: int, made_of: str, field: str) -> None:
    """made_of: what the step's samples come from, in words. Raises InvalidArgumentError when they are too many."""
    if samples > MAX_SAMPLES_PER_STEP:
        raise InvalidArgumentError(
            f"{made_of} are over {MAX_SAMPLES_PER_STEP} samples, the most of one step: ask for fewer", field
        )


def _outside(params: object, ranges: dict[str, Range]) -> Iterator[FieldViolation]:
    for field, allowed in ranges.items():
        value = getattr(params, field)
        if value is not None and value not in allowed:
            yield FieldViolation(field, f"is {value}, must be {allowed}")


def check_sampling(params: SamplingParams) -> Iterator[FieldViolation]:
    """Numbers that no engine could take."""
    yield from _outside(params, _SAMPLING_RANGES)
    if params.top_k is not None and params.top_k != -1 and not 1 <= params.top_k <= _MAX_INT32:
        yield FieldViolation("top_k", f"is {params.top_k}, must be at least 1, or -1 for all tokens")
    if (
        params.min_new_tokens is not None
        and params.max_new_tokens is not None
        and params.min_new_tokens > params.max_new_tokens
    ):
        yield FieldViolation(
            "min_new_tokens", f"is {params.min_new_tokens}, must not exceed max_new_tokens ({params.max_new_tokens})"
        )
    if params.stop is not None and (len(params.stop) > MAX_STOPS or "" in params.stop):
        yield FieldViolation("stop", f"must hold at most {MAX_STOPS} strings, none of them empty")
    if params.stop_token_ids is not None and (
        len(params.stop_token_ids) > MAX_STOPS or any(not 0 <= token <= _MAX_INT32 for token in params.stop_token_ids)
    ):
        yield FieldViolation("stop_token_ids", f"must hold at most {MAX_STOPS} token ids, none of them negative")


def check_stopping(criteria: StoppingCriteria) -> Iterator[FieldViolation]:
    """Criteria under which no episode could begin."""
    yield from _outside(criteria, _STOPPING_RANGES)


def check_weight_update(update: WeightUpdate) -> Iterator[FieldViolation]:
    path = update.model_path
    if not path.startswith("/") or len(path) > MAX_PATH_LENGTH or not path.isprintable():
        # Anything else could be the name of a model that the engine would fetch from a hub.
        yield FieldViolation("model_path", f"must be an absolute path of at most {MAX_PATH_LENGTH} characters")
    if fault := name_fault(update.weight_version):
        yield FieldViolation("weight_version", fault)


def is_address(value: object) -> bool:
    """Whether it is where a server can be: http or https with a host, without a query or fragment."""
    if not isinstance(value, str) or len(value) > MAX_PATH_LENGTH or not value.isprintable():
        return False
    try:
        parts = urlsplit(value)
        is_place = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        return is_place and "?" not in value and "#" not in value
    except ValueError:  # such as a port that is no number
        return False


def check_endpoints(endpoints: Endpoints) -> Iterator[FieldViolation]:
    for field, urls in (("urls", endpoints.urls), ("control_urls", endpoints.control_urls)):
        if len(urls) > MAX_ENDPOINTS:
            yield FieldViolation(field, f"names {len(urls)} servers, at most {MAX_ENDPOINTS} are taken")
            continue
        first: dict[str, int] = {}
        for number, url in enumerate(urls):
            if not is_address(url):
                yield FieldViolation(f"{field}[{number}]", f"{url!r} is no address: {ADDRESS_EXAMPLE}")
            elif (earlier := first.setdefault(url.rstrip("/"), number)) != number:
                yield FieldViolation(f"{field}[{number}]", f"{url!r} is named already, by {field}[{earlier}]")
    if endpoints.control_urls and len(endpoints.urls) != 1:
        yield FieldViolation(
            "control_urls", f"are the workers behind one router: name that in urls, which names {len(endpoints.urls)}"
        )


def check_dataset_config(metadata: Mapping[str, Any], dataset: str) -> Iterator[FieldViolation]:
    """What a task's metadata says about its data set, which `dataset` names if the metadata do not."""
    if DATASET_CONFIG_KEY not in metadata:
        return
    path = f"metadata.{DATASET_CONFIG_KEY}"
    try:
        config = dataset_config(metadata)
    except InvalidArgumentError as error:
        yield from error.violations
        return
    label = f"data set {config.name or dataset!r}"
    for violation in check_sampling(config.sampling):
        yield FieldViolation(f"{path}.sampling.{violation.field}", f"{label}: {violation.description}")
    for violation in check_stopping(config.stopping):
        yield FieldViolation(f"{path}.stopping.{violation.field}", f"{label}: {violation.description}")


def check_task_config(config: TaskConfig) -> Iterator[FieldViolation]:
    """Everything that can be said of a TaskConfig without knowing the server's evaluators."""
    if fault := name_fault(config.task_type):
        yield FieldViolation("task_type", f"{fault}: name an evaluator of the server")
    if fault := name_fault(config.dataset, required=False):
        yield FieldViolation("dataset", fault)
    if not 1 <= config.repeat_times <= MAX_REPEAT_TIMES:
        yield FieldViolation(
            "repeat_times", f"is {config.repeat_times}, must be at least 1 and at most {MAX_REPEAT_TIMES}"
        )
    deadline = config.task_deadline_seconds
    if deadline is not None and deadline not in _DEADLINE:
        yield FieldViolation("task_deadline_seconds", f"is {deadline}, must be {_DEADLINE}")
    size = config.max_samples_per_subtask
    if size is not None and not 1 <= size <= MAX_REPEAT_TIMES:
        description = f"is {size}, must be at least 1 and at most {MAX_REPEAT_TIMES}, or absent for all in one"
        yield FieldViolation("max_samples_per_subtask", description)
    timeout = config.attempt_timeout_seconds
    if timeout is not None and timeout not in _DEADLINE:
        yield FieldViolation("attempt_timeout_seconds", f"is {timeout}, must be {_DEADLINE}")
    for field in RetryPolicy.__struct_fields__:
        retries = getattr(config.retry, field)
        if retries is not None and not 0 <= retries <= MAX_RETRIES:
            yield FieldViolation(f"retry.{field}", f"is {retries}, must be at least 0 and at most {MAX_RETRIES}")
    for violation in check_sampling(config.sampling):
        yield FieldViolation(f"sampling.{violation.field}", violation.description)
    for violation in check_stopping(config.stopping):
        yield FieldViolation(f"stopping.{violation.field}", violation.description)


def check_submit(request: SubmitRequest) -> None:
    """Raises InvalidArgumentError that names every fault of the values, at most MAX_VIOLATIONS of them."""
    for _ in checking_submit(request):
        pass


def checking_submit(request: SubmitRequest) -> Iterator[None]:
    """`check_submit` in slices."""
    violations: list[FieldViolation] = []
    for violation in _submit_violations(request):
        if violation is None:
            yield
            continue
        violations.append(violation)
        if len(violations) == MAX_VIOLATIONS:
            break
    if violations:
        raise InvalidArgumentError(violations)


def _submit_violations(request: SubmitRequest) -> Iterator[FieldViolation | None]:
    """None: it may be interrupted here."""
    for field, value in (("request_id", request.request_id), ("namespace", request.key.namespace)):
        if fault := name_fault(value):
            yield FieldViolation(field, fault)
    yield from _below("batch_id", check_batch_id(request.key.batch_id))
    if request.iteration is not None:
        yield from _below("iteration", check_iteration(request.iteration))
    if not request.tasks:
        yield FieldViolation("tasks", "is empty: send at least one task")
    yield from check_sample_count(request.tasks)
    right_configs: set[int] = set()
    for number, task in enumerate(request.tasks):
        path = f"tasks[{number}]"
        if id(task.config) not in right_configs:
            faults = list(check_task_config(task.config))
            if not faults:
                right_configs.add(id(task.config))
            yield from _below(f"{path}.config", faults)
        if task.client_key and (fault := name_fault(task.client_key)):
            yield FieldViolation(f"{path}.client_key", fault)
        if task.metadata:
            yield from _below(path, check_dataset_config(task.metadata, task.config.dataset))
        if number % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
            yield None


def check_sample_count(tasks: Sequence[Task]) -> Iterator[FieldViolation]:
    """How many samples the tasks of one call plan: 8 000 tasks of 64 samples are 512 000, too many for one."""
    samples = sum([task.config.repeat_times for task in tasks])
    if samples > MAX_SAMPLES_PER_CALL:
        yield FieldViolation("tasks", f"plan {samples} samples, at most {MAX_SAMPLES_PER_CALL} in one call: split them")


def _below(path: str, violations: Iterable[FieldViolation]) -> Iterator[FieldViolation]:
    for violation in violations:
        yield FieldViolation(f"{path}.{violation.field}", violation.description)
