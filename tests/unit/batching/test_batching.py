from __future__ import annotations

from py_scheduler.batching import fifo_batching
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of


def batches_of(*task_types: str, **sizes: int | None) -> list[tuple[str, list[str]]]:
    specs = {name: spec_of(SolvingAgent(), name, batch_size=size) for name, size in sizes.items()}
    tasks = [task_of(str(number), task_type) for number, task_type in enumerate(task_types)]
    return [(batch.task_type, [task.prompt for task in batch.tasks]) for batch in fifo_batching(tasks, specs)]


def test_tasks_are_grouped_by_type_in_the_order_they_are_met() -> None:
    assert batches_of("a", "b", "a", "a", "b", a=2, b=2) == [("a", ["0", "2"]), ("b", ["1", "4"]), ("a", ["3"])]


def test_the_last_batch_may_be_smaller() -> None:
    assert batches_of("a", "a", "a", "a", "a", a=4) == [("a", ["0", "1", "2", "3"]), ("a", ["4"])]


def test_no_batch_size_means_one_batch() -> None:
    assert batches_of("a", "a", "a", a=None) == [("a", ["0", "1", "2"])]


def test_a_type_without_a_spec_is_one_batch() -> None:
    assert batches_of("x", "a", "x", a=1) == [("x", ["0", "2"]), ("a", ["1"])]


def test_evals_and_training_never_share_a_batch() -> None:
    specs = {"a": spec_of(SolvingAgent(), "a", batch_size=2)}
    tasks = [task_of(str(number), "a", is_eval=number in (1, 2, 5)) for number in range(6)]
    batches = [[task.prompt for task in batch.tasks] for batch in fifo_batching(tasks, specs)]
    assert batches == [["0", "3"], ["1", "2"], ["4"], ["5"]]
