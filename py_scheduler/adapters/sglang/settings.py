"""How one SGLang server is spoken to."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from py_scheduler.adapters.http_server.settings import ServerSettings


class SglangSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server is spoken to. Times in seconds; `None` means "ask the server" or "leave to the server"."""

    streaming: Literal["auto", "increments", "cumulative", "plain"] = "auto"
    """How tokens are asked for (see Streaming); auto: in increments where the server says that it streams them, and
    else in a few cumulative events. Plain costs least, and a generation whose connection breaks, or that is aborted in
    a pause of mode in_place, loses all its tokens.
    """
    cumulative_events: Annotated[int, msgspec.Meta(ge=1)] = 8
    """Of a generation that uses all its max_new_tokens, where each event repeats the output so far: a connection that
    breaks loses at most one part in so many, but never less than stream_interval."""
