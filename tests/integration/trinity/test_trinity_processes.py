"""The Scheduler of seed 2 on runners that are processes: what a workflow blocks or exits costs that one alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.errors import InvalidArgumentError, RunnerStartError
from py_scheduler.interfaces.trinity import (
    Config,
    Experience,
    ModelConfig,
    ProcessConfig,
    RunnerWrapper,
    Scheduler,
    Task,
    TaskWrapper,
    Workflow,
)
from py_scheduler.interfaces.trinity.runners.process import TrinityProcessRunner
from tests.support.runners.process_workflows import FailingModels, InLoop, InThread, Model, pids_in, told
from tests.support.runners.trinity_workflows import new_config, read
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[3]


class Impatient(Scheduler):
    stop_grace_seconds = 0.3
    stop_deadline_seconds = 0.0


def in_processes(**explorer: Any) -> Config:
    defaults: dict[str, Any] = {
        "runner": "process",
        "runner_per_model": 1,
        "rollout_model": ModelConfig(open_model=Model),
    }
    return new_config(**{**defaults, **explorer})


@asynccontextmanager
async def started(**explorer: Any) -> AsyncIterator[Scheduler]:
    scheduler = Impatient(in_processes(**explorer))
    await scheduler.start()
    try:
        yield scheduler
    finally:
        pids = [pid_of(runner) for runner in scheduler.runners.values()]
        await scheduler.close()
        assert not any(map(is_there, pids))


def pid_of(runner: RunnerWrapper) -> int:
    assert isinstance(runner.runner, TrinityProcessRunner)
    return runner.runner.pid


def is_there(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()


async def test_workflows_of_both_kinds_play_in_processes_of_their_own() -> None:
    async with started(runner_per_model=2, max_repeat_times_per_runner=2) as scheduler:
        scheduler.schedule([told(InLoop, 4), told(InThread, 3)], 0)
        statuses, payloads = await scheduler.get_payload_results(0, timeout=60)
        made = read(payloads)
        assert sorted((each.eid.task, each.eid.run) for each in made) == [(0, n) for n in range(4)] + [
            (1, n) for n in range(3)
        ]
        assert all(status.ok and status.metrics[0]["score"] == 1.0 for status in statuses)
        assert {each.info["model_version"] for each in made} == {7}
        pids = {pid_of(runner) for runner in scheduler.runners.values()}
        assert {each.info["pid"] for each in made} <= pids
        assert len(pids) == 2
        assert os.getpid() not in pids


@pytest.mark.parametrize("workflow", [InLoop, InThread])
@pytest.mark.parametrize(("how", "said"), [("exit", "SystemExit: 1"), ("interrupt", "KeyboardInterrupt")])
async def test_exit_in_a_workflow_fails_its_run_and_the_next_task_plays(
    workflow: type[Workflow], how: str, said: str
) -> None:
    async with started(max_retry_times=0) as scheduler:
        scheduler.schedule([told(workflow, always=how), told(workflow)], 0)
        failed, following = await scheduler.get_statuses(0, timeout=60)
        assert (failed.completed_runs, following.ok) == (0, True)
        assert said in failed.message


async def test_a_process_that_dies_costs_a_try_and_no_task(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    async with started(runner_per_model=2) as scheduler:
        scheduler.schedule([told(first="die", trace=trace), told(), told(), told()], 0)
        statuses, payloads = await scheduler.get_payload_results(0, timeout=60)
        assert [status.ok for status in statuses] == [True] * 4
        assert sorted(each.eid.task for each in read(payloads)) == [0, 1, 2, 3]
        assert len(pids_in(trace)) == 2
        await eventually(lambda: scheduler.idle_runners == {0, 1}, pause_seconds=0.02)


@pytest.mark.parametrize("workflow", [InLoop, InThread])
async def test_a_blocking_sleep_that_ignores_its_stop_is_killed_and_capacity_comes_back(
    workflow: type[Workflow], tmp_path: Path
) -> None:
    trace = str(tmp_path / "trace")
    async with started(max_timeout=0.4, max_retry_times=1) as scheduler:
        scheduler.schedule([told(workflow, first="block", trace=trace), told()], 0)
        statuses = await scheduler.get_statuses(0, timeout=60)
        assert [status.ok for status in statuses] == [True, True]
        blocked, second = pids_in(trace)
        assert blocked != second
        assert not is_there(blocked)
        await eventually(lambda: scheduler.idle_runners == {0}, pause_seconds=0.02)


async def test_a_restart_that_fails_twice_is_tried_again(tmp_path: Path) -> None:
    models, trace = str(tmp_path / "models"), str(tmp_path / "trace")
    failing = ModelConfig(open_model=FailingModels(models, range(2, 4)))
    async with started(rollout_model=failing) as scheduler:
        scheduler.schedule([told(first="die", trace=trace)], 0)
        (status,) = await scheduler.get_statuses(0, timeout=60)
        assert status.ok
        assert len(pids_in(models)) == 4
        assert scheduler.idle_runners == {0}


async def test_a_report_of_the_first_try_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    async with started(max_timeout=0.4) as scheduler:
        scheduler.schedule([told(first="come_back_late", trace=trace)], 0)
        (status,), payloads = await scheduler.get_payload_results(0, timeout=60)
        assert status.ok
        assert [each.reward for each in read(payloads)] == [2.0]


async def test_a_stop_that_is_heeded_leaves_the_process_as_it_is() -> None:
    async with started() as scheduler:
        before = pid_of(scheduler.runners[0])
        scheduler.schedule([told(always="hang")], 0)
        await eventually(lambda: bool(scheduler.busy_runners), pause_seconds=0.02)
        await scheduler.abort_batch(0, restart_runners=False)
        assert pid_of(scheduler.runners[0]) == before
        scheduler.schedule([told(always="hang")], 1)
        await eventually(lambda: bool(scheduler.busy_runners), pause_seconds=0.02)
        await scheduler.abort_batch(1, restart_runners=True)
        await eventually(lambda: scheduler.idle_runners == {0}, pause_seconds=0.02)
        assert pid_of(scheduler.runners[0]) != before
        assert not is_there(before)


async def test_a_process_that_is_too_large_after_a_task_is_replaced() -> None:
    async with started(process=ProcessConfig(max_resident_mib=150)) as scheduler:
        scheduler.schedule([told(always="grow")], 0)
        scheduler.schedule([told(), told()], 1)
        statuses, payloads = await scheduler.get_payload_results(0, timeout=60)
        following, others = await scheduler.get_payload_results(1, timeout=60)
        assert [status.ok for status in [*statuses, *following]] == [True] * 3
        (large,), (first, second) = ([each.info["pid"] for each in read(some)] for some in (payloads, others))
        assert large != first == second


async def test_the_state_of_a_process_shows_what_its_workflow_says() -> None:
    async with started() as scheduler:
        scheduler.schedule([told(always="say_how_far")], 3)

        async def is_shown() -> bool:
            await scheduler.update_states()
            return scheduler.get_key_state("progress") == {0: 0.5}

        await eventually(lambda: bool(scheduler.busy_runners), pause_seconds=0.02)
        while not await is_shown():
            pass
        assert scheduler.get_key_state("workflow_id") == {0: "3/0/0"}
        assert scheduler.get_key_state("model_version") == {0: 7}
        await scheduler.abort_batch(3)


async def test_stop_ends_every_process_and_start_goes_on_with_the_rest(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    async with started() as scheduler:
        before = pid_of(scheduler.runners[0])
        scheduler.schedule([told(first="hang", trace=trace), told()], 0)
        await eventually(lambda: Path(trace).exists(), pause_seconds=0.02)
        await scheduler.stop()
        assert not is_there(before)
        await scheduler.start()
        assert [status.ok for status in await scheduler.get_statuses(0, timeout=60)] == [True, True]


async def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    models = str(tmp_path / "models")
    failing = ModelConfig(open_model=FailingModels(models, range(1, 99)))
    scheduler = Impatient(in_processes(rollout_model=failing, runner_per_model=2, runner_prepare_max_retries=0))
    with pytest.raises(RunnerStartError, match="no room for a model"):
        await scheduler.start()
    assert not any(map(is_there, pids_in(models)))


async def test_a_start_that_takes_too_long_names_the_setting() -> None:
    config = in_processes(process=ProcessConfig(start_seconds=0.01), runner_prepare_max_retries=0)
    with pytest.raises(RunnerStartError, match=r"process\.start_seconds"):
        await Impatient(config).start()


async def test_what_cannot_be_sent_to_a_process_is_refused_before_anything_changes() -> None:
    class Local(Workflow):
        pass

    with pytest.raises(InvalidArgumentError, match="config: cannot be sent to a process runner"):
        Scheduler(in_processes(rollout_model=ModelConfig(open_model=lambda _: None)))
    scheduler = Scheduler(in_processes())
    with pytest.raises(InvalidArgumentError, match=r"tasks\[1\]: cannot be sent to a process runner .*Local"):
        scheduler.schedule([told(), Task(Local)], 0)
    with pytest.raises(InvalidArgumentError, match=r"tasks\[0\]: cannot be sent"):
        scheduler.schedule([told(lock=threading.Lock())], 0)
    assert not scheduler.has_step(0)


async def test_a_runner_by_itself_plays_and_stays_alive() -> None:
    runner = RunnerWrapper(0, 1, [], in_processes())
    await runner.prepare()
    try:
        for _ in range(2):
            task = TaskWrapper(replace(told(repeats=2), batch_id=5, task_id=1), 5)
            status, payload, runner_id, _ = await runner.run_with_retry(task, 2, 4, 30.0, collect_partial_runs=False)
            assert (status.ok, runner_id) == (True, 0)
            made = Experience.deserialize_many(payload)
            assert [(each.eid.run, each.info["pid"], each.info["model_version"]) for each in made] == [
                (run, pid_of(runner), 8) for run in (4, 5)
            ]
    finally:
        runner.kill()
        await runner.ended()
    assert not is_there(pid_of(runner))


PROGRAM = """
import asyncio

from py_scheduler.interfaces.trinity import Config, Experience, ExplorerConfig, Scheduler, Task, Workflow


class Guess(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        return [Experience(reward=1.0)]


async def main() -> None:
    scheduler = Scheduler(Config(explorer=ExplorerConfig(runner="process", runner_per_model=1)))
    await scheduler.start()
    scheduler.schedule([Task(Guess, 3)], 0)
    (status,) = await scheduler.get_statuses(0, timeout=60)
    await scheduler.close()
    print(status.completed_runs)


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workflows_may_be_defined_in_the_program_itself(tmp_path: Path) -> None:
    program = tmp_path / "guess.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("3\n", 0), ended.stderr
