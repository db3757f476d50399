"""Arrays that stay aligned, whatever is appended in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, ENVIRONMENT, TrajectoryBuilder

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=5)


def generation(token_ids: list[int], version: str = "v1", log_prob_kind: LogProbKind = LogProbKind.MODEL) -> Generation:
    return Generation.of(
        token_ids=token_ids,
        log_probs=[-0.5] * len(token_ids),
        text="text",
        finish_reason=FinishReason.STOP,
        weight_spans=(WeightSpan(version, 0, len(token_ids)),),
        log_prob_kind=log_prob_kind,
    )


@given(st.lists(st.tuples(st.booleans(), token_lists), min_size=1, max_size=6))
def test_arrays_are_aligned_and_the_mask_is_one_exactly_on_generated_tokens(
    turns: list[tuple[bool, list[int]]],
) -> None:
    builder = TrajectoryBuilder()
    for generated, token_ids in turns:
        if generated:
            builder.append_generation(generation(token_ids), "student")
        else:
            builder.append_environment(token_ids)
    trajectory = builder.build()
    expected_mask = [int(generated) for generated, token_ids in turns for _ in token_ids]
    assert trajectory.token_ids.tolist() == [token for _, token_ids in turns for token in token_ids]
    assert trajectory.loss_mask.tolist() == expected_mask
    assert trajectory.log_probs.tolist() == [-0.5 * mask for mask in expected_mask]
    assert len(trajectory) == len(expected_mask)
    assert trajectory.generated_tokens == sum(expected_mask)
    assert [turn.end - turn.start for turn in trajectory.turns] == [len(token_ids) for _, token_ids in turns]
    assert sum(span.end - span.start for span in trajectory.weight_spans) == trajectory.generated_tokens
    assert all(trajectory.loss_mask[span.start : span.end].all() for span in trajectory.weight_spans)


def test_each_turn_says_what_its_log_probs_are() -> None:
    builder = TrajectoryBuilder()
    builder.append_environment([1])
    builder.append_generation(generation([2]), "student")
    builder.append_generation(generation([3], log_prob_kind=LogProbKind.SAMPLED), "teacher")
    kinds = [(turn.source, turn.log_prob_kind, turn.finish_reason) for turn in builder.build().turns]
    assert kinds == [
        (ENVIRONMENT, None, None),
        ("student", LogProbKind.MODEL, FinishReason.STOP),
        ("teacher", LogProbKind.SAMPLED, FinishReason.STOP),
    ]


def test_arrays_are_views_that_cannot_be_written() -> None:
    builder = TrajectoryBuilder()
    builder.append_environment([1, 2])
    trajectory = builder.build()
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.log_probs.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        trajectory.token_ids[0] = 9


def test_tokens_without_log_probs_are_refused() -> None:
    broken = Generation.of(token_ids=[1, 2], log_probs=[-1.0], text="", finish_reason=FinishReason.STOP)
    with pytest.raises(ValueError, match="2 token ids came with 1 log-probs"):
        TrajectoryBuilder().append_generation(broken, "student")


@pytest.mark.parametrize("faulty", [[1, "2"], [1, 2**31], [1, 2.5], [1, -5]])
def test_a_faulty_token_id_raises_and_leaves_the_arrays_aligned(faulty: list[object]) -> None:
    builder = TrajectoryBuilder()
    builder.append_environment([7])
    with pytest.raises((TypeError, OverflowError, ValueError)):
        builder.append_environment(faulty)  # type: ignore[arg-type]
    trajectory = builder.build()
    assert (trajectory.token_ids.tolist(), len(trajectory.log_probs), len(trajectory)) == ([7], 1, 1)


def test_nothing_recorded_is_the_empty_trajectory() -> None:
    assert TrajectoryBuilder().build() is EMPTY_TRAJECTORY
    assert len(EMPTY_TRAJECTORY) == 0


def test_what_older_weights_of_the_same_source_generated_can_be_left_out_of_the_mask() -> None:
    def generation(*versions: str) -> Generation:
        spans = tuple(WeightSpan(version, 2 * number, 2 * number + 2) for number, version in enumerate(versions))
        count = 2 * len(versions)
        return Generation.of(
            token_ids=[1] * count,
            log_probs=[-1.0] * count,
            text="",
            finish_reason=FinishReason.STOP,
            weight_spans=spans,
        )

    builder = TrajectoryBuilder()
    builder.append_environment([5])
    builder.append_generation(generation("a"), "student")
    builder.append_generation(generation(), "student")
    builder.append_generation(generation("a"), "teacher")
    builder.append_environment([])
    builder.append_generation(generation("a", "b"), "student")
    assert builder.build().loss_mask.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    masked = builder.build(mask_off_policy_prefix=True)
    assert masked.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert masked.weight_spans == builder.build().weight_spans


def test_what_is_printed_has_the_first_tokens_and_how_many_there_are() -> None:
    long = Generation.of(range(32_000), [-1 / 3] * 32_000, text="so", finish_reason=FinishReason.LENGTH)
    assert repr(long).startswith(
        "Generation(token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 32000 in all], log_probs=[-0.333333, "
    )
    builder = TrajectoryBuilder()
    builder.append_environment([5])
    builder.append_generation(generation([7, 8]), "student")
    assert repr(builder.build()).startswith(
        "Trajectory(token_ids=[5, 7, 8], log_probs=[0, -0.5, -0.5], loss_mask=[0, 1, 1], turns=(Turn("
    )
    assert len(repr(long)) < 500
