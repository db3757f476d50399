"""Tasks as trainers submit them, and the groups they are scheduled in (design words: Task, Sample, SubTask, Batch)."""

from __future__ import annotations

from typing import Any

import msgspec

from py_scheduler.domain.generation import SamplingParams, StoppingCriteria

BatchId = int | str
"""The trainer's label of a submission: a step (`7`), or a string such as `"7/gsm8k"` for an eval."""

DEFAULT_NAMESPACE = "default"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """How many new attempts a SubTask may have."""

    max_failure_retries: int = 0
    """After a failure or timeout of the agent."""
    max_loss_retries: int = 2
    """After a lost worker or node."""
    max_infra_refills: int = 0
    """After an attempt whose samples ended by a fault of the infrastructure."""
    max_retries: int | None = None
    """One budget for failures, timeouts and losses, in place of the first two; None: they have their own."""


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """How a task is to be run."""

    task_type: str
    """Names the EvaluatorSpec."""
    repeat_times: int = 1
    """Samples that the task is to give."""
    dataset: str = ""
    """Groups results in reports."""
    sampling: SamplingParams = SamplingParams()
    """This task's own values; they beat the spec's, field by field."""
    stopping: StoppingCriteria = StoppingCriteria()
    """Likewise."""
    task_deadline_seconds: float | None = None
    """Counted from acceptance; the task ends then, whatever it is doing. None: no deadline."""
    retry: RetryPolicy = RetryPolicy()
    is_eval: bool = False
    """Whether it measures instead of producing training data; evals and training share room by weight."""
    max_samples_per_subtask: int | None = 1
    """Samples that run together, by one runner, and are retried together; None: all of them. 8 repeats with 3 make
    SubTasks of 3, 3 and 2."""
    keeps_partial: bool = False
    """Whether a SubTask that fails keeps the samples that succeeded; it is not tried again then. Without it a SubTask's
    samples count together or not at all."""
    attempt_timeout_seconds: float | None = None
    """How long one attempt at a SubTask may take from its start; None: no limit of its own."""
    has_dynamic_timeout: bool = False
    """Whether an attempt has less time than that once it is known how long sub-tasks take; see
    `scheduler.ledger.dynamic_timeout`."""

    @property
    def subtask_count(self) -> int:
        """How many of its SubTasks could run at once."""
        return -(-self.repeat_times // (self.max_samples_per_subtask or self.repeat_times))


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One prompt plus its configuration; yields `repeat_times` samples and exactly one TaskDone.

    prompt and data are the handler's business alone: data is opaque bytes and is never decoded here.
    metadata: a JSON object; its "_dataset_cfg" may hold `sampling` and `stopping` of the data set, which come first in
    the cascade. client_key: the trainer's own name, unique among the live tasks of a submission; optional.
    """

    config: TaskConfig
    prompt: str = ""
    data: bytes = b""
    metadata: dict[str, Any] = {}
    client_key: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of a task's repeats, as a handler sees it."""

    task_id: str
    sample_no: int
    task: Task


class SubmissionKey(msgspec.Struct, frozen=True, gc=False):
    """Who calls it what: the key of a submission while it is not drained."""

    batch_id: BatchId
    namespace: str = DEFAULT_NAMESPACE


class Batch(msgspec.Struct):
    """Tasks of one type, launched together on one Evaluator: the unit of admission."""

    task_type: str
    tasks: list[Task] = msgspec.field(default_factory=list)
