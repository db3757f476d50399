"""`py-scheduler token new`: a bearer token, shown this once, and its line for the server's tokens file."""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.commands.common import standard_console
from py_scheduler.domain.limits import name_fault
from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

_PREFIX = "pyst_"
"""Lets scanners for leaked secrets know one."""
_SECRET_BYTES = 32
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB", help="what to do")
    new = verbs.add_parser("new", help="print a new token once, and its line for the server's tokens file")
    new.add_argument("name", metavar="NAME", help="what the audit log calls its holder")
    new.add_argument(
        "--namespace", action="append", required=True, metavar="NAME", help='may be given several times; "*": all'
    )
    new.add_argument(
        "--engines", action="store_true", help="lets it pause generation and change weights, for every namespace"
    )
    new.add_argument("--to", type=Path, metavar="FILE", help="adds the line to this tokens file")


def run(options: argparse.Namespace) -> int:
    make_token(options.name, options.namespace, options.to, standard_console(), controls_engines=options.engines)
    return 0


def make_token(
    name: str, namespaces: list[str], tokens_file: Path | None, console: Console, *, controls_engines: bool = False
) -> None:
    """Prints the token, and its line unless it goes to the end of a file. Raises ConfigError."""
    secret, line = new_token(name, namespaces, controls_engines=controls_engines)
    if tokens_file is not None:
        _append(line, name, tokens_file)
    console.print(f"token, shown this once: {secret}", soft_wrap=True)
    if tokens_file is None:
        console.print(f"its line for server.tokens_file: {line}", soft_wrap=True)
        return
    console.print(f"added to {tokens_file}", soft_wrap=True)


def _append(line: str, name: str, tokens_file: Path) -> None:
    """Before the token is shown: one that is shown is good. A file that is made is its owner's alone."""
    try:
        tokens_file.touch(0o600)
        with tokens_file.open("a+", encoding="utf-8") as file:
            file.seek(0)
            held = file.read()
            if name in tomllib.loads(held):
                raise ConfigError(f"{tokens_file} has a token of {name!r} already: take another name", "name")
            file.write(f"{'' if not held or held.endswith(chr(10)) else chr(10)}{line}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {tokens_file}: {error.strerror}", "tokens_file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{tokens_file} is not TOML, and nothing was added: {error}", "tokens_file") from error


def new_token(name: str, namespaces: list[str], *, controls_engines: bool = False) -> tuple[str, str]:
    """A fresh token, and its line for the file. The token itself is nowhere else. Raises ConfigError."""
    if not _BARE_KEY.fullmatch(name):
        raise ConfigError(f"{name!r} must be of letters, digits, - and _", "name")
    for namespace in namespaces:
        if fault := name_fault(namespace):
            raise ConfigError(fault, "namespace")
    secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    listed = ", ".join(msgspec.json.encode(namespace).decode() for namespace in namespaces)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    engines = ", controls_engines = true" if controls_engines else ""
    return secret, f'{name} = {{ sha256 = "{digest}", namespaces = [{listed}]{engines} }}'
