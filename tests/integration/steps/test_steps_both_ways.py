"""One scenario of whole steps, in-process and on a server in another process: the same reports, samples and files."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pytest

from py_scheduler.app import in_process
from py_scheduler.client import SchedulerClient
from py_scheduler.config import load_config
from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.requests import WatchedFrame
from py_scheduler.domain.results import SampleDone
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.errors import CursorExpiredError, FailedPreconditionError, ServerError
from py_scheduler.rollout.files.iteration_summary import read_summary
from py_scheduler.rollout.files.store import read_samples
from tests.support.servers.served_process import served_process
from tests.support.steps.rows import write_lines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from py_scheduler.domain.requests import WatchedRecord
    from py_scheduler.interfaces.task_scheduler import TaskScheduler
    from py_scheduler.rollout.groups import Group

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.step_handlers:Rated"
resource = { concurrency = 4 }
[rollout]
groups_per_step = 4
artifact_dir = "kept"
save_eval_details = true
n_samples_per_eval_prompt = 4
filters = { rejection = "spread" }
reuse = { mode = "never" }
dagger = { beta_start = 1.0, beta_end = 0.0, decay_iterations = 4 }
"""
TABLE = """
[[{kind}]]
name = "{name}"
path = "{name}.jsonl"
task_type = "agent"
repeat_times = 2
"""
# Rows with a spread survive; the others make a step fetch again.
TRAIN = [{"prompt": f"train {n}", "scores": [1.0, n % 2]} for n in range(16)]
SHORT = [{"prompt": f"short {n}", "scores": [1.0]} for n in range(2)]
LONG = [{"prompt": f"long {n}", "scores": [0.0]} for n in range(4)] + [{"prompt": "broken", "raises": "no network"}]


class Steps(Protocol):
    async def rollout(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]: ...
    async def eval(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]: ...


