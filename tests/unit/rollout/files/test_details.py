"""What an iteration or an eval leaves behind for people."""

from __future__ import annotations

import gc
import json
import statistics
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.results import Outcome, Reward, Timings
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.rollout.files.details import SLOWEST, DetailsWriter
from py_scheduler.rollout.files.iteration_summary import IterationSummary, read_summary, summary_paths
from tests.support.steps.samples import SOLVED, WRONG, done_sample, group_with, trajectory_of

if TYPE_CHECKING:
    from pathlib import Path

TURNS = (("environment", 4), ("teacher", 2), ("environment", 1), ("student", 3))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_eval_leaves_three_files(tmp_path: Path) -> None:
    writer = DetailsWriter(tmp_path, "eval", 3, samples=True, started_unix_seconds=10.0)
    solved = done_sample(
        SOLVED,
        reward=Reward(score=1.0, details={"expected": "é"}),
        trajectory=trajectory_of(*TURNS),
        termination_reason="answered",
    )
    writer.add(group_with(solved, done_sample(WRONG, sample_no=1)))
    names = [path.name for path in writer.paths]
    assert names == ["3.jsonl", "3.placement.jsonl", "3.summary.json"]
    # They can be followed while the eval runs.
    first, second = lines_of(tmp_path / "eval_details" / "3.jsonl")
    summary = writer.close(70.0)

    assert (first["outcome"], first["score"], first["details"]) == ("solved", 1.0, {"expected": "é"})
    assert (first["dataset"], first["client_key"], first["sample_no"]) == ("gcd", "gcd/t-1", 0)
    assert (first["turns"], first["tokens"], first["generated_tokens"]) == (2, 10, 5)
    assert (first["prompt"], first["answer"]) == ("prompt of t-1", "wrote 1\nwrote 3")
    assert (first["node_ip"], first["gpu_ids"], first["wait_seconds"]) == ("10.0.0.1", [3], 1.0)
    assert (first["termination_reason"], second["outcome"]) == ("answered", "wrong_answer")

    placed = lines_of(tmp_path / "eval_details" / "3.placement.jsonl")
    assert [(line["turn_no"], line["source"], line["start"], line["tokens"]) for line in placed[:4]] == [
        (0, "environment", 0, 4),
        (1, "teacher", 4, 2),
        (2, "environment", 6, 1),
        (3, "student", 7, 3),
    ]
    assert {(line["node_ip"], tuple(line["gpu_ids"]), line["task_id"]) for line in placed} == {
        ("10.0.0.1", (3,), "t-1")
    }
    assert read_summary(tmp_path / "eval_details" / "3.summary.json") == summary
    assert summary.metrics == {"eval/gcd/accuracy": 0.5, "eval/gcd/pass@1": 0.5, "eval/gcd/pass@2": 1.0}
    assert summary.elapsed_seconds == 60.0


def test_lines_are_only_written_when_asked_for_and_always_anew(tmp_path: Path) -> None:
    folder = tmp_path / "eval_details"
    for samples in (True, True, False):
        writer = DetailsWriter(tmp_path, "eval", 0, samples=samples)
        writer.add(group_with(SOLVED))
        writer.close(0.0)
        assert len(lines_of(folder / "0.jsonl")) == 1
    DetailsWriter(tmp_path, "train", 0).close(0.0)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["0.jsonl", "0.placement.jsonl", "0.summary.json", "train_0.summary.json"]
    assert [path.name for path in summary_paths(tmp_path)] == ["0.summary.json", "train_0.summary.json"]
    assert summary_paths(folder) == summary_paths(tmp_path)
    assert summary_paths(tmp_path / "nowhere") == []


def test_a_summary_tells_of_each_data_set_and_of_all(tmp_path: Path) -> None:
    writer = DetailsWriter(tmp_path, "train", 2)
    writer.add(group_with(SOLVED, WRONG, Outcome.INFRA_CONN, Outcome.ABORTED, dataset="gcd"))
    writer.add(group_with(done_sample(WRONG, 0.5, trajectory=trajectory_of(*TURNS)), task_id="t-2", dataset="lcm"))
    report = FilterReport(filter="rejection", kept_groups=1, sample_reasons={"no_spread": 2})
    context = IterationContext(rollout_id=2, beta=0.25, t_max=64)
    summary = writer.close(0.0, context=context, filters=[report], warnings=["few"], reuse="roll_out")
    gcd, lcm = summary.datasets["gcd"], summary.datasets["lcm"]
    assert gcd.outcomes == {"solved": 1, "wrong_answer": 1, "infra_conn": 1, "aborted": 1}
    assert (gcd.samples, gcd.model_results, gcd.accuracy, gcd.pass_at_k) == (4, 2, 0.5, {"1": 0.5, "2": 1.0})
    assert (gcd.reward.count, gcd.reward.mean, gcd.reward.std, gcd.reward.min, gcd.reward.max) == (2, 0.5, 0.5, 0, 1)
    assert (lcm.accuracy, lcm.pass_at_k, lcm.reward.mean) == (0.0, {}, 0.5)
    assert lcm.tokens == {"environment": 5, "student": 3, "teacher": 2}
    assert (lcm.teacher_share, gcd.teacher_share) == (0.4, 0.0)
    total = summary.total
    assert (total.groups, total.samples, total.model_results, summary.dummies) == (2, 5, 3, 2)
    assert (total.time.wait_seconds, total.time.generate_seconds) == (5.0, 7.5)
    assert (total.time.tool_seconds, total.time.verify_seconds) == (2.5, 2.5)
    assert summary.nodes["10.0.0.1"].held_seconds == 12.5
    assert summary.nodes["10.0.0.1"].gpu_seconds == {"3": 12.5}
    assert summary.context is not None
    assert (summary.context.beta, summary.context.t_max) == (0.25, 64)
    assert (summary.filters, summary.warnings, summary.reuse, summary.metrics) == ((report,), ("few",), "roll_out", {})


