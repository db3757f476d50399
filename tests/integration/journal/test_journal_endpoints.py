"""A server that is killed after its trainer has named servers generates at those again, whatever its file says."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.client import GenerationClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.generation import STUDENT, Endpoints, PauseMode
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.agents.app_handlers import Generating
from tests.support.fake_clock import FakeClock
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.models.fleets import Controlled, fleet_of
from tests.support.servers.served_process import ROOT, served_process

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[server]
listen = "127.0.0.1:0"
drain_seconds = 0.0
[journal]
state_dir = "state"
[generation.student]
kind = "sglang"
base_urls = {urls}
[generation.student.fleet]
warm_up_seconds = 20.0
[generation.teacher]
kind = "with_examples"
base = "student"
instruction = "Answer."
[[evaluator]]
evaluator_id = "talk"
handler = "tests.support.agents.app_handlers:Generating"
resource = {{ concurrency = 8 }}
default_sampling = {{ max_new_tokens = 8 }}
"""
NOBODY = '["http://127.0.0.1:9"]'


async def urls_of(address: str) -> list[str]:
    async with GenerationClient.connect(address) as client:
        endpoints = await client.endpoints()
    assert endpoints[STUDENT] == endpoints["teacher"]
    return [view.url for view in endpoints[STUDENT]]


async def said(*words: str, target: str) -> str:
    """By a command that goes well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "py_scheduler.cli", *words, "--target", target),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    return stdout.decode()


async def end_of_a_sample(address: str) -> TaskState:
    async with SchedulerClient.connect(address) as client, asyncio.timeout(30):
        events = client.rollout([Task(config=TaskConfig(task_type="talk"), prompt="a")], batch_id=0)
        return next(iter([event.state async for event in events if isinstance(event, TaskDone)]))


async def test_after_a_kill_it_generates_where_it_was_told_last_and_goes_back_when_told(tmp_path: Path) -> None:
    config = tmp_path / "scheduler.toml"
    async with Controlled() as first, Controlled() as second:
        config.write_text(CONFIG.format(urls="[]"))
        async with served_process(config) as served, GenerationClient.connect(served.address) as client:
            assert await urls_of(served.address) == []
            await client.set_endpoints(STUDENT, ["http://127.0.0.1:9"])
            await client.set_endpoints(STUDENT, [first.base_url])
            assert await end_of_a_sample(served.address) is TaskState.SUCCEEDED
            served.process.kill()
            await served.process.wait()
        # That its own list leads nowhere does not matter: it is not the one that counts.
        config.write_text(CONFIG.format(urls=NOBODY))
        async with served_process(config) as served:
            assert await urls_of(served.address) == [first.base_url]
            assert await end_of_a_sample(served.address) is TaskState.SUCCEEDED
            assert second.base_url in await said("endpoints", STUDENT, second.base_url, target=served.address)
            served.process.kill()
            await served.process.wait()
        # What was set may be gone as well: the server is there all the same, to be told of others.
        await second.__aexit__()
        config.write_text(CONFIG.format(urls=f'["{first.base_url}"]'))
        async with served_process(config) as served:
            assert await urls_of(served.address) == [second.base_url]
            status = await said("status", target=served.address)
            assert "engine     student  none of its servers is up" in status
            assert f"endpoint   student  {second.base_url}  warming up  0 in flight: " in status
            assert first.base_url in await said("endpoints", STUDENT, "--configured", target=served.address)
            assert await urls_of(served.address) == [first.base_url]
            assert await end_of_a_sample(served.address) is TaskState.SUCCEEDED
        await second.__aenter__()


async def test_after_a_restart_old_weights_may_come_back_and_their_samples_say_so(tmp_path: Path) -> None:
    async def run(batch_id: int, server: Controlled, pushed: str = "") -> tuple[int | None, int]:
        """The epoch of a sample that the server generates, and the present one."""
        fleet = fleet_of([server.base_url], FakeClock())
        await fleet.start()
        journal = SqliteJournal(tmp_path, JournalLimits(ballast_bytes=0))
        async with running_engine(spec_of(Generating()), journal=journal, generation_backends={STUDENT: fleet}) as h:
            if pushed:
                await h.engine.generation.pause(STUDENT, PauseMode.IN_PLACE)
                await h.engine.generation.weights_changed(STUDENT, pushed)
                await h.engine.generation.resume(STUDENT)
            (sample,) = await h.samples(await h.submit([task_of()], batch_id, request_id=str(batch_id)))
            (state,) = await h.engine.generation.states(STUDENT)
        await fleet.close()
        return sample.weight_epoch, state.weight_epoch

    async with Controlled() as first, Controlled() as second:
        assert await run(0, first) == (0, 0)
        assert await run(1, first, "step-1") == (1, 1)
        assert await run(2, second) == (0, 1), "it missed the push"
        assert await run(3, first) == (1, 1)


@pytest.mark.parametrize("between", ["nothing", "a checkpoint"])
async def test_the_list_is_in_the_events_and_in_the_snapshot(tmp_path: Path, between: str) -> None:
    async def run(wanted: Endpoints | None) -> Endpoints:
        """What it begins with; then `wanted` is set."""
        fleet = fleet_of(["http://127.0.0.1:9"], FakeClock())
        journal = SqliteJournal(tmp_path, JournalLimits(ballast_bytes=0, checkpoint_bytes=1 << 16))
        async with running_engine(spec_of(SolvingAgent()), journal=journal, generation_backends={STUDENT: fleet}) as h:
            before = fleet.endpoints
            await h.engine.generation.set_endpoints(STUDENT, wanted)
            if between == "a checkpoint":
                await h.engine._checkpoints.take()
        await fleet.close()
        return before

    configured = Endpoints(urls=("http://127.0.0.1:9",))
    others = Endpoints(urls=("http://127.0.0.1:10",), control_urls=("http://127.0.0.1:11",))
    wanted = [others, Endpoints(urls=()), None, others]
    assert [await run(each) for each in wanted] == [configured, others, Endpoints(urls=()), configured]
