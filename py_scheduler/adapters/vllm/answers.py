"""What vLLM answers when it is asked for something else than tokens.

Invariant: nothing a server says is used before it was read as one of these.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from py_scheduler.adapters.http_server.values import Version


class Served(msgspec.Struct, frozen=True, gc=False):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """Of an adapter: the model that it changes."""


class Models(msgspec.Struct, frozen=True):
    """Of /v1/models; the model of the server stands first."""

    data: Annotated[list[Served], msgspec.Meta(min_length=1)]


class Load(msgspec.Struct, frozen=True, gc=False):
    """Of /load. 0 where the server does not count."""

    server_load: int


class ServedWeights(msgspec.Struct, frozen=True, gc=False):
    """Of /weight_info."""

    weight_version: Version


class Obeyed(msgspec.Struct, frozen=True, gc=False):
    """Of every control call, which has one of these keys. What else answers 200, such as a proxy, has none."""

    status: str | None = None
    success: bool | None = None
    results: list[object] | None = None

    @property
    def says_nothing(self) -> bool:
        return self.status is None and self.success is None and self.results is None
