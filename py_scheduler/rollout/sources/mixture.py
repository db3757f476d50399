"""Several data sources as one, mixed by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.episodes.cascade import DATASET_CONFIG_KEY, DatasetConfig, dataset_config
from py_scheduler.domain.training.data import DataSource
from py_scheduler.errors import FailedPreconditionError, FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.data import SourceState


_MOST_WEIGHT = 1e6
"""Sums of such weights stay finite, and a source that weighs this much leaves the others a turn now and then."""


def weight_fault(weight: float) -> str | None:
    """What is wrong with a source's weight, if anything."""
    if 1 / _MOST_WEIGHT <= weight <= _MOST_WEIGHT:
        return None
    return f"is {weight:g}, must be above 0: from {1 / _MOST_WEIGHT:g} to {_MOST_WEIGHT:g}"


class WeightedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a mixture. config: what it says about its data set; None leaves what its tasks say themselves."""

    source: DataSource
    weight: float = 1.0
    config: DatasetConfig | None = None


class _MixtureState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    members: dict[str, dict[str, Any]]
    credits: dict[str, float]
    ended: list[str]


class MultiDataSource:
    """Several sources, mixed by weight, always in the same order; implements `DataSource`.

    Smooth weighted round robin: each turn every source gains its weight, and the richest gives a task and pays the sum
    of all. So a source A of weight 2 and a B of weight 1 give A B A, A B A. Every task carries
    `metadata["_dataset_cfg"]`. A source that has ended leaves its share to the others.
    """

    def __init__(self, members: Sequence[WeightedSource], name: str = "mixture") -> None:
        faults = []
        names = [member.source.name for member in members]
        for member, own in zip(members, names, strict=True):
            if names.count(own) > 1:
                faults.append(FieldViolation(f"data set {own!r}", "is there twice: names must differ"))
            if fault := weight_fault(member.weight):
                faults.append(FieldViolation(f"data set {own!r}, weight", fault))
        if not members:
            faults.append(FieldViolation("sources", "there is none"))
        if faults:
            raise InvalidArgumentError(dict.fromkeys(faults))
        self._name = name
        self._members = {member.source.name: member for member in members}
        self._credits = dict.fromkeys(names, 0.0)
        self._ended: set[str] = set()

    @property
    def name(self) -> str:
        return self._name

    @property
    def names(self) -> tuple[str, ...]:
        """Of the members, in their order."""
        return tuple(self._members)

    def take(self, count: int) -> list[Task]:
        """Fewer than `count` only when every source has ended.

        Raises what a member raises; the tasks taken in that call are then lost, so go back by `restore`.
        """
        tasks: list[Task] = []
        while len(tasks) < count and len(self._ended) < len(self._members):
            member = self._members[self._richest()]
            taken = member.source.take(1)
            if taken:
                self._credits[member.source.name] -= self._live_weight()
                tasks.append(_tagged(taken[0], member))
            else:
                self._ended.add(member.source.name)
        return tasks

    def state(self) -> SourceState:
        """The states of all members, and whose turn it is."""
        members = {name: member.source.state() for name, member in self._members.items()}
        ended = [name for name in self._members if name in self._ended]
        state = _MixtureState(source=self.name, members=members, credits=dict(self._credits), ended=ended)
        return msgspec.structs.asdict(state)

    def restore(self, state: SourceState) -> None:
        """Brings all members to the state. Raises FailedPreconditionError when it is of other members."""
        try:
            saved = msgspec.convert(state, _MixtureState)
        except msgspec.ValidationError as error:
            raise FailedPreconditionError(f"this is no state of the mixture {self.name!r}: {error}") from error
        if saved.source != self.name or not self._members.keys() == saved.members.keys() == saved.credits.keys():
            raise FailedPreconditionError(
                f"this is the state of {saved.source!r} with {', '.join(saved.members)}, "
                f"not of {self.name!r} with {', '.join(self._members)}"
            )
        for name, member in self._members.items():
            member.source.restore(saved.members[name])
        self._credits = dict(saved.credits)
        self._ended = set(saved.ended)

    def _live_weight(self) -> float:
        return sum(member.weight for name, member in self._members.items() if name not in self._ended)

    def _richest(self) -> str:
        live = [name for name in self._members if name not in self._ended]
        for name in live:
            self._credits[name] += self._members[name].weight
        return max(live, key=self._credits.__getitem__)


def said_by(config: DatasetConfig) -> dict[str, Any]:
    """The configuration as metadata hold it: without what it does not say."""
    return {key: value for key, value in msgspec.to_builtins(config).items() if value}


def _tagged(task: Task, member: WeightedSource) -> Task:
    name = member.source.name
    config = dataset_config(task.metadata) if member.config is None else member.config
    told = said_by(msgspec.structs.replace(config, name=name))
    return msgspec.structs.replace(
        task,
        metadata=task.metadata | {DATASET_CONFIG_KEY: told},
        config=task.config if task.config.dataset else msgspec.structs.replace(task.config, dataset=name),
    )
