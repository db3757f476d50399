"""Code that works against the sandbox: it gains nothing, and whatever comes of it is its own result."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.sandbox import child as sandbox_child
from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox, SandboxSettings
from py_scheduler.app import make_sandbox
from py_scheduler.errors import ConfigError, SandboxError
from tests.support.runners.sandboxes import needs_sandbox, python_in

if TYPE_CHECKING:
    from tests.support.runners.sandboxes import Run

pytestmark = needs_sandbox


# Against init and the supervisor


async def test_no_signal_ends_init(run: Run) -> None:
    result = await run(
        """
        import os, signal
        for number in signal.valid_signals():
            os.kill(1, number)
        print('alive')
        """
    )
    assert (result.exit_code, result.output) == (0, "alive\n")


@pytest.mark.parametrize("limit", ["AS", "DATA", "STACK", "CPU", "NPROC"])
async def test_limits_put_on_init_are_the_codes_own_doing(run: Run, limit: str) -> None:
    result = await run(f"import resource\nresource.prlimit(1, resource.RLIMIT_{limit}, (0, 0))\nprint('done')")
    assert result.exit_code == 0 or result.signal == "SIGKILL"


async def test_an_init_that_ends_is_a_result_of_the_code(run: Run, tmp_path: Path) -> None:
    """By a debugger's hand, since nothing inside can do it."""
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    task = asyncio.create_task(run("open('begun', 'w').close()\nimport time\ntime.sleep(1000)"))
    await asyncio.wait_for(asyncio.to_thread(fifo.read_bytes), 20)
    (supervisor,) = [child for child in children(os.getpid()) if b"sandbox.child" in command_line(child)]
    (init,) = children(supervisor)
    os.kill(init, 9)
    result = await task
    assert (result.exit_code, result.signal, result.timed_out) == (None, "SIGKILL", False)


def children(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").iterdir()
    return [int(word) for thread in threads for word in (thread / "children").read_text().split()]


def command_line(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def test_without_namespaces_a_long_line_of_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than calls can nest."""
    monkeypatch.setattr(sandbox_child, "_children", lambda parent: [parent + 1] if parent < 3_000 else [])
    assert sandbox_child._descendants(0) == list(range(1, 3_001))


async def test_without_namespaces_a_folder_that_the_code_has_closed_is_no_fault(without_namespaces: Run) -> None:
    await without_namespaces("import os\nos.chmod('.', 0)")
    result = await without_namespaces("print('here')")
    assert result.output == "here\n"


# System calls that pass by the other walls


async def test_the_servers_keyring_is_closed(run: Run, without_namespaces: Run) -> None:
    number = {"x86_64": 250, "aarch64": 219, "riscv64": 219}[os.uname().machine]
    libc = ctypes.CDLL(None, use_errno=True)
    session = libc.syscall(number, 6, -3, None, 0)
    look = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.syscall({number}, 6, -3, None, 0), ctypes.get_errno())
        """
    for inside in (run, without_namespaces):
        result = await inside(look)
        assert result.output == "-1 1\n", f"outside it is {session}"


async def test_memory_that_no_limit_counts_is_refused(run: Run) -> None:
    result = await run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for make in (lambda: libc.shmget(0, 1 << 20, 0o1600), lambda: libc.msgget(0, 0o1600),
                     lambda: libc.semget(0, 9, 0o1600)):
            print(make(), ctypes.get_errno())
        try:
            os.memfd_create('x')
        except PermissionError:
            print('no memfd')
        """
    )
    assert result.output == "-1 1\n" * 3 + "no memfd\n"


async def test_there_are_no_user_namespaces_inside(run: Run) -> None:
    result = await run(
        """
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), ctypes.get_errno())
        number = {'x86_64': 56}.get(os.uname().machine, 220)
        print(libc.syscall(number, ctypes.c_ulong(0x10000000 | signal.SIGCHLD), None, None, None, None))
        print(libc.syscall(435, None, 0), ctypes.get_errno())
        """
    )
    assert result.output == "-1 1\n-1\n-1 38\n"


async def test_sockets_that_no_network_namespace_holds_are_refused(run: Run, without_namespaces: Run) -> None:
    code = """
        import socket
        made = []
        for family in range(64):
            for kind in (1, 2, 3, 5):
                try:
                    socket.socket(family, kind).close()
                    made.append(family)
                except OSError:
                    pass
        print(*sorted(set(made) - {1, 2, 10, 16}))
        """
    for inside in (run, without_namespaces):
        assert (await inside(code)).output == "\n"


async def test_what_programs_need_is_left(run: Run) -> None:
    result = await run(
        """
        import multiprocessing, socket, subprocess, sys, threading
        thread = threading.Thread(target=print, args=('thread',))
        thread.start()
        thread.join()
        print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout, end='')
        one, other = socket.socketpair()
        one.send(b'x')
        print(other.recv(1), multiprocessing.Lock().acquire())
        """
    )
    assert result.output == "thread\n1\nb'x' True\n"


# What the settings may name


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"python": "./python3"}, "python: is './python3', must be an absolute path"),
        ({"python": "no-such-program"}, "the name of a program that PATH leads to"),
        ({"readable_paths": ["data"]}, "readable_paths: has 'data', must be absolute paths"),
        ({"readable_paths": ["/usr/.."]}, "and not /"),
        ({"python": "/nowhere/python3"}, "/nowhere/python3: No such file or directory. Correct `python`"),
    ],
)
def test_paths_that_would_open_the_servers_surroundings_are_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_sandbox(table, "evaluator[0].handler_args.sandbox")
    assert "evaluator[0].handler_args.sandbox" in str(caught.value)
    assert says in str(caught.value)


async def test_a_name_is_looked_up_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    surroundings = tmp_path_factory.mktemp("surroundings")
    (surroundings / "secret.txt").write_text("secret")
    python = os.path.realpath(sys.executable)  # noqa: ASYNC240
    name = Path(python).name
    monkeypatch.setenv("PATH", str(Path(python).parent))
    monkeypatch.chdir(surroundings)
    sandbox = ProcessSandbox(SandboxSettings(python=name))
    result = await python_in(sandbox, tmp_path)(
        f"import os, sys\nprint(os.path.realpath(sys.executable), os.path.exists({str(surroundings)!r}))"
    )
    assert result.output == f"{python} False\n"


@pytest.mark.skipif(not Path("/bin/python3").exists(), reason="the system has no Python of its own")
async def test_the_systems_own_python_opens_nothing_else(tmp_path: Path) -> None:
    sandbox = ProcessSandbox(SandboxSettings(python="/bin/python3"))
    result = await python_in(sandbox, tmp_path)("import os\nprint(os.path.exists('/etc/passwd'))")
    assert result.output == "False\n"


async def test_an_interpreter_outside_of_any_bin_opens_itself_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tools")
    python = folder / "python3"
    await asyncio.to_thread(shutil.copy, "/bin/true", python)
    assert str(python) in ProcessSandbox(SandboxSettings(python=str(python)))._readable
    assert str(folder.parent) not in ProcessSandbox(SandboxSettings(python=str(python)))._readable
    with pytest.raises(SandboxError):
        ProcessSandbox(SandboxSettings(python=str(folder / "gone"))).probe()
