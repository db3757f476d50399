"""The client's end of the connection: its options, and statuses turned back into errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from py_scheduler.errors import InvalidArgumentError, ResourceExhaustedError, ServerError
from py_scheduler.wire.common.errors import error_of

if TYPE_CHECKING:
    from py_scheduler.errors import SchedulerError

_TARGET = re.compile(r"unix(-abstract)?:.+|.+:\d+")
_LOCAL = re.compile(r"unix(-abstract)?:.+|(127(\.\d{1,3}){3}|localhost|\[::1\]):\d+")
_NOBODY_THERE = ("failed to connect", "DNS resolution failed")
"""How gRPC's words begin when nothing was reached, rather than lost on the way."""
_REFUSED_THERE = re.compile(r"socket closed|handshake|verification", re.IGNORECASE)
"""In what follows, when somebody was there and the two did not agree on how to encrypt."""
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_DETAILS_KEY = "grpc-status-details-bin"


def check_target(target: str) -> None:
    """Raises InvalidArgumentError; gRPC itself would take port 443, and wait."""
    if not _TARGET.fullmatch(target):
        raise InvalidArgumentError(f'is {target!r}, must be "host:port" or "unix:/path"', "target")


class ClientTls(msgspec.Struct, frozen=True, kw_only=True):
    """Files for an encrypted connection, as PEM. ca: who signed the server's certificate; empty: the usual authorities.

    certificate, key: the client's own, for a server that asks for one.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgumentError for a file that cannot be read."""
        ca, certificate, key = (_pem(getattr(self, field), f"tls.{field}") for field in self.__struct_fields__)
        return grpc.ssl_channel_credentials(ca, key, certificate)


def _pem(file: str, field: str) -> bytes | None:
    try:
        return Path(file).read_bytes() if file else None
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {error.strerror}", field) from error


def check_token(token: str, target: str, tls: ClientTls | None) -> None:
    """Raises InvalidArgumentError for a token that whoever listens in could read, or that no header could carry."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgumentError("has characters that no token has", "token")
    if token and tls is None and not _LOCAL.fullmatch(target):
        raise InvalidArgumentError(
            f"would travel to {target} for everybody to read: give tls=ClientTls(ca=...) too", "token"
        )


def open_channel(target: str, max_message_bytes: int, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel of the running loop. Nothing is connected before the first call."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A watch may be silent for hours: pings keep middle boxes from forgetting it, and notice a dead server.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The calls' own retries know about request ids and cursors; the channel reconnects as soon as they ask.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.max_metadata_size", 64 * 1024),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.credentials(), options=options)


def is_broken_connection(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server could not be reached, is going, or broke the call off: the same may work in a moment.

    CANCELLED is nobody's wish here, since a caller's own cancel is a CancelledError: a server resets streams when there
    are thousands of calls at once.
    """
    return error.code() in _BROKEN and _details(error) is None


def raise_error_of_call(error: grpc.aio.AioRpcError, target: str) -> NoReturn:
    """Raises what a failed call means. Where nobody answers, gRPC's own error says nothing more."""
    if is_broken_connection(error) and (error.details() or "").startswith(_NOBODY_THERE):
        message = f"no py-scheduler answers at {target}: start it with `py-scheduler serve`"
        if _REFUSED_THERE.search(why := (error.details() or "").rpartition("last error: ")[2]):
            message = (
                f"{target} lets nobody in like this ({why}): where the server has TLS, the client needs "
                "tls=ClientTls(ca=...) (--ca) and a name that the certificate has; with client_ca, one of its own too"
            )
        raise ServerError(message, error.code().name) from None
    raise error_of_call(error) from error


def error_of_call(error: grpc.aio.AioRpcError) -> SchedulerError:
    """What a failed call means, in the tree of errors.py."""
    code = error.code()
    message = error.details() or ""
    status = _details(error)
    if status is not None:
        return error_of(status, code.name)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhaustedError(f"a message is larger than one end takes (max_message_bytes): {message}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = "no answer within the call's timeout: whether it took effect is unknown, so call again"
    if code is grpc.StatusCode.CANCELLED:
        message = "the server broke the call off again and again, as it does when too many are made at once: make fewer"
        return ResourceExhaustedError(message)
    return ServerError(message or code.name, code.name)


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
