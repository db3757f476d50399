"""What an exception means (design words: Outcome). What a finished episode means, `domain/results.py` says.

Classification looks at the exception's type first, by qualified class name along the MRO and its causes, so that no
client library need be imported; only then at its text. Source: seed 1, section 4 (abort classification).
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING

from py_scheduler.domain.results import Outcome
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import (
    ContextOverflowError,
    EngineUnavailableError,
    GenerationError,
    SandboxError,
    TurnLimitError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class ReportedError(Exception):
    """What a handler raised in a child, by the child's word: the exception itself stays there. shown: its traceback."""

    def __init__(self, said: str, outcome: Outcome, shown: str = "") -> None:
        super().__init__(shown or said)
        self.said = said
        self.outcome = outcome


_TYPES: tuple[tuple[type[BaseException], Outcome], ...] = (
    (ContextOverflowError, Outcome.CONTEXT_OVERFLOW),
    (TurnLimitError, Outcome.MAX_TURNS),
    (EngineUnavailableError, Outcome.INFRA_CONN),
    (GenerationError, Outcome.INFRA_OTHER),
    (SandboxError, Outcome.INFRA_SANDBOX),
    (subprocess.TimeoutExpired, Outcome.INFRA_SANDBOX),
    (subprocess.SubprocessError, Outcome.INFRA_SANDBOX),
    (TimeoutError, Outcome.AGENT_TIMEOUT),
    (asyncio.IncompleteReadError, Outcome.INFRA_CONN),
    (ConnectionError, Outcome.INFRA_CONN),
)

_QUALIFIED_NAMES: dict[str, Outcome] = {
    "aiohttp.client_exceptions.ServerTimeoutError": Outcome.INFRA_CONN,
    "aiohttp.client_exceptions.ClientError": Outcome.INFRA_CONN,
    "grpc.RpcError": Outcome.INFRA_CONN,
    "httpx.TransportError": Outcome.INFRA_CONN,
    "requests.exceptions.ConnectionError": Outcome.INFRA_CONN,
    "requests.exceptions.Timeout": Outcome.INFRA_CONN,
    "urllib3.exceptions.HTTPError": Outcome.INFRA_CONN,
    "openai.APIConnectionError": Outcome.INFRA_CONN,
    "socket.gaierror": Outcome.INFRA_CONN,
    "urllib.error.URLError": Outcome.INFRA_CONN,
    "ssl.SSLError": Outcome.INFRA_CONN,
    "http.client.HTTPException": Outcome.INFRA_CONN,
    "docker.errors.DockerException": Outcome.INFRA_SANDBOX,
}

_CONNECTION_PACKAGES = frozenset({"aiohttp", "http", "httpcore", "socket", "ssl", "urllib3"})
"""A bare TimeoutError that these raise is their own: aiohttp's `total` has no class of its own, nor has a socket's."""

_CONNECTION_ERRNOS = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL}
)
"""Of an OSError that no class of its own tells apart. ETIMEDOUT is the peer's silence, not the agent's time."""

_MAX_CHARACTERS = 4_096

_TEXTS: tuple[tuple[str, Outcome], ...] = (
    ("connection refused", Outcome.INFRA_CONN),
    ("connection reset", Outcome.INFRA_CONN),
    ("connection closed", Outcome.INFRA_CONN),
    ("sandbox", Outcome.INFRA_SANDBOX),
)
"""For exceptions whose type says nothing. Only classes of infrastructure: words alone never blame the model."""


def classify_abort(error: BaseException) -> Outcome:
    """The outcome of a sample whose handler raised."""
    if isinstance(error, ReportedError):
        return error.outcome
    for link in _chain(error):
        outcome = _outcome_of_type(link)
        if outcome is not None:
            return outcome
    if type(error) in (RuntimeError, Exception, OSError):
        text = _text_of(error).lower()
        for part, outcome in _TEXTS:
            if part in text:
                return outcome
    return Outcome.INFRA_OTHER


def describe(error: BaseException) -> str:
    """One line about an exception, for reports, with the file and line that raised it."""
    if isinstance(error, ReportedError):
        return error.said
    text = _text_of(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(said) > _MAX_CHARACTERS:
        said = f"{said[:_MAX_CHARACTERS]}... ({len(said)} characters)"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said


def _text_of(error: BaseException) -> str:
    """What an exception says; nothing when even saying it fails, which is somebody else's code."""
    try:
        return safe_text(str(error))
    except Exception:  # noqa: BLE001 -- an exception of a handler's own making may raise anything here
        return ""


def _outcome_of_type(error: BaseException) -> Outcome | None:
    # Libraries and the system first: their timeouts are TimeoutErrors too, but speak of a connection, not of the
    # agent's time.
    if isinstance(error, OSError) and error.errno in _CONNECTION_ERRNOS:
        return Outcome.INFRA_CONN
    if type(error) is TimeoutError and _raised_in(error) in _CONNECTION_PACKAGES:
        return Outcome.INFRA_CONN
    for base in type(error).__mro__:
        outcome = _QUALIFIED_NAMES.get(f"{base.__module__}.{base.__qualname__}")
        if outcome is not None:
            return outcome
    return next((known for kind, known in _TYPES if isinstance(error, kind)), None)


def _raised_in(error: BaseException) -> str:
    """The package whose code raised it; empty when that is not known."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what caused it, outermost first; the members of a group one after the other."""
    seen: set[int] = set()
    left = [error]
    while left:
        link = left.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            left.append(link.__cause__)
        if isinstance(link, BaseExceptionGroup):
            left.extend(reversed(link.exceptions))
