"""A trainer whose handlers run in children that die, exit, block and cannot be started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.runners.runner import RunnerState
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from tests.support.runners.children import Pipe
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.trainers.pulling import Pulling

# Two runners: two nodes of one slot each. Two failures of any kind use up a task.
CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
"{nodes[0]}" = {{ gpus = [], cpu = 1, memory_gb = 1 }}
"{nodes[1]}" = {{ gpus = [], cpu = 1, memory_gb = 1 }}
[scheduler]
retry_backoff_seconds = 0.0
stop_grace_seconds = 0.3
[[evaluator]]
evaluator_id = "workflow"
handler = "tests.support.agents.child_handlers:OddAgent"
handler_args = {{ fault = "until:{there}" }}
resource = {{ cpu = 1, concurrency = 1 }}
run_resource = {{ cpu = 1 }}
eval_resource = {{ cpu = 1 }}
runner = "{kind}"
runner_settings = {{ min_runners = 2, max_runners = 2, prepare_max_retries = 1 }}
"""
KILLED = {"process": "signal SIGKILL", "ray": "ActorDiedError"}
"""What is said of a runner that was killed."""
EXITED_HARD = {"process": "exit status 1", "ray": "ActorDiedError"}


def configuration(tmp_path: Path, kind: str, nodes: tuple[str, str] = ("10.0.0.1", "10.0.0.2")) -> Path:
    there = tmp_path / "there"
    there.touch()
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG.format(there=there, kind=kind, nodes=nodes))
    return config


def task(prompt: str, **config: Any) -> Task:
    return Task(config=TaskConfig(task_type="workflow", retry=RetryPolicy(max_retries=1), **config), prompt=prompt)


class Run:
    """A trainer at work, the pipe by which handlers tell, one at which nobody listens, the file without which no
    runner starts, and the one that kills each at its start.
    """

    def __init__(self, trainer: Pulling, tmp_path: Path, kind: str) -> None:
        self.trainer = trainer
        self.kind = kind
        self.pipe = Pipe(tmp_path / "pipe")
        self.unheard = Pipe(tmp_path / "unheard")
        self.mark = tmp_path / "mark"
        self.there = tmp_path / "there"
        self.kills = tmp_path / "there.kills"

    async def until_one_has_failed(self) -> None:
        """Only a look tells."""

        async def one_has() -> bool:
            return any(view.state is RunnerState.FAILED for view in await self.trainer.runners())

        await eventually(one_has, pause_seconds=0.02)

    async def all_runners_work(self, batch_id: str = "capacity") -> None:
        """Both of them, at once; and then a batch ends as if nothing had been."""
        trainer = self.trainer
        await trainer.schedule([task(f"wait {self.pipe}") for _ in range(2)], batch_id)
        pids = {await self.pipe.told() for _ in range(2)}
        assert len(pids) == 2
        assert sorted(view.pid for view in await trainer.runners()) == sorted(pids)
        await trainer.abort_batch(batch_id, return_partial_tasks=False)
        await trainer.schedule([task("fine") for _ in range(6)], batch_id)
        results = (await trainer.collect(batch_id, timeout_seconds=30)).results
        assert [result.ok for result in results] == [True] * 6
