"""Processes: whom the signals to one reach, and what is left of one that dies at any moment of its start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.children.process_host import ProcessHost, import_path
from py_scheduler.domain.runners.frames import Hello, Pong, Ready, read_child_frame
from py_scheduler.domain.runners.runner import DEFAULT_ENVIRONMENT, HandlerPlan, RunnerSettings
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children import session as child_session
from py_scheduler.execution.children.starter import ChildStarter
from tests.support.runners.children import AGENT, is_there

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.adapters.children.process_host import ProcessChild


async def ended(child: ProcessChild) -> str:
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    child.listen(lambda _: None, over.set_result)
    async with asyncio.timeout(30):
        return await over


async def test_nothing_is_signalled_once_a_child_was_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by then, and is its own until then."""
    signalled: list[tuple[int, bool]] = []
    killpg = os.killpg

    def noted(group: int, number: int) -> None:
        signalled.append((group, is_unreaped(group)))
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", noted)
    child = await ProcessHost().launch(("", None), RunnerSettings(environment=DEFAULT_ENVIRONMENT))
    os.kill(child.pid, signal.SIGKILL)
    assert await ended(child) == "signal SIGKILL"
    assert signalled == [(child.pid, True)], "what it has started is ended with it"
    child.kill("too late")
    assert len(signalled) == 1


def is_unreaped(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SETTINGS = RunnerSettings(environment=DEFAULT_ENVIRONMENT)
PLAN = HandlerPlan(name=AGENT)


class KillingHost(ProcessHost):
    """Kills its child when that has said something of this kind; None: before it can say anything."""

    def __init__(self, moment: type | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = moment
        self.pid = 0
        self._read = read_child_frame
        monkeypatch.setattr(child_session, "read_child_frame", self.read_child_frame)

    async def launch(self, *args: Any) -> ProcessChild:
        child = await super().launch(*args)
        self.pid = child.pid
        if self.moment is None:
            os.kill(child.pid, signal.SIGKILL)
        return child

    def read_child_frame(self, data: bytes) -> Any:
        frame = self._read(data)
        if self.moment is not None and isinstance(frame, self.moment):
            os.kill(self.pid, signal.SIGKILL)
        return frame


@pytest.mark.parametrize("moment", [None, Hello])
async def test_a_child_killed_before_it_is_ready_leaves_nothing(
    moment: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, over = KillingHost(moment, monkeypatch), list[str]()
    starter = ChildStarter(host, SETTINGS, PLAN, lambda _: {}, import_path())
    with pytest.raises(RunnerStartError, match="the runner ended before it was ready: signal SIGKILL"):
        await starter.launch(("", None), lambda ended: over.append(ended.how_it_ended))
    await starter.close()
    assert over == ["signal SIGKILL"]
    assert not is_there(host.pid)


@pytest.mark.parametrize("moment", [Ready, Pong])
async def test_a_child_killed_once_it_is_ready_is_told_of_at_the_next_ping(
    moment: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, over = KillingHost(moment, monkeypatch), list[str]()
    starter = ChildStarter(host, SETTINGS, PLAN, lambda _: {}, import_path())
    session = await starter.launch(("", None), lambda ended: over.append(ended.how_it_ended))
    assert await session.ping() is (moment is Pong), "what it said before it died was heard"
    await session.over.wait()
    assert not await session.ping()
    await starter.close()
    assert over == ["signal SIGKILL"]
    assert not is_there(host.pid)


async def test_without_a_thread_to_watch_it_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    def none_left(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(RunnerStartError, match="can't start new thread"):
        await ProcessHost().launch(("", None), SETTINGS)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


async def test_a_child_that_something_else_reaped_has_ended_all_the_same() -> None:
    child = await ProcessHost().launch(("", None), SETTINGS)
    ending = asyncio.create_task(ended(child))
    os.kill(child.pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # Whoever was faster: the other finds no such child.
        await asyncio.to_thread(os.waitpid, child.pid, 0)
    assert await ending


async def test_whatever_goes_wrong_while_a_child_is_ended_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    child = await ProcessHost().launch(("", None), SETTINGS)
    kill: Callable[[], None] = child._end_by_force

    def failing() -> None:
        kill()
        raise OSError("no such luck")

    monkeypatch.setattr(child, "_end_by_force", failing)
    os.kill(child.pid, signal.SIGKILL)
    assert await ended(child) == "it cannot be seen any more: OSError: no such luck"
    child._process.wait()
