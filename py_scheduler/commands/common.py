"""What several commands share: where they print, which server they ask, and how they name a submission."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.client import ClientTls, GenerationClient, SchedulerClient
    from py_scheduler.config import Config
    from py_scheduler.knobs import Override

_PIPE_WIDTH = 160
_DEFAULT_TARGET = "127.0.0.1:50051"
SUBMISSION_HELP = 'a submission: a step (7), a label ("7/gsm8k"), or the submission_id that the server gave it'
_SUBMISSION_ID = re.compile(r"s[0-9a-f]{16}")


def standard_console() -> Console:
    """A pipe has no width; what reads it had rather have whole lines."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def positive(text: str) -> int:
    """Of an option that is a number of things. Raises ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def read_specs(path: Path, overrides: Iterable[Override]) -> Config:
    """A server's configuration, or any TOML or JSON file with evaluators, which need name no handler: none is imported.
    Raises ConfigError.
    """
    from py_scheduler.config import convert_config  # noqa: PLC0415 - likewise

    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the evaluators' file {path}: {reason}") from error
    if not isinstance(tables, dict):
        raise ConfigError(f'{path} must hold an object such as {{"evaluator": [...]}}')
    return convert_config(tables, overrides, needs_handlers=False)


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it lets one in."""

    target: str
    token: str = ""
    tls: ClientTls | None = None

    def client(self, namespace: str) -> SchedulerClient:
        """One that says at once when nobody answers."""
        from py_scheduler.client import SchedulerClient  # noqa: PLC0415 - gRPC is slow to load, and most commands need none

        settings: dict[str, Any] = {"namespace": namespace, "reconnect_seconds": 0.0}
        return SchedulerClient(self.target, token=self.token, tls=self.tls, **settings)

    def generation_client(self) -> GenerationClient:
        """Likewise, for what concerns the language models."""
        from py_scheduler.client import GenerationClient  # noqa: PLC0415 - likewise

        return GenerationClient(self.target, token=self.token, tls=self.tls, reconnect_seconds=0.0)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is, what it takes to be let in, and in which namespace to look."""
    target = "the server (default %(default)s)"
    parser.add_argument("--target", default=_DEFAULT_TARGET, metavar="HOST:PORT", help=target)
    parser.add_argument("--namespace", default="default", metavar="NAME", help="default: %(default)s")
    for name, what in (
        ("token-file", "a file that holds the bearer token"),
        ("ca", "who signed the server's certificate, as PEM; asks for TLS"),
        ("client-certificate", "the client's own certificate, as PEM"),
        ("client-key", "and its key"),
    ):
        variable = f"PY_SCHEDULER_{name.replace('-', '_').upper()}"
        place = os.environ.get(variable)
        parser.add_argument(
            f"--{name}", type=Path, default=place and Path(place), metavar="FILE", help=f"{what} ({variable})"
        )


def connection_of(options: argparse.Namespace) -> Connection:
    """The server that those flags name. Raises ConfigError."""
    from py_scheduler.client import ClientTls  # noqa: PLC0415 - likewise

    files = [str(file or "") for file in (options.ca, options.client_certificate, options.client_key)]
    tls = ClientTls(ca=files[0], certificate=files[1], key=files[2]) if any(files) else None
    return Connection(target=options.target, token=_read_token(options.token_file), tls=tls)


def _read_token(file: Path | None) -> str:
    """What a file holds that a client is told to take its token from. Raises ConfigError."""
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {file}: {error}", "token_file") from error


def selector_of(options: argparse.Namespace) -> SubmissionSelector:
    """What `submission` and `namespace` name."""
    text, namespace = options.submission, options.namespace
    if _SUBMISSION_ID.fullmatch(text):
        return SubmissionSelector(submission_id=text, namespace=namespace)
    return SubmissionSelector(batch_id=int(text) if text.isdecimal() else text, namespace=namespace)
