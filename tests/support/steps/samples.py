"""Finished samples and groups, as the engine would deliver them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.generation import FinishReason, Generation, WeightSpan
from py_scheduler.domain.results import Outcome, Reward, SampleDone, TaskState, Timings
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.trajectory import Trajectory, TrajectoryBuilder
from py_scheduler.rollout.groups import Group, group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SOLVED, WRONG = Outcome.SOLVED, Outcome.WRONG_ANSWER


def trajectory_of(*turns: tuple[str, int], finish_reason: FinishReason = FinishReason.STOP) -> Trajectory:
    """Turns of (source, tokens); what was generated ends in `finish_reason`."""
    builder = TrajectoryBuilder()
    for number, (source, tokens) in enumerate(turns):
        ids = [100 * (number + 1) + i for i in range(tokens)]
        if source == "environment":
            builder.append_environment(ids, f"read {number}")
        else:
            builder.append_generation(
                Generation.of(
                    token_ids=ids,
                    log_probs=[-0.1 * (i + 1) for i in range(tokens)],
                    text=f"wrote {number}",
                    finish_reason=finish_reason,
                    weight_spans=(WeightSpan("v1", 0, tokens),),
                ),
                source,
            )
    return builder.build()


SHORT = (("environment", 3), ("student", 2))


def done_sample(
    outcome: Outcome = SOLVED, score: float | None = None, *, sample_no: int = 0, task_id: str = "t-1", **changes: Any
) -> SampleDone:
    """A sample of five tokens, two of them generated; one that solved scores 1."""
    values: dict[str, Any] = {
        "task_id": task_id,
        "sample_no": sample_no,
        "attempt_no": 1,
        "outcome": outcome,
        "reward": Reward(score=float(outcome is SOLVED) if score is None else score),
        "trajectory": trajectory_of(*SHORT),
        "node_ip": "10.0.0.1",
        "gpu_ids": (3,),
        "timings": Timings(wait_seconds=1.0, run_seconds=2.0, generate_seconds=1.5, eval_seconds=0.5),
        "started_unix_seconds": 1_000.0,
        **changes,
    }
    return SampleDone(**values)


def group_with(
    *samples: SampleDone | Outcome,
    task_id: str = "t-1",
    dataset: str = "gcd",
    metadata: dict[str, Any] | None = None,
    rewards: Sequence[float] = (),
    group_outcomes: Sequence[Outcome] = (),
) -> Group:
    """A group of these samples, numbered in this order. group_outcomes: left out, the rewards change none."""
    made = [
        done_sample(given, sample_no=number, task_id=task_id) if isinstance(given, Outcome) else given
        for number, given in enumerate(samples)
    ]
    task = Task(
        config=TaskConfig(task_type="t", repeat_times=len(made), dataset=dataset),
        prompt=f"prompt of {task_id}",
        metadata=metadata or {},
        client_key=f"{dataset}/{task_id}",
    )
    done = TaskDone(
        submission_id="s-1",
        task_id=task_id,
        client_key=task.client_key,
        state=TaskState.SUCCEEDED,
        planned_samples=len(made),
        outcomes={outcome: sum(s.outcome is outcome for s in made) for outcome in Outcome},
        reason="",
        unix_seconds=2_000.0,
        rewards=tuple(Reward(score=score) for score in rewards),
        group_outcomes=tuple(group_outcomes) or tuple(sample.outcome for sample in made if rewards),
    )
    return group_of(task, made, done)
