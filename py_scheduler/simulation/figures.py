"""What a simulation came to: how long it took, beside how long it had to take at least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from py_scheduler.domain.resources import AMOUNTS, NODE_AMOUNTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import NodeResource
    from py_scheduler.simulation.spans import Spans

    Column = np.ndarray[tuple[int], np.dtype[np.float64]]
    Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class Supply(msgspec.Struct, frozen=True):
    """What there was at the beginning. slots: by evaluator, how many of its samples could run at once."""

    kinds: Mapping[str, float]
    slots: Mapping[str, int]
    max_running_samples: int


class Bound(msgspec.Struct, frozen=True):
    """The least time in which samples can have run, and what makes it so long."""

    seconds: float
    by: str


class SimulationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. Seconds are virtual; shares are between 0 and 1."""

    makespan_seconds: float
    """From the beginning until the last task was done."""
    bound_seconds: float
    """No order of the same samples on the same nodes takes less: the larger of the work over the room, by each kind of
    room, and the longest sample."""
    bound_by: str
    """Which of these it is."""
    bound_share: float
    """`bound_seconds` over `makespan_seconds`: 1 is the best there can be."""
    step_bound_seconds: float
    """The same for each step alone, added up: where each waits for the one before, no order takes less."""
    utilisation: dict[str, float]
    """By kind of room, how much of it samples held that came to their end."""
    wait_p50_seconds: float
    """For admission, of a sample."""
    wait_p95_seconds: float
    tail_share: float
    """Of the makespan: how long something ran and nothing waited for room."""
    steps: int
    steps_per_hour: float
    tasks: int
    samples: int
    outcomes: dict[str, int]
    """Of samples."""
    task_states: dict[str, int]
    failed_attempts: int
    """That were tried again."""
    failed_seconds: float
    """What those had held their room for."""


def supply_of(
    nodes: Iterable[NodeResource], specs: Iterable[EvaluatorSpec], slots: Mapping[str, int], max_running_samples: int
) -> Supply:
    """See Supply. slots: of the empty cluster; none without a layout."""
    kinds: dict[str, float] = {}
    for node in nodes:
        kinds["gpu"] = kinds.get("gpu", 0.0) + len(node.gpus)
        for kind in NODE_AMOUNTS:
            kinds[kind] = kinds.get(kind, 0.0) + getattr(node, kind)
        for name, count in node.named.items():
            kinds[f"named.{name}"] = kinds.get(f"named.{name}", 0.0) + count
    at_once = {
        spec.evaluator_id: min(slots.get(spec.evaluator_id, max_running_samples), max_running_samples) for spec in specs
    }
    used = {kind for spec in specs for kind in spec.sample_resource.taken}
    order = [*AMOUNTS, *sorted(kinds.keys() - set(AMOUNTS))]
    return Supply(
        {kind: kinds[kind] for kind in order if kinds.get(kind) and kind in used}, at_once, max_running_samples
    )


def bound_of(areas: Mapping[str, float], longest: float, specs: Mapping[str, EvaluatorSpec], supply: Supply) -> Bound:
    """areas: by evaluator, the seconds of all its samples. longest: of one of them."""
    reasons = {"the longest sample": longest, "max_running_samples": sum(areas.values()) / supply.max_running_samples}
    for kind, amount in supply.kinds.items():
        reasons[kind] = _held(areas, kind, specs) / amount
    for evaluator_id, area in areas.items():
        reasons[f"room for {evaluator_id}"] = area / max(supply.slots[evaluator_id], 1)
    by = max(reasons, key=lambda reason: reasons[reason])
    return Bound(reasons[by], by)


def _held(areas: Mapping[str, float], kind: str, specs: Mapping[str, EvaluatorSpec]) -> float:
    """How much of that kind of room is held for how many seconds."""
    return sum(area * specs[name].sample_resource.taken.get(kind, 0.0) for name, area in areas.items())


def bounds_of(spans: Spans, specs: Mapping[str, EvaluatorSpec], supply: Supply) -> tuple[Bound, float]:
    """Of all samples together, and of each step alone, added up."""
    held, step = np.asarray(spans.held), np.asarray(spans.step)
    evaluator = np.asarray(spans.evaluator)
    whole = bound_of(_areas(spans, held, evaluator), float(held.max(initial=0.0)), specs, supply)
    by_step = 0.0
    order = np.argsort(step, kind="stable")
    for place in np.split(order, np.flatnonzero(np.diff(step[order])) + 1):
        areas = _areas(spans, held[place], evaluator[place])
        by_step += bound_of(areas, float(held[place].max(initial=0.0)), specs, supply).seconds
    return whole, by_step


def _areas(spans: Spans, held: Column, evaluator: Column) -> dict[str, float]:
    sums = np.bincount(evaluator, weights=held, minlength=len(spans.evaluators.names))
    return {name: float(area) for name, area in zip(spans.evaluators.names, sums, strict=True) if area}


def utilisation_of(
    spans: Spans, specs: Mapping[str, EvaluatorSpec], supply: Supply, makespan: float
) -> dict[str, float]:
    """By kind of room, and of the places that `max_running_samples` gives."""
    areas = _areas(spans, np.asarray(spans.held), np.asarray(spans.evaluator))
    return {kind: _held(areas, kind, specs) / (amount * makespan) for kind, amount in supply.kinds.items() if makespan}


def tail_seconds(spans: Spans) -> float:
    """How long something ran and nothing waited for room."""
    times, waiting, running = course_of(spans)
    is_tail = (waiting[:-1] == 0) & (running[:-1] > 0)
    return float(np.diff(times)[is_tail].sum())


def course_of(spans: Spans) -> tuple[Column, Counts, Counts]:
    """The moments at which anything changed, and how many samples waited and ran from each of them on."""
    submitted, started = np.asarray(spans.submitted), np.asarray(spans.started)
    ended = started + np.asarray(spans.held)
    count = len(spans)
    times = np.concatenate([submitted, started, ended])
    waits = np.repeat(np.array([1, -1, 0]), count)
    runs = np.repeat(np.array([0, 1, -1]), count)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(waits[order]), np.cumsum(runs[order])
