"""A real server process, whose handler starts an agent in a process of its own, over the unix socket."""

from __future__ import annotations

import signal
import stat
from typing import TYPE_CHECKING

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.results import Outcome, SampleDone
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.models.scripted_sglang import ScriptedSglang
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[server]
listen = "127.0.0.1:0"
[gateway]
socket = "gateway/api.sock"
[generation.student]
kind = "sglang"
base_url = "{base_url}"
default_max_new_tokens = 8
[[evaluator]]
evaluator_id = "child"
handler = "tests.support.agents.chat_handlers:ChildAgent"
resource = {{ concurrency = 2 }}
[[evaluator]]
evaluator_id = "token_by_token"
handler = "tests.support.agents.chat_handlers:TokenAgent"
resource = {{ concurrency = 2 }}
"""


async def test_a_child_process_plays_what_a_handler_would_play(tmp_path: Path) -> None:
    config, path = tmp_path / "server.toml", tmp_path / "gateway" / "api.sock"
    async with ScriptedSglang(opening="<assistant>") as sglang:
        config.write_text(CONFIG.format(base_url=sglang.base_url))
        async with served_process(config) as server:
            assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path)] == [0o700, 0o600]
            tasks = [Task(config=TaskConfig(task_type=name)) for name in ("child", "token_by_token")]
            async with SchedulerClient(server.address) as client:
                events = [event async for event in client.rollout(tasks, batch_id=1)]
            samples = [event for event in events if isinstance(event, SampleDone)]
            assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 2, samples
            assert samples[0].trajectory == samples[1].trajectory
            assert samples[0].trajectory.generated_tokens == 24
            assert not sglang.running
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0
            assert not path.exists()
