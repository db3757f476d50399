"""The composition root in the test's own process: how engines are started, and how a server ends."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from py_scheduler import app
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.app import building
from py_scheduler.client import SchedulerClient
from py_scheduler.config import Config, parse_config
from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.requests import EventFilter, SubmitRequest
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import ConfigError, EngineUnavailableError
from tests.support.agents.app_handlers import Stubborn

if TYPE_CHECKING:
    from py_scheduler.domain.ports import GenerationBackend

STUBBORN = """
[server]
listen = "127.0.0.1:0"
drain_seconds = 0.0
[scheduler]
stop_grace_seconds = 0.1
[[evaluator]]
evaluator_id = "stubborn"
handler = "tests.support.agents.app_handlers:Stubborn"
resource = { concurrency = 8 }
"""


LAST_FIRST = """
[scheduler]
batching_strategy = "tests.support.agents.app_handlers:last_first"
max_running_samples = 1
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Echo"
resource = { concurrency = 1 }
"""
MADE = """
[[dataset]]
name = "made"
kind = "python"
factory = "tests.support.agents.app_handlers:made_rows"
options = { count = 2 }
task_type = "echo"
"""


class StartingBackend:
    """Starts when it is told to, or fails; writes down what happens to it."""

    def __init__(self, diary: list[str], name: str, error: Exception | None = None) -> None:
        self._diary, self._name, self._error = diary, name, error
        self.may_start = asyncio.Event()
        self.begun = asyncio.Event()

    async def start(self) -> None:
        self.begun.set()
        try:
            if self._error is not None:
                raise self._error
            await self.may_start.wait()
            self._diary.append(f"{self._name} started")
        except asyncio.CancelledError:
            # What cleaning up takes: a child process is ended, a connection closed.
            await asyncio.sleep(0)
            self._diary.append(f"{self._name} gave up")
            raise

    async def close(self) -> None:
        self._diary.append(f"{self._name} closed")


def parts_of(**backends: StartingBackend | SglangFleet) -> app.Parts:
    nothing = cast("Any", None)
    return app.Parts(
        backends=cast("dict[str, GenerationBackend]", backends),
        scheduler=nothing,
        steps=nothing,
        step_service=nothing,
        api=nothing,
    )


async def start(parts: app.Parts, stop: asyncio.Event) -> bool:
    async with AsyncExitStack() as stack:
        return await app.start_backends(parts, stack, stop)


async def test_engines_are_started_together_and_closed_after(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "py_scheduler")
    diary: list[str] = []
    engines = {name: StartingBackend(diary, name) for name in ("a", "b")}
    engines["b"].may_start.set()
    starting = asyncio.create_task(start(parts_of(**engines), asyncio.Event()))
    await engines["a"].begun.wait()
    await engines["b"].begun.wait()
    engines["a"].may_start.set()
    assert await starting
    assert diary == ["b started", "a started", "b closed", "a closed"]
    assert [message.partition(" after")[0] for message in caplog.messages] == [
        "engine a: StartingBackend is loading",
        "engine b: StartingBackend is loading",
        "engine b: StartingBackend is ready",
        "engine a: StartingBackend is ready",
    ]
    assert await start(parts_of(), asyncio.Event())


async def test_an_engine_of_which_no_server_is_up_is_not_called_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "py_scheduler")
    fleet = SglangFleet([])
    assert await start(parts_of(student=fleet), asyncio.Event())
    assert caplog.messages == [
        "engine student: no server of it is named yet: `py-scheduler endpoints student URL` names some",
        "engine student: none of its servers is up yet; generations wait for one",
    ]


async def test_one_engine_that_fails_ends_the_start_of_the_others_before_they_are_closed() -> None:
    diary: list[str] = []
    failing = StartingBackend(diary, "a", EngineUnavailableError("nobody there"))
    with pytest.raises(EngineUnavailableError, match="nobody there"):
        await start(parts_of(a=failing, b=StartingBackend(diary, "b")), asyncio.Event())
    assert diary == ["b gave up", "b closed", "a closed"]


async def test_a_stop_ends_the_start() -> None:
    diary: list[str] = []
    slow = StartingBackend(diary, "a")
    stop = asyncio.Event()
    starting = asyncio.create_task(start(parts_of(a=slow), stop))
    await slow.begun.wait()
    stop.set()
    assert not await starting
    assert diary == ["a gave up", "a closed"]


async def test_the_journal_is_closed_although_a_handler_will_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[MemoryJournal] = []

    class WatchedJournal(MemoryJournal):
        async def close(self) -> None:
            await super().close()
            closed.append(self)

    monkeypatch.setattr(building, "MemoryJournal", WatchedJournal)
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(app.serve(parse_config(STUBBORN), Path(), address.set_result, stop))
    async with SchedulerClient(await address) as client:
        submission = await client.submit([Task(config=TaskConfig(task_type="stubborn"))], 1)
        frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
        async for frame in frames:
            if any(isinstance(record.event, AttemptStarted) for record in frame.records):
                break
        await frames.aclose()
        stop.set()
        assert await serving == 1, "the handlers that would not end"
    assert len(closed) == 1
    Stubborn.let_go()
    await asyncio.sleep(0)


async def test_a_batching_strategy_of_the_file_is_that_of_submits_and_of_steps(tmp_path: Path) -> None:
    parts = app.build(parse_config(LAST_FIRST), tmp_path)
    tasks = [Task(config=TaskConfig(task_type="echo"), prompt=str(number)) for number in range(3)]
    assert [batch.tasks[0].prompt for batch in parts.steps.batch(tasks)] == ["2", "1", "0"]
    async with app.running(parts):
        request = SubmitRequest(request_id="r", key=SubmissionKey(1), tasks=tuple(tasks))
        reply = await parts.scheduler.submit(request)
        begun: list[str] = []
        async for frame in parts.scheduler.watch(EventFilter(submission_id=reply.submission_id), reply.before_sequence):
            begun += [record.event.task_id for record in frame.records if isinstance(record.event, AttemptStarted)]
            if len(begun) == len(tasks):
                break
    assert begun == [*reversed(reply.task_ids)]


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ('[rollout]\nartifact_dir = "rows.jsonl"', "rollout.artifact_dir"),
        ('[rollout]\nartifact_dir = "a\\u0000b"', "rollout.artifact_dir"),
        ("[scheduler]\nretained_events = 50", "scheduler.retained_events"),
        ("[scheduler]\nretained_bytes = 8_000_000", "scheduler.retained_bytes"),
    ],
)
def test_what_steps_cannot_work_with_is_refused_at_the_start(tables: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    dataset = '[[dataset]]\nname = "d"\npath = "rows.jsonl"\ntask_type = "echo"\n'
    echo = LAST_FIRST[LAST_FIRST.index("[[evaluator]]") :]
    with pytest.raises(ConfigError) as caught:
        app.build(parse_config(f"{tables}\n{echo}\n{dataset}"), tmp_path)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(("file_format", "package"), [("pt", "torch"), ("parquet", "pyarrow")])
def test_what_saves_the_samples_is_missed_at_the_start(
    file_format: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    tables = f"[rollout]\nfile_format = '{file_format}'\n" + MADE
    with pytest.raises(ConfigError) as caught:
        app.build(parse_config(LAST_FIRST + tables), tmp_path)
    (fault,) = caught.value.violations
    assert fault.field == "rollout.file_format"
    assert re.search(f"{package}.*: install", fault.description)


async def test_a_budget_that_outgrows_the_cluster_is_told_with_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = "[cluster.layout]\na = { gpus = [0], cpu = 8, memory_gb = 8 }\n"
    told: list[str] = []
    for concurrency, warned in ((8, False), (9, True)):
        caplog.clear()
        text = LAST_FIRST.replace("concurrency = 1", f"concurrency = {concurrency}, cpu = 100")
        app.build(parse_config(layout + text + "run_resource = { cpu = 1.0 }\n"), tmp_path)
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert bool(told) == warned
    assert "lets 9 samples of a batch run at once, the empty cluster holds 8" in told[0]


def test_the_watchdog_leaves_room_for_drain_grace_and_the_rest() -> None:
    config = Config()
    assert app.stop_limit_seconds(config) >= config.server.drain_seconds + config.scheduler.stop_grace_seconds + 5
    assert app.stop_limit_seconds(config) <= 30, "by default, whatever is under way"
    longer = parse_config(STUBBORN.replace("0.1", "300.0"))
    assert app.stop_limit_seconds(longer) > 300