class InProcess:
    def __init__(self, scheduler: TaskScheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[Group] = []
        scheduler.on_task_done = self._groups.append

    async def rollout(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]:
        self._groups.clear()
        result = await self._scheduler.execute_rollout(rollout_id)
        request = StepRequest(kind=StepKind.ROLLOUT, rollout_id=rollout_id, request_id="r")
        return result.report(request), [sample for group in self._groups for sample in group.samples]

    async def eval(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]:
        self._groups.clear()
        result = await self._scheduler.execute_eval(rollout_id)
        request = StepRequest(kind=StepKind.EVAL, rollout_id=rollout_id, request_id="r")
        return result.report(request), [sample for group in self._groups for sample in group.samples]


class OverGrpc:
    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    async def rollout(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]:
        return split([event async for event in self._client.execute_rollout(rollout_id)])

    async def eval(self, rollout_id: int) -> tuple[StepReport, list[SampleDone]]:
        return split([event async for event in self._client.execute_eval(rollout_id)])


def split(events: list[Any]) -> tuple[StepReport, list[SampleDone]]:
    *before, report = events
    assert isinstance(report, StepReport)
    return report, [event for event in before if isinstance(event, SampleDone)]


@asynccontextmanager
async def steps_of(way: str, config: Path) -> AsyncIterator[Steps]:
    if way == "in-process":
        async with in_process(load_config(config), config.parent) as scheduler:
            yield InProcess(scheduler)
    else:
        async with served_process(config) as served, SchedulerClient(served.address) as client:
            yield OverGrpc(client)


def write(folder: Path, config: str = CONFIG) -> Path:
    for kind, name, rows in (
        ("dataset", "train", TRAIN),
        ("eval_dataset", "short", SHORT),
        ("eval_dataset", "long", LONG),
    ):
        write_lines(folder / f"{name}.jsonl", rows)
        config += TABLE.format(kind=kind, name=name)
    path = folder / "scheduler.toml"
    path.write_text(config)
    return path


def numbers(task_ids: Iterable[str]) -> list[int]:
    """What is the same in every process: which of a submission's tasks they are."""
    return [int(task_id.rpartition("-")[2]) for task_id in task_ids]


@pytest.mark.parametrize("way", ["in-process", "over gRPC"])
async def test_steps(way: str, tmp_path: Path) -> None:
    async with steps_of(way, write(tmp_path)) as steps:
        report, samples = await steps.rollout(0)
        check_rollout(report, samples)
        check_files_of_rollout(report, tmp_path / "kept")

        report, samples = await steps.eval(0)
        check_eval(report, samples)
        lines = (tmp_path / "kept/eval_details/0.jsonl").read_bytes().splitlines()
        assert len([msgspec.json.decode(line) for line in lines]) == 28

        _, samples = await steps.rollout(1)
        assert {sample.reward.details["beta"] for sample in samples} == {0.75}
        prompts = {sample.trajectory.turns[0].text for sample in samples}
        assert prompts == {f"train {n}" for n in range(7, 15)}


def check_rollout(report: StepReport, samples: list[SampleDone]) -> None:
    assert report.kind is StepKind.ROLLOUT
    # Rows 0 to 3 give two survivors, 4 and 5 one more, 6 the last.
    assert report.rounds == 3
    assert numbers(report.task_ids) == [0, 2, 4, 6]
    assert {group.sample_nos for group in report.kept} == {(0, 1)}
    assert report.training_samples == 8
    (spread,) = report.filters
    assert (spread.filter, spread.kept_groups, spread.dropped_groups) == ("rejection", 4, 3)
    assert spread.group_reasons == {"no_spread": 3}
    assert sorted(numbers(spread.dropped_task_ids)) == [1, 3, 5]
    assert len(samples) == 14
    assert {sample.reward.details["beta"] for sample in samples} == {1.0}
    assert report.datasets[0].dataset == "train"
    assert sum(report.datasets[0].outcomes.values()) == 14
    assert report.reused_from == ""


def check_files_of_rollout(report: StepReport, folder: Path) -> None:
    assert sorted(report.files) == [
        "eval_details/train_0.summary.json",
        "trajectory_sft_samples.parquet",
        "trajectory_sft_samples_iter_000.parquet",
    ]
    kept = list(read_samples(folder / "trajectory_sft_samples_iter_000.parquet"))
    assert [[sample.prompt for sample in group] for group in kept] == [[f"train {n}"] * 2 for n in (0, 2, 4, 6)]
    assert read_summary(folder / "eval_details/train_0.summary.json").filters == report.filters
    assert not (folder / "partial/iter_000").exists()


def check_eval(report: StepReport, samples: list[SampleDone]) -> None:
    assert report.kind is StepKind.EVAL
    # Interleaved, every prompt and copy, as it was taken in: short 0, long 0, short 0, long 0, ...
    assert len(set(report.task_ids)) == 4 * (2 + 5)
    assert sorted(report.task_ids) == sorted(sample.task_id for sample in samples)
    assert {sample.sample_no for sample in samples} == {0}
    assert {group.sample_nos for group in report.kept} == {(0,)}
    assert len(samples) == 28
    assert {sample.reward.details.get("beta") for sample in samples if not sample.error} == {0.0}
    # The broken prompt has no model result: it is in no rate.
    assert report.metrics == {
        "eval/short/accuracy": 1.0,
        **{f"eval/short/pass@{k}": 1.0 for k in (1, 2, 4)},
        "eval/long/accuracy": 0.0,
        **{f"eval/long/pass@{k}": 0.0 for k in (1, 2, 4)},
    }
    outcomes = {dataset.dataset: dataset.outcomes for dataset in report.datasets}
    assert outcomes == {"short": {"solved": 8}, "long": {"wrong_answer": 16, "infra_conn": 4}}
    assert sorted(report.files) == [
        "eval_details/0.jsonl",
        "eval_details/0.placement.jsonl",
        "eval_details/0.summary.json",
    ]


@pytest.mark.parametrize("way", ["in-process", "over gRPC"])
async def test_what_there_is_no_table_for(way: str, tmp_path: Path) -> None:
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG)
    async with steps_of(way, config) as steps:
        with pytest.raises(FailedPreconditionError, match=r"a \[\[dataset\]\] table"):
            await steps.rollout(0)
        with pytest.raises(FailedPreconditionError, match=r"an \[\[eval_dataset\]\] table"):
            await steps.eval(0)


