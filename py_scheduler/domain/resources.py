"""Supply and demand of placement: what a node has, what a sample or a batch holds.

Floats are what people write; the placement core turns them into integers in one place (micro-GPU, milli-cores, MiB).
Source: seed 1, section 3 (resource descriptors).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from py_scheduler.domain.values.frozen_dict import FrozenDict
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NODE_AMOUNTS = {"cpu": "cores", "memory_gb": "GiB"}
"""The kinds of room that a node has one amount of, each with its unit. They are fields of NodeResource, Resource and
NodeView and of the messages alike; what is free of `cpu` is `free_cpu` in a NodeView.
"""
AMOUNTS = ("gpu", *NODE_AMOUNTS)
"""The kinds of room that a sample takes, beside named resources. GPUs of a node are counted one by one."""
MAX_NAMED_AMOUNT = 2**32 - 1
"""The most of one named resource that a node can have and a sample can take."""
MAX_BUDGET_AMOUNT = 2**63 - 1
MAX_NAMES = 64
"""Named resources, and likewise labels, of one resource or node."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?", re.ASCII)
_NAME_RULE = "must have 1 to 63 characters of A-Z a-z 0-9 . _ - / and begin and end with a letter or digit"
_SHOWN = 64
_NONE: FrozenDict[str, Any] = FrozenDict()


class Resource(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, cache_hash=True):
    """A demand of one sample, or the budget of one batch. Its hash is made once: the ready queue asks for it often."""

    gpu: float = 0.0
    """GPUs; below 1 a share of one GPU, from 1 on a whole number of entirely free GPUs of one node."""
    cpu: float = 0.0
    """Cores."""
    memory_gb: float = 0.0
    """GiB."""
    concurrency: int = 1
    """Running samples; 1 for a demand, a ceiling in a budget."""
    # Of strings and numbers only and never changed, so that no cycle can go through them and gc=False holds.
    named: dict[str, int] = _NONE
    """Further things that there is a number of (licences, sandboxes), by name; 0 is the same as absent."""
    required_labels: dict[str, str] = _NONE
    """Only nodes that have all of these labels will do; not looked at in a budget."""

    def __post_init__(self) -> None:
        if type(self.named) is not FrozenDict and isinstance(self.named, dict):
            named = FrozenDict({name: count for name, count in self.named.items() if count != 0})
            msgspec.structs.force_setattr(self, "named", named)
        if type(self.required_labels) is not FrozenDict and isinstance(self.required_labels, dict):
            msgspec.structs.force_setattr(self, "required_labels", FrozenDict(self.required_labels))

    def field_max(self, other: Resource) -> Resource:
        """The least resource that covers both, field by field; it requires the labels of both.

        Raises InvalidArgumentError for labels that are required to have two values.
        """
        conflicts = [
            FieldViolation(
                f"required_labels.{key}",
                f"must be {value!r} and {other.required_labels[key]!r} at once, which no node can be: a sample stays "
                f"where it is from run to eval",
            )
            for key, value in self.required_labels.items()
            if other.required_labels.get(key, value) != value
        ]
        if conflicts:
            raise InvalidArgumentError(conflicts)
        names = [*self.named, *(name for name in other.named if name not in self.named)]
        return Resource(
            concurrency=max(self.concurrency, other.concurrency),
            named={name: max(self.named.get(name, 0), other.named.get(name, 0)) for name in names},
            required_labels=self.required_labels | other.required_labels,
            **{kind: max(getattr(self, kind), getattr(other, kind)) for kind in AMOUNTS},
        )

    @property
    def taken(self) -> dict[str, float]:
        """How much it takes of each kind of room that it takes anything of: `{"gpu": 0.5, "named.licence": 1}`."""
        taken = {kind: amount for kind in AMOUNTS if (amount := getattr(self, kind))}
        return taken | {f"named.{name}": count for name, count in self.named.items()}

    @property
    def words(self) -> str:
        """For messages: `gpu 0.5, cpu 4, memory_gb 16, named.licence 1, label zone=a`."""
        return ", ".join(
            [
                *(f"{kind} {getattr(self, kind):g}" for kind in AMOUNTS),
                *(f"named.{name} {count:,}" for name, count in self.named.items()),
                *(f"label {key}={value}" for key, value in self.required_labels.items()),
            ]
        )


class NodeResource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supply of one node."""

    node_ip: str
    """Its address, which names it."""
    gpus: list[int]
    """The ids of its GPUs."""
    cpu: float
    """Cores."""
    memory_gb: float
    """GiB."""
    named: dict[str, int] = {}
    """How much there is of each named resource."""
    labels: dict[str, str] = {}
    """What samples may require it to be."""


class PlacementToken(Protocol):
    """Room for one running sample on one node, held until released."""

    @property
    def node_ip(self) -> str: ...

    @property
    def gpu_ids(self) -> list[int]: ...

    def release(self) -> None:
        """Gives the room back. Raises LeaseError the second time."""
        ...


def check_extras(resource: Resource, *, is_budget: bool = False) -> Iterator[FieldViolation]:
    """Faulty named resources and labels; the rule is the placement core's, told before there is a pool."""
    yield from check_named(resource.named, MAX_BUDGET_AMOUNT if is_budget else MAX_NAMED_AMOUNT)
    yield from check_labels(resource.required_labels, "required_labels")


def check_named(named: Mapping[str, int], limit: int) -> Iterator[FieldViolation]:
    """See `check_extras`."""
    yield from _check_names(named, "named")
    for name, count in named.items():
        if _NAME.fullmatch(name) and not 0 <= count <= limit:
            yield FieldViolation(f"named.{name}", f"is {count}, must be at least 0 and at most {limit}")


def check_labels(labels: Mapping[str, str], field: str) -> Iterator[FieldViolation]:
    """See `check_extras`."""
    yield from _check_names(labels, field)
    for key, value in labels.items():
        if _NAME.fullmatch(key) and not _NAME.fullmatch(value):
            yield FieldViolation(f"{field}.{key}", f"the value {value[:_SHOWN]!r} {_NAME_RULE}")


def _check_names(names: Mapping[str, Any], field: str) -> Iterator[FieldViolation]:
    if len(names) > MAX_NAMES:
        yield FieldViolation(field, f"has {len(names)} names, at most {MAX_NAMES} can be")
        return
    for name in names:
        if not _NAME.fullmatch(name):
            yield FieldViolation(field, f"the name {name[:_SHOWN]!r} {_NAME_RULE}")
