"""The STACX_* variables of an iteration."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.environment import EnvironmentExporter, eval_context, process_environment, variables

FULL = IterationContext(rollout_id=3, beta=0.25, t_max=128)
NAMES = {"STACX_ROLLOUT_ID": "3", "STACX_DAGGER_BETA": "0.25", "STACX_DAGGER_T_MAX": "128"}


def test_an_iteration_is_published_and_taken_back() -> None:
    environ = {"PATH": "/bin", "STACX_ROLLOUT_ID": "before"}
    with EnvironmentExporter(environ).training(FULL) as context:
        assert context is FULL
        assert environ == {"PATH": "/bin", **NAMES}
    assert environ == {"PATH": "/bin", "STACX_ROLLOUT_ID": "before"}


def test_a_tail_that_the_schedule_does_not_speak_of_stays_as_it_is() -> None:
    environ = {"STACX_DAGGER_T_MAX": "64"}
    with EnvironmentExporter(environ).training(IterationContext(rollout_id=0, beta=1.0)):
        assert environ["STACX_DAGGER_T_MAX"] == "64"
    assert environ == {"STACX_DAGGER_T_MAX": "64"}


def test_the_environment_is_restored_when_the_iteration_fails() -> None:
    environ: dict[str, str] = {}
    exporter = EnvironmentExporter(environ)
    with pytest.raises(RuntimeError, match="broken"), exporter.training(FULL):
        raise RuntimeError("broken")
    assert environ == {}
    with exporter.training(FULL):
        assert environ == NAMES


def test_a_second_iteration_is_refused_and_the_ways_out_are_named() -> None:
    environ: dict[str, str] = {}
    exporter = EnvironmentExporter(environ)
    with exporter.training(FULL):
        with (
            pytest.raises(FailedPreconditionError, match=r"episode\.iteration.*process.*ray") as caught,
            exporter.training(IterationContext(rollout_id=4)),
        ):
            raise AssertionError("unreachable")
        assert "iteration 4" in str(caught.value)
        assert "iteration 3" in str(caught.value)
        with pytest.raises(FailedPreconditionError, match="the eval of iteration 3"), exporter.evaluation(3):
            raise AssertionError("unreachable")
        assert environ == NAMES


def test_an_eval_runs_without_beta_and_restores_it() -> None:
    environ = {"STACX_DAGGER_BETA": "0.5", "STACX_DAGGER_T_MAX": "64"}
    with EnvironmentExporter(environ).evaluation(7) as context:
        assert environ == {"STACX_ROLLOUT_ID": "7", "STACX_DAGGER_T_MAX": "64"}
        assert context == IterationContext(rollout_id=7, beta=0.0)
    assert environ == {"STACX_DAGGER_BETA": "0.5", "STACX_DAGGER_T_MAX": "64"}


def test_an_eval_gets_the_beta_that_is_meant_for_it() -> None:
    before = {"STACX_DAGGER_EVAL_BETA": "0.1", "STACX_DAGGER_BETA": "0.5"}
    environ = dict(before)
    with EnvironmentExporter(environ).evaluation(7) as context:
        assert (environ["STACX_DAGGER_BETA"], context.beta) == ("0.1", 0.1)
    assert environ == before


def test_the_settings_beta_of_evals_stands_where_no_variable_does() -> None:
    environ = {"STACX_DAGGER_BETA": "0.5"}
    with EnvironmentExporter(environ).evaluation(7, eval_beta=0.25) as context:
        assert (environ["STACX_DAGGER_BETA"], context.beta) == ("0.25", 0.25)
    assert eval_context(7, {"STACX_DAGGER_EVAL_BETA": "0"}, 0.25).beta == 0.0


def test_an_eval_of_a_loop_without_schedule_leaves_nothing_behind() -> None:
    environ: dict[str, str] = {}
    with EnvironmentExporter(environ).evaluation(0):
        assert environ == {"STACX_ROLLOUT_ID": "0"}
    assert environ == {}


@pytest.mark.parametrize("text", ["much", "1.5", "-0.1", "nan"])
def test_a_beta_that_is_none(text: str) -> None:
    environ = {"STACX_DAGGER_EVAL_BETA": text}
    exporter = EnvironmentExporter(environ)
    with pytest.raises(InvalidArgumentError, match="STACX_DAGGER_EVAL_BETA"), exporter.evaluation(0):
        raise AssertionError("unreachable")
    with exporter.training(FULL):
        pass


def test_an_empty_eval_beta_says_nothing() -> None:
    assert eval_context(1, {"STACX_DAGGER_EVAL_BETA": " "}) == IterationContext(rollout_id=1)


def test_a_child_process_sees_its_own_iteration() -> None:
    code = "import os; print(os.environ['STACX_ROLLOUT_ID'], os.environ['STACX_DAGGER_BETA'])"
    children = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **variables(IterationContext(rollout_id=number, beta=number / 10))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for number in (1, 2)
    ]
    assert children == [["1", "0.1"], ["2", "0.2"]]
    assert "STACX_DAGGER_T_MAX" not in variables(IterationContext(rollout_id=1))
    assert variables(FULL) == NAMES


def test_the_process_has_one_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STACX_ROLLOUT_ID", raising=False)
    with process_environment.training(FULL):
        assert os.environ["STACX_ROLLOUT_ID"] == "3"
    assert "STACX_ROLLOUT_ID" not in os.environ


def test_of_many_threads_one_publishes() -> None:
    environ: dict[str, str] = {}
    exporter = EnvironmentExporter(environ)
    published, refused = [], []
    all_tried, start = threading.Barrier(9), threading.Barrier(8)

    def publish(rollout_id: int) -> None:
        start.wait()
        try:
            with exporter.training(IterationContext(rollout_id=rollout_id)):
                published.append(rollout_id)
                all_tried.wait()
                assert environ["STACX_ROLLOUT_ID"] == str(rollout_id)
        except FailedPreconditionError:
            refused.append(rollout_id)
            all_tried.wait()

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    all_tried.wait()
    for thread in threads:
        thread.join()
    assert (len(published), len(refused), environ) == (1, 7, {})


async def test_of_two_asyncio_tasks_one_publishes() -> None:
    exporter = EnvironmentExporter({})
    inside, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        with exporter.training(FULL):
            inside.set()
            await leave.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        await inside.wait()
        with pytest.raises(FailedPreconditionError), exporter.training(FULL):
            raise AssertionError("unreachable")
        leave.set()
    with exporter.training(FULL):
        pass
