"""SchedulerRolloutManager: whole steps of a training loop, driven by calls to an actor of a real Ray cluster."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.app.ray_manager import SchedulerRolloutManager, rollout_manager_actor
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.step_handlers:Rated"
resource = { concurrency = 4 }
[rollout]
reuse = { mode = "never" }
groups_per_step = 3
file_format = "parquet"
[[dataset]]
name = "sums"
path = "sums.jsonl"
task_type = "agent"
repeat_times = 2
[[eval_dataset]]
name = "words"
path = "words.jsonl"
task_type = "agent"
"""


def folder(tmp_path: Path) -> str:
    for name in ("sums", "words"):
        rows = [json.dumps({"prompt": f"{name} {n}", "scores": [1.0, 0.0]}) for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return str(tmp_path)


async def test_a_training_loop_drives_the_actor(cluster: Any, tmp_path: Path) -> None:
    manager = rollout_manager_actor().remote(CONFIG, folder(tmp_path))
    assert await manager.start.remote() == 0
    for rollout_id in range(2):
        rollout, evaluated = await asyncio.gather(
            manager.execute_rollout.remote(rollout_id), manager.execute_eval.remote(rollout_id)
        )
        assert (rollout.rollout_id, len(rollout.groups)) == (rollout_id, 3)
        assert [len(group) for group in rollout.samples] == [2, 2, 2]
        assert any(name.startswith("eval/words/") for name in evaluated.metrics)
    assert await manager.next_rollout_id.remote() == 2
    await manager.close.remote()
    with pytest.raises(FailedPreconditionError, match="call start first"):
        await manager.next_rollout_id.remote()
    assert await manager.start.remote() == 2, "the loop's state is in its folder"
    await manager.close.remote()


async def test_it_is_plain_async_python(tmp_path: Path) -> None:
    manager = SchedulerRolloutManager(CONFIG, folder(tmp_path))
    assert await manager.start() == 0
    assert await manager.start() == 0
    assert len((await manager.execute_rollout(0)).groups) == 3
    assert await manager.runners() == []
    await manager.close()
