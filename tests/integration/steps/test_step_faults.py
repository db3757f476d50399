"""What a step survives: odd values of a handler, cancellations at every point, a disk that refuses, too much asked."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.errors import InvalidArgumentError, ResourceExhaustedError
from py_scheduler.interfaces import training_loop
from py_scheduler.interfaces.step_service import StepService
from py_scheduler.rollout.files.loop_state import read_loop_state, write_loop_state
from py_scheduler.rollout.files.store import read_samples
from py_scheduler.rollout.settings import RolloutSettings
from tests.support.agents.step_handlers import Rated
from tests.support.steps.task_schedulers import prompts, rows, scheduler_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task
    from py_scheduler.rollout.files.loop_state import LoopState


class Odd(Rated):
    """Says, everywhere, what neither JSON nor UTF-8 carries."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([1, 2], "seen \ud800")
        if episode.sample.sample_no:
            raise RuntimeError("no words \ud800")
        return AgentResult(termination_reason="why \ud800", answer="\ud800")

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        circle: dict[str, Any] = {}
        circle["in"] = circle
        details: dict[Any, Any] = {"circle": circle, "number": np.float32(0.5), "rows": np.arange(2), 7: "\ud800"}
        return Reward(score=np.float64(1.0), details=details)


class OddGroup(Rated):
    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> list[Reward]:
        score: Any = np.float32(0.5)
        return [Reward(score=score, details={"o": object(), "n": np.int64(1)}) for _ in samples]


class LargeGroup(Rated):
    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> list[Reward]:
        return [Reward(score=0.0, details={"x": "y" * 1_000_000}) for _ in samples]


SAVED = RolloutSettings(groups_per_step=2, save_eval_details=True)


async def test_what_cannot_be_carried_costs_the_step_nothing(tmp_path: Path) -> None:
    evals = {"held out": rows("held out", 1)}
    async with scheduler_of(Odd(), evals=evals, settings=SAVED, artifact_root=tmp_path) as scheduler:
        result = await scheduler.execute_rollout(0)
        measured = await scheduler.execute_eval(0)
    good, raised = result.groups[0].samples
    assert good.outcome is Outcome.SOLVED
    assert good.termination_reason == "why ?"
    assert good.trajectory.read_text == "seen ?"
    details = good.reward.details
    assert (details["number"], details["rows"], details["7"]) == (0.5, [0, 1], "?")
    assert details["circle"].startswith("unreadable_details: RecursionError")
    assert "no words ?" in raised.error
    saved = next(iter(read_samples(tmp_path / "trajectory_sft_samples.parquet")))
    assert saved[0].reward["number"] == 0.5
    assert measured.summary.total.samples == 1


async def test_a_group_scorer_may_say_anything_too(tmp_path: Path) -> None:
    async with scheduler_of(OddGroup(), artifact_root=tmp_path) as scheduler:
        result = await scheduler.execute_rollout(0)
    first = result.groups[0].done.rewards[0]
    assert (first.score, first.details["n"]) == (0.5, 1)
    assert first.details["o"].startswith("unreadable_details: ")


async def test_a_group_says_no_more_than_a_message_carries() -> None:
    async with scheduler_of(LargeGroup()) as scheduler:
        result = await scheduler.execute_rollout(0, groups=1, samples=17)
    assert "bytes of details in all" in result.groups[0].done.reason
    assert result.groups[0].done.rewards == ()


async def test_the_artifact_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    async with scheduler_of(artifact_root=tmp_path / "link") as scheduler:
        result = await scheduler.execute_rollout(0)
    assert "trajectory_sft_samples.parquet" in result.files
    assert (tmp_path / "disk" / "trajectory_sft_samples.parquet").exists()


# Cancelled, and refused by the disk


class Gate:
    """Stops the write of a finished state, in its thread, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = asyncio.Event()
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(training_loop, "write_loop_state", self._write)

    def _write(self, path: Path, state: LoopState) -> None:
        if state.is_finished:
            self._loop.call_soon_threadsafe(self.entered.set)
            self._open.wait()
        write_loop_state(path, state)

    def open(self) -> None:
        self._open.set()


async def test_what_is_cancelled_while_it_finishes_is_finished_and_handed_out_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_of(artifact_root=tmp_path) as scheduler:
        gate = Gate(monkeypatch)
        step = asyncio.create_task(scheduler.execute_rollout(0))
        await gate.entered.wait()
        step.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert scheduler.next_rollout_id == 1
        assert prompts(await scheduler.execute_rollout(0)) == ["train 0", "train 1"]
        assert prompts(await scheduler.execute_rollout(1)) == ["train 2", "train 3"]


async def test_a_client_that_leaves_while_its_step_finishes_gets_the_report_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StepRequest(kind=StepKind.ROLLOUT, rollout_id=0, request_id="r", cancel_on_disconnect=True)
    async with scheduler_of(artifact_root=tmp_path) as scheduler, StepService(scheduler) as service:
        gate = Gate(monkeypatch)
        async with aclosing(service.follow(request, None)) as following:
            await anext(following)
            await gate.entered.wait()
        gate.open()
        last = [item async for item in service.follow(request, None)][-1]
        assert isinstance(last, StepReport)
        assert prompts(await scheduler.execute_rollout(1)) == ["train 2", "train 3"]


async def test_a_step_that_is_cancelled_before_its_first_turn_is_over(tmp_path: Path) -> None:
    request = StepRequest(kind=StepKind.ROLLOUT, rollout_id=0, request_id="r", cancel_on_disconnect=True)
    async with scheduler_of(artifact_root=tmp_path) as scheduler, StepService(scheduler) as service:
        following = service.follow(request, None)
        await anext(following)
        await following.aclose()
        for _ in range(3):  # the task's end, and the news of it
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            last = [item async for item in service.follow(request, None)][-1]
        assert isinstance(last, StepReport)


async def test_a_step_that_cannot_be_written_down_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, state: LoopState) -> None:
        if state.is_finished:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_loop_state(path, state)

    async with scheduler_of(artifact_root=tmp_path) as scheduler:
        monkeypatch.setattr(training_loop, "write_loop_state", full)
        with pytest.raises(ResourceExhaustedError, match="no room left"):
            await scheduler.execute_rollout(0)
        state = read_loop_state(tmp_path / "loop_state.json")
        assert state is not None
        assert (scheduler.next_rollout_id, state.unfinished) == (0, 0)
        monkeypatch.undo()
        assert prompts(await scheduler.execute_rollout(0)) == ["train 0", "train 1"]


# Too much


async def test_more_samples_than_a_step_may_have_are_refused_before_they_are_made() -> None:
    evals = {"held out": rows("held out", 200)}
    async with scheduler_of(evals=evals) as scheduler:
        with pytest.raises(InvalidArgumentError, match="200 prompts or more of data set 'held out', 65536 times each"):
            await scheduler.execute_eval(0, samples=65_536)
        with pytest.raises(InvalidArgumentError, match="20 groups of 65536 are over 500000 samples"):
            await scheduler.execute_rollout(0, groups=20, samples=65_536)
        assert (await scheduler.execute_rollout(0)).groups
