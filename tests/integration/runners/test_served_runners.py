"""`py-scheduler serve` with evaluators in processes of their own: by configuration alone, over gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from py_scheduler.client import SchedulerClient
from py_scheduler.config import parse_config
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, SampleDone, TaskState
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ConfigError
from tests.support.runners.children import Pipe, is_there
from tests.support.servers.served_process import served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[server]
listen = "127.0.0.1:0"
drain_seconds = 0.5
[scheduler]
stop_grace_seconds = 0.5
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1], cpu = 4, memory_gb = 4 }}
[[evaluator]]
evaluator_id = "agent"
handler = "{handler}"
handler_args = {arguments}
resource = {{ gpu = 2.0, cpu = 4.0, memory_gb = 4.0, concurrency = 2 }}
run_resource = {{ gpu = 1.0, cpu = 1.0 }}
runner = "process"
runner_settings = {{ max_runners = 2, prepare_max_retries = 0 }}
"""


def configuration(
    tmp_path: Path, arguments: str = "{}", handler: str = "tests.support.agents.child_handlers:OddAgent"
) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(CONFIG.format(arguments=arguments, handler=handler), encoding="utf-8")
    return path


def task(prompt: str) -> Task:
    return Task(config=TaskConfig(task_type="agent"), prompt=prompt)


async def played(client: SchedulerClient, tasks: list[Task]) -> tuple[list[SampleDone], list[TaskDone]]:
    """Both in the order of the tasks."""
    events = [event async for event in client.rollout(tasks, batch_id=1)]
    samples = [event for event in events if isinstance(event, SampleDone)]
    done = [event for event in events if isinstance(event, TaskDone)]
    return sorted(samples, key=lambda event: event.task_id), sorted(done, key=lambda event: event.task_id)


async def test_a_server_outlives_its_handlers_and_they_do_not_outlive_it(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with served_process(configuration(tmp_path)) as server, SchedulerClient(server.address) as client:
        tasks = [task("say CUDA_VISIBLE_DEVICES"), task("exit 1"), task(f"wait_once {pipe} {tmp_path / 'mark'}")]
        rollout = asyncio.create_task(played(client, tasks))
        os.kill(await pipe.told(), signal.SIGKILL)
        samples, done = await rollout
        assert [task.state for task in done] == [TaskState.SUCCEEDED, TaskState.FAILED, TaskState.SUCCEEDED]
        assert '"CUDA_VISIBLE_DEVICES": "' in samples[0].termination_reason
        assert samples[1].outcome is Outcome.INFRA_OTHER
        assert samples[2].termination_reason == "attempt 2"
        # A handler that blocks holds up nobody who asks.
        await client.submit([task(f"block {pipe}")], batch_id=2)
        child = await pipe.told()
        await client.server_info()
        assert is_there(child), "which blocks for an hour"
        server.process.send_signal(signal.SIGTERM)
        assert await server.process.wait() == 0
        await eventually(lambda: not is_there(child), pause_seconds=0.01)


async def test_who_watches_hears_that_all_runners_died_and_that_none_can_be_started(tmp_path: Path) -> None:
    """Case 3 of the faults: as many tries as each task has, and no timeout."""
    pipe, there = Pipe(tmp_path / "pipe"), tmp_path / "there"
    there.touch()
    config = configuration(tmp_path, f'{{ fault = "until:{there}" }}')
    async with served_process(config) as server, SchedulerClient(server.address) as client:
        rollout = asyncio.create_task(played(client, [task(f"wait {pipe}"), task(f"wait {pipe}"), task("fine")]))
        pids = {await pipe.told() for _ in range(2)}
        there.with_suffix(".kills").touch()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            samples, done = await rollout
        assert [task.state for task in done] == [TaskState.FAILED] * 3
        assert [sample.outcome for sample in samples] == [Outcome.INFRA_OTHER] * 3, "never the model's failure"
        for ended in done:
            assert "quarantined, it lost its worker 3 times: no runner could be started: " in ended.reason
            assert "signal SIGKILL" in ended.reason


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('runner_settings = { environment = ["PATH", "LD_PRELOAD"] }', "LD_PRELOAD is never handed to a runner"),
        ("runner_settings = { max_resident_mib = 200, hard_resident_mib = 100 }", "must be at least max_resident_mib"),
        ("runner_settings = { min_runners = 3, max_runners = 2 }", "max_runners is 2"),
        ('runner = "thread"', "evaluator[0].runner"),
    ],
)
def test_faults_of_the_settings_are_told_by_name(change: str, told: str) -> None:
    text = f'[[evaluator]]\nevaluator_id = "a"\nhandler = "m:C"\nresource = {{ concurrency = 1 }}\n{change}\n'
    with pytest.raises(ConfigError) as refused:
        parse_config(text)
    assert told in str(refused.value)


def test_a_rays_port_off_loopback_has_to_be_asked_for() -> None:
    text = '[[evaluator]]\nevaluator_id = "a"\nhandler = "m:C"\nresource = { concurrency = 1 }\n[ray]\n'
    with pytest.raises(ConfigError, match="not loopback"):
        parse_config(text + 'listen = "0.0.0.0:0"')
    parse_config(text + 'listen = "0.0.0.0:0"\ninsecure_remote = true')
