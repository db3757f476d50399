"""`py-scheduler abort`: stops a submission of a running server, or some of its tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.commands.common import SUBMISSION_HELP, add_server, connection_of, selector_of, standard_console

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from py_scheduler.domain.requests import AbortReply


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("submission", metavar="BATCH_ID", help=SUBMISSION_HELP)
    parser.add_argument(
        "--task", action="append", default=[], metavar="ID", help="only this task; may be given several times"
    )
    add_server(parser)
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


def run(options: argparse.Namespace) -> int:
    """1 when it waited and something still runs. Raises NotFoundError, ServerError."""
    reply = asyncio.run(_abort(options))
    _show_reply(reply, standard_console(), wait=not options.no_wait)
    return int(not options.no_wait and bool(reply.still_stopping))


async def _abort(options: argparse.Namespace) -> AbortReply:
    selector = selector_of(options)
    async with connection_of(options).client(selector.namespace) as client:
        return await client.abort(
            selector.batch_id,
            submission_id=selector.submission_id,
            task_ids=options.task,
            reason=options.reason,
            wait=not options.no_wait,
            keep_partial=options.keep_partial,
            restart_runners=options.restart_runners,
        )


def _show_reply(reply: AbortReply, console: Console, *, wait: bool) -> None:
    console.print(f"{reply.aborted_tasks} tasks aborted" if reply.aborted_tasks else "nothing was open")
    if reply.still_stopping:
        hint = "they end by themselves, or `status` shows them" if wait else "not waited for"
        console.print(f"still stopping ({hint}): {', '.join(reply.still_stopping)}", soft_wrap=True)
