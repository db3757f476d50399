"""`py-scheduler try-handler`: one sample through the real scheduler, in this process and without a server.

The way is that of `serve`: the same configuration, pool, engines and episode, so what works here works there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler import app
from py_scheduler.commands.common import standard_console
from py_scheduler.commands.views.try_handler import Trial, show_json, show_trial
from py_scheduler.config import Config, GatewaySettings, convert_config, load_config
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import EventFilter, SubmitRequest
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task
from py_scheduler.errors import ConfigError, InvalidArgumentError
from py_scheduler.execution.containment import contained_task
from py_scheduler.knobs import CONFIG, overrides_of
from py_scheduler.version import version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.console import Console

    from py_scheduler.domain.requests import SubmitReply
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.scheduler.engine import Engine

_EVALUATOR_ID = "tried"
_GATEWAY = GatewaySettings(listen="127.0.0.1:0")
_MAX_FRAMES = 8
_RUN_SAMPLE = "py_scheduler.execution.run_sample"
"""The logger that gets what handlers raise."""


class TryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to try. handler: `module:Class`, or the evaluator_id of one in `config_file`.

    engine: "embedded", "none" or the address of an SGLang server; None: what the configuration says, or else embedded.
    handler_args: JSON; None: the configuration's. task_json: a file with a Task; None: `prompt` is the task.
    """

    handler: str
    config_file: Path | None = None
    engine: str | None = None
    handler_args: str | None = None
    prompt: str = ""
    task_json: Path | None = None
    as_json: bool = False
    whole_text: bool = False


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Exit code 0: it ran and was scored, whatever the score; 1: the handler raised or was "
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


def run(options: argparse.Namespace) -> int:
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
    return run_try(request, standard_console())


def run_try(request: TryRequest, console: Console) -> int:
    """Prints what came of the sample; 0 when it ran to its end, else 1. Raises InvalidArgumentError."""
    config = _read_config(request)
    task, warnings = _read_task(request, config.evaluator[0].evaluator_id)
    base_dir = request.config_file.resolve().parent if request.config_file else Path.cwd()
    sys.path.append(str(base_dir))
    with asyncio.Runner() as runner:
        trial = runner.run(_try(config, base_dir, task, warnings))
        if request.as_json:
            show_json(trial, console)
        else:
            show_trial(trial, console, whole_text=request.whole_text)
        code = int(not trial.is_finished)
        if trial.stranded_workers:
            # The runner would wait for the handler; nothing but the end of the process stops it.
            sys.stdout.flush()
            os._exit(code)
    return code


# What is asked


def _read_config(request: TryRequest) -> Config:
    """A configuration of one evaluator. Raises ConfigError.

    Its gateway listens on a port of its own: the server of the same configuration may be running.
    """
    arguments = None if request.handler_args is None else _object(request.handler_args, "--args")
    engines = _engines(request.engine)
    if request.config_file is None:
        evaluator: dict[str, Any] = {"evaluator_id": _EVALUATOR_ID, "handler": request.handler, "resource": {}}
        tables = {
            "gateway": {"listen": _GATEWAY.listen},
            "generation": engines,
            "evaluator": [evaluator | {"handler_args": arguments or {}}],
        }
        return convert_config(tables)
    config = load_config(request.config_file, overrides_of({}, os.environ))
    found = [known for known in config.evaluator if request.handler in {known.handler, known.evaluator_id}]
    if not found:
        names = ", ".join(f"{known.evaluator_id} ({known.handler})" for known in config.evaluator)
        raise ConfigError(f"no evaluator of {request.config_file} has this handler or id; it has {names}", "HANDLER")
    changes: dict[str, Any] = {} if arguments is None else {"handler_args": arguments}
    return msgspec.structs.replace(
        config,
        evaluator=(msgspec.structs.replace(found[0], **changes),),
        gateway=_GATEWAY,
        generation=config.generation if request.engine is None else engines,
        # Other tasks than the one that is tried are not opened.
        dataset=(),
        eval_dataset=(),
    )


def _engines(engine: str | None) -> dict[str, dict[str, Any]]:
    if engine == "none":
        return {}
    if engine is None or engine == "embedded":
        return {"student": {"kind": "embedded"}}
    if engine.startswith(("http://", "https://")):
        return {"student": {"kind": "sglang", "base_url": engine}}
    raise ConfigError(f'is {engine!r}, must be "embedded", "none" or the address of an SGLang server', "--engine")


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"is no JSON object: {error}", where) from error


