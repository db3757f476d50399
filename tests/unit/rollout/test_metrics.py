"""Accuracy and pass@k."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.results import Outcome
from py_scheduler.rollout.metrics import SolveTally, eval_metrics, ks_up_to, pass_at_k
from tests.support.steps.samples import SOLVED, WRONG


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(prompts())
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_solved_one(prompt: tuple[int, int, int]) -> None:
    n, solved, k = prompt
    draws = list(combinations([True] * solved + [False] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_large_counts_do_not_overflow() -> None:
    assert pass_at_k(65_536, 1, 1) == pytest.approx(1 / 65_536)
    assert 0.99 < pass_at_k(65_536, 6_000, 64) < 1.0


@pytest.mark.parametrize(("n", "solved", "k"), [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_what_cannot_be_estimated(n: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, solved, k)


def test_ks_are_powers_of_two_and_n() -> None:
    assert [ks_up_to(n) for n in (0, 1, 2, 3, 8, 12)] == [[], [1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_infrastructure_never_counts() -> None:
    broken, whole = SolveTally(), SolveTally()
    whole.add([SOLVED, WRONG, WRONG, SOLVED])
    broken.add([SOLVED, WRONG, WRONG, SOLVED, Outcome.INFRA_CONN, Outcome.INFRA_OTHER, Outcome.ABORTED])
    assert broken.accuracy == whole.accuracy == 0.5
    assert broken.pass_rates() == whole.pass_rates() == {1: 0.5, 2: pytest.approx(5 / 6), 4: 1.0}
    assert broken.model_results == 4


def test_agents_that_ran_out_of_time_or_turns_do_count() -> None:
    tally = SolveTally()
    tally.add([SOLVED, Outcome.AGENT_TIMEOUT, Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW])
    assert tally.accuracy == 0.25


def test_pass_at_k_is_over_the_prompts_that_have_k_results() -> None:
    tally = SolveTally()
    tally.add([SOLVED, SOLVED, WRONG, WRONG])
    tally.add([WRONG, WRONG, Outcome.INFRA_CONN, Outcome.INFRA_CONN])
    tally.add([Outcome.INFRA_CONN] * 4)
    assert tally.pass_at(1) == pytest.approx(0.25)
    assert tally.pass_at(2) == pytest.approx((5 / 6 + 0) / 2)
    assert tally.pass_at(4) == 1.0
    assert tally.pass_at(8) is None
    assert tally.accuracy == pytest.approx(2 / 6)


def test_metrics_are_named_by_data_set() -> None:
    single, several, broken = SolveTally(), SolveTally(), SolveTally()
    single.add([SOLVED])
    single.add([WRONG])
    several.add([SOLVED, WRONG])
    broken.add([Outcome.INFRA_CONN])
    assert eval_metrics([("math", single), ("code", several), ("broken", broken)]) == {
        "eval/math/accuracy": 0.5,
        "eval/code/accuracy": 0.5,
        "eval/code/pass@1": 0.5,
        "eval/code/pass@2": 1.0,
    }


def test_nothing_has_no_rate() -> None:
    assert (SolveTally().accuracy, SolveTally().pass_at(1), SolveTally().pass_rates()) == (None, None, {})
