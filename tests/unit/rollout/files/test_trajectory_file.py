"""Trajectory files and summaries."""

from __future__ import annotations

import io
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from py_scheduler.domain.generation import FinishReason, Generation, WeightSpan
from py_scheduler.domain.results import Outcome, Reward, SampleDone, Timings
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.trajectory import TrajectoryBuilder
from py_scheduler.rollout.figures import summarise, summary_table
from py_scheduler.rollout.files.trajectories import Origin, write_trajectories
from py_scheduler.version import version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TASKS = {
    "a": Task(config=TaskConfig(task_type="t", dataset="gcd"), client_key="gcd/0"),
    "b": Task(config=TaskConfig(task_type="t", dataset="lcm"), client_key="lcm/0"),
}


def sample(task_id: str, outcome: Outcome, score: float = 0.0, generated: int = 2) -> SampleDone:
    builder = TrajectoryBuilder()
    builder.append_environment([10, 11, 12], "what?")
    builder.append_generation(
        Generation.of(
            token_ids=[20 + i for i in range(generated)],
            log_probs=[-0.5] * generated,
            text="that",
            finish_reason=FinishReason.STOP,
            weight_spans=(WeightSpan("v1", 0, generated),),
        ),
        "student",
    )
    return SampleDone(
        task_id=task_id,
        sample_no=0,
        attempt_no=1,
        outcome=outcome,
        reward=Reward(score=score, details={"expected": "é"}),
        trajectory=builder.build(),
        gpu_ids=(3,),
        timings=Timings(wait_seconds=1.0, run_seconds=2.0, eval_seconds=0.5),
    )


def test_a_row_holds_aligned_arrays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.parquet"
    written = write_trajectories(path, [sample("a", Outcome.SOLVED, 1.0), sample("x", Outcome.WRONG_ANSWER)], TASKS)
    first, second = pq.read_table(path).to_pylist()
    assert written == 2
    assert first["token_ids"] == [10, 11, 12, 20, 21]
    assert first["loss_mask"] == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(first["log_probs"], [0, 0, 0, -0.5, -0.5])
    assert first["weight_spans"] == [{"version": "v1", "start": 3, "end": 5}]
    assert first["turns"] == [
        {"start": 0, "end": 3, "source": "environment", "finish_reason": None, "log_prob_kind": None},
        {"start": 3, "end": 5, "source": "student", "finish_reason": "stop", "log_prob_kind": "sampled"},
    ]
    assert (first["dataset"], first["client_key"], first["outcome"], first["reward"]) == ("gcd", "gcd/0", "solved", 1.0)
    assert (first["prompt"], first["answer"]) == ("what?", "that")
    assert first["reward_details_json"] == '{"expected":"é"}'
    assert first["gpu_ids"] == [3]
    assert second["dataset"] == ""


def test_a_file_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    origin = Origin(batch_id=7, namespace="ns", model="smol")
    write_trajectories(path, [sample("a", Outcome.SOLVED)], TASKS, origin)
    (row,) = pq.read_table(path).to_pylist()
    names = ("batch_id", "namespace", "task_type", "model", "weight_version")
    assert [row[name] for name in names] == ["7", "ns", "t", "smol", "v1"]
    written = pq.read_schema(path).metadata
    assert written[b"py_scheduler_version"].decode() == version()
    assert datetime.fromisoformat(written[b"created"].decode()).tzinfo is not None


def test_a_sample_of_several_versions_has_no_plain_one(tmp_path: Path) -> None:
    whole = sample("a", Outcome.SOLVED)
    spans = (WeightSpan("v1", 3, 4), WeightSpan("v2", 4, 5))
    mixed = msgspec.structs.replace(whole, trajectory=msgspec.structs.replace(whole.trajectory, weight_spans=spans))
    write_trajectories(tmp_path / "out.parquet", [mixed], TASKS)
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["weight_version"], len(row["weight_spans"])) == ("", 2)


def test_a_sample_without_tokens_has_empty_arrays(tmp_path: Path) -> None:
    lost = SampleDone(task_id="a", sample_no=0, attempt_no=1, outcome=Outcome.INFRA_OTHER, error="gone")
    write_trajectories(tmp_path / "out.parquet", [lost], TASKS)
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["token_ids"], row["loss_mask"], row["log_probs"], row["error"]) == ([], [], [], "gone")


def test_more_samples_than_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    assert write_trajectories(path, (sample("a", Outcome.SOLVED) for _ in range(1_001)), TASKS) == 1_001
    assert pq.read_metadata(path).num_rows == 1_001


def test_a_failed_write_leaves_the_file_before_it(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write_trajectories(path, [sample("a", Outcome.SOLVED)], TASKS)

    def failing() -> Iterator[SampleDone]:
        yield sample("b", Outcome.SOLVED)
        raise RuntimeError("the stream broke")

    with pytest.raises(RuntimeError, match="broke"):
        write_trajectories(path, failing(), TASKS)
    assert pq.read_table(path).to_pylist()[0]["task_id"] == "a"


def test_rates_are_over_model_results_alone() -> None:
    samples = [
        sample("a", Outcome.SOLVED, 1.0),
        sample("a", Outcome.WRONG_ANSWER, 0.5),
        sample("a", Outcome.INFRA_CONN),
        sample("a", Outcome.ABORTED),
        sample("b", Outcome.INFRA_OTHER),
    ]
    summary = summarise(samples, TASKS)
    gcd, lcm = summary.datasets["gcd"], summary.datasets["lcm"]
    assert (gcd.samples, gcd.model_results, gcd.solve_rate, gcd.mean_reward) == (4, 2, 0.5, 0.75)
    assert (lcm.samples, lcm.solve_rate, lcm.mean_reward) == (1, None, None)
    assert (summary.total.samples, summary.total.generated_tokens, summary.total.prompt_tokens) == (5, 10, 15)
    assert (gcd.mean_wait_seconds, gcd.mean_run_seconds) == (1.0, 2.5)


def test_the_table_shows_the_outcomes_that_occurred() -> None:
    text = io.StringIO()
    summary = summarise([sample("a", Outcome.SOLVED, 1.0), sample("b", Outcome.INFRA_CONN)], TASKS)
    Console(file=text, width=120).print(summary_table(summary))
    assert "solved" in text.getvalue()
    assert "infra conn" in text.getvalue()
    assert "wrong answer" not in text.getvalue()


def test_a_summary_of_nothing() -> None:
    summary = summarise([], TASKS)
    assert summary.total.solve_rate is None
    assert summary_table(summary).row_count == 1
