"""The shipped batching strategy. Source: seed 1, section 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.task import Batch, Task

BatchingStrategy = Callable[[Sequence[Task], Mapping[str, EvaluatorSpec]], list[Batch]]
"""Any callable that puts every task into exactly one batch of its own task type."""


def fifo_batching(tasks: Sequence[Task], specs: Mapping[str, EvaluatorSpec]) -> list[Batch]:
    """Groups tasks by type in the order they are met; a batch is full at its spec's batch_size (None: never).

    Evals and training share room by weight, so no batch holds both.
    """
    batches: list[Batch] = []
    fill_fifo(tasks, specs, batches, {})
    return batches


def fill_fifo(
    tasks: Sequence[Task],
    specs: Mapping[str, EvaluatorSpec],
    batches: list[Batch],
    filling: dict[tuple[str, bool], Batch],
) -> None:
    """`fifo_batching` of some tasks, behind those that are in `batches` already; `filling` has those with room left."""
    for task in tasks:
        task_type = task.config.task_type
        kind = (task_type, task.config.is_eval)
        batch = filling.get(kind)
        if batch is None:
            batch = filling[kind] = Batch(task_type)
            batches.append(batch)
        batch.tasks.append(task)
        spec = specs.get(task_type)
        if spec is not None and spec.batch_size is not None and len(batch.tasks) >= spec.batch_size:
            del filling[kind]
