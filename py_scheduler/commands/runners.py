"""`py-scheduler runners`: what each runner of a running server is at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.runner_table import runner_table

if TYPE_CHECKING:
    from rich.console import Console


async def show_runners(target: str, console: Console) -> None:
    """Prints an aligned table. Raises ServerError."""
    async with SchedulerClient(target, reconnect_seconds=0.0) as client:
        views = await client.list_runners()
    if views:
        console.print(runner_table(views), soft_wrap=True)
    else:
        console.print("no runners: handlers run in the server's own loop")
