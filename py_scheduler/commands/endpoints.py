"""`py-scheduler endpoints`: names the servers of a role of a running server, or shows them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.commands.common import add_server, connection_of, standard_console
from py_scheduler.commands.views.endpoints import endpoint_lines
from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from py_scheduler.domain.generation import EndpointView


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", nargs="?", metavar="ROLE", help="such as student; none: all of them are shown")
    parser.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help="of every server that the role is to have, or of one router; none: they are shown as they are",
    )
    parser.add_argument(
        "--control-url",
        action="append",
        default=[],
        metavar="URL",
        help="of a worker behind the router; once for each",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--none", action="store_true", help="the role has no server for now: generations wait")
    instead.add_argument(
        "--configured", action="store_true", help="the addresses of the server's configuration count again"
    )
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    """Prints how each server stands. Raises SchedulerError."""
    console, shown = standard_console(), asyncio.run(_endpoints(options))
    for role, endpoints in shown.items():
        for line in endpoint_lines(role, endpoints):
            console.print(line, soft_wrap=True)
    if not shown:
        console.print("no role has servers that could be named: its table says base_urls, see examples/scheduler.toml")
    return 0


async def _endpoints(options: argparse.Namespace) -> Mapping[str, Sequence[EndpointView]]:
    names_some = bool(options.urls or options.control_url)
    if names_some and (options.none or options.configured):
        raise InvalidArgumentError("--none and --configured stand in place of addresses: leave one of the two out")
    async with connection_of(options).generation_client() as client:
        if names_some or options.none or options.configured:
            if options.role is None:
                raise InvalidArgumentError("name the role whose servers these are, such as student")
            urls = None if options.configured else options.urls
            return {options.role: await client.set_endpoints(options.role, urls, control_urls=options.control_url)}
        shown = await client.endpoints()
        return {role: shown[role] for role in shown if options.role in (None, role)}
