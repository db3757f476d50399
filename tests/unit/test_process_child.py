"""Whom the signals to a child reach."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from py_scheduler.adapters.process_runner import ProcessHost
from py_scheduler.domain.runners import DEFAULT_ENVIRONMENT, RunnerSettings

if TYPE_CHECKING:
    import pytest

    from py_scheduler.adapters.process_runner import ProcessChild


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
