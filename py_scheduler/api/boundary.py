"""The one place where exceptions become statuses, for every method of every service on the server.

grpc.aio by itself sends an exception's text to the client, answers malformed messages with UNKNOWN, and leaves a client
waiting when a handler raises CancelledError. So requests reach this interceptor as bytes and are parsed here, and
whatever a handler raises ends here: errors of the tree as themselves, a cancelled call as cancelled, anything else as
INTERNAL with a correlation id under which the log has the rest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from py_scheduler.errors import InvalidArgumentError, SchedulerError
from py_scheduler.wire.damage import damage_error
from py_scheduler.wire.errors import internal_status, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from google.rpc import status_pb2

_log = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}

# grpc's own types know nothing of handlers that take bytes, or write to the context.
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]


class CallRefusedError(Exception):
    """Ends a call with a status that is not an error of the tree. Raised by servicers, caught at the boundary."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps each method once, when it is first called."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # an unknown method: grpc answers UNIMPLEMENTED
                return handler
            wrapped = self._wrapped[method] = _wrap(handler, method)
        return wrapped


def _wrap(handler: Handler, method: str) -> Handler:
    parse = _parser(handler)
    if handler.request_streaming:
        behaviour = _stream_stream(handler, parse, method)
        return grpc.stream_stream_rpc_method_handler(behaviour, None, handler.response_serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _unary_stream(handler.unary_stream, parse, method), None, _bytes_as_they_are(handler.response_serializer)
        )
    return grpc.unary_unary_rpc_method_handler(
        _unary_unary(handler.unary_unary, parse, method), None, handler.response_serializer
    )


def _unary_unary(call: Any, parse: Callable[[bytes], Any], method: str) -> Any:
    async def behaviour(raw: bytes, context: Context) -> Any:
        try:
            return await call(parse(raw), context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
            await _fail(error, context, method)

    return behaviour


def _unary_stream(call: Any, parse: Callable[[bytes], Any], method: str) -> Any:
    """For handlers that write to the context themselves: their clean-up runs in the call's own task, at once."""

    async def behaviour(raw: bytes, context: Context) -> None:
        try:
            await call(parse(raw), context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
            await _fail(error, context, method)

    return behaviour


def _stream_stream(handler: Handler, parse: Callable[[bytes], Any], method: str) -> Any:
    """For the reflection service, whose handler is an async generator."""

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in requests:
            yield parse(raw)

    async def behaviour(requests: AsyncIterator[bytes], context: Context) -> None:
        try:
            async for response in handler.stream_stream(parsed(requests), context):
                await context.write(response)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - this is the boundary
            await _fail(error, context, method)

    return behaviour


def _parser(handler: Handler) -> Callable[[bytes], Any]:
    """The handler's own deserializer, which is a bound `FromString`, with errors that say what is wrong."""
    deserialize = handler.request_deserializer

    def parse(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            message_class = getattr(deserialize, "__self__", None)
            descriptor = getattr(message_class, "DESCRIPTOR", None)
            if descriptor is None:
                raise InvalidArgumentError("the request is malformed") from None
            raise damage_error(raw, descriptor) from None

    return parse


def _bytes_as_they_are(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Messages that a servicer has serialised already pass through."""
    return lambda message: message if type(message) is bytes else serialize(message)


async def _fail(error: BaseException, context: Context, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
    if isinstance(error, CallRefusedError):
        await context.abort(error.code, str(error))
    if isinstance(error, SchedulerError):
        await _abort(context, status_of(error))
    correlation_id = secrets.token_hex(8)
    _log.error("%s failed unexpectedly (%s)", method, correlation_id, exc_info=error)
    await _abort(context, internal_status(correlation_id))


async def _abort(context: Context, status: status_pb2.Status) -> NoReturn:
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(_CODES[status.code], status.message, metadata)
