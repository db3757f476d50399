"""The sandbox with real processes: nothing of a command is left, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.runners.processes import Marker, wait_until_ended
from tests.support.runners.sandboxes import needs_sandbox

if TYPE_CHECKING:
    from tests.support.runners.sandboxes import Run

ROOT = Path(__file__).parents[3]
pytestmark = needs_sandbox


DOUBLE_FORK = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', '{argument}'])
    os._exit(0)
{then}
"""


async def test_what_a_command_leaves_behind_ends_with_it(run: Run) -> None:
    marker = Marker()
    result = await run(DOUBLE_FORK.format(argument=marker.argument, then="time.sleep(0.1); print('gone')"))
    assert result.output == "gone\n"
    assert marker.processes() == []


async def test_what_a_command_started_ends_with_its_time(run: Run) -> None:
    marker = Marker()
    result = await run(DOUBLE_FORK.format(argument=marker.argument, then="time.sleep(1000)"), timeout_seconds=1)
    assert result.timed_out
    assert marker.processes() == []


async def begun(fifo: Path) -> None:
    """Until somebody opens the pipe to write."""
    await asyncio.wait_for(asyncio.to_thread(fifo.read_bytes), 20)


def pipe_in(folder: Path) -> Path:
    fifo = folder / "begun"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    return fifo


TELL = "open('begun', 'w').close(); "


async def test_a_cancel_ends_everything(run: Run, tmp_path: Path) -> None:
    marker, fifo = Marker(), pipe_in(tmp_path)
    code = DOUBLE_FORK.format(argument=marker.argument, then=TELL + f"os.system('sleep {marker.argument}')")
    task = asyncio.create_task(run(code))
    await begun(fifo)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marker.processes() == []


async def test_a_cancel_before_it_has_begun(run: Run, tmp_path: Path) -> None:
    for turns in range(6):
        marker = Marker()
        task = asyncio.create_task(run(f"import os\nos.execvp('sleep', ['sleep', '{marker.argument}'])"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert marker.processes() == []


SERVER = """
import asyncio, sys
from pathlib import Path
from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox
code = sys.stdin.read()
asyncio.run(ProcessSandbox().run(('python', '-c', code), workdir=Path(sys.argv[1]), timeout_seconds=600))
"""


async def test_the_servers_own_death_ends_everything(tmp_path: Path) -> None:
    marker, fifo = Marker(), pipe_in(tmp_path)
    code = DOUBLE_FORK.format(argument=marker.argument, then=f"os.system('sleep {marker.argument} & sleep 0.1')")
    code += TELL + "time.sleep(1000)"
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(tmp_path), stdin=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert server.stdin is not None
    server.stdin.write(code.encode())
    server.stdin.close()
    await begun(fifo)
    left = marker.processes()
    assert len(left) == 2
    server.send_signal(signal.SIGKILL)
    await server.wait()
    await asyncio.to_thread(wait_until_ended, left)


async def test_without_namespaces_nothing_is_left_either(without_namespaces: Run, tmp_path: Path) -> None:
    marker, fifo = Marker(), pipe_in(tmp_path)
    await without_namespaces(DOUBLE_FORK.format(argument=marker.argument, then="time.sleep(0.1)"))
    assert marker.processes() == []
    result = await without_namespaces(
        DOUBLE_FORK.format(argument=marker.argument, then="time.sleep(1000)"), timeout_seconds=1
    )
    assert result.timed_out
    assert marker.processes() == []
    task = asyncio.create_task(
        without_namespaces(DOUBLE_FORK.format(argument=marker.argument, then=TELL + "time.sleep(1000)"))
    )
    await begun(fifo)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marker.processes() == []
