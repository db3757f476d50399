"""All samples of one task, once its TaskDone is there: what a training step is made of (design words: Group)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, Reward, SampleDone
from py_scheduler.domain.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterable


class Group(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A task with its samples, in the order of sample_no.

    A filter may have taken samples out of it; `planned_samples` still says how many there were to be.
    """

    task_id: str
    task: Task
    samples: tuple[SampleDone, ...]
    done: TaskDone

    @property
    def planned_samples(self) -> int:
        return self.done.planned_samples

    @property
    def dataset(self) -> str:
        return self.task.config.dataset

    @property
    def judged(self) -> tuple[SampleDone, ...]:
        """`samples` as they count: with the reward and the outcome that the group's own scoring gave, if any."""
        if not self.done.rewards:
            return self.samples
        return tuple(_judged(sample, self.done) for sample in self.samples)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """Those of `judged`."""
        return tuple(sample.reward for sample in self.judged)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Those of `judged`."""
        return tuple(sample.outcome for sample in self.judged)

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores of `rewards`."""
        return tuple(reward.score for reward in self.rewards)


def group_of(task: Task, samples: Iterable[SampleDone], done: TaskDone) -> Group:
    """A group of samples that came in any order."""
    ordered = tuple(sorted(samples, key=lambda sample: sample.sample_no))
    return Group(task_id=done.task_id, task=task, samples=ordered, done=done)


def _judged(sample: SampleDone, done: TaskDone) -> SampleDone:
    number = sample.sample_no
    return msgspec.structs.replace(sample, reward=done.rewards[number], outcome=done.group_outcomes[number])
