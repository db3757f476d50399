"""From a data set's file through the real engine to filtered, padded and saved samples and their summary."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.rollout.files.details import DetailsWriter
from py_scheduler.rollout.files.iteration_summary import read_summary
from py_scheduler.rollout.files.store import RolloutStore
from py_scheduler.rollout.filters import FilterSettings, Rejection
from py_scheduler.rollout.groups import Group, group_of
from py_scheduler.rollout.sources.settings import SourceSettings
from py_scheduler.rollout.sources.sources import open_source
from py_scheduler.rollout.training import pad_groups, training_group
from tests.support.handlers import spec_of
from tests.support.harness import running_engine
from tests.support.steps.filtering import apply_filters

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task
    from tests.support.harness import Harness


class CountingAgent(BaseAgent):
    """Reads and answers; every other sample is right where the level is odd, and the fourth loses its connection."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([1, 2, 3], episode.sample.task.prompt)
        if episode.sample.sample_no == 3:
            raise ConnectionRefusedError("the tool is gone")
        return AgentResult(termination_reason="answered")

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        level, sample_no = episode.sample.task.metadata["level"], episode.sample.sample_no
        return Reward(score=float(level % 2 and sample_no % 2))


async def rolled_out(harness: Harness, tasks: list[Task]) -> list[Group]:
    reply = await harness.submit(tasks)
    samples: defaultdict[str, list[SampleDone]] = defaultdict(list)
    done: dict[str, TaskDone] = {}
    for record in await harness.records_until_done(reply):
        if isinstance(record.event, AttemptEnded):
            samples[record.event.task_id] += record.event.samples
        elif isinstance(record.event, TaskDone):
            done[record.event.task_id] = record.event
    return [group_of(task, samples[id_], done[id_]) for id_, task in zip(reply.task_ids, tasks, strict=True)]


async def test_a_step_by_hand(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{level}", "level": level} for level in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SourceSettings(name="levels", path="train.jsonl", task_type="agent", repeat_times=4)
    tasks = open_source(settings, tmp_path).take(6)
    async with running_engine(spec_of(CountingAgent())) as harness:
        groups = await rolled_out(harness, tasks)

    survivors = apply_filters(groups, FilterSettings(rejection=Rejection.SPREAD, finish_only=True))
    assert [group.task.metadata["level"] for group in survivors.groups] == [1, 3, 5]
    rejection, finish = survivors.reports
    assert (rejection.dropped_groups, rejection.group_reasons) == (3, {"no_spread": 3})
    assert finish.sample_reasons == {"infra_conn": 3}

    samples = pad_groups([training_group(group) for group in survivors.groups], 4)
    assert [[sample.remove_sample for sample in group] for group in samples] == [
        *[[False, False, False, True]] * 3,
        [True] * 4,
    ]
    store = RolloutStore(tmp_path / "out")
    for group, trained in zip(survivors.groups, samples, strict=False):
        store.checkpoint_group(0, group.task_id, trained)
    store.save(0, samples)
    store.drop_checkpoints(0)
    assert list(store.load()) == samples

    writer = DetailsWriter(store.root, "train", 0, samples=True)
    for group in groups:
        writer.add(group)
    writer.close(1.0, filters=survivors.reports)
    summary = read_summary(writer.paths[-1])
    assert summary.total.outcomes == {"solved": 3, "wrong_answer": 15, "infra_conn": 6}
    assert (summary.total.model_results, summary.total.accuracy) == (18, 3 / 18)
    assert summary.filters == survivors.reports
    assert sum(len(group.samples) for group in groups) == 24
    broken = training_group(groups[0])[3]
    assert broken.metadata["_termination_reason"] == Outcome.INFRA_CONN
    assert broken.metadata["_abort"]["phase"] == "run"
    assert "ConnectionRefusedError" in broken.metadata["_abort"]["error"]
