"""What SGLang answers when it is asked for something else than tokens.

Invariant: nothing a server says is used before it was read as one of these.
"""

from __future__ import annotations

import msgspec

from py_scheduler.adapters.http_server.values import Version


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    num_running_reqs: int
    num_waiting_reqs: int


class Loads(msgspec.Struct, frozen=True):
    """Of /v1/loads."""

    loads: list[RankLoad]


class ServedWeights(msgspec.Struct, frozen=True, gc=False):
    """Of /model_info."""

    weight_version: Version | None = None


class Obeyed(msgspec.Struct, frozen=True, gc=False):
    """Of every control call. Something else that answers 200, such as a proxy, says otherwise."""

    message: str
    success: bool = True
