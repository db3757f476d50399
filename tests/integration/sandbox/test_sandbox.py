"""The sandbox with real processes: what commands find and may do in it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox, SandboxSettings
from py_scheduler.app import make_sandbox
from py_scheduler.domain.episodes.sandbox import PYTHON
from py_scheduler.errors import ConfigError, SandboxError
from tests.support.runners.sandboxes import SETTINGS, needs_sandbox, python_in

if TYPE_CHECKING:
    from tests.support.runners.sandboxes import Run

ROOT = Path(__file__).parents[3]


pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def sandbox() -> ProcessSandbox:
    return ProcessSandbox(SETTINGS)


# Results


async def test_a_command_and_its_output_in_order(run: Run) -> None:
    result = await run("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three')\nsys.exit(3)")
    assert (result.exit_code, result.signal, result.timed_out) == (3, "", False)
    assert result.output == "one\ntwo\nthree\n"
    assert result.dropped_bytes == 0
    assert 0 < result.seconds < 10
    assert not result.is_ok


async def test_the_shell(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    result = await sandbox.run(("sh", "-c", "yes | head -2; echo $((6 * 7)); pwd"), workdir=tmp_path)
    assert (result.exit_code, result.output) == (0, "y\ny\n42\n/sandbox\n")


async def test_a_signal_has_a_name(run: Run) -> None:
    result = await run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.exit_code, result.signal) == (None, "SIGSEGV")


async def test_what_is_written_stays_for_the_next_command(run: Run, tmp_path: Path) -> None:
    await run("open('kept.txt', 'w').write('here')")
    result = await run("print(open('kept.txt').read())")
    assert result.output == "here\n"
    assert (tmp_path / "kept.txt").read_text() == "here"


async def test_bytes_that_are_no_text_and_text_that_is_no_utf8(run: Run) -> None:
    result = await run("import sys\nsys.stdout.buffer.write(b'\\xff\\x00')\nprint('\\u00e9')")
    assert result.output == "\ufffd\0é\n"
    result = await run("print(ascii(open('odd.txt').read()))", files={"odd.txt": "a\ud800b"})
    assert result.output == "'a?b'\n"


async def test_a_long_output_keeps_its_beginning_and_its_end(run: Run) -> None:
    result = await run("print('first')\nfor _ in range(300_000): print('x' * 99)\nprint('last')")
    assert result.exit_code == 0
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert result.dropped_bytes == 6 + 300_000 * 100 + 5 - 4_096
    assert f"[... {result.dropped_bytes} bytes are left out here ...]" in result.output


async def test_many_at_once(run: Run, tmp_path: Path, sandbox: ProcessSandbox) -> None:
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    results = await asyncio.gather(
        *(sandbox.run(("sh", "-c", f"echo {folder.name}"), workdir=folder) for folder in folders)
    )
    assert [result.output for result in results] == [f"{number}\n" for number in range(6)]


# What a command finds


async def test_nothing_of_the_server_is_handed_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_TOKEN", "LD_DEBUG_OUTPUT", "PYTHONBREAKPOINT", "BASH_ENV"):
        monkeypatch.setenv(name, "secret")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        result = await run(
            """
            import os, sys
            print(sorted(os.environ), repr(sys.stdin.read()))
            for number in range(3, 64):
                try:
                    print(number, os.fstat(number))
                except OSError:
                    pass
            """
        )
    finally:
        os.close(read)
        os.close(write)
    assert result.output == "['HOME', 'LANG', 'PATH', 'TMPDIR'] ''\n"


async def test_its_own_root_holds_no_files_of_this_machine(run: Run, tmp_path: Path) -> None:
    (tmp_path.parent / "beside.txt").write_text("secret")
    result = await run(
        f"""
        import os, tempfile
        print(os.getcwd(), os.path.expanduser('~'), tempfile.gettempdir())
        for path in ({str(tmp_path)!r}, {str(ROOT)!r}, '/etc/passwd', '/proc/1', '/home', '/var', '/run', '/sys'):
            print(os.path.exists(path))
        """
    )
    assert result.output == "/sandbox /sandbox /sandbox\n" + "False\n" * 8


async def test_nothing_outside_its_folder_can_be_written(run: Run, tmp_path: Path) -> None:
    result = await run(
        """
        import os, sys
        for path in ('/x', '/usr/x', '/etc/x', '/dev/x', sys.prefix + '/x', '/sandbox/../x'):
            try:
                open(path, 'w')
            except OSError as error:
                print(type(error).__name__)
        for what in (lambda: os.remove('/bin/sh'), lambda: os.chmod('/usr', 0o777)):
            try:
                what()
            except OSError as error:
                print(type(error).__name__)
        """
    )
    assert len(result.output.splitlines()) == 8, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["main.py"]  # noqa: ASYNC240


async def test_it_has_no_rights(run: Run) -> None:
    result = await run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.getuid(), os.getgid(), os.getgroups() in ([], [65534]))
        print(libc.mount(b'tmpfs', b'/sandbox', b'tmpfs', 0, None), libc.umount2(b'/usr', 2), libc.unshare(0x20000000))
        print(libc.sethostname(b'x', 1), libc.ptrace(16, 1, 0, 0))
        """
    )
    assert result.output == "65534 65534 True\n-1 -1 -1\n-1 -1\n"


