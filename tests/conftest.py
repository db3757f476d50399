"""What every test shares. Fixtures of one area stay beside its tests."""

from __future__ import annotations

import asyncio.constants
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# torch is gigabytes, so the tests' own environment has none: where another one does, it is borrowed from there, behind
# everything of our own.
if "TEST_TORCH_PACKAGES" in os.environ:
    sys.path.append(os.environ["TEST_TORCH_PACKAGES"])

# A shell starts what is to run in the background (`pytest &`) with SIGINT ignored, and so would be whatever the tests
# start: a signal that is handled here is its usual self in a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Neither a slow example nor slow generation is a fault on a machine that does something else beside the tests.
settings.register_profile("py-scheduler", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("py-scheduler")

# asyncio's debug mode notes where each task and callback was made, by default ten calls deep. That took half of the
# processor time of the engine's tests. Three calls tell as well where it was, and take 5 seconds of 25 away.
vars(asyncio.constants)["DEBUG_STACK_DEPTH"] = 3

# A handler that blocks the loop stops every other rollout, so a test during which the loop stood still this long
# fails. Wall time, since what blocks mostly waits; but not the time for which this thread would have gone on and others
# had the cores: it is meant for calls that block, not for code that is merely slow, nor for a machine that is busy.
LOOP_BLOCKED_SECONDS = float(os.environ.get("PY_SCHEDULER_LOOP_BLOCKED_SECONDS", "5.0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        nargs="?",
        const="",
        metavar="SEED",
        help="run the tests in a random order: the modules, and the tests within each; the header prints the seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist must agree on the order, so they are told the seed, and choose none."""
    told = getattr(config, "workerinput", {}).get("shuffle")
    if told:
        config.option.shuffle = told
    elif config.option.shuffle == "":
        config.option.shuffle = str(random.randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shuffle"] = node.config.option.shuffle


def pytest_report_header(config: pytest.Config) -> str:
    return f"order: --shuffle={config.option.shuffle}" if config.option.shuffle else "order: as written"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A module's tests stay together, so that they still share what is expensive to start."""
    if not config.option.shuffle:
        return
    shuffled = random.Random(config.option.shuffle)
    places = {path: shuffled.random() for path in dict.fromkeys(item.path for item in items)}
    shuffled.shuffle(items)
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Some handlers say halves of surrogate pairs, and logs have them; workers of pytest-xdist cannot send these."""
    return sendable((yield))


def sendable(report: Any) -> Any:
    if isinstance(report, str):
        return report.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(report, dict):
        return {key: sendable(value) for key, value in report.items()}
    if isinstance(report, list | tuple):
        return type(report)(map(sendable, report))
    return report


@pytest.fixture(autouse=True, scope="session")
def _state_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that a test starts keep their journals where nobody else's are."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


class SlowCallbacks(logging.Filter):
    """Collects asyncio's reports of slow callbacks and keeps the harmless ones out of the log.

    What this thread has waited for a core since the test began is no callback's fault.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocked: list[str] = []
        self._waited_before = seconds_without_a_core()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Executing %s took %.3f seconds" or not isinstance(record.args, tuple):
            return True
        _callback, seconds = record.args
        if isinstance(seconds, float) and self._blocked_for(seconds) >= LOOP_BLOCKED_SECONDS:
            self.blocked.append(record.getMessage())
            return True
        return False

    def _blocked_for(self, seconds: float) -> float:
        return seconds - (seconds_without_a_core() - self._waited_before)


def seconds_without_a_core() -> float:
    """For how long this thread could have run, all in all, while others did; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@pytest.fixture(autouse=True)
def _loop_is_never_blocked() -> Iterator[None]:
    slow = SlowCallbacks()
    logger = logging.getLogger("asyncio")
    logger.addFilter(slow)
    try:
        yield
    finally:
        logger.removeFilter(slow)
    if slow.blocked:
        pytest.fail("the event loop was blocked: " + "; ".join(slow.blocked))
