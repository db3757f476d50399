"""Schedules of β and t_max."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.plot_dagger_schedules import draw, main
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.dagger import DAggerSchedule, Decay

if TYPE_CHECKING:
    from pathlib import Path

probabilities = st.floats(0, 1)


@st.composite
def schedules(draw: st.DrawFn) -> DAggerSchedule:
    end, start = sorted((draw(probabilities), draw(probabilities)))
    return DAggerSchedule(
        decay=draw(st.sampled_from(Decay)),
        beta_start=start,
        beta_end=end,
        decay_iterations=draw(st.integers(1, 50)),
        rate=draw(st.floats(0.01, 0.99)),
        step_iterations=draw(st.integers(1, 10)),
        t_max_start=draw(st.integers(0, 10_000)),
        t_max_end=draw(st.integers(0, 10_000)),
        t_max_iterations=draw(st.integers(1, 50)),
    )


@given(schedules())
def test_beta_starts_at_its_start_never_rises_and_stays_within_its_ends(schedule: DAggerSchedule) -> None:
    betas = [schedule.beta(rollout_id) for rollout_id in range(60)]
    assert betas[0] == schedule.beta_start
    assert all(later <= earlier for earlier, later in pairwise(betas))
    assert all(schedule.beta_end <= beta <= schedule.beta_start for beta in betas)


@given(schedules())
def test_beta_arrives_at_its_end_or_comes_as_close_as_one_likes(schedule: DAggerSchedule) -> None:
    if schedule.decay in (Decay.LINEAR, Decay.COSINE):
        for rollout_id in (schedule.decay_iterations, schedule.decay_iterations + 7):
            assert schedule.beta(rollout_id) == schedule.beta_end
    else:
        assert schedule.beta(100_000) == pytest.approx(schedule.beta_end, abs=1e-12)


@given(schedules())
def test_t_max_goes_in_a_line_from_start_to_end(schedule: DAggerSchedule) -> None:
    values = [schedule.t_max(rollout_id) for rollout_id in range(60)]
    assert values[0] == schedule.t_max_start
    assert values[schedule.t_max_iterations] == values[-1] == schedule.t_max_end
    rises = schedule.t_max_end >= schedule.t_max_start
    assert all((later >= earlier) if rises else (later <= earlier) for earlier, later in pairwise(values))


@pytest.mark.parametrize(
    ("schedule", "betas"),
    [
        (DAggerSchedule(decay=Decay.LINEAR, decay_iterations=4), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (DAggerSchedule(decay=Decay.COSINE, decay_iterations=4), [1.0, (1 + math.sqrt(0.5)) / 2, 0.5]),
        (DAggerSchedule(decay=Decay.EXPONENTIAL, rate=0.5), [1.0, 0.5, 0.25, 0.125]),
        (DAggerSchedule(decay=Decay.STEP, rate=0.5, step_iterations=2, beta_end=0.2), [1.0, 1.0, 0.6, 0.6, 0.4]),
    ],
)
def test_values_by_hand(schedule: DAggerSchedule, betas: list[float]) -> None:
    assert [schedule.beta(rollout_id) for rollout_id in range(len(betas))] == pytest.approx(betas)


def test_a_context_says_both() -> None:
    schedule = DAggerSchedule(decay_iterations=4, t_max_start=10, t_max_end=20, t_max_iterations=4)
    assert schedule.context(2) == IterationContext(rollout_id=2, beta=0.5, t_max=15)
    assert DAggerSchedule().context(0).t_max == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"beta_start": 1.5}, "beta_start"),
        ({"beta_start": math.nan}, "beta_start"),
        ({"beta_start": 0.2, "beta_end": 0.5}, "beta_end"),
        ({"rate": 1.0}, "rate"),
        ({"rate": 0.0}, "rate"),
        ({"decay_iterations": 0}, "decay_iterations"),
        ({"step_iterations": 0}, "step_iterations"),
        ({"t_max_end": -1}, "t_max_end"),
        ({"t_max_end": 10**20}, "t_max_end"),
        ({"t_max_iterations": 0}, "t_max_iterations"),
    ],
)
def test_a_schedule_that_cannot_be(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        DAggerSchedule(**values)
    assert field in [violation.field for violation in caught.value.violations]


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        DAggerSchedule(rate=2.0, t_max_start=-1, step_iterations=0)
    assert len(caught.value.violations) == 3


def test_a_table_of_a_file() -> None:
    schedule = msgspec.convert({"decay": "cosine", "decay_iterations": 8}, DAggerSchedule)
    assert schedule.decay is Decay.COSINE
    with pytest.raises(msgspec.ValidationError, match="beta"):
        msgspec.convert({"beta": 1}, DAggerSchedule)


def test_iterations_count_from_0() -> None:
    with pytest.raises(InvalidArgumentError, match="count from 0"):
        DAggerSchedule().beta(-1)


def test_the_plot_shows_what_the_schedules_give(tmp_path: Path) -> None:
    beta_axes, tail_axes = draw().axes
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in beta_axes.lines}
    assert lines["linear, 10 iterations"] == [DAggerSchedule().beta(number) for number in range(16)]
    assert len(lines) == len(Decay)
    assert np.asarray(tail_axes.lines[0].get_ydata()).max() == 1_024
    main([str(tmp_path / "schedules.png")])
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
