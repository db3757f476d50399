"""The servers of a role as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from py_scheduler.domain.generation import EndpointView


def endpoint_lines(role: str, endpoints: Sequence[EndpointView]) -> Iterator[str]:
    if not endpoints:
        yield f"endpoint   {role}  none is named: generations wait"
    for endpoint in endpoints:
        workers = f"  router of {', '.join(endpoint.control_urls)}" if endpoint.control_urls else ""
        state = endpoint.state.replace("_", " ")
        reason = f": {endpoint.reason}" if endpoint.reason else ""
        yield f"endpoint   {role}  {endpoint.url}  {state}  {endpoint.in_flight} in flight{workers}{reason}"
