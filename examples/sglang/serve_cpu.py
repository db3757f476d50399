"""A real SGLang server without a GPU, for tests and trials; on a CPU it is slow, but it is the real one.

    python serve_cpu.py MODEL_FOLDER [--port 30000] [--log FILE] [-- COMMAND ...]

Runs with the Python that has SGLang. With a COMMAND the server lives as long as that does.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST = "127.0.0.1"
STAND_INS = Path(__file__).parent / "stand_ins"
START_SECONDS = 300.0
PROBE_SECONDS = 0.5
PROBE_TIMEOUT_SECONDS = 10.0
LOG_TAIL_LINES = 30
PR_SET_PDEATHSIG = 1
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    # The model's own numbers: with bfloat16, log-probs would differ from other implementations in the second digit.
    *("--dtype", "float32"),
    # Room for the tokens of all requests; what would otherwise be taken is a share of the machine's memory.
    *("--max-total-tokens", "65536"),
    # An idle server would otherwise keep a core busy.
    "--sleep-on-idle",
)


class ServerFailedError(Exception):
    """The server did not come up."""


class CpuServer:
    """One server with all its processes; they end with the block, or with this process, however it ends."""

    maker = "SGLang"
    start_seconds = START_SECONDS

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *,
        port: int = 0,
        streams_increments: bool = True,
        flags: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.base_url = f"http://{HOST}:{self.port}"
        self.log = log
        address = ("--host", HOST, "--port", str(self.port))
        self._command = [python, "-m", "sglang.launch_server", "--model-path", str(model.resolve()), *address, *FLAGS]
        if streams_increments:
            # Each event has what is new: the bytes of a generation would otherwise grow with the square of its length.
            self._command.append("--incremental-streaming-output")
        self._command += flags
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Also the id of the group of all its processes."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one thread runs here when a server is started
            )

    def wait_until_ready(self) -> None:
        """Raises ServerFailedError."""
        assert self._process is not None
        deadline = time.monotonic() + self.start_seconds
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ServerFailedError(f"{self.maker} ended with code {self._process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailedError(
                    f"{self.maker} is not ready after {self.start_seconds:g} s:\n{self._log_tail()}"
                )
            time.sleep(PROBE_SECONDS)

    def stop(self) -> None:
        """Its whole group at once: there is nothing to save."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process = None

    def _environment(self) -> dict[str, str]:
        return environment()

    def _is_healthy(self) -> bool:
        try:
            # It generates a token to be sure, so it takes a second.
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=PROBE_TIMEOUT_SECONDS):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def environment() -> dict[str, str]:
    ours = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(STAND_INS.resolve()),
        "HF_HUB_OFFLINE": "1",
        # More threads wait for one another rather than compute: on two cores that was ten times slower.
        "OMP_NUM_THREADS": "1",
    }
    # Without compiled modules every start compiles some thousands of them anew.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | ours


def end_with_parent() -> None:
    """The server's own children do the same, so none is left behind when this process is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def run(command: Sequence[str]) -> int:
    """Its exit code. Ctrl-C reaches the command by itself, SIGTERM is handed on; both times its end is waited for."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        return process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="A real SGLang server without a GPU.")
    parser.add_argument("model", type=Path, help="a folder that transformers could load")
    parser.add_argument("--port", type=int, default=30000, help="0: any free one (default %(default)s)")
    parser.add_argument("--log", type=Path, default=Path("sglang.log"))
    parser.epilog = "What stands after -- is run beside it."
    # By hand: argparse would have the command's place before the options, too.
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[end + 1 :]
    options = parser.parse_args(arguments[:end])
    options.log.parent.mkdir(parents=True, exist_ok=True)
    print(f"starting SGLang with {options.model} (its log: {options.log})", flush=True)
    try:
        with CpuServer(sys.executable, options.model, options.log, port=options.port) as server:
            print(f"SGLang serves on {server.base_url}", flush=True)
            if command:
                return run(command)
            signal.pause()
    except ServerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
