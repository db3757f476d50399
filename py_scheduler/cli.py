"""The command `py-scheduler`. A flag beats its environment variable, which beats the configuration file.

Exit codes: 0 done, 1 the server says no, 2 a fault in the call or the configuration.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from py_scheduler.errors import InvalidArgumentError, SchedulerError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = (
    ("serve", "run the server", "serve --config scheduler.toml --listen 127.0.0.1:50051"),
    ("status", "show a running server, or one of its submissions", "status 7/gsm8k"),
    ("abort", "stop a submission of a running server, or some of its tasks", "abort 7 --reason 'too long'"),
    ("plan", "say what a cluster can hold, without a server", "plan cluster.json scheduler.toml"),
    (
        "simulate",
        "run a server's scheduler in virtual time, without a server, and say how full its nodes are",
        "simulate scheduler.toml --workload lognormal:median=55 --groups 64 --compare concurrency=4,16",
    ),
    ("runners", "show what each runner of a running server is at", "runners --target 127.0.0.1:50051"),
    (
        "endpoints",
        "name the servers that a role of a running server generates at, or show them",
        "endpoints student http://10.0.0.1:30000 http://10.0.0.2:30000",
    ),
    ("why", "say why a task of a running server waits", "why s1f0c9a2b3d4e5f60-12"),
    (
        "try-handler",
        "run one sample with a handler, without a server, and show all that came of it",
        "try-handler my_agents:MathAgent --task-json task.json",
    ),
    ("report", "show how training steps and evals went, as tables and plots", "report rollouts"),
    ("knobs", "show every flag and variable, and the key that it sets", "knobs --markdown"),
    ("journal", "look after the journal of a server that does not run", "journal check"),
    ("token", "make bearer tokens for a server", "token new trainer-a --namespace a"),
    ("fetch-model", "put the embedded engine's default model into the cache", "fetch-model"),
    ("version", "print the version", "version"),
)
"""Name, what it does, an example; each is a module of `commands`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what it returns is the process's exit code."""
    parser, _ = parsers()
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except InvalidArgumentError as error:
        return _report(
            2, *(str(violation) if violation.field else violation.description for violation in error.violations)
        )
    except SchedulerError as error:
        return _report(1, str(error))
    except KeyboardInterrupt:
        return 130
    return code


def _report(code: int, *lines: str) -> int:
    for line in lines:
        print(f"py-scheduler: {line}", file=sys.stderr)
    return code


class CommandParser(argparse.ArgumentParser):
    """One command's. Its module is imported when the command is named: none pays for what another needs."""

    module = ""
    """The one to be imported; empty when nothing is, or is any more."""

    def load(self) -> None:
        """Has the module add the command's words."""
        if self.module:
            command = import_module(f"py_scheduler.commands.{self.module}")
            self.module = ""
            command.add(self)
            self.set_defaults(run=command.run)

    def parse_known_args(self, *words: Any, **named: Any) -> Any:
        self.load()
        return super().parse_known_args(*words, **named)


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from py_scheduler.version import version  # noqa: PLC0415 - reading it is slow

        print(version())
        parser.exit()


def parsers() -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    """The whole command line's, and each command's by name."""
    parser = argparse.ArgumentParser(
        prog="py-scheduler",
        description="A rollout scheduler for RL post-training.",
        epilog="`py-scheduler COMMAND --help` says more, with an example.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and end")
    adding = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    commands: dict[str, CommandParser] = {}
    for name, text, example in _COMMANDS:
        command = adding.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"Example: py-scheduler {example}"
        )
        command.module = name.replace("-", "_")
        commands[name] = command
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
