"""How an inference server is spoken to, whichever it is."""

from __future__ import annotations

from typing import Annotated

import msgspec

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.settings_checks import check_numbers


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds; `None` means "ask the server" or "leave to the server"."""

    default_max_new_tokens: int = 256
    """For a request that says none; the servers' own default is less."""
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = 64
    """Tokens between two increments: lost at most when a connection breaks, sent anyway when a request is aborted."""
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

    def __post_init__(self) -> None:
        check_numbers(self, may_be_zero=("abort_grace_seconds", "encoded_seconds"))
