"""The command `py-scheduler`. A flag beats its environment variable, which beats the configuration file.

Exit codes: 0 done, 1 the server says no, 2 a fault in the call or the configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.config import load_config
from py_scheduler.errors import InvalidArgumentError, SchedulerError
from py_scheduler.knobs import CONFIG, add_flags, knob_table, overrides_of, variables_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from py_scheduler.commands.connection import Connection
    from py_scheduler.domain.requests import SubmissionSelector

_DEFAULT_TARGET = "127.0.0.1:50051"
_PIPE_WIDTH = 160
_SUBMISSION_HELP = 'a submission: a step (7), a label ("7/gsm8k"), or the submission_id that the server gave it'
_SUBMISSION_ID = re.compile(r"s[0-9a-f]{16}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what it returns is the process's exit code."""
    options = _parser().parse_args(arguments)
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


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _version(argparse.Namespace())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="py-scheduler",
        description="A rollout scheduler for RL post-training.",
        epilog="`py-scheduler COMMAND --help` says more, with an example.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"Example: py-scheduler {example}"
        )

    _add_serve(add("serve", "run the server", "serve --config scheduler.toml --listen 127.0.0.1:50051"))
    _add_status(add("status", "show a running server, or one of its submissions", "status 7/gsm8k"))
    _add_abort(
        add("abort", "stop a submission of a running server, or some of its tasks", "abort 7 --reason 'too long'")
    )
    _add_plan(add("plan", "say what a cluster can hold, without a server", "plan cluster.json scheduler.toml"))
    runners = add("runners", "show what each runner of a running server is at", "runners --target 127.0.0.1:50051")
    _add_server(runners)
    runners.set_defaults(run=_runners)
    _add_why(add("why", "say why a task of a running server waits", "why s1f0c9a2b3d4e5f60-12"))
    _add_try(
        add(
            "try-handler",
            "play one sample with a handler, without a server, and show all that came of it",
            "try-handler my_agents:MathAgent --task-json task.json",
        )
    )
    _add_report(add("report", "show how training steps and evals went, as tables and plots", "report rollouts"))
    _add_knobs(add("knobs", "show every flag and variable, and the key that it sets", "knobs --markdown"))
    _add_journal(add("journal", "look after the journal of a server that does not run", "journal check"))
    _add_token(add("token", "make bearer tokens for a server", "token new trainer-a --namespace a"))
    fetch = add("fetch-model", "put the embedded engine's default model into the cache", "fetch-model")
    fetch.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="another folder than the user's cache")
    fetch.set_defaults(run=_fetch_model)
    add("version", "print the version", "version").set_defaults(run=_version)
    return parser


# serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{parser.epilog}. Variables without a flag: {', '.join(variables_alone())}; see `knobs`."
    _add_config(parser)
    add_flags(parser)
    parser.set_defaults(run=_serve)


def _add_config(parser: argparse.ArgumentParser) -> None:
    config = os.environ.get(CONFIG.variable)
    parser.add_argument(
        CONFIG.flag,
        type=Path,
        default=config and Path(config),
        required=not config,
        metavar=CONFIG.metavar,
        help=f"{CONFIG.help} ({CONFIG.variable})",
    )


def _serve(options: argparse.Namespace) -> int:
    config_file: Path = options.config
    config = load_config(config_file, overrides_of(vars(options), os.environ))
    # gRPC's core writes to stderr about what is an ordinary answer here, a port in use for one.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from py_scheduler import app  # noqa: PLC0415 - after the file, so that its faults show at once

    app.run(config, config_file)
    return 0


# status


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", nargs="?", metavar="BATCH_ID", help=f"{_SUBMISSION_HELP}; none: the server")
    _add_server(parser)
    parser.set_defaults(run=_status)