@pytest.mark.parametrize("way", ["in-process", "over gRPC"])
async def test_a_step_of_which_nothing_survives_is_an_error_and_can_be_tried_again(way: str, tmp_path: Path) -> None:
    config = write(
        tmp_path, CONFIG.replace('rejection = "spread"', 'rejection = "threshold", min_score = 2, max_fetches = 1')
    )
    async with steps_of(way, config) as steps:
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match=r"0 of 4 groups survived .*rejection dropped 8 groups"):
                await steps.rollout(0)


async def _records_of(frames: AsyncGenerator[WatchedFrame | StepReport, None]) -> AsyncGenerator[WatchedRecord, None]:
    async for frame in frames:
        if isinstance(frame, WatchedFrame):
            for record in frame.records:
                yield record


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_that_ends_in_a_step_executes_it_with_the_same_tasks_afterwards(
    how: signal.Signals, tmp_path: Path, *, journal: bool
) -> None:
    gate = tmp_path / "gate"
    held = f'step_handlers:HeldInIteration"\nhandler_args = {{ rollout_id = 1, free = 3, gate = "{gate}" }}'
    server = f"[journal]\nenabled = {str(journal).lower()}\n[server]\ndrain_seconds = 0.0"
    config = write(tmp_path, CONFIG.replace('step_handlers:Rated"', held).replace("[server]", server))
    step = StepRequest(kind=StepKind.ROLLOUT, rollout_id=1, request_id="second")
    async with served_process(config) as served, SchedulerClient(served.address, reconnect_seconds=0) as client:
        await OverGrpc(client).rollout(0)
        cursor, finished = b"", 0
        with pytest.raises(ServerError) as caught:  # noqa: PT012 - it ends by raising
            async for frame in client.step_frames(step):
                assert isinstance(frame, WatchedFrame)
                cursor = frame.cursor
                ended = sum(isinstance(record.event, AttemptEnded) for record in frame.records)
                finished += ended
                # Once: a second signal ends the server at once.
                if ended and finished == 3:
                    served.process.send_signal(how)
        assert caught.value.code == "UNAVAILABLE"
        code = await served.process.wait()
        assert code == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    gate.touch()
    async with served_process(config) as served, SchedulerClient(served.address) as client:
        if not journal:
            with pytest.raises(CursorExpiredError, match="start without a cursor"):
                await anext(client.step_frames(step, cursor))
        with pytest.raises(FailedPreconditionError, match="iteration 1 is unfinished: execute it first"):
            await OverGrpc(client).rollout(2)
        report, samples = split([event async for event in client.execute_rollout(1, request_id="second")])
        # The same as in `test_steps`, where nothing ended.
        assert {sample.trajectory.turns[0].text for sample in samples} == {f"train {n}" for n in range(7, 15)}
        assert len(report.task_ids) == 4
        if journal:
            rest = [record async for record in _records_of(client.step_frames(step, cursor))]
            ended = sum(isinstance(record.event, AttemptEnded) and bool(record.event.samples) for record in rest)
            assert ended == len(samples) - finished, "who followed it before misses nothing and sees nothing twice"
        *_, again = [event async for event in client.execute_rollout(1, request_id="second")]
        assert again == report
    async with served_process(config) as served, SchedulerClient(served.address) as client:
        with pytest.raises(FailedPreconditionError, match=r"'second' was iteration 1, .* Go on with iteration 2"):
            await anext(client.step_frames(step))
