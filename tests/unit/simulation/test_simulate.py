"""A simulation: its figures beside those that can be known beforehand, and what no run may ever do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from py_scheduler import app
from py_scheduler.domain.quotas import NamespaceSettings
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, UnplaceableError
from py_scheduler.simulation import simulate as simulate_module
from py_scheduler.simulation.simulate import LostNode, SimulationSettings, simulate
from py_scheduler.simulation.workload import (
    DrawnWorkload,
    DurationDistribution,
    SimulatedStep,
    SimulatedTask,
    parse_distribution,
)
from tests.support.simulated import cluster

if TYPE_CHECKING:
    from py_scheduler.placement import PlacementPool
    from py_scheduler.simulation.spans import Spans

ROOT = Path(__file__).parents[3]
TEN = DurationDistribution(kind="constant", median=10.0)


def tasks(*seconds: tuple[float, ...]) -> list[SimulatedTask]:
    return [SimulatedTask(one) for one in seconds]


def ends_of(spans: Spans) -> np.ndarray[Any, Any]:
    ended: np.ndarray[Any, Any] = np.asarray(spans.started) + np.asarray(spans.held)
    return ended


# What can be known beforehand


def test_equal_samples_fill_the_room_in_waves() -> None:
    run = simulate(cluster(concurrency=8), DrawnWorkload(distribution=TEN, groups=8, samples=8))
    figures = run.figures
    assert figures.makespan_seconds == 40.0
    assert (figures.bound_seconds, figures.bound_share, figures.tail_share) == (40.0, 1.0, 0.25)
    assert figures.utilisation == {"gpu": 1.0, "cpu": 64 * 10 / (512 * 40)}
    assert (figures.wait_p50_seconds, figures.wait_p95_seconds) == (15.0, 30.0)
    assert figures.outcomes == {"solved": 64}
    assert figures.task_states == {"succeeded": 8}
    assert Counter(run.spans.started) == {0.0: 16, 10.0: 16, 20.0: 16, 30.0: 16}


def test_scoring_takes_its_time_in_the_same_room() -> None:
    step = SimulatedStep([SimulatedTask((10.0,) * 16, eval_seconds=(5.0,) * 16)] * 2)
    figures = simulate(cluster(concurrency=16), [step]).figures
    assert (figures.makespan_seconds, figures.bound_share) == (30.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "concurrency", "share"),
    [
        *(("lognormal", concurrency, share) for concurrency, share in ((16, 33), (8, 73), (4, 85), (1, 80))),
        ("pareto", 16, 25),
    ],
)
def test_what_was_measured_of_batches_that_get_all_tokens_or_none(kind: str, concurrency: int, share: int) -> None:
    """16 slots, groups of 16: the figures of the first prototype, which ran the engine from outside."""
    workload = DrawnWorkload(distribution=parse_distribution(kind), groups=40, samples=16)
    figures = simulate(cluster(concurrency=concurrency), workload, seed=5).figures
    assert round(100 * figures.bound_share) == share


def test_the_bound_is_the_longest_sample_or_the_room_that_is_short() -> None:
    one = simulate(cluster(), [SimulatedStep(tasks((7.0,), (3.0,)))]).figures
    assert (one.bound_seconds, one.bound_by) == (7.0, "the longest sample")
    thirds = simulate(cluster(share=0.4), DrawnWorkload(distribution=TEN, groups=32, samples=1)).figures
    assert (thirds.bound_seconds, thirds.bound_by) == (20.0, "room for a"), "two shares of 0.4 to a GPU, not 2.5"
    few = simulate(cluster(max_running_samples=4), DrawnWorkload(distribution=TEN, groups=32, samples=1)).figures
    assert (few.bound_seconds, few.makespan_seconds) == (80.0, 80.0)


def test_without_a_layout_nothing_waits_for_room() -> None:
    config = cluster()
    config = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, layout=None))
    figures = simulate(config, DrawnWorkload(distribution=TEN, groups=100, samples=1)).figures
    assert (figures.makespan_seconds, figures.utilisation) == (10.0, {})


def test_nothing_to_do_takes_no_time() -> None:
    figures = simulate(cluster(), []).figures
    assert (figures.makespan_seconds, figures.bound_share, figures.samples) == (0.0, 1.0, 0)


# Steps


@pytest.mark.parametrize("ahead", [0, 1, 3, None])
def test_a_step_begins_when_as_few_are_open_as_it_was_told(ahead: int | None) -> None:
    workload = DrawnWorkload(groups=8, samples=4, steps=6)
    spans = simulate(cluster(), workload, SimulationSettings(ahead=ahead), seed=1).spans
    submitted: defaultdict[int, set[float]] = defaultdict(set)
    ended: defaultdict[int, float] = defaultdict(float)
    for step, at, end in zip(spans.step, spans.submitted, ends_of(spans), strict=True):
        submitted[step].add(at)
        ended[step] = max(ended[step], float(end))
    for step in range(6):
        (at,) = submitted[step]
        waited_for = -1 if ahead is None else step - 1 - ahead
        assert at == pytest.approx(max([ended[before] for before in range(waited_for + 1)], default=0.0))


def test_a_barrier_waits_for_no_eval() -> None:
    steps = [SimulatedStep(tasks((10.0,)), evals=tasks((1_000.0,))) for _ in range(3)]
    run = simulate(cluster(), steps)
    assert [at for at, is_eval in zip(run.spans.submitted, run.spans.is_eval, strict=True) if not is_eval] == [
        0,
        10,
        20,
    ]
    assert run.figures.makespan_seconds == 1_020.0


def test_a_step_of_a_trace_comes_at_its_moment() -> None:
    steps = [SimulatedStep(tasks((10.0,)), at_seconds=at) for at in (5.0, 7.0, 100.0)]
    spans = simulate(cluster(), steps, SimulationSettings(ahead=None)).spans
    assert list(spans.started) == [5.0, 7.0, 100.0]


def test_namespaces_have_their_shares() -> None:
    """One batch runs at a time, and b weighs three times what a does."""
    config = msgspec.structs.replace(cluster(share=8), namespace={"b": NamespaceSettings(weight=3.0)})
    steps = [SimulatedStep(tasks(*[(10.0,)] * 12), batch_id=7, namespace=name) for name in "ab"]
    spans = simulate(config, steps, SimulationSettings(ahead=None)).spans
    first = np.asarray(spans.step)[np.argsort(spans.started)][:12]
    assert 8 <= np.count_nonzero(first == 1) <= 10


# What goes wrong


def test_a_run_that_stops_with_work_left_says_where_and_why() -> None:
    config = cluster(concurrency=16, has_fixed_nodes=False)
    lost = SimulationSettings(lost_nodes=(LostNode("n0", 15.0),))
    with pytest.raises(
        FailedPreconditionError, match=r"stopped at 15\.\d s with work left: batch_id 0: 1 open, no node is left"
    ):
        simulate(config, [SimulatedStep(tasks((10.0,) * 16, (10.0,) * 16))], lost)


def test_what_runs_on_a_node_that_is_lost_runs_again_on_another() -> None:
    lost = SimulationSettings(lost_nodes=(LostNode("n0", 5.0),))
    config = cluster(nodes=2, retry_backoff_seconds=0)
    run = simulate(config, [SimulatedStep(tasks(*[(10.0,)] * 32))], lost)
    assert run.figures.failed_attempts == 16
    assert run.figures.failed_seconds == 80.0
    assert set(run.spans.nodes.names) == {"n1"}
    assert run.figures.makespan_seconds == 20.0
    assert run.figures.outcomes == {"solved": 32}


def test_nothing_runs_on_a_node_from_the_moment_on_at_which_it_is_lost() -> None:
    """Batches of 32 samples on 16 tokens: what is left of them does not go on with tokens of the node."""
    config = cluster(nodes=2, concurrency=16, batch_size=4)
    lost = SimulationSettings(lost_nodes=(LostNode("n0", 60.0),))
    run = simulate(config, DrawnWorkload(groups=16, samples=8), lost)
    assert run.figures.outcomes == {"solved": 128}
    there = run.spans.nodes.names.index("n0")
    assert max(ends_of(run.spans)[np.asarray(run.spans.node) == there]) <= 60.0


def test_with_no_node_left_nothing_is_solved_and_the_run_says_so() -> None:
    lost = SimulationSettings(lost_nodes=(LostNode("n0", 5.0), LostNode("n1", 5.0)))
    with pytest.raises(FailedPreconditionError, match=r"64 of 64 samples were given up: no node that is left can hold"):
        simulate(cluster(nodes=2, concurrency=16), DrawnWorkload(distribution=TEN, groups=8, samples=8), lost)


def test_what_fails_as_it_was_asked_to_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    simulate(cluster(nodes=2), DrawnWorkload(groups=8), SimulationSettings(lost_nodes=(LostNode("n0", 5.0),)))
    assert not caplog.records


def test_refills_that_are_used_up_leave_the_failure() -> None:
    settings = SimulationSettings(infra_rate=0.5, retry=RetryPolicy(max_infra_refills=1))
    figures = simulate(cluster(), DrawnWorkload(distribution=TEN, groups=200, samples=1), settings).figures
    assert figures.outcomes["infra_conn"] == pytest.approx(50, abs=25)
    assert sum(figures.outcomes.values()) == 200
    assert figures.failed_attempts == pytest.approx(100, abs=30)


def test_a_batch_that_could_never_run_is_refused_as_a_server_does() -> None:
    with pytest.raises(UnplaceableError, match="lower"):
        simulate(cluster(concurrency=17), [SimulatedStep(tasks((1.0,) * 17))])


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="no node 'n7': the layout has n0"):
        simulate(cluster(), [], SimulationSettings(lost_nodes=(LostNode("n7", 1.0),)))
    with pytest.raises(InvalidArgumentError, match=r"infra_rate.*ahead"):
        simulate(cluster(), [], SimulationSettings(infra_rate=1.0, ahead=-1))
    for at, said in ((-5.0, "-5"), (math.nan, "nan"), (math.inf, "inf")):
        with pytest.raises(
            InvalidArgumentError, match=rf"lost_nodes\[0\].*at_seconds is {said}, must be a number from 0"
        ):
            simulate(cluster(), [], SimulationSettings(lost_nodes=(LostNode("n0", at),)))
    with pytest.raises(InvalidArgumentError, match=r"lost_nodes\[0\]: is \('n0', 5.0\), must be a LostNode"):
        simulate(cluster(), [], SimulationSettings(lost_nodes=(("n0", 5.0),)))  # type: ignore[arg-type]


# What no run may do


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[PlacementPool]:
    """Of each run."""
    made: list[PlacementPool] = []
    build = app.build_simulated

    def noted(*args: Any) -> Any:
        engine, pool = build(*args)
        assert pool is not None
        made.append(pool)
        return engine, pool

    monkeypatch.setattr(simulate_module, "build_simulated", noted)
    return made


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 1 << 20),
    st.sampled_from([0.1, 0.33, 0.5, 1.0, 2.0]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([0, 1, None]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_every_task_ends_once_and_all_room_comes_back(  # noqa: PLR0917
    pools: list[PlacementPool],
    seed: int,
    share: float,
    concurrency: int,
    batch_size: int,
    ahead: int | None,
    infra_rate: float,
    loses_a_node: bool,
    max_bypass: int,
    eval_weight: float,
) -> None:
    config = cluster(
        nodes=3,
        share=share,
        concurrency=concurrency,
        batch_size=batch_size,
        evaluators="a b",
        max_bypass=max_bypass,
        eval_weight=eval_weight,
    )
    workload = DrawnWorkload(steps=3, groups=9, samples=4, eval_groups=3, eval_samples=2, eval_evaluator_id="b")
    settings = SimulationSettings(
        ahead=ahead, infra_rate=infra_rate, lost_nodes=(LostNode("n1", 60.0),) if loses_a_node else ()
    )
    run = simulate(config, workload, settings, seed=seed)
    figures, spans = run.figures, run.spans
    assert (figures.tasks, figures.samples) == (3 * 12, 3 * (9 * 4 + 3 * 2))
    assert sum(figures.task_states.values()) == figures.tasks
    assert sum(figures.outcomes.values()) == figures.samples
    assert len(set(zip(spans.task_no, spans.sample_no, strict=True))) == len(spans) == figures.samples
    assert figures.bound_seconds <= figures.makespan_seconds * (1 + 1e-9)
    assert all(0.0 <= used <= 1.0 + 1e-9 for used in figures.utilisation.values())
    for node in pools[-1].nodes():
        assert node.tokens == 0
        assert all(math.isclose(free, 1.0) for free in node.gpu_free)


RUN = """
from py_scheduler.simulation.simulate import LostNode, SimulationSettings, simulate
from py_scheduler.simulation.workload import DrawnWorkload
from tests.support.simulated import cluster
import msgspec
run = simulate(
    cluster(nodes=3, concurrency=4, evaluators="a b"),
    DrawnWorkload(steps=3, groups=30, samples=4, eval_groups=5, eval_evaluator_id="b"),
    SimulationSettings(ahead=1, infra_rate=0.1, lost_nodes=(LostNode("n1", 100.0),)),
    seed=7,
)
print(msgspec.json.encode(run.figures).decode(), list(run.spans.task_no), list(run.spans.started))
"""


def test_the_same_seed_gives_the_same_run_in_any_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", RUN],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    (one,) = said
    assert len(one) > 1_000
