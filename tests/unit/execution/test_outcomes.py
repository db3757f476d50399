"""What exceptions and finished episodes are called."""

from __future__ import annotations

import asyncio
import subprocess
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest

from py_scheduler.domain.results import Outcome, classify_termination
from py_scheduler.errors import (
    ContextOverflowError,
    EngineRejectedError,
    EngineUnavailableError,
    GenerationAbortedError,
    TurnLimitError,
)
from py_scheduler.execution.outcomes import classify_abort, describe

if TYPE_CHECKING:
    from collections.abc import Callable


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def failed_process() -> Exception:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        subprocess.run(["false"], check=True)
    return raised.value


def slow_process() -> Exception:
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        subprocess.run(["sleep", "5"], check=True, timeout=0.01)
    return raised.value


async def refused_by_nobody() -> Exception:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as raised:
            await session.get("http://127.0.0.1:9/")
    return raised.value


async def refused_by_nobody_over_grpc() -> Exception:
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/a/b")(b"", timeout=5)  # type: ignore[arg-type]
    return raised.value


async def test_real_client_errors_are_connection_faults() -> None:
    assert classify_abort(await refused_by_nobody()) is Outcome.INFRA_CONN
    assert classify_abort(await refused_by_nobody_over_grpc()) is Outcome.INFRA_CONN


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (lambda: ContextOverflowError("too long"), Outcome.CONTEXT_OVERFLOW),
        (lambda: TurnLimitError("max_turns is 1"), Outcome.MAX_TURNS),
        (lambda: EngineUnavailableError("gone"), Outcome.INFRA_CONN),
        (lambda: EngineRejectedError("no such regex"), Outcome.INFRA_OTHER),
        (lambda: GenerationAbortedError("aborted"), Outcome.INFRA_OTHER),
        (ConnectionResetError, Outcome.INFRA_CONN),
        (BrokenPipeError, Outcome.INFRA_CONN),
        (lambda: asyncio.IncompleteReadError(b"", 4), Outcome.INFRA_CONN),
        (aiohttp.ServerTimeoutError, Outcome.INFRA_CONN),
        (aiohttp.ServerDisconnectedError, Outcome.INFRA_CONN),
        (TimeoutError, Outcome.AGENT_TIMEOUT),
        (failed_process, Outcome.INFRA_SANDBOX),
        (slow_process, Outcome.INFRA_SANDBOX),
        (MemoryError, Outcome.INFRA_OTHER),
        (lambda: OSError(28, "No space left on device"), Outcome.INFRA_OTHER),
        (lambda: ValueError("connection to the point is lost"), Outcome.INFRA_OTHER),
        (lambda: RuntimeError("sandbox died"), Outcome.INFRA_SANDBOX),
        (lambda: RuntimeError("the proof timed out"), Outcome.INFRA_OTHER),
        (lambda: RuntimeError("connection refused by peer"), Outcome.INFRA_CONN),
        (lambda: chained(ValueError("no answer"), ConnectionResetError()), Outcome.INFRA_CONN),
        (lambda: ExceptionGroup("several", [ConnectionRefusedError()]), Outcome.INFRA_CONN),
        (lambda: SystemExit(1), Outcome.INFRA_OTHER),
    ],
)
def test_exceptions(make: Callable[[], BaseException], outcome: Outcome) -> None:
    error = make()
    assert classify_abort(error) is outcome
    assert describe(error).startswith(type(error).__name__)


@pytest.mark.parametrize(
    ("score", "reason", "outcome"),
    [
        (1.0, "", Outcome.SOLVED),
        (1.0, "max_turns", Outcome.SOLVED),
        (0.5, "", Outcome.WRONG_ANSWER),
        (0.0, "max_turns", Outcome.MAX_TURNS),
        (0.0, "context_overflow", Outcome.CONTEXT_OVERFLOW),
        (0.0, "gave up", Outcome.WRONG_ANSWER),
    ],
)
def test_finished_episodes(score: float, reason: str, outcome: Outcome) -> None:
    assert classify_termination(score, reason, 1.0) is outcome


def test_infrastructure_and_aborts_say_nothing_about_the_model() -> None:
    assert {outcome for outcome in Outcome if not outcome.is_model_result} == {
        Outcome.INFRA_CONN,
        Outcome.INFRA_SANDBOX,
        Outcome.INFRA_OTHER,
        Outcome.ABORTED,
    }
