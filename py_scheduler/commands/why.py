"""`py-scheduler why`: how a task of a running server stands and, if it waits, for what."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from py_scheduler.commands.common import add_server, connection_of, standard_console
from py_scheduler.domain.explanations import TaskPhase

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from py_scheduler.commands.common import Connection
    from py_scheduler.domain.explanations import TaskExplanation, TaskWait
    from py_scheduler.domain.leases import NodeShortageView

_MAX_NODES = 20


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task_id", metavar="TASK_ID", help="as `submit` returned it, and events carry it")
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    asyncio.run(_show_task(options.task_id, connection_of(options), options.namespace, standard_console()))
    return 0


async def _show_task(task_id: str, server: Connection, namespace: str, console: Console) -> None:
    """Asks the server and prints. Raises NotFoundError for a task that it does not know, ServerError."""
    async with server.client(namespace) as client:
        show_explanation(await client.explain_task(task_id), console)


def show_explanation(explanation: TaskExplanation, console: Console) -> None:
    console.print(
        f"task {explanation.task_id} of batch_id {explanation.batch_id} ({explanation.submission_id}): "
        f"{explanation.phase}"
    )
    if explanation.phase is not TaskPhase.DONE:
        console.print(
            f"attempts: queued {explanation.queued_attempts}, leased {explanation.leased_attempts}, "
            f"running {explanation.running_attempts}"
        )
    for wait in explanation.waits:
        _show_wait(wait, console)


def _show_wait(wait: TaskWait, console: Console) -> None:
    console.print(
        f"\nits batch ({wait.tasks} tasks, {wait.attempts} attempts, evaluator {wait.evaluator_id}) has waited "
        f"{wait.waiting_seconds:.1f} s: {wait.reason}\n"
        f"bypassed {wait.bypassed} times by what took room that it could use; it may be {wait.max_bypass} times\n"
        f"tokens: {wait.wanted_tokens} needed at once"
        + (f", {wait.free_tokens} free, {wait.max_tokens} in the empty pool" if wait.nodes_in_all else ""),
        soft_wrap=True,
    )
    if wait.nodes:
        console.print(_nodes(wait))
    if wait.ahead_in_all == 0:
        console.print("nothing is ahead of it")
        return
    console.print(f"ahead of it: {wait.ahead_in_all}")
    console.print(_ahead(wait))
    head = wait.ahead[0]
    if head.bypassed >= wait.max_bypass:
        console.print(
            f"the first of them was bypassed {head.bypassed} times: nobody takes room any more that it could use"
        )


def _nodes(wait: TaskWait) -> Table:
    table = _table("node", "free tokens", "of", "short of")
    for node in wait.nodes[:_MAX_NODES]:
        table.add_row(node.node_ip, f"{node.free_tokens:,}", f"{node.max_tokens:,}", _short(node))
    hidden = wait.nodes_in_all - min(len(wait.nodes), _MAX_NODES)
    if hidden:
        table.add_row(f"and {hidden:,} more, none freer")
    return table


def _short(node: NodeShortageView) -> str:
    return ", ".join(node.words) or "nothing"


def _ahead(wait: TaskWait) -> Table:
    table = _table("batch_id", "tasks", "tokens", "waits s", "bypassed", "namespace")
    for entry in wait.ahead:
        table.add_row(
            "(a lease of another scheduler)" if entry.batch_id is None else str(entry.batch_id),
            f"{entry.tasks:,}",
            f"{entry.tokens:,}",
            f"{entry.waiting_seconds:.1f}",
            str(entry.bypassed),
            entry.namespace,
        )
    if wait.ahead_in_all > len(wait.ahead):
        table.add_row(f"and {wait.ahead_in_all - len(wait.ahead):,} more")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.ASCII2)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
