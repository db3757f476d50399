"""The command `py-scheduler`. A flag beats its environment variable, which beats the configuration file.

Exit codes: 0 done, 1 the server says no, 2 a fault in the call or the configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.config import KNOBS, load_config, overrides_of
from py_scheduler.errors import InvalidArgumentError, SchedulerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.requests import ServerInfo, SubmissionView
    from py_scheduler.domain.task import BatchId

_DEFAULT_TARGET = "127.0.0.1:50051"
_CONFIG_VARIABLE = "PY_SCHEDULER_CONFIG"


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="py-scheduler", description="A rollout scheduler for RL post-training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="run the server"))
    _add_status(commands.add_parser("status", help="show a running server, or one of its submissions"))
    fetch = commands.add_parser("fetch-model", help="put the embedded engine's default model into the cache")
    fetch.add_argument("--cache-dir", type=Path, help="another folder than the user's cache")
    fetch.set_defaults(run=_fetch_model)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


# serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    config = os.environ.get(_CONFIG_VARIABLE)
    parser.add_argument(
        "--config",
        type=Path,
        default=config and Path(config),
        required=not config,
        metavar="FILE",
        help=f"the TOML file; or the variable {_CONFIG_VARIABLE}",
    )
    for knob in KNOBS:
        parser.add_argument(
            knob.flag, dest=knob.flag, metavar="VALUE", help=f"{knob.help} ({', '.join(knob.keys)}; {knob.variable})"
        )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    config_file: Path = options.config
    overrides = overrides_of({knob.flag: getattr(options, knob.flag) for knob in KNOBS}, os.environ)
    config = load_config(config_file, overrides)
    # gRPC's core writes to stderr about what is an ordinary answer here, a port in use for one.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from py_scheduler import app  # noqa: PLC0415 - after the file, so that its faults show at once

    app.run(config, config_file.resolve().parent)
    return 0


# status


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", nargs="?", help='a submission: a step (7) or a label ("7/gsm8k"); none: the server')
    parser.add_argument("--target", default=_DEFAULT_TARGET, help="the server's host:port (default %(default)s)")
    parser.add_argument("--namespace", default="default")
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> int:
    return asyncio.run(_show_status(options))


async def _show_status(options: argparse.Namespace) -> int:
    from py_scheduler.client import SchedulerClient  # noqa: PLC0415 - serve needs no client

    settings = {"namespace": options.namespace, "reconnect_seconds": 0.0}
    async with SchedulerClient.connect(options.target, **settings) as client:
        if options.batch_id is None:
            _print_server(await client.server_info())
        else:
            _print_submission(await client.get_submission(_batch_id(options.batch_id)))
    return 0


def _batch_id(text: str) -> BatchId:
    return int(text) if text.isdecimal() else text


def _print_server(info: ServerInfo) -> None:
    print(f"py-scheduler {info.version}")
    for evaluator in info.evaluators:
        sample = evaluator.sample_resource
        print(
            f"evaluator  {evaluator.evaluator_id}  {evaluator.handler}  at once {evaluator.resource.concurrency}  "
            f"a sample: gpu {sample.gpu:g}, cpu {sample.cpu:g}, memory_gb {sample.memory_gb:g}"
        )
    for engine in info.engines:
        print(f"engine     {engine.role}  {engine.model_name}  weights {engine.weight_version or '-'}")
    for node in info.nodes:
        free = " ".join(f"{share:.2f}" for share in node.free_gpus)
        print(
            f"node       {node.node_ip}  free gpus [{free}]  cpu {node.free_cpu:g}/{node.cpu:g}  "
            f"memory_gb {node.free_memory_gb:g}/{node.memory_gb:g}"
        )


def _print_submission(view: SubmissionView) -> None:
    print(f"submission {view.submission_id}  batch_id {view.key.batch_id}  namespace {view.key.namespace}")
    print(
        f"attempts   queued {view.queued_attempts}  leased {view.leased_attempts}  running {view.running_attempts}\n"
        f"tasks      open {view.open_tasks}  succeeded {view.succeeded_tasks}  partial {view.partial_tasks}  "
        f"failed {view.failed_tasks}  aborted {view.aborted_tasks}"
    )
    for batch in view.waiting:
        print(
            f"waiting    {len(batch.task_ids)} tasks from {batch.task_ids[0] if batch.task_ids else '-'}  "
            f"for {batch.waiting_seconds:.1f} s, bypassed {batch.bypassed} times: {batch.reason}"
        )


# The rest


def _fetch_model(options: argparse.Namespace) -> int:
    from py_scheduler.adapters.model_store import fetch_smollm2  # noqa: PLC0415 - only this command needs it

    print(fetch_smollm2(options.cache_dir))
    return 0


def _version(_options: argparse.Namespace) -> int:
    from py_scheduler.app import version  # noqa: PLC0415 - the app is large

    print(version())
    return 0


if __name__ == "__main__":
    sys.exit(main())
