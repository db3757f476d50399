"""Rejection and finish-only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.generation import FinishReason
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout import filters
from py_scheduler.rollout.filters import (
    FilterSettings,
    GroupFilter,
    NextMove,
    Rejection,
    ended_short,
    next_move,
    shortfall,
)
from tests.support.steps.filtering import apply_filters
from tests.support.steps.samples import SOLVED, WRONG, done_sample, group_with, trajectory_of

THRESHOLD = FilterSettings(rejection=Rejection.THRESHOLD, min_score=0.5)
SPREAD = FilterSettings(rejection=Rejection.SPREAD)
FINISH = FilterSettings(finish_only=True)


def test_without_filters_everything_survives_and_nothing_is_reported() -> None:
    groups = [group_with(SOLVED, Outcome.INFRA_CONN), group_with(Outcome.ABORTED, task_id="t-2")]
    survivors = apply_filters(groups, FilterSettings())
    assert (survivors.groups, survivors.reports) == (tuple(groups), ())


def test_a_threshold_keeps_the_samples_that_reach_it() -> None:
    mixed = group_with(done_sample(WRONG, 0.4), done_sample(WRONG, 0.5, sample_no=1), done_sample(sample_no=2))
    survivors = apply_filters([mixed, group_with(WRONG, Outcome.INFRA_CONN, task_id="t-2")], THRESHOLD)
    (left,) = survivors.groups
    assert [sample.sample_no for sample in left.samples] == [1, 2]
    assert left.planned_samples == 3
    assert survivors.reports == (
        FilterReport(
            filter="rejection",
            kept_groups=1,
            kept_samples=2,
            dropped_groups=1,
            dropped_samples=3,
            group_reasons={"too_few_samples": 1},
            sample_reasons={"below_threshold": 2, "infra_conn": 1},
            dropped_task_ids=("t-2",),
        ),
    )


def test_infrastructure_never_passes_a_threshold() -> None:
    lenient = FilterSettings(rejection=Rejection.THRESHOLD, min_score=-1.0)
    (left,) = apply_filters([group_with(WRONG, Outcome.INFRA_OTHER, Outcome.ABORTED)], lenient).groups
    assert [sample.outcome for sample in left.samples] == [WRONG]


def test_the_groups_own_scores_decide() -> None:
    (left,) = apply_filters([group_with(SOLVED, SOLVED, rewards=[0.1, 0.9])], THRESHOLD).groups
    assert [sample.sample_no for sample in left.samples] == [1]
    assert left.scores == (0.9,)


def test_the_groups_own_outcomes_decide() -> None:
    group = group_with(Outcome.MAX_TURNS, WRONG, rewards=[1.0, 0.0], group_outcomes=[SOLVED, Outcome.MAX_TURNS])
    (left,) = apply_filters([group], FilterSettings(finish_only=True)).groups
    assert [sample.sample_no for sample in left.samples] == [0]


def test_groups_without_spread_teach_nothing() -> None:
    groups = [
        group_with(SOLVED, SOLVED, task_id="all"),
        group_with(WRONG, WRONG, task_id="none"),
        group_with(SOLVED, WRONG, Outcome.INFRA_CONN, task_id="both"),
        # The score of an infrastructure failure is no score.
        group_with(SOLVED, Outcome.INFRA_CONN, task_id="broken"),
        group_with(Outcome.INFRA_CONN, task_id="lost"),
    ]
    survivors = apply_filters(groups, SPREAD)
    assert survivors.groups == (groups[2],)
    (report,) = survivors.reports
    assert report.group_reasons == {"no_spread": 3, "no_model_result": 1}
    assert report.sample_reasons == {"no_spread": 6, "no_model_result": 1}
    assert report.dropped_task_ids == ("all", "none", "broken", "lost")


def test_a_spread_has_to_exceed_its_least() -> None:
    group = group_with(done_sample(WRONG, 0.2), done_sample(WRONG, 0.4, sample_no=1))
    spreads = {
        spread: apply_filters([group], FilterSettings(rejection=Rejection.SPREAD, min_spread=spread))
        for spread in (0.1, 0.5)
    }
    assert (len(spreads[0.1].groups), len(spreads[0.5].groups)) == (1, 0)


CUT = trajectory_of(("environment", 1), ("student", 2), finish_reason=FinishReason.LENGTH)
STOPPED = trajectory_of(("environment", 1), ("student", 2), finish_reason=FinishReason.ABORT)
CUT_THEN_ENDED = msgspec.structs.replace(
    CUT, turns=(*CUT.turns, msgspec.structs.replace(CUT.turns[-1], finish_reason=FinishReason.STOP))
)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (done_sample(SOLVED), None),
        (done_sample(WRONG, termination_reason="gave up"), None),
        (done_sample(SOLVED, trajectory=CUT_THEN_ENDED), None),
        (done_sample(Outcome.MAX_TURNS), "max_turns"),
        (done_sample(SOLVED, termination_reason="max_turns"), "max_turns"),
        (done_sample(Outcome.CONTEXT_OVERFLOW), "context_overflow"),
        (done_sample(WRONG, termination_reason="length"), "length"),
        (done_sample(WRONG, trajectory=CUT), "length"),
        (done_sample(WRONG, trajectory=STOPPED), "abort"),
        (done_sample(Outcome.AGENT_TIMEOUT), "agent_timeout"),
        (done_sample(WRONG, termination_reason="timeout"), "timeout"),
        (done_sample(Outcome.ABORTED), "aborted"),
        (done_sample(Outcome.INFRA_SANDBOX), "infra_sandbox"),
        (done_sample(WRONG, error="ValueError"), "error"),
    ],
)
def test_which_episodes_ended_by_themselves(sample: Any, reason: str | None) -> None:
    assert ended_short(sample) == reason


def test_finish_only_looks_at_what_rejection_left() -> None:
    both = msgspec.structs.replace(THRESHOLD, finish_only=True)
    capped = done_sample(SOLVED, sample_no=1, termination_reason="max_turns")
    survivors = apply_filters([group_with(WRONG, capped, done_sample(sample_no=2))], both)
    (left,) = survivors.groups
    assert [sample.sample_no for sample in left.samples] == [2]
    rejection, finish = survivors.reports
    assert (rejection.filter, rejection.sample_reasons) == ("rejection", {"below_threshold": 1})
    assert (finish.filter, finish.sample_reasons) == ("finish_only", {"max_turns": 1})
    assert rejection.kept_samples == finish.kept_samples + finish.dropped_samples == 2


def test_a_group_that_rejection_dropped_is_not_seen_by_finish_only() -> None:
    both = msgspec.structs.replace(SPREAD, finish_only=True)
    survivors = apply_filters([group_with(WRONG, Outcome.MAX_TURNS)], both)
    assert survivors.groups == ()
    assert survivors.reports[1] == FilterReport(filter="finish_only")


def test_a_group_with_too_few_left_is_dropped_whole() -> None:
    settings = FilterSettings(finish_only=True, min_samples=2)
    survivors = apply_filters([group_with(SOLVED, Outcome.MAX_TURNS, Outcome.MAX_TURNS)], settings)
    (report,) = survivors.reports
    assert survivors.groups == ()
    assert (report.dropped_groups, report.dropped_samples, report.kept_samples) == (1, 3, 0)
    assert report.group_reasons == {"too_few_samples": 1}
    assert report.sample_reasons == {"max_turns": 2, "too_few_samples": 1}


@given(
    st.lists(st.lists(st.sampled_from(Outcome), min_size=1, max_size=4), max_size=6),
    st.builds(
        FilterSettings,
        rejection=st.sampled_from(Rejection),
        min_score=st.sampled_from([0.0, 0.5, 1.0]),
        finish_only=st.booleans(),
        min_samples=st.integers(1, 3),
    ),
)
def test_the_reports_account_for_every_sample(outcomes: list[list[Outcome]], settings: FilterSettings) -> None:
    groups = [group_with(*members, task_id=f"t-{number}") for number, members in enumerate(outcomes)]
    survivors = apply_filters(groups, settings)
    left_groups, left_samples = len(groups), sum(len(group.samples) for group in groups)
    for report in survivors.reports:
        assert report.kept_groups + report.dropped_groups == left_groups
        assert report.kept_samples + report.dropped_samples == left_samples
        assert sum(report.sample_reasons.values()) == report.dropped_samples
        assert sum(report.group_reasons.values()) == report.dropped_groups == len(report.dropped_task_ids)
        left_groups, left_samples = report.kept_groups, report.kept_samples
    assert len(survivors.groups) == left_groups
    assert sum(len(group.samples) for group in survivors.groups) == left_samples
    order = [group.task_id for group in groups]
    assert [group.task_id for group in survivors.groups] == [
        task_id for task_id in order if task_id in {group.task_id for group in survivors.groups}
    ]


def test_groups_may_come_one_by_one_and_a_report_names_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "MAX_TASK_IDS", 3)
    one_by_one = GroupFilter(SPREAD)
    assert [one_by_one.admit(group_with(WRONG, task_id=f"t-{number}")) for number in range(5)] == [None] * 5
    (report,) = one_by_one.reports
    assert (report.dropped_groups, report.dropped_task_ids) == (5, ("t-0", "t-1", "t-2"))


FETCH = FilterSettings(max_fetches=2)
KEEP = FilterSettings(when_insufficient="keep")


@pytest.mark.parametrize(
    ("survivors", "settings", "fetches", "can_fetch", "move"),
    [
        (4, FETCH, 0, True, NextMove.ENOUGH),
        (5, KEEP, 0, True, NextMove.ENOUGH),
        (3, FETCH, 0, True, NextMove.FETCH),
        (0, FETCH, 1, True, NextMove.FETCH),
        (3, FETCH, 2, True, NextMove.KEEP),
        (3, FETCH, 0, False, NextMove.KEEP),
        (3, KEEP, 0, True, NextMove.KEEP),
    ],
)
def test_what_a_step_does_next(
    survivors: int, settings: FilterSettings, fetches: int, can_fetch: bool, move: NextMove
) -> None:
    assert next_move(survivors, 4, settings, fetches=fetches, can_fetch=can_fetch) is move


@pytest.mark.parametrize(("settings", "fetches", "can_fetch"), [(FETCH, 2, True), (FETCH, 0, False), (KEEP, 0, True)])
def test_a_step_is_never_empty_in_silence(settings: FilterSettings, fetches: int, can_fetch: bool) -> None:
    reports = apply_filters([group_with(WRONG, WRONG)], SPREAD).reports
    with pytest.raises(FailedPreconditionError, match=r"0 of 4 groups survived .*no_spread 2.*Loosen the filters"):
        next_move(0, 4, settings, reports, fetches=fetches, can_fetch=can_fetch)


def test_what_fell_short_is_said() -> None:
    reports = apply_filters([group_with(SOLVED, Outcome.MAX_TURNS)], FINISH).reports
    assert shortfall(1, 4, reports) == (
        "1 of 4 groups survived (finish_only dropped 0 groups and 1 samples (max_turns 1))"
    )
    assert shortfall(1, 4) == "1 of 4 groups survived"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"min_spread": -0.1}, "min_spread"),
        ({"min_spread": float("nan")}, "min_spread"),
        ({"min_samples": 0}, "min_samples"),
        ({"max_fetches": -1}, "max_fetches"),
        ({"min_score": float("inf")}, "min_score"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        FilterSettings(**values)
    assert [violation.field for violation in caught.value.violations] == [field]
