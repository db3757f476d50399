"""`py-scheduler abort`: stops a submission of a running server, or some of its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from py_scheduler.commands.connection import Connection
    from py_scheduler.domain.requests import AbortReply
    from py_scheduler.domain.requests import SubmissionSelector as Selector


async def abort_submission(
    selector: Selector,
    task_ids: Sequence[str],
    *,
    server: Connection,
    reason: str,
    wait: bool,
    keep_partial: bool,
    restart_runners: bool,
    console: Console,
) -> int:
    """Asks the server and prints; 1 when it waited and something still runs. Raises NotFoundError, ServerError."""
    async with server.client(selector.namespace) as client:
        reply = await client.abort(
            selector.batch_id,
            submission_id=selector.submission_id,
            task_ids=task_ids,
            reason=reason,
            wait=wait,
            keep_partial=keep_partial,
            restart_runners=restart_runners,
        )
    _show_reply(reply, console, wait=wait)
    return int(wait and bool(reply.still_stopping))


def _show_reply(reply: AbortReply, console: Console, *, wait: bool) -> None:
    console.print(f"{reply.aborted_tasks} tasks aborted" if reply.aborted_tasks else "nothing was open")
    if reply.still_stopping:
        hint = "they end by themselves, or `status` shows them" if wait else "not waited for"
        console.print(f"still stopping ({hint}): {', '.join(reply.still_stopping)}", soft_wrap=True)