def _add_server(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and in which namespace to look."""
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


def _connection(options: argparse.Namespace) -> Connection:
    """The server that the flags name, and what it takes to be let in."""
    from py_scheduler.client import ClientTls  # noqa: PLC0415 - serve needs no client
    from py_scheduler.commands.connection import Connection, read_token  # noqa: PLC0415 - likewise

    files = [str(file or "") for file in (options.ca, options.client_certificate, options.client_key)]
    tls = ClientTls(ca=files[0], certificate=files[1], key=files[2]) if any(files) else None
    return Connection(target=options.target, token=read_token(options.token_file), tls=tls)


def _status(options: argparse.Namespace) -> int:
    from py_scheduler.commands.status import show_server, show_submission  # noqa: PLC0415 - serve needs none of it

    if options.submission is None:
        asyncio.run(show_server(_connection(options), options.namespace, _console()))
    else:
        asyncio.run(show_submission(_selector(options), _connection(options), _console()))
    return 0


def _selector(options: argparse.Namespace) -> SubmissionSelector:
    from py_scheduler.domain.requests import SubmissionSelector  # noqa: PLC0415 - serve needs no client

    text, namespace = options.submission, options.namespace
    if _SUBMISSION_ID.fullmatch(text):
        return SubmissionSelector(submission_id=text, namespace=namespace)
    return SubmissionSelector(batch_id=int(text) if text.isdecimal() else text, namespace=namespace)


# abort


def _add_abort(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", metavar="BATCH_ID", help=_SUBMISSION_HELP)
    parser.add_argument(
        "--task", action="append", default=[], metavar="ID", help="only this task; may be given several times"
    )
    _add_server(parser)
    parser.add_argument(
        "--no-wait", action="store_true", help="answer at once, rather than when the work is seen to have stopped"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="what the tasks' ends will say")
    parser.add_argument(
        "--keep-partial",
        action="store_true",
        help="of tasks whose results are collected, those with runs that succeeded leave a result of these",
    )
    parser.add_argument(
        "--restart-runners", action="store_true", help="replace the runners that are at them before they take more work"
    )
    parser.set_defaults(run=_abort)


def _abort(options: argparse.Namespace) -> int:
    from py_scheduler.commands.abort import abort_submission  # noqa: PLC0415 - serve needs none of it

    return asyncio.run(
        abort_submission(
            _selector(options),
            options.task,
            server=_connection(options),
            reason=options.reason,
            wait=not options.no_wait,
            keep_partial=options.keep_partial,
            restart_runners=options.restart_runners,
            console=_console(),
        )
    )


# plan


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Exit code 1: the largest batch of some evaluator can never run; says what would help."
    )
    parser.add_argument(
        "layout", nargs="?", metavar="LAYOUT", help="the cluster: inline JSON or a JSON file; none: the one in SPECS"
    )
    parser.add_argument(
        "specs", type=Path, metavar="SPECS", help="a server's configuration, or any TOML or JSON file with evaluators"
    )
    # The longer names are those of `serve`, which the layout's own messages name.
    parser.add_argument(
        "--num-cpus", "--env-num-cpus", type=float, metavar="CORES", help="cores of each node whose layout names none"
    )
    parser.add_argument(
        "--memory-gb", "--env-memory-gb", type=float, metavar="GIB", help="GiB of each node whose layout names none"
    )
    parser.add_argument(
        "--samples-per-task", type=_positive, metavar="N", help="bounds a batch by batch_size times this"
    )
    parser.add_argument("--draw", metavar="EVALUATOR_ID", help="whose packing to draw (default: the first that fits)")
    parser.set_defaults(run=_plan)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _plan(options: argparse.Namespace) -> int:
    from py_scheduler.commands.plan import plan_request, run_plan  # noqa: PLC0415 - serve needs none of it

    return run_plan(plan_request(options), _console())


def _console() -> Console:
    """A pipe has no width; what reads it had rather have whole lines."""
    from rich.console import Console  # noqa: PLC0415 - serve needs none of it

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


# why


def _add_why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task_id", metavar="TASK_ID", help="as `submit` returned it, and events carry it")
    _add_server(parser)
    parser.set_defaults(run=_why)


def _why(options: argparse.Namespace) -> int:
    from py_scheduler.commands.why import show_task  # noqa: PLC0415 - serve needs none of it

    asyncio.run(show_task(options.task_id, _connection(options), options.namespace, _console()))
    return 0


# runners


def _runners(options: argparse.Namespace) -> int:
    from py_scheduler.commands.runners import show_runners  # noqa: PLC0415 - serve needs none of it

    asyncio.run(show_runners(options.target, _console()))
    return 0


# try-handler


def _add_try(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Exit code 0: it was played and scored, whatever the score; 1: the handler raised or was "
        "stopped; 2: a fault in what was asked."
    )
    parser.add_argument(
        "handler", metavar="HANDLER", help="module:Class, or the evaluator_id of one in the configuration"
    )
    parser.add_argument(
        CONFIG.flag, type=Path, metavar=CONFIG.metavar, help="a server's configuration: cluster, engines, evaluator"
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        help='"embedded" (the default without a configuration), "none", or the address of an SGLang server',
    )
    parser.add_argument("--args", metavar="JSON", help="the handler's arguments; default: the configuration's")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt", metavar="TEXT", help="the prompt of the task")
    task.add_argument(
        "--task-json", type=Path, metavar="FILE", help='the whole task: {"prompt": ..., "metadata": {...}}'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--whole-text", action="store_true", help="shorten no text")
    parser.set_defaults(run=_try_handler)


def _try_handler(options: argparse.Namespace) -> int:
    # gRPC's core writes to stderr about what is an ordinary answer here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from py_scheduler.commands.try_handler import TryRequest, run_try  # noqa: PLC0415 - serve needs none of it

    request = TryRequest(
        handler=options.handler,
        config_file=options.config,
        engine=options.engine,
        handler_args=options.args,
        prompt=options.prompt or "",
        task_json=options.task_json,
        as_json=options.json,
        whole_text=options.whole_text,
    )
    return run_try(request, _console())


# report


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the artifact folder of a rollout, or its eval_details"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where plots are written (default: DIR/report)")
    parser.add_argument("--no-plots", action="store_true", help="tables only; matplotlib is not needed")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown, with the plots in it")
    parser.set_defaults(run=_report_folder)


def _report_folder(options: argparse.Namespace) -> int:
    from py_scheduler.commands.report import run_report  # noqa: PLC0415 - serve needs none of it

    plots = None if options.no_plots else options.out or options.folder / "report"
    run_report(options.folder, plots, _console(), markdown=options.markdown)
    return 0


# journal


def _add_journal(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB", help="what to do")
    for verb, text in (
        ("check", "reads everything and says what is damaged; exit code 1 if something is"),
        ("recover", "makes a new store of what is sound, moves the old one aside and says exactly what is lost"),
        ("compact", "drops what the configuration no longer keeps, and makes the file as small as it gets"),
        ("export", "prints every event that is retained, one JSON object to a line"),
    ):
        command = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument(
            CONFIG.flag, type=Path, metavar=CONFIG.metavar, help="the server's configuration, which says where it lies"
        )
        command.add_argument("--state-dir", type=Path, metavar="FOLDER", help="where it lies")
        command.set_defaults(run=_journal, verb=verb)


def _journal(options: argparse.Namespace) -> int:
    from py_scheduler.commands.journal import run_journal  # noqa: PLC0415 - serve needs none of it

    named = os.environ.get(CONFIG.variable)
    config_file = options.config or (Path(named) if named else None)
    return run_journal(options.verb, config_file, options.state_dir, _console())


# token


def _add_token(parser: argparse.ArgumentParser) -> None:
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
    new.set_defaults(run=_new_token)


def _new_token(options: argparse.Namespace) -> int:
    from py_scheduler.commands.token import make_token  # noqa: PLC0415 - serve needs none of it

    make_token(options.name, options.namespace, options.to, _console(), controls_engines=options.engines)
    return 0


# The rest


def _fetch_model(options: argparse.Namespace) -> int:
    from py_scheduler.adapters.model_store import fetch_smollm2  # noqa: PLC0415 - only this command needs it

    path = fetch_smollm2(options.cache_dir)
    print(f"model ready: {path} ({path.stat().st_size / 1e6:.0f} MB)")
    return 0


def _add_knobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put that table between its marks in a document")
    parser.set_defaults(run=_knobs)


def _knobs(options: argparse.Namespace) -> int:
    from py_scheduler.commands.knobs import show_knobs, write_knobs  # noqa: PLC0415 - serve needs none of it

    if options.write:
        write_knobs(options.write)
    elif options.markdown:
        print(knob_table(), end="")
    else:
        show_knobs(_console())
    return 0


def _version(_options: argparse.Namespace) -> int:
    from py_scheduler.version import version  # noqa: PLC0415 - reading it is slow

    print(version())
    return 0


if __name__ == "__main__":
    sys.exit(main())
