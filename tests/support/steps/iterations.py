"""Groups of finished samples, and whole iterations written with them as a loop writes them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, Reward, SampleDone, TaskState, Timings
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.trajectory import ENVIRONMENT, Trajectory, Turn
from py_scheduler.rollout.files.details import DetailsWriter
from py_scheduler.rollout.groups import Group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.training.steps import FilterReport
    from py_scheduler.rollout.files.iteration_summary import IterationSummary, Kind


def sample(number: int, outcome: Outcome, task_id: str, node: int = 1, seconds: float = 1.0) -> SampleDone:
    """Six token ids, four of them generated; generating takes half of `seconds`, tools and scoring a quarter each."""
    turns = (Turn(start=0, end=2, source=ENVIRONMENT, text="2 + 2?"), Turn(start=2, end=6, source="student", text="4"))
    return SampleDone(
        task_id=task_id,
        sample_no=number,
        attempt_no=1,
        outcome=outcome,
        reward=Reward(score=float(outcome is Outcome.SOLVED)),
        trajectory=Trajectory(
            token_id_bytes=bytes(24), log_prob_bytes=bytes(24), loss_mask_bytes=b"\0\0\1\1\1\1", turns=turns
        ),
        node_ip=f"10.0.0.{node}",
        gpu_ids=(node % 4,),
        timings=Timings(
            wait_seconds=seconds,
            run_seconds=0.75 * seconds,
            generate_seconds=0.5 * seconds,
            eval_seconds=0.25 * seconds,
        ),
    )


def group(
    task_id: str, outcomes: Sequence[Outcome], dataset: str = "gsm8k", *, node: int = 1, seconds: float = 1.0
) -> Group:
    """One sample to an outcome; each takes `seconds` more than the one before it."""
    samples = tuple(
        sample(number, outcome, task_id, node, (number + 1) * seconds) for number, outcome in enumerate(outcomes)
    )
    done = TaskDone(
        submission_id="s1",
        task_id=task_id,
        client_key="",
        state=TaskState.SUCCEEDED,
        planned_samples=len(samples),
        outcomes={outcome: list(outcomes).count(outcome) for outcome in outcomes},
        reason="",
        unix_seconds=0.0,
    )
    task = Task(config=TaskConfig(task_type="math", repeat_times=len(samples), dataset=dataset), prompt="2 + 2?")
    return Group(task_id=task_id, task=task, samples=samples, done=done)


def write_iteration(
    root: Path,
    kind: Kind,
    rollout_id: int,
    groups: Sequence[Group],
    *,
    beta: float | None = None,
    filters: Sequence[FilterReport] = (),
    warnings: Sequence[str] = (),
) -> IterationSummary:
    """As a loop that began at second 100 and took ten."""
    writer = DetailsWriter(root, kind, rollout_id, samples=True, started_unix_seconds=100.0)
    for one in groups:
        writer.add(one)
    context = None if beta is None else IterationContext(rollout_id=rollout_id, beta=beta)
    return writer.close(110.0, context=context, filters=filters, warnings=warnings)


def random_groups(seed: int, count: int, datasets: Sequence[str], solve_rate: float, nodes: int = 4) -> list[Group]:
    """Groups of four with every outcome among them, most of them solved or wrong."""
    rng = random.Random(seed)
    weights = [20 * solve_rate, 20 * (1 - solve_rate), 2, 1, 1, 0.6, 0.5, 0.5, 0.4]
    return [
        group(
            f"s{seed:016x}-{number}",
            rng.choices(list(Outcome), weights, k=4),
            datasets[number % len(datasets)],
            node=rng.randrange(1, nodes + 1),
            seconds=rng.uniform(0.5, 3.0),
        )
        for number in range(count)
    ]