def _read_task(request: TryRequest, task_type: str) -> tuple[Task, list[str]]:
    """The task with one sample and no second attempt, and what was not taken as it was said."""
    said: dict[str, Any] = {"prompt": request.prompt}
    where = str(request.task_json)
    if request.task_json is not None:
        try:
            said = _object(request.task_json.read_bytes(), where)
        except OSError as error:
            raise InvalidArgumentError(f"cannot be read: {error.strerror}", where) from error
        if unknown := said.keys() - set(Task.__struct_fields__):
            known = ", ".join(Task.__struct_fields__)
            hint = f"a task has {known}; what handlers read goes into metadata"
            raise InvalidArgumentError(f"unknown keys {', '.join(sorted(unknown))}: {hint}", where)
    config = said.get("config", {})
    if not isinstance(config, dict):
        raise InvalidArgumentError("must be an object", f"{where}: config")
    try:
        # Through JSON once more, which is what makes bytes of the base64 in `data`.
        task = msgspec.json.decode(msgspec.json.encode(said | {"config": config | {"task_type": task_type}}), type=Task)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(str(error), where) from error
    repeats = task.config.repeat_times
    warnings = [f"repeat_times is {repeats}: one sample is tried"] if repeats != 1 else []
    once = msgspec.structs.replace(task.config, repeat_times=1, retry=RetryPolicy(max_loss_retries=0))
    return msgspec.structs.replace(task, config=once), warnings


# Trying


async def _try(config: Config, base_dir: Path, task: Task, warnings: list[str]) -> Trial:
    asyncio.get_running_loop().set_task_factory(contained_task)
    with _listening() as heard:
        parts = app.build(config, base_dir)
        async with AsyncExitStack() as stack:
            await app.start_backends(parts, stack, asyncio.Event())
            await app.open_front(parts, stack)
            scheduler = await stack.enter_async_context(parts.scheduler)
            info = await scheduler.server_info(version())
            request = SubmitRequest(request_id="try-handler", key=SubmissionKey(0), tasks=(task,))
            reply = await scheduler.submit(request)
            sample, done = await _until_done(scheduler, reply)
    return Trial(
        handler=config.evaluator[0].handler,
        info=info,
        sample=sample,
        done=done,
        traceback=heard.traceback,
        warnings=(*warnings, *reply.warnings, *heard.warnings),
        stranded_workers=scheduler.stranded_workers,
    )


async def _until_done(scheduler: Engine, reply: SubmitReply) -> tuple[SampleDone | None, TaskDone]:
    sample = None
    async for frame in scheduler.watch(EventFilter(submission_id=reply.submission_id), reply.before_sequence):
        for record in frame.records:
            if isinstance(record.event, AttemptEnded) and record.event.samples:
                sample = record.event.samples[-1]
            if isinstance(record.event, TaskDone):
                return sample, record.event
    raise AssertionError("a watch of a running engine has no end")


class _Heard(logging.Handler):
    """Warnings of the scheduler, and the traceback of what the handler raised."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.traceback: tuple[str, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == _RUN_SAMPLE and record.exc_info and record.exc_info[1]:
            self.traceback = _short_traceback(record.exc_info[1])
        elif record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


@contextmanager
def _listening() -> Iterator[_Heard]:
    heard = _Heard()
    package, runs = logging.getLogger("py_scheduler"), logging.getLogger(_RUN_SAMPLE)
    level = runs.level
    package.addHandler(heard)
    # What was raised before in this process is logged at debug level only.
    runs.setLevel(logging.DEBUG)
    try:
        yield heard
    finally:
        runs.setLevel(level)
        package.removeHandler(heard)


def _short_traceback(error: BaseException) -> tuple[str, ...]:
    """From the handler's first frame on, the last few frames of it."""
    frames = traceback.extract_tb(error.__traceback__)
    run_sample = os.path.join("execution", "run_sample.py")  # noqa: PTH118 -- the end of a path
    own = [frame for frame in frames if not frame.filename.endswith(run_sample)]
    lines = traceback.format_list(own[-_MAX_FRAMES:]) + traceback.format_exception_only(error)
    return tuple("".join(lines).splitlines())
