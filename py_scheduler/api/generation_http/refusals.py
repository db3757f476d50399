"""Every answer that is none: statuses and codes in the shape that clients of OpenAI's API read."""

from __future__ import annotations

import logging
from typing import Any

from py_scheduler.errors import (
    ContextOverflowError,
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    GenerationAbortedError,
    GenerationError,
    TurnLimitError,
)

logger = logging.getLogger(__name__)

BAD_REQUEST, UNAUTHORIZED, NOT_FOUND, CONFLICT, TOO_LARGE = 400, 401, 404, 409, 413
INTERNAL, UNAVAILABLE = 500, 503

_TYPES = {UNAUTHORIZED: "authentication_error", INTERNAL: "server_error", UNAVAILABLE: "server_error"}


class RefusedError(Exception):
    """What a client is told instead of an answer. `param`: the field that is at fault.

    may_retry: whether the same request could be answered later; OpenAI's own client would try a 409 and a 503 again.
    """

    def __init__(
        self, status: int, message: str, code: str, *, param: str | None = None, may_retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.may_retry = may_retry

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true" if self.may_retry else "false"}


def unsupported(field: str, message: str) -> RefusedError:
    return RefusedError(BAD_REQUEST, f"{field}: {message}", "unsupported_parameter", param=field)


def refusal_of(error: Exception) -> RefusedError:
    """What an exception of the episode means to its client."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ContextOverflowError):
        return RefusedError(BAD_REQUEST, str(error), "context_length_exceeded", param="messages")
    if isinstance(error, TurnLimitError):
        return RefusedError(BAD_REQUEST, str(error), "max_turns_reached")
    if isinstance(error, EngineRejectedError):
        return RefusedError(BAD_REQUEST, str(error), "engine_rejected")
    if isinstance(error, GenerationAbortedError):
        return RefusedError(CONFLICT, f"{error}; the tokens made until then are recorded", "generation_aborted")
    if isinstance(error, EngineUnavailableError):
        # Its address is none of a client's business; the log has it.
        logger.warning("a request was not answered: %s", error)
        message = "the language model does not answer: the server's log says why"
        return RefusedError(UNAVAILABLE, message, "engine_unavailable", may_retry=error.partial is None)
    if isinstance(error, GenerationError | FailedPreconditionError):
        return RefusedError(CONFLICT, str(error), "not_in_this_state")
    logger.error("a request failed in a way that nobody foresaw", exc_info=error)
    return RefusedError(INTERNAL, "an error on the server: its log says which", "internal_error")
