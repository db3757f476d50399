"""ReadSamples: what a step handed out, rolled out or reused, for whoever asked from afar."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.app import Parts, build, running
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.config import parse_config
from py_scheduler.domain.training.steps import StepReport
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from py_scheduler.rollout.files.store import RolloutStore
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine
from tests.support.steps.rows import write_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from py_scheduler.domain.training.samples import TrainingSample

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.step_handlers:Rated"
resource = { concurrency = 64 }
[rollout]
groups_per_step = 3
artifact_dir = "kept"
filters = { rejection = "threshold", min_score = 0.5 }
reuse = { mode = "auto" }
[[dataset]]
name = "train"
path = "rows.jsonl"
task_type = "agent"
repeat_times = 3
"""


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """A server that trains on iteration 0 again; the middle sample of each group does not survive its filter."""
    rows = [{"prompt": f"row {number}", "scores": [1.0, 0.0, 1.0]} for number in range(4)]
    write_lines(tmp_path / "rows.jsonl", rows)
    built = build(parse_config(CONFIG), tmp_path)
    async with running(built):
        yield built
        built.step_service.stop()
        await built.api.stop()


@pytest.fixture
async def address(parts: Parts) -> str:
    bound = parts.api.bind()
    await parts.api.start()
    return bound


async def report_of(client: SchedulerClient, rollout_id: int) -> StepReport:
    *_, report = [event async for event in client.execute_rollout(rollout_id)]
    assert isinstance(report, StepReport)
    return report


async def read(client: SchedulerClient, rollout_id: int | None) -> list[list[TrainingSample]]:
    assert rollout_id is not None
    return [group async for group in client.read_samples(rollout_id)]


async def test_a_rollout_and_its_reuse(address: str, tmp_path: Path) -> None:
    async with SchedulerClient(address) as client:
        with pytest.raises(NotFoundError, match="iteration 0 are not in 'kept'"):
            await read(client, 0)
        first = await report_of(client, 0)
        groups = await read(client, first.samples_of)
        assert groups == list(RolloutStore(tmp_path / "kept").load(0))
        assert [[sample.remove_sample for sample in group] for group in groups] == [[False, True, False]] * 3
        # The report alone says what of the streamed samples is trained on.
        assert [group.task_id for group in first.kept] == [group[0].task_id for group in groups]
        assert [group.sample_nos for group in first.kept] == [(0, 2)] * 3
        again = await report_of(client, 1)
        assert (again.kept, again.samples_of, again.training_samples) == ((), 0, 9)
        assert await read(client, again.samples_of) == groups
        with pytest.raises(NotFoundError):
            await read(client, 1)
        with pytest.raises(InvalidArgumentError, match="rollout_id"):
            await read(client, -1)


async def test_reading_may_be_left_early_and_blocking(address: str) -> None:
    async with SchedulerClient(address) as client:
        await report_of(client, 0)
        groups = client.read_samples(0)
        assert len(await anext(groups)) == 3
        await groups.aclose()

    def count() -> list[int]:
        with BlockingSchedulerClient(address) as client:
            return [len(group) for group in client.read_samples(0)]

    assert await asyncio.to_thread(count) == [3, 3, 3]


async def test_the_newest_file_says_whose_samples_it_holds(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SchedulerClient(address) as client:
        await report_of(client, 0)
        monkeypatch.setenv("STACX_REUSE_ROLLOUT", "1")
        again = await report_of(client, 5)
    assert (again.reused_from, again.samples_of) == ("trajectory_sft_samples.parquet", 0)


async def test_a_server_that_executes_no_steps_keeps_no_samples() -> None:
    served = await serve(FakeEngine())
    async with SchedulerClient(served.address) as client:
        with pytest.raises(FailedPreconditionError, match="executes no steps"):
            await read(client, 0)
    await served.server.stop()