def test_the_groups_own_rewards_are_what_is_told(tmp_path: Path) -> None:
    writer = DetailsWriter(tmp_path, "eval", 0, samples=True)
    writer.add(group_with(WRONG, SOLVED, WRONG, rewards=[1.0, 0.0, 1.0], group_outcomes=[SOLVED, WRONG, SOLVED]))
    summary = writer.close(0.0)
    assert summary.total.reward.mean == summary.total.accuracy == pytest.approx(2 / 3)
    assert summary.total.outcomes == {"solved": 2, "wrong_answer": 1}
    assert summary.metrics["eval/gcd/pass@3"] == 1.0
    assert {sample.outcome for sample in summary.slowest} == {"solved", "wrong_answer"}
    told = [(line["score"], line["outcome"]) for line in lines_of(writer.paths[0])]
    assert told == [(1.0, "solved"), (0.0, "wrong_answer"), (1.0, "solved")]


def test_a_sample_that_never_ran_held_no_node(tmp_path: Path) -> None:
    writer = DetailsWriter(tmp_path, "train", 0)
    writer.add(group_with(done_sample(Outcome.INFRA_OTHER, node_ip="", gpu_ids=(), timings=Timings())))
    assert writer.close(0.0).nodes == {}


def test_the_slowest_come_first_and_are_few() -> None:
    writer = DetailsWriter(None, "train", 0)
    for number in range(3 * SLOWEST):
        seconds = float(number * 7 % (3 * SLOWEST))
        timings = Timings(run_seconds=seconds, generate_seconds=seconds / 2)
        writer.add(group_with(done_sample(task_id=f"t-{number}", timings=timings), task_id=f"t-{number}"))
    slowest = writer.close(0.0).slowest
    assert [sample.held_seconds for sample in slowest] == [float(3 * SLOWEST - 1 - n) for n in range(SLOWEST)]
    assert writer.paths == ()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_reward_figures_equal_those_of_a_list(scores: list[float]) -> None:
    writer = DetailsWriter(None, "train", 0)
    for score in scores:
        writer.add(group_with(done_sample(WRONG, score)))
    reward = writer.close(0.0).total.reward
    assert reward.count == len(scores)
    assert reward.mean == pytest.approx(statistics.fmean(scores), rel=1e-9, abs=1e-6)
    assert reward.std == pytest.approx(statistics.pstdev(scores), rel=1e-6, abs=1e-4)
    assert (reward.min, reward.max) == (min(scores), max(scores))


def test_memory_does_not_grow_with_the_tasks() -> None:
    writer = DetailsWriter(None, "train", 0)

    def held_after(groups: int) -> int:
        for number in range(groups):
            writer.add(group_with(SOLVED, WRONG, task_id=f"t-{number}"))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = held_after(200)
        late = held_after(2_000)
    finally:
        tracemalloc.stop()
    assert late - early < 20_000
    assert writer.close(0.0).total.groups == 2_200


def test_a_summary_of_another_version_gives_what_both_know(tmp_path: Path) -> None:
    path = tmp_path / "train_4.summary.json"
    path.write_text('{"kind": "train", "rollout_id": 4, "invented_later": {"x": 1}, "total": {"samples": 3, "new": 1}}')
    summary = read_summary(path)
    assert (summary.rollout_id, summary.total.samples, summary.datasets) == (4, 3, {})
    path.write_text("{}")
    assert read_summary(path) == IterationSummary()


@pytest.mark.parametrize("content", ["", "{", '{"rollout_id": "x"}'])
def test_what_is_no_summary(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train_4.summary.json"
    path.write_text(content)
    with pytest.raises(FailedPreconditionError, match=r"train_4\.summary\.json is no summary"):
        read_summary(path)
    with pytest.raises(FailedPreconditionError):
        read_summary(tmp_path / "none.summary.json")
