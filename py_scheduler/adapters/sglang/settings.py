"""How one SGLang server is spoken to, and how a fleet of them is driven."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from py_scheduler.adapters.http_client import RetrySettings


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server is spoken to. Times in seconds; `None` means "ask the server" or "leave to the server"."""

    default_max_new_tokens: int = 256
    """For a request that says none; the server's own default is 128."""
    streaming: Literal["auto", "increments", "cumulative", "plain"] = "auto"
    """How tokens are asked for (see Streaming); auto: in increments where the server says that it streams them, and
    else in a few cumulative events. Plain costs least, and a generation whose connection breaks, or that is aborted in
    a pause of mode in_place, loses all its tokens.
    """
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = 64
    """Tokens between two increments: lost at most when a connection breaks, sent anyway when a request is aborted."""
    cumulative_events: Annotated[int, msgspec.Meta(ge=1)] = 8
    """Of a generation that uses all its max_new_tokens, where each event repeats the output so far: a connection that
    breaks loses at most one part in so many, but never less than stream_interval."""
    least_tokens_per_second: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Of one generation. The limits of silence below are longer by the time that the tokens until the next event take
    at this speed."""
    first_token_timeout_seconds: float = 600.0
    """Queueing and pauses of the server included: it holds new requests while it is paused."""
    idle_read_timeout_seconds: float = 120.0
    """Silence after the first event."""
    connect_timeout_seconds: float = 5.0
    """For a connection to be made."""
    control_timeout_seconds: float = 10.0
    """For an answer to a short call: an abort, a tokenization, a look at the load."""
    pause_timeout_seconds: float = 60.0
    """For a pause; one that aborts waits for the last request to end."""
    weight_update_timeout_seconds: float = 600.0
    """For the server to load weights."""
    abort_grace_seconds: float = 2.0
    """How long an aborted request may take to end by itself, with all its tokens, before its connection is closed."""
    encoded_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """How long the tokenizer's answer for a text or a chat is good for the next one who asks the same; less than a
    server takes to start, which may come back with another chat template. 0: each is asked for."""
    keepalive_seconds: float = 3.0
    """The server closes idle connections after 5."""
    retry: RetrySettings = RetrySettings()
    """Of an attempt that failed before its first token."""
    vocab_size: int | None = None
    """Token ids that a request may hold, from 0 on."""
    context_length: int | None = None
    """Token ids of prompt and output together."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. How each server is spoken to stands in SglangSettings."""

    max_concurrency: int | None = None
    """Generations at one endpoint at once; further ones wait here, first come first served. None: no limit."""
    load_interval_seconds: float = 1.0
    """Between two questions to one endpoint for its load; own generations are counted in between."""
    warm_up_seconds: float = 600.0
    """How long after the start an endpoint that does not answer yet is taken to be loading its model."""
    no_endpoint_seconds: float = 120.0
    """How long a generation waits while no endpoint is up."""
    set_aside_base_seconds: float = 0.5
    """Before an endpoint that failed is probed for the first time; the wait doubles with each failure in a row, and of
    each up to a half is left out at random."""
    set_aside_max_seconds: float = 30.0
    """The longest of these waits."""
    max_attempts: int = 4
    """Endpoints that one generation is tried at, counting an endpoint again when it comes back to it."""
    sticky_load_ratio: float = 1.5
    """A session stays with its endpoint, and so with its prefix cache, up to that many times the least load."""
    remembered_sessions: int = 100_000
    """Sessions whose endpoint is known, those that generated last."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} is {value}: it must be above 0")
        if self.set_aside_max_seconds < self.set_aside_base_seconds:
            raise ValueError("set_aside_max_seconds is less than set_aside_base_seconds")