async def test_it_sees_no_other_process(run: Run) -> None:
    result = await run(
        """
        import os
        print(os.getpid() < 10, os.getppid())
        for process in set(range(2, 5000)) - {os.getpid()}:
            try:
                os.kill(process, 9)
                print('killed', process)
            except ProcessLookupError:
                pass
        os.kill(1, 9)
        print('init lives')
        """
    )
    assert result.output == "True 1\ninit lives\n"


async def test_there_is_no_network_not_even_this_machines(run: Run, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind(f"\0py-scheduler-{os.getpid()}")
        abstract.listen()
        result = await run(
            f"""
            import socket
            def attempt(family, address, kind=socket.SOCK_STREAM):
                with socket.socket(family, kind) as client:
                    client.settimeout(2)
                    try:
                        client.connect(address)
                        client.send(b'x')
                    except OSError as error:
                        print(type(error).__name__)
                    else:
                        print('connected')
            attempt(socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]}))
            attempt(socket.AF_INET, ('203.0.113.7', 53), socket.SOCK_DGRAM)
            attempt(socket.AF_UNIX, '\\0py-scheduler-{os.getpid()}')
            attempt(socket.AF_UNIX, '/run/docker.sock')
            """
        )
    assert "connected" not in result.output
    assert len(result.output.splitlines()) == 4, result.output


async def test_a_network_that_is_asked_for(tmp_path: Path) -> None:
    sandbox = ProcessSandbox(SandboxSettings(network="allow"))
    assert "network open" in await asyncio.to_thread(sandbox.probe)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('connected')"
        result = await python_in(sandbox, tmp_path)(code)
    assert result.output == "connected\n"


# Limits


async def test_memory_is_bounded(run: Run) -> None:
    result = await run("x = bytearray(10**9)")
    assert result.exit_code == 1
    assert result.output.endswith("MemoryError\n")


async def test_a_fork_bomb_stays_small_and_ends(run: Run) -> None:
    result = await run(
        """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
                made += 1
        except BlockingIOError:
            print(made)
        """
    )
    assert 8 <= int(result.output) <= 16


async def test_a_bomb_of_bombs_ends_with_its_time(run: Run) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    result = await run(code, timeout_seconds=0.5)
    assert result.timed_out
    assert result.seconds < 10


async def test_files_are_bounded(run: Run, tmp_path: Path) -> None:
    result = await run("f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(10**6))\nprint('done')")
    assert result.signal == "SIGXFSZ" or "File too large" in result.output
    assert (tmp_path / "big").stat().st_size <= 1 << 20
    result = await run("files = [open('main.py') for _ in range(100)]")
    assert "Too many open files" in result.output


async def test_processor_time_is_bounded(tmp_path: Path) -> None:
    sandbox = ProcessSandbox(SandboxSettings(cpu_seconds=1))
    result = await python_in(sandbox, tmp_path)("while True: pass", timeout_seconds=60)
    assert result.signal in {"SIGXCPU", "SIGKILL"}
    assert not result.timed_out


async def test_an_endless_loop_that_prints_ends_in_time_and_shows_its_output(run: Run) -> None:
    result = await run("print('begun')\nwhile True: pass", timeout_seconds=0.5)
    assert (result.exit_code, result.signal, result.timed_out) == (None, "SIGKILL", True)
    assert result.output == "begun\n"


# What earlier commands leave in the folder


async def test_a_link_in_the_way_is_not_followed(run: Run, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside.txt"
    outside.write_text("as it was")
    await run(f"import os\nos.remove('main.py')\nos.symlink({str(outside)!r}, 'main.py')")
    result = await run("print('never run')")
    assert outside.read_text() == "as it was"
    assert (result.exit_code, "main.py cannot be written" in result.output) == (126, True)


async def test_a_folder_in_the_way_is_the_commands_own_fault(run: Run) -> None:
    await run("import os\nos.remove('main.py')\nos.mkdir('main.py')")
    result = await run("print('never run')")
    assert result.exit_code == 126
    assert result.output == "main.py cannot be written: Is a directory\n"


# A sandbox that does not do its own work


async def test_a_program_that_is_not_there(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no_such_program: No such file"):
        await sandbox.run(("no_such_program",), workdir=tmp_path)


async def test_a_folder_that_is_not_there(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="gone: No such file"):
        await sandbox.run((PYTHON, "-c", ""), workdir=tmp_path / "gone")


async def test_an_interpreter_that_does_not_run(tmp_path: Path) -> None:
    sandbox = ProcessSandbox(SandboxSettings(python="/nowhere/bin/python"))
    with pytest.raises(SandboxError, match="/nowhere/bin/python: No such file"):
        await sandbox.run((PYTHON, "-c", ""), workdir=tmp_path)


def test_limits_too_low_to_begin_are_told() -> None:
    with pytest.raises(SandboxError, match="cannot be had here"):
        ProcessSandbox(SandboxSettings(memory_mib=1)).probe()


@pytest.mark.parametrize(
    ("table", "key", "says"),
    [
        ({"python": "/nowhere/bin/python"}, "evaluator[0].handler_args.sandbox", "cannot be had here"),
        ({"memory": 1}, "evaluator[0].handler_args.sandbox.memory", "did you mean memory_mib?"),
        ({"timeout_seconds": float("inf")}, "evaluator[0].handler_args.sandbox.timeout_seconds", "86400"),
        ({"network": "some"}, "evaluator[0].handler_args.sandbox.network", "'some'"),
    ],
)
def test_a_server_does_not_start_without_the_sandbox_that_it_is_told_to_have(
    table: dict[str, object], key: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_sandbox(table, "evaluator[0].handler_args.sandbox")
    (fault,) = caught.value.violations
    assert fault.field == key
    assert says in fault.description


NO_NAMESPACES_LEFT = """
import sys
from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox, SandboxSettings
from py_scheduler.errors import SandboxError
for settings in (SandboxSettings(), SandboxSettings(network='allow')):
    try:
        print('in force:', *ProcessSandbox(settings).probe(), sep=' / ')
    except SandboxError as error:
        print('error:', error)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not installed")
def test_a_machine_that_grants_no_namespaces_is_an_error_unless_the_network_may_be_open() -> None:
    """In a namespace whose own limit of further ones is 0, which is what such a machine is like."""
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    command = f'{forbid}"{sys.executable}" -c "$CODE"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", command],
        cwd=ROOT,
        env={**os.environ, "CODE": NO_NAMESPACES_LEFT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    denied, allowed = done.stdout.splitlines()
    assert denied.startswith("error: the sandbox cannot be had here, it failed at namespaces: ")
    assert 'set network = "allow"' in denied
    if "landlock" in allowed:
        assert 'set files = "allow"' in allowed
    else:
        assert allowed == "in force: / network open / files confined by Landlock / system calls filtered / limits"


# Without namespaces


async def test_without_namespaces_landlock_keeps_the_files(without_namespaces: Run, tmp_path: Path) -> None:
    (tmp_path.parent / "beside.txt").write_text("secret")
    result = await without_namespaces(
        f"""
        import os
        print(os.getcwd() == os.path.realpath({str(tmp_path)!r}), open('/dev/null').read() == '')
        open('/dev/null', 'w').write('x')
        open('own.txt', 'w').write('x')
        for path, mode in (('../beside.txt', 'r'), ('/etc/passwd', 'r'), ('/usr/x', 'w'), ('../x', 'w')):
            try:
                open(path, mode)
            except OSError as error:
                print(type(error).__name__)
        """
    )
    assert result.output == "True True\n" + "PermissionError\n" * 4
