"""What every test shares. Fixtures of one area stay beside its tests."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

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

# A handler that blocks the loop stops every other rollout, so a test during which the loop stood still this long
# fails. Wall time, since what blocks mostly waits; generous, since the machine's few cores may be busy with something
# else: it is meant for calls that block, not for code that is merely slow.
LOOP_BLOCKED_SECONDS = float(os.environ.get("PY_SCHEDULER_LOOP_BLOCKED_SECONDS", "5.0"))


@pytest.fixture(autouse=True, scope="session")
def _state_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that a test starts keep their journals where nobody else's are."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


class SlowCallbacks(logging.Filter):
    """Collects asyncio's reports of slow callbacks and keeps the harmless ones out of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != "Executing %s took %.3f seconds" or not isinstance(record.args, tuple):
            return True
        _callback, seconds = record.args
        if isinstance(seconds, float) and seconds >= LOOP_BLOCKED_SECONDS:
            self.blocked.append(record.getMessage())
            return True
        return False


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
