"""`py-scheduler status`: a running server, or one of its submissions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.commands.common import SUBMISSION_HELP, add_server, connection_of, selector_of, standard_console
from py_scheduler.commands.views.endpoints import endpoint_lines
from py_scheduler.errors import PermissionDeniedError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from py_scheduler.commands.common import Connection
    from py_scheduler.domain.generation import EndpointView
    from py_scheduler.domain.requests import ServerInfo, SubmissionSelector, SubmissionView


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", nargs="?", metavar="BATCH_ID", help=f"{SUBMISSION_HELP}; none: the server")
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    server, console = connection_of(options), standard_console()
    if options.submission is None:
        asyncio.run(_show_server(server, options.namespace, console))
    else:
        asyncio.run(_show_submission(selector_of(options), server, console))
    return 0


async def _show_server(server: Connection, namespace: str, console: Console) -> None:
    """Prints what the server is made of. Raises SchedulerError."""
    async with server.client(namespace) as client:
        info = await client.server_info()
    for line in _server_lines(info, await _endpoints(server) if info.engines else {}):
        console.print(line, soft_wrap=True)


async def _endpoints(server: Connection) -> dict[str, tuple[EndpointView, ...]]:
    """None for whoever may not see addresses of engines."""
    async with server.generation_client() as client:
        try:
            return await client.endpoints()
        except PermissionDeniedError:
            return {}


async def _show_submission(selector: SubmissionSelector, server: Connection, console: Console) -> None:
    """Prints how a submission stands, and why what waits is waiting. Raises NotFoundError."""
    async with server.client(selector.namespace) as client:
        view = await client.get_submission(selector.batch_id, submission_id=selector.submission_id)
    for line in _submission_lines(view):
        console.print(line, soft_wrap=True)


def _server_lines(info: ServerInfo, endpoints: Mapping[str, Sequence[EndpointView]]) -> list[str]:
    lines = [
        f"py-scheduler {info.version}",
        *(
            f"evaluator  {evaluator.evaluator_id}  {evaluator.handler}  at once {evaluator.resource.concurrency}  "
            f"a sample: {evaluator.sample_resource.words}"
            for evaluator in info.evaluators
        ),
    ]
    for engine in info.engines:
        model = engine.error or f"{engine.model_name}  weights {engine.weight_version or '-'}"
        if engine.streaming:
            model += f"  streams {engine.streaming}"
        lines.append(f"engine     {engine.role}  {model}")
        if engine.role in endpoints:
            lines += endpoint_lines(engine.role, endpoints[engine.role])
    for node in info.nodes:
        free = " ".join(f"{share:.2f}" for share in node.free_gpus)
        lines.append(f"node       {node.node_ip}  gpus free [{free}]  {node.words}")
    return lines


def _submission_lines(view: SubmissionView) -> list[str]:
    tasks = (
        f"tasks      open {view.open_tasks}  succeeded {view.succeeded_tasks}  partial {view.partial_tasks}  "
        f"failed {view.failed_tasks}  aborted {view.aborted_tasks}"
    )
    results = (
        f"results    to collect {view.collectable_tasks}  not acknowledged {view.unacknowledged_tasks}  "
        f"together about {view.kept_bytes:,} bytes"
    )
    return [
        f"submission {view.submission_id}  batch_id {view.key.batch_id}  namespace {view.key.namespace}",
        f"attempts   queued {view.queued_attempts}  leased {view.leased_attempts}  running {view.running_attempts}",
        tasks,
        *([results] if view.kept_bytes else []),
        *(
            f"waiting    {len(batch.task_ids)} tasks from {batch.task_ids[0] if batch.task_ids else '-'}  "
            f"for {batch.waiting_seconds:.1f} s, bypassed {batch.bypassed} times: {batch.reason}"
            for batch in view.waiting
        ),
    ]
