"""`py-scheduler runners`: what each runner of a running server is at."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.commands.common import add_server, connection_of, standard_console
from py_scheduler.domain.runners.table import runner_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from py_scheduler.domain.runners.runner import RunnerView


def add(parser: argparse.ArgumentParser) -> None:
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    """Prints an aligned table. Raises ServerError."""
    views, console = asyncio.run(_runners(options)), standard_console()
    if views:
        console.print(runner_table(views), soft_wrap=True)
    else:
        console.print("no runners: handlers run in the server's own loop")
    return 0


async def _runners(options: argparse.Namespace) -> Sequence[RunnerView]:
    async with connection_of(options).client(options.namespace) as client:
        return await client.list_runners()
