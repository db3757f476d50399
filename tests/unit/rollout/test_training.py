"""Groups, and the samples that trainers get of them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from py_scheduler.domain.generation import FinishReason
from py_scheduler.domain.results import Outcome, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY
from py_scheduler.rollout.groups import group_of
from py_scheduler.rollout.training import SampleStatus, pad_groups, training_group, training_sample
from tests.support.steps.samples import SOLVED, WRONG, done_sample, group_with, trajectory_of

TASK = Task(config=TaskConfig(task_type="t", dataset="gcd"), prompt="what?", metadata={"level": 3})


def test_a_finished_sample_carries_its_arrays_and_its_reward() -> None:
    done = done_sample(WRONG, reward=Reward(score=0.25, details={"expected": "7"}), termination_reason="answered")
    sample = training_sample(TASK, done)
    assert (sample.status, sample.remove_sample, sample.score) == (SampleStatus.COMPLETED, False, 0.25)
    assert sample.reward == {"expected": "7", "score": 0.25}
    assert sample.token_ids.tolist() == [100, 101, 102, 200, 201]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(sample.log_probs, [0, 0, 0, -0.1, -0.2], rtol=1e-6)
    assert sample.metadata == {
        "level": 3,
        "_termination_reason": "wrong_answer",
        "_termination_reason_agent": "answered",
    }
    assert TASK.metadata == {"level": 3}


def test_a_sample_tells_its_weight_epoch_and_staleness_also_as_a_dummy() -> None:
    for outcome in (SOLVED, Outcome.ABORTED):
        metadata = training_sample(TASK, done_sample(outcome, weight_epoch=3, staleness=2)).metadata
        assert (metadata["_weight_epoch"], metadata["_staleness"]) == (3, 2)


def test_the_groups_score_takes_the_place_of_the_samples_own_and_changes_what_it_came_to() -> None:
    group = group_with(SOLVED, WRONG, rewards=[0.5, 1.0], group_outcomes=[WRONG, SOLVED])
    first, second = training_group(group)
    assert (first.reward, second.score) == ({"score": 0.5}, 1.0)
    assert [one.metadata["_termination_reason"] for one in (first, second)] == ["wrong_answer", "solved"]
    assert [sample.outcome for sample in group.samples] == [SOLVED, WRONG], "the facts stay what they are"


def test_the_source_of_every_token_is_known() -> None:
    turns = (("environment", 2), ("teacher", 2), ("environment", 1), ("student", 3))
    sample = training_sample(TASK, done_sample(trajectory=trajectory_of(*turns)))
    assert sample.teacher_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert sample.source_mask("student").tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    generated = sample.teacher_mask | sample.source_mask("student")
    assert (generated == sample.loss_mask).all()


def test_a_generation_that_was_cut_is_truncated() -> None:
    cut = trajectory_of(("environment", 1), ("student", 2), finish_reason=FinishReason.LENGTH)
    assert training_sample(TASK, done_sample(trajectory=cut)).status is SampleStatus.TRUNCATED


@pytest.mark.parametrize(
    "outcome", [Outcome.INFRA_CONN, Outcome.INFRA_SANDBOX, Outcome.INFRA_OTHER, Outcome.ABORTED, Outcome.AGENT_TIMEOUT]
)
def test_what_was_broken_off_is_a_dummy(outcome: Outcome) -> None:
    done = done_sample(outcome, 0.7, error="ValueError: gone", phase="eval", termination_reason="gave_up")
    sample = training_sample(TASK, done)
    assert (sample.status, sample.remove_sample, sample.reward) == (SampleStatus.ABORTED, True, {"score": 0.0})
    assert len(sample.token_ids) == len(sample.log_probs) == len(sample.loss_mask) == 2
    assert not sample.loss_mask.any()
    assert sample.metadata["_termination_reason"] == outcome.value
    assert sample.metadata["_termination_reason_agent"] == "gave_up"
    assert sample.metadata["_abort"] == {
        "phase": "eval",
        "start_unix_seconds": 1_000.0,
        "end_unix_seconds": 1_002.5,
        "seconds": 2.5,
        "node_ip": "10.0.0.1",
        "gpu_ids": [3],
        "turns": 1,
        "error": "ValueError: gone",
    }


def test_one_that_never_ran_has_no_window() -> None:
    lost = done_sample(Outcome.INFRA_OTHER, started_unix_seconds=0.0, node_ip="", gpu_ids=(), error="no node")
    annotation = training_sample(TASK, lost).metadata["_abort"]
    assert (annotation["start_unix_seconds"], annotation["end_unix_seconds"]) == (None, None)


def test_a_sample_without_a_token_cannot_be_trained_on() -> None:
    assert training_sample(TASK, done_sample(WRONG, trajectory=EMPTY_TRAJECTORY)).remove_sample


def test_a_group_is_ordered_whatever_order_its_samples_came_in() -> None:
    whole = group_with(SOLVED, WRONG, SOLVED)
    shuffled = group_of(whole.task, [whole.samples[i] for i in (2, 0, 1)], whole.done)
    assert shuffled == whole


def test_the_groups_own_scoring_comes_first_also_when_samples_are_gone() -> None:
    group = group_with(SOLVED, WRONG, SOLVED, rewards=[0.1, 0.2, 0.3])
    assert group.scores == (0.1, 0.2, 0.3)
    assert group_with(SOLVED, WRONG).scores == (1.0, 0.0)
    left = msgspec.structs.replace(group, samples=group.samples[1:])
    assert left.scores == (0.2, 0.3)


def test_a_group_gives_as_many_as_were_planned() -> None:
    group = group_with(SOLVED, WRONG, Outcome.INFRA_CONN, SOLVED)
    filtered = msgspec.structs.replace(group, samples=(group.samples[0], group.samples[2]))
    samples = training_group(filtered)
    assert [sample.sample_no for sample in samples] == [0, 1, 2, 3]
    assert [sample.remove_sample for sample in samples] == [False, True, True, True]
    reasons = [sample.metadata["_termination_reason"] for sample in samples]
    assert reasons == ["solved", "missing", "infra_conn", "missing"]
    assert {sample.task_id for sample in samples} == {"t-1"}


def test_padding_gives_every_batch_the_same_shape() -> None:
    groups = [training_group(group_with(SOLVED, WRONG, SOLVED)), training_group(group_with(SOLVED, task_id="t-2"))]
    padded = pad_groups(groups, 4)
    assert [len(group) for group in padded] == [3, 3, 3, 3]
    weights = [[int(sample.loss_mask.sum()) for sample in group] for group in padded]
    assert weights == [[2, 2, 2], [2, 0, 0], [0, 0, 0], [0, 0, 0]]
    added = [*padded[1][1:], *padded[2], *padded[3]]
    assert all(sample.remove_sample and sample.score == 0.0 for sample in added)
    assert [sample.sample_no for sample in padded[1]] == [0, 1, 2]


def test_full_groups_are_left_as_they_are() -> None:
    groups = [training_group(group_with(SOLVED, WRONG))]
    assert pad_groups(groups, 1) == groups


def test_nothing_at_all_cannot_be_padded() -> None:
    with pytest.raises(ValueError, match="no sample to pad"):
        pad_groups([], 4)
