"""A simulation is the engine: what a server recorded of a real run, replayed with its durations, goes as it went."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.app.building import build_pool
from py_scheduler.app.journal import export
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.simulation.simulate import SimulationSettings, simulate
from py_scheduler.simulation.traces import read_trace
from py_scheduler.simulation.workload import SimulatedStep, SimulatedTask
from tests.support.handlers import spec_of
from tests.support.harness import running_engine
from tests.support.simulated import cluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from py_scheduler.config import Config
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.simulation.spans import Spans

APART = 0.05
"""Seconds between any two moments of a run at which something is decided. What is closer together in a real run comes
in an order that the machine makes, and its load."""
EVAL_SECONDS = 0.02


class Sleeper(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        await asyncio.sleep(episode.sample.task.metadata["seconds"][episode.sample.sample_no])
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        await asyncio.sleep(EVAL_SECONDS)
        return Reward(score=1.0)


def drawn_tasks(drawn: random.Random, evaluator_id: str) -> list[SimulatedTask]:
    found = []
    for repeats in (3, 1, 2):
        seconds = tuple([drawn.uniform(0.3, 1.2) for _ in range(repeats)])
        found.append(SimulatedTask(seconds, (EVAL_SECONDS,) * repeats, evaluator_id))
    return found


def drawn_steps(config: Config, seed: int) -> list[SimulatedStep]:
    """A step, evals beside it and a step that comes while both are under way; all that is decided is decided apart."""
    drawn = random.Random(seed)
    while True:
        steps = [
            SimulatedStep(drawn_tasks(drawn, "a"), batch_id=0),
            SimulatedStep([], drawn_tasks(drawn, "b"), batch_id="0/quiz"),
            SimulatedStep(drawn_tasks(drawn, "b"), at_seconds=0.5, batch_id=1),
        ]
        spans = simulate(config, steps, SimulationSettings(ahead=None)).spans
        ends = [start + held for start, held in zip(spans.started, spans.held, strict=True)]
        moments = sorted([0.0, 0.5, *ends])
        if all(later - moment >= APART for moment, later in itertools.pairwise(moments)):
            return steps


async def really(config: Config, steps: list[SimulatedStep], folder: Path) -> None:
    """The same in real time, with handlers that sleep, into a journal."""
    specs = [
        spec_of(
            Sleeper(),
            table.evaluator_id,
            resource=table.resource,
            run_resource=table.run_resource,
            eval_resource=table.run_resource,
            batch_size=table.batch_size,
        )
        for table in config.evaluator
    ]
    pool = build_pool(config, folder)
    async with running_engine(*specs, pool=pool, settings=config.scheduler, journal=SqliteJournal(folder)) as harness:
        replies = []
        for step in steps:
            await asyncio.sleep(step.at_seconds)
            assert step.batch_id is not None
            replies.append(
                await harness.submit(
                    [real_task(task, is_eval=bool(step.evals)) for task in step.tasks or step.evals], step.batch_id
                )
            )
        for reply in replies:
            await harness.records_until_done(reply)


def real_task(task: SimulatedTask, *, is_eval: bool) -> Task:
    repeats = len(task.run_seconds)
    config = TaskConfig(task_type=task.evaluator_id, repeat_times=repeats, is_eval=is_eval)
    return Task(config=config, metadata={"seconds": list(task.run_seconds)})


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_recorded_run_replayed_admits_in_the_same_order_and_takes_as_long(tmp_path: Path, seed: int) -> None:
    config = cluster(share=2.0, concurrency=3, evaluators="a b", eval_weight=0.5)
    steps = drawn_steps(config, seed)
    (folder := tmp_path / "journal").mkdir()
    asyncio.run(really(config, steps, folder))
    events = list(export(folder))
    trace = tmp_path / "recorded.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))

    run = simulate(config, read_trace(trace), SimulationSettings(ahead=None))

    numbers: dict[str, int] = {}
    real: dict[tuple[int, int], float] = {}
    for event in events:
        if event["event"] == "TasksAccepted":
            numbers |= {accepted["task_id"]: len(numbers) + no for no, accepted in enumerate(event["tasks"])}
        for sample in event.get("samples", ()):
            real[numbers[sample["task_id"]], sample["sample_no"]] = sample["started_unix_seconds"]
    began = min(event["unix_seconds"] for event in events if event["event"] == "TasksAccepted")
    ended = max(event["unix_seconds"] for event in events if event["event"] == "TaskDone")
    assert in_order(run.spans) == [
        sorted(moment) for moment in split(sorted(real, key=real.__getitem__), map(len, in_order(run.spans)))
    ]
    assert run.figures.makespan_seconds == pytest.approx(ended - began, rel=0.03)


def in_order(spans: Spans) -> list[list[tuple[int, int]]]:
    """The samples that began at each moment, as they are named."""
    moments: dict[float, list[tuple[int, int]]] = {}
    for task_no, sample_no, start in zip(spans.task_no, spans.sample_no, spans.started, strict=True):
        moments.setdefault(round(start, 6), []).append((task_no, sample_no))
    return [sorted(moments[start]) for start in sorted(moments)]


def split(samples: list[tuple[int, int]], counts: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
    for count in counts:
        yield samples[:count]
        samples = samples[count:]
    assert samples == []
