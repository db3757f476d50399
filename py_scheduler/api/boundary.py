"""The one place where exceptions become statuses, for every method of every service on the server.

grpc.aio by itself sends an exception's text to the client, answers malformed messages with UNKNOWN, and leaves a client
waiting when a handler raises CancelledError. So requests reach this interceptor as bytes and are parsed here, and
whatever a handler raises ends here: errors of the tree as themselves, a cancelled call as cancelled, anything else as
INTERNAL with a correlation id under which the log has the rest. Who may call is asked here too (`access`): for a token
before the message is read, for its namespace as soon as it is parsed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2 import SubmitTasksRequest
from py_scheduler.api.security.access import NEEDS, Need, log_refusal
from py_scheduler.api.security.bearer_tokens import ANYBODY
from py_scheduler.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SchedulerError,
    UnauthenticatedError,
)
from py_scheduler.wire.common.damage import damage_error
from py_scheduler.wire.common.errors import internal_status, status_of
from py_scheduler.wire.envelopes import LARGE_BYTES, SubmitEnvelope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from google.rpc import status_pb2

    from py_scheduler.api.security.access import Access
    from py_scheduler.api.security.bearer_tokens import Caller

_log = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_REFUSALS = (UnauthenticatedError, PermissionDeniedError, ResourceExhaustedError)
"""What the audit log hears of: who was kept out, and who was held to a limit."""
_RETRY_AFTER_SECONDS = 1.0
_ANSWER_MARGIN_SECONDS = 0.25
"""How long before its deadline a waiting call is answered, so that the answer arrives in time."""
_MAX_STREAMS_FOR_ALL = 1_000
"""Watches of the server's health."""
_TURN_BYTES = 4 << 20
"""To copy a message out of its packets takes gRPC about a millisecond a MiB: a larger one is parsed a turn later."""
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
_LARGE_MESSAGE_BYTES: ContextVar[int] = ContextVar("large_message_bytes", default=0)

# grpc's own types know nothing of handlers that take bytes, or write to the context.
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]


