"""execute_rollout and execute_eval in-process, over the real engine and real files."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.domain.results import Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.interfaces import eval_step
from py_scheduler.interfaces.rollout_step import SURPLUS
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from py_scheduler.rollout.dagger import DAggerSchedule
from py_scheduler.rollout.files.iteration_summary import read_summary
from py_scheduler.rollout.files.loop_state import read_loop_state
from py_scheduler.rollout.filters import FilterSettings, Rejection
from py_scheduler.rollout.settings import RolloutSettings
from py_scheduler.rollout.sources.iterable import IterableSource
from tests.support.agents.step_handlers import Published, Rated
from tests.support.handlers import GatedAgent, SolvingAgent, spec_of
from tests.support.steps.task_schedulers import engine_of, prompts, rows, scheduler_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.rollout.groups import Group

SPREAD = FilterSettings(rejection=Rejection.SPREAD)


def numbered(scores: dict[int, list[float]], count: int = 12) -> list[Task]:
    """Tasks of one data set; number n has the scores that are named for it, or a spread."""
    config = TaskConfig(task_type="agent", repeat_times=2, dataset="train")
    return [
        Task(config=config, prompt=f"train {n}", metadata={"scores": scores.get(n, [0.0, 1.0])}) for n in range(count)
    ]


# Rollouts


async def test_steps_go_through_the_source_one_after_the_other() -> None:
    settings = RolloutSettings(groups_per_step=2, dagger=DAggerSchedule(decay_iterations=2))
    async with scheduler_of(settings=settings) as scheduler:
        results = [await scheduler.execute_rollout(rollout_id) for rollout_id in range(3)]
        assert scheduler.next_rollout_id == 3
    assert [prompts(result) for result in results] == [[f"train {n}", f"train {n + 1}"] for n in (0, 2, 4)]
    assert [r.groups[0].rewards[0].details["beta"] for r in results] == [1.0, 0.5, 0.0]
    assert all(len(group) == 2 for result in results for group in result.samples)
    assert not any(sample.remove_sample for result in results for group in result.samples for sample in group)


async def test_an_aborted_sample_is_a_dummy_in_its_place() -> None:
    tasks = rows("train", 1) + rows("broken", 1, raises="no network")
    async with scheduler_of(source=tasks) as scheduler:
        result = await scheduler.execute_rollout(0)
    good, broken = result.samples
    assert [sample.remove_sample for sample in good] == [False, False]
    assert [(s.remove_sample, s.score, len(s.trajectory)) for s in broken] == [(True, 0.0, 2)] * 2
    assert broken[0].metadata["_termination_reason"] == "infra_conn"
    assert result.summary.dummies == 2


async def test_more_are_fetched_until_enough_survive_and_what_is_beyond_is_dropped_and_told() -> None:
    settings = RolloutSettings(groups_per_step=2, filters=SPREAD, over_sampling=2.0)
    flat = [1.0, 1.0]
    async with scheduler_of(source=numbered({0: flat, 1: flat, 2: flat}), settings=settings) as scheduler:
        result = await scheduler.execute_rollout(0)
        assert result.rounds == 2
        # Four are fetched, one survives; of the two for the missing one both do.
        assert prompts(result) == ["train 3", "train 4"]
        spread, surplus = result.summary.filters
        assert (spread.kept_groups, spread.dropped_groups) == (3, 3)
        assert (surplus.filter, surplus.dropped_groups) == (SURPLUS, 1)
        assert prompts(await scheduler.execute_rollout(1)) == ["train 6", "train 7"]


async def test_too_few_survivors_are_kept_with_dummies_and_a_warning() -> None:
    filters = FilterSettings(rejection=Rejection.SPREAD, when_insufficient="keep")
    settings = RolloutSettings(groups_per_step=3, filters=filters)
    flat = [0.0, 0.0]
    async with scheduler_of(source=numbered({0: flat, 1: flat}), settings=settings) as scheduler:
        result = await scheduler.execute_rollout(0)
    assert prompts(result) == ["train 2"]
    assert [[s.remove_sample for s in group] for group in result.samples] == [[False] * 2, [True] * 2, [True] * 2]
    (warning,) = result.warnings
    assert warning.startswith("iteration 0: 1 of 3 groups survived (rejection dropped 2 groups")
    assert result.summary.warnings == result.warnings


async def test_a_source_at_its_end_says_so() -> None:
    async with scheduler_of(source=[], settings=RolloutSettings(groups_per_step=2)) as scheduler:
        with pytest.raises((FailedPreconditionError, InvalidArgumentError)):
            await scheduler.execute_rollout(0)
    source = IterableSource("train", rows("train", 3), on_end="stop")
    engine = engine_of(spec_of(Rated()))
    async with TaskScheduler(engine, settings=RolloutSettings(groups_per_step=2), source=source) as scheduler:
        await scheduler.execute_rollout(0)
        assert len((await scheduler.execute_rollout(1)).groups) == 1
        with pytest.raises(FailedPreconditionError, match="0 of 2 groups survived: a step cannot be empty"):
            await scheduler.execute_rollout(2)


async def test_a_cancelled_step_aborts_its_tasks_and_gives_them_back(tmp_path: Path) -> None:
    agent = GatedAgent()
    async with scheduler_of(agent, artifact_root=tmp_path) as scheduler:
        step = asyncio.create_task(scheduler.execute_rollout(0))
        await eventually(lambda: agent.inside == 4)
        with pytest.raises(FailedPreconditionError, match="a rollout is under way already"):
            await scheduler.execute_rollout(1)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert agent.inside == 0
        state = read_loop_state(tmp_path / "loop_state.json")
        assert state is not None
        assert state.unfinished == 0
        with pytest.raises(FailedPreconditionError, match="iteration 0 is unfinished: execute it first"):
            await scheduler.execute_rollout(1)
        agent.gate.set()
        again = await scheduler.execute_rollout(0)
        assert prompts(again) == ["train 0", "train 1"]
        assert {group.done.state for group in again.groups} == {"succeeded"}


async def test_a_loop_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    async with scheduler_of(artifact_root=tmp_path) as scheduler:
        await scheduler.execute_rollout(0)
    async with scheduler_of(artifact_root=tmp_path) as scheduler:
        assert scheduler.next_rollout_id == 1
        assert prompts(await scheduler.execute_rollout(1)) == ["train 2", "train 3"]
        # An iteration that is executed again is another execution, with the tasks that come next.
        assert prompts(await scheduler.execute_rollout(1)) == ["train 4", "train 5"]


async def test_groups_are_checkpointed_while_the_step_runs(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def on_task_done(_group: Group) -> None:
        seen.append(sorted(path.name for path in (tmp_path / "partial").glob("*/*")))

    async with scheduler_of(artifact_root=tmp_path, on_task_done=on_task_done) as scheduler:
        result = await scheduler.execute_rollout(0)
    assert seen[1] == [f"{result.groups[0].task_id}.parquet"]
    assert not (tmp_path / "partial/iter_000").exists()


async def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with scheduler_of(evals={"a": rows("a", 1)}) as scheduler:
        assert (await scheduler.execute_rollout(0)).files == ()
        assert (await scheduler.execute_eval(0)).files == ()
    assert os.listdir(tmp_path) == []  # noqa: PTH208 -- so short a look holds no loop up


async def test_a_step_of_dummies_alone_is_an_error() -> None:
    async with scheduler_of(source=rows("broken", 4, raises="no network")) as scheduler:
        with pytest.raises(FailedPreconditionError, match=r"no sample ran to its end .infra_conn 4"):
            await scheduler.execute_rollout(0)
        with pytest.raises(InvalidArgumentError, match="rollout_id"):
            await scheduler.execute_rollout(-1)


async def test_a_step_without_a_token_to_learn_from_says_so() -> None:
    async with scheduler_of(SolvingAgent(), settings=RolloutSettings(groups_per_step=2)) as scheduler:
        result = await scheduler.execute_rollout(0)
    assert result.summary.dummies == 4
    (warning,) = result.warnings
    assert warning.startswith("iteration 0: not one sample can be learnt from (solved 4): that takes tokens")


# Reuse


async def test_auto_reuse_trains_on_iteration_0_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RolloutSettings(groups_per_step=2)
    assert settings.reuse.mode is None, "in-process that is the seed's default"
    async with scheduler_of(settings=settings, artifact_root=tmp_path) as scheduler:
        first = await scheduler.execute_rollout(0)
        second = await scheduler.execute_rollout(1)
        assert second.samples == first.samples
        assert second.groups == ()
        assert second.reused_from == "trajectory_sft_samples_iter_000.parquet"
        assert second.files == ("eval_details/train_1.summary.json",)
        told = read_summary(tmp_path / second.files[0])
        assert (told.reuse, told.warnings, told.total.samples) == ("load", second.warnings, 0)
        assert "trains on the samples of iteration 0 again" in second.warnings[0]
        assert second.warnings[0] in caplog.text
        assert scheduler.next_rollout_id == 2


@pytest.mark.parametrize("is_kept", [True, False])
async def test_without_a_file_of_iteration_0_auto_reuse_rolls_out(tmp_path: Path, is_kept: bool) -> None:
    settings = RolloutSettings(groups_per_step=2)
    async with scheduler_of(settings=settings, artifact_root=tmp_path if is_kept else None) as scheduler:
        for rollout_id in (1, 2):
            result = await scheduler.execute_rollout(rollout_id)
            assert (result.reused_from, result.warnings, len(result.groups)) == ("", (), 2)


async def test_the_variables_of_reuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler_of(artifact_root=tmp_path / "first") as scheduler:
        rolled = [await scheduler.execute_rollout(rollout_id) for rollout_id in range(2)]
    monkeypatch.setenv("STACX_REUSE_PER_ITER_DIR", str(tmp_path / "first"))
    async with scheduler_of(artifact_root=tmp_path / "second") as scheduler:
        for rollout_id in range(2):
            assert (await scheduler.execute_rollout(rollout_id)).samples == rolled[rollout_id].samples
    async with scheduler_of(artifact_root=tmp_path / "first") as scheduler:
        assert (await scheduler.execute_rollout(0)).files == ()
        told = read_summary(tmp_path / "first/eval_details/train_0.summary.json")
        assert told == rolled[0].summary, "the figures of the rollout itself stay"
    async with scheduler_of(artifact_root=tmp_path / "second") as scheduler:
        with pytest.raises(FailedPreconditionError, match="iteration 2 has nothing to replay"):
            await scheduler.execute_rollout(2)
        monkeypatch.setenv("STACX_FORCE_FRESH_ROLLOUT", "1")
        with pytest.raises(InvalidArgumentError, match="STACX_FORCE_FRESH_ROLLOUT"):
            await scheduler.execute_rollout(2)


# The environment


async def test_the_iteration_is_published_while_a_step_runs_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACX_DAGGER_BETA", "by hand")
    settings = RolloutSettings(
        groups_per_step=1, export_environment=True, dagger=DAggerSchedule(beta_start=0.5, t_max_start=7)
    )
    async with scheduler_of(Published(), settings=settings, evals={"a": rows("a", 1)}) as scheduler:
        result = await scheduler.execute_rollout(0)
        told = {"STACX_ROLLOUT_ID": "0", "STACX_DAGGER_BETA": "0.5", "STACX_DAGGER_T_MAX": "7"}
        assert result.groups[0].rewards[0].details == told
        evaluated = await scheduler.execute_eval(3)
        assert evaluated.datasets["a"][0].rewards[0].details == {"STACX_ROLLOUT_ID": "3"}
    assert {k: v for k, v in os.environ.items() if k.startswith("STACX_")} == {"STACX_DAGGER_BETA": "by hand"}


# Evals


async def test_an_eval_is_interleaved_and_split_and_the_same_every_time() -> None:
    order: list[str] = []

    class Ordered(TaskScheduler):
        def batch(self, tasks: Any) -> Any:
            order.extend(task.prompt for task in tasks)
            return super().batch(tasks)

    sources = [IterableSource(name, rows(name, n), on_end="stop") for name, n in (("a", 1), ("b", 2), ("c", 3))]
    settings = RolloutSettings(n_samples_per_eval_prompt=2)
    async with Ordered(engine_of(spec_of(Rated())), eval_sources=sources, settings=settings) as scheduler:
        first = await scheduler.execute_eval(0)
        # a0 twice, b0 twice, ... side by side: ABCABC until a data set is at its end.
        assert order == ["a 0", "b 0", "c 0", "a 0", "b 0", "c 0", "b 1", "c 1", "b 1", "c 1", "c 2", "c 2"]
        assert {name: [(g.task.prompt, len(g.samples)) for g in groups] for name, groups in first.datasets.items()} == {
            "a": [("a 0", 2)],
            "b": [("b 0", 2), ("b 1", 2)],
            "c": [("c 0", 2), ("c 1", 2), ("c 2", 2)],
        }
        again = await scheduler.execute_eval(0)
        assert again.metrics == first.metrics
        assert [len(groups) for groups in again.datasets.values()] == [1, 2, 3]


async def test_an_eval_data_set_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_step, "MAX_PROMPTS", 1_000)
    endless = IterableSource("a", rows("a", 3), on_end="restart")
    async with TaskScheduler(engine_of(spec_of(Rated())), eval_sources=[endless]) as scheduler:
        with pytest.raises(InvalidArgumentError, match="data set 'a': has more than 1000 prompts"):
            await scheduler.execute_eval(0)


async def test_the_eval_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler_of(evals={"a": rows("a", 1)}) as scheduler:
        assert (await scheduler.execute_eval(0)).datasets["a"][0].rewards[0].details["beta"] == 0.0
        monkeypatch.setenv("STACX_DAGGER_EVAL_BETA", "0.25")
        assert (await scheduler.execute_eval(0)).datasets["a"][0].rewards[0].details["beta"] == 0.25
    settings = RolloutSettings(eval_beta=0.75)
    async with scheduler_of(evals={"a": rows("a", 1)}, settings=settings) as scheduler:
        assert (await scheduler.execute_eval(0)).datasets["a"][0].rewards[0].details["beta"] == 0.25
        monkeypatch.delenv("STACX_DAGGER_EVAL_BETA")
        assert (await scheduler.execute_eval(0)).datasets["a"][0].rewards[0].details["beta"] == 0.75


async def test_an_eval_runs_beside_a_step_under_one_limit() -> None:
    agent = GatedAgent()
    engine = engine_of(spec_of(agent), max_running_samples=5)
    source = IterableSource("train", rows("train", 50))
    evals = [IterableSource("a", rows("a", 30), on_end="stop")]
    settings = RolloutSettings(groups_per_step=20)
    async with TaskScheduler(engine, source=source, eval_sources=evals, settings=settings) as scheduler:
        async with asyncio.TaskGroup() as steps:
            rolling = steps.create_task(scheduler.execute_rollout(0))
            evaluating = steps.create_task(scheduler.execute_eval(0))
            await eventually(lambda: agent.inside == 5)
            agent.gate.set()
        assert len(rolling.result().groups) == 20
        assert len(evaluating.result().datasets["a"]) == 30
        assert agent.peak == 5
        first = agent.order[:40]
        assert any(p.startswith("a ") for p in first), "the eval is not starved"
        assert any(p.startswith("train ") for p in first), "nor is the step"


# The moves


async def test_a_subclass_may_override_each_move() -> None:
    class Own(TaskScheduler):
        def fetch(self, count: int) -> list[Task]:
            moves.append(f"fetch {count}")
            return super().fetch(count)

        def distribute(self, datasets: Any, *, samples: int | None = None) -> Iterator[Task]:
            moves.append("distribute")
            return super().distribute(datasets, samples=3)

        def batch(self, tasks: Any) -> Any:
            moves.append(f"batch {len(tasks)}")
            return super().batch(tasks)

        async def run_each(self, *args: Any, **more: Any) -> Any:
            moves.append("run")
            async for group in super().run_each(*args, **more):
                yield group

    moves: list[str] = []
    source = IterableSource("train", rows("train", 4))
    settings = RolloutSettings(groups_per_step=2)
    async with Own(engine_of(spec_of(Rated())), source=source, settings=settings) as scheduler:
        result = await scheduler.execute_rollout(0)
    assert moves == ["fetch 2", "distribute", "run", "batch 2"]
    assert [len(group.samples) for group in result.groups] == [3, 3]


# Groups that are scored as a whole


class Overruled(Rated):
    """Its groups' scores say the opposite of the samples' own."""

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        return [Reward(score=1.0 - sample.reward.score) for sample in samples]


async def test_what_the_group_is_given_is_what_every_figure_counts() -> None:
    tasks = numbered({}, count=2)
    evals = {"held_out": [msgspec.structs.replace(tasks[0], metadata={"scores": [0.0]})]}
    async with scheduler_of(Overruled(), source=tasks, evals=evals) as scheduler:
        step = await scheduler.execute_rollout(0)
        measured = await scheduler.execute_eval(0)
    assert step.metrics == {"rollout/mean_reward": 0.5, "rollout/accuracy": 0.5, "rollout/dummies": 0.0}
    assert [group.outcomes for group in step.groups] == [("solved", "wrong_answer")] * 2
    assert [s.metadata["_termination_reason"] for s in step.samples[0]] == ["solved", "wrong_answer"]
    assert measured.metrics == {"eval/held_out/accuracy": 1.0}
    (prompt,) = measured.datasets["held_out"]
    assert (prompt.done.outcomes, prompt.outcomes) == ({"solved": 1}, ("solved",))
