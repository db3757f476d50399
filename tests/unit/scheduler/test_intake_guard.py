"""What `Intake.guard` refuses is what `check_deadlock` refuses, by the nodes that take tokens at that moment."""

from __future__ import annotations

import pytest

from py_scheduler.batching import fifo_batching
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.task import Batch, Task, TaskConfig
from py_scheduler.errors import UnplaceableError
from py_scheduler.placement import PlacementPool, check_deadlock
from py_scheduler.scheduler.intake import Intake
from tests.support.handlers import SolvingAgent, gpu_spec, spec_of, two_nodes

GPUS = gpu_spec(SolvingAgent(), 1.0, evaluator_id="gpus")
CORES = spec_of(SolvingAgent(), "cores", resource=Resource(cpu=8, concurrency=8), run_resource=Resource(cpu=1))


def refused(guard: Intake, pool: PlacementPool, samples: int) -> bool:
    """Whether so many samples are refused, by the guard and by the rule alike, with the same words."""
    said = []
    for check in (
        lambda: guard.guard([Batch("cores", [Task(config=TaskConfig(task_type="cores", repeat_times=100))])]),
        lambda: guard.guard([Batch("gpus", [Task(config=TaskConfig(task_type="gpus"))] * samples)]),
        lambda: check_deadlock(
            pool,
            evaluator_id="gpus",
            budget=GPUS.resource,
            per_sample=GPUS.sample_resource,
            max_batch_samples=samples,
        ),
    ):
        try:
            check()
            said.append("")
        except UnplaceableError as error:
            said.append(str(error))
    assert said[0] == ""
    assert said[1] == said[2]
    return bool(said[1])


def test_a_batch_is_measured_against_the_nodes_of_its_moment() -> None:
    pool = two_nodes()  # Of 8 GPUs each; the budget is 16.
    intake = Intake([GPUS, CORES], pool, fifo_batching)
    assert not refused(intake, pool, 100), "16 run at a time"
    pool.drain_node("10.0.0.2")
    assert [refused(intake, pool, samples) for samples in (8, 9, 100)] == [False, True, True]
    pool.resume_node("10.0.0.2")
    assert not refused(intake, pool, 100)
    pool.remove_node("10.0.0.2")
    assert [refused(intake, pool, samples) for samples in (8, 9)] == [False, True]
    pool.add_node(NodeResource(node_ip="10.0.0.3", gpus=[0, 1, 2, 3], cpu=64, memory_gb=256))
    assert [refused(intake, pool, samples) for samples in (12, 13)] == [False, True]


def test_a_sample_that_no_budget_holds_is_refused_before_there_is_a_batch() -> None:
    too_small = gpu_spec(SolvingAgent(), 1.0, budget_gpus=0.5)
    with pytest.raises(UnplaceableError):
        Intake([too_small], None, fifo_batching)