class CallRefusedError(Exception):
    """Ends a call with a status that is not an error of the tree. Raised by servicers, caught at the boundary."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class OutgoingStream:
    """A call's context for handlers that stream: what they write has a reader who may still read it.

    Invariant: nothing is written for a caller whose token is no longer in force, and no write waits longer than
    `stalled_seconds` for a client that takes nothing.
    """

    def __init__(self, context: Context, access: Access, caller: Caller, stalled_seconds: float) -> None:
        self._context = context
        self._access = access
        self._caller = caller
        self._stalled_seconds = stalled_seconds

    async def begin(self) -> None:
        """Tells the caller that the call was taken, where the first message may be long in coming."""
        await _sent(self._context.send_initial_metadata(()))

    async def write(self, message: Any) -> None:
        """Returns once the message is on its way. Raises UnauthenticatedError, CallRefusedError."""
        self._access.check_in_force(self._caller)
        if not await _sent(self._context.write(message), self._stalled_seconds):
            # The message is with gRPC already; the status follows it as soon as the client reads again.
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE,
                f"nothing was read for {self._stalled_seconds:g} s: resume from the last cursor",
            )

    def cancelled(self) -> bool:
        return bool(self._context.cancelled())

    def peer(self) -> str:
        return str(self._context.peer())


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps each method once, when it is first called.

    max_streams: streams at once; more are refused. Those that need no token are counted by themselves, so that who has
    none keeps nobody else out. stalled_seconds: how long a stream waits for a client that does not read.
    """

    def __init__(self, access: Access, max_streams: int = 1 << 62, stalled_seconds: float = 60.0) -> None:
        self._access = access
        self._max_streams = max_streams
        self._stalled_seconds = stalled_seconds
        self._open_streams = {True: 0, False: 0}
        """By whether they are open to anybody."""
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        try:
            # gRPC runs interceptors and the handler in one task: the variable is the call's own.
            _CALLER.set(self._access.caller_of(method, handler_call_details.invocation_metadata or ()))
        except UnauthenticatedError as error:
            return _refusing(error, method)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # an unknown method: grpc answers UNIMPLEMENTED
                return handler
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        parse = _parser(handler)
        if handler.request_streaming:
            behaviour = self._stream_stream(handler, parse, method)
            return grpc.stream_stream_rpc_method_handler(behaviour, None, handler.response_serializer)
        if handler.response_streaming:
            behaviour = self._unary_stream(handler.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(
                behaviour, None, _bytes_as_they_are(handler.response_serializer)
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary_unary(handler.unary_unary, parse, method), None, handler.response_serializer
        )

    def _admitted(self, raw: bytes, parse: Callable[[bytes], Any], method: str) -> Any:
        request = parse(raw)
        self._access.check(_CALLER.get(), method, request)
        return request

    def _unary_unary(self, call: Any, parse: Callable[[bytes], Any], method: str) -> Any:
        async def behaviour(raw: bytes, context: Context) -> Any:
            try:
                if len(raw) > _TURN_BYTES:
                    await asyncio.sleep(0)
                return await call(self._admitted(raw, parse, method), context)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
                await _fail(error, context, method)

        return behaviour

    def _unary_stream(self, call: Any, parse: Callable[[bytes], Any], method: str) -> Any:
        """For handlers that write to the context themselves: their clean-up runs in the call's own task, at once."""

        is_for_all = NEEDS.get(method) is Need.NOTHING
        limit = min(self._max_streams, _MAX_STREAMS_FOR_ALL) if is_for_all else self._max_streams

        async def behaviour(raw: bytes, context: Context) -> None:
            self._open_streams[is_for_all] += 1
            try:
                if self._open_streams[is_for_all] > limit:
                    raise ResourceExhaustedError(
                        f"{'as many' if is_for_all else 'max_streams'} ({limit}) are open: come back later",
                        _RETRY_AFTER_SECONDS,
                    )
                request = self._admitted(raw, parse, method)
                with self._access.while_in_force(who := _CALLER.get()):
                    await call(request, OutgoingStream(context, self._access, who, self._stalled_seconds))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
                await _fail(error, context, method)
            finally:
                self._open_streams[is_for_all] -= 1

        return behaviour

    def _stream_stream(self, handler: Handler, parse: Callable[[bytes], Any], method: str) -> Any:
        """For the reflection service, whose handler is an async generator."""

        async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for raw in requests:
                yield self._admitted(raw, parse, method)

        async def behaviour(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                async for response in handler.stream_stream(parsed(requests), context):
                    await _sent(context.write(response))
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
                await _fail(error, context, method)

        return behaviour


async def _sent(sending: Coroutine[Any, Any, None], seconds: float | None = None) -> bool:
    """Whether gRPC has sent it within so many seconds. If not, or when who waits is cancelled, gRPC goes on sending.

    In a task of its own, which nothing cancels: what a cancelled send had taken, gRPC never frees (grpc/grpc#43360),
    and it would hold the message until the client reads or goes all the same.
    """
    task = asyncio.create_task(sending)
    task.add_done_callback(_heard)
    await asyncio.wait((task,), timeout=seconds)
    try:
        if task.done():
            task.result()
        return task.done()
    finally:
        # The error of a task has this frame in its traceback, and the task has the error.
        del task


def _heard(task: asyncio.Task[None]) -> None:
    """Who waited may be gone, and asyncio reports errors that nobody has looked at."""
    if not task.cancelled():
        task.exception()


def _refusing(error: SchedulerError, method: str) -> Handler:
    """A handler for any kind of call that never reads what was sent."""

    async def behaviour(_requests: AsyncIterator[bytes], context: Context) -> None:
        await _fail(error, context, method)

    return grpc.stream_stream_rpc_method_handler(behaviour)


def caller() -> Caller:
    """Whose call this is; for servicers."""
    return _CALLER.get()


def large_message_bytes() -> int:
    """Of the message of this call, if it came as an envelope; for servicers."""
    return _LARGE_MESSAGE_BYTES.get()


def time_to_answer(context: Any) -> float | None:
    """Seconds a call may wait so that its answer arrives in time; None without a deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else max(0.0, remaining - min(_ANSWER_MARGIN_SECONDS, remaining / 4))


def _parser(handler: Handler) -> Callable[[bytes], Any]:
    """The handler's own deserializer, which is a bound `FromString`, with errors that say what is wrong. A large submit
    comes as its envelope.
    """
    deserialize = handler.request_deserializer
    message_class = getattr(deserialize, "__self__", None)
    has_envelope = message_class is SubmitTasksRequest

    def parse(raw: bytes) -> Any:
        try:
            if has_envelope and len(raw) > LARGE_BYTES:
                _LARGE_MESSAGE_BYTES.set(len(raw))
                return SubmitEnvelope.FromString(raw)
            return deserialize(raw)
        except DecodeError:
            descriptor = getattr(message_class, "DESCRIPTOR", None)
            if descriptor is None:
                raise InvalidArgumentError("the request is malformed") from None
            raise damage_error(raw, descriptor) from None

    return parse


def _bytes_as_they_are(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Messages that a servicer has serialised already pass through."""
    return lambda message: message if type(message) is bytes else serialize(message)


async def _fail(error: BaseException, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError) or _is_cancelling(error):
        try:
            raise error
        finally:
            # Its traceback now holds this frame. A frame that holds it too keeps what the call held, a watch's last
            # events for one, until the collector's next full run.
            del error
    if isinstance(error, CallRefusedError):
        # The status may have long to wait for a client that does not read; until then nothing but it is kept.
        error.__traceback__ = None
        await context.abort(error.code, str(error))
    if isinstance(error, SchedulerError):
        status = status_of(error)
        if isinstance(error, _REFUSALS):
            who = None if isinstance(error, UnauthenticatedError) else _CALLER.get()
            log_refusal(who, str(context.peer()), method, _CODES[status.code].name, status.message)
        await _abort(context, status)
    correlation_id = secrets.token_hex(8)
    _log.error("%s failed unexpectedly (%s)", method, correlation_id, exc_info=error)
    await _abort(context, internal_status(correlation_id))


def _is_cancelling(error: BaseException) -> bool:
    """Whether the call itself is cancelled, and not what it waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _abort(context: Context, status: status_pb2.Status) -> NoReturn:
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_CODES[status.code], status.message, metadata)
