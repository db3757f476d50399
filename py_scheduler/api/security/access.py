"""Who may make which call.

Invariants
  1. A call without a token that is in force is refused before its message is read; so is one of a method that is not
     in the table below.
  2. A call reaches a servicer only if its caller may use the namespace that it names. What it asks for there by id is
     looked up in that namespace alone, so an id of another one is not found.
  3. A stream does not outlive its caller's token: it is broken off once the server knows that this was taken back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

from py_scheduler.api.security.bearer_tokens import ANYBODY, Caller
from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.errors import PermissionDeniedError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from py_scheduler.api.security.bearer_tokens import BearerTokens

audit_log = logging.getLogger("py_scheduler.audit")

_MAX_LOGGED = 200
_AUTHORIZATION = "authorization"
_BEARER = "bearer"


class Need(Enum):
    """What a method asks of its caller."""

    NOTHING = auto()
    TOKEN = auto()
    NAMESPACE = auto()
    """The one that its request names."""
    STEPS = auto()
    """The one that whole steps run in."""
    ENGINES = auto()


_OWN = "/rollout_scheduler.v1."
NEEDS = {
    "/grpc.health.v1.Health/Check": Need.NOTHING,
    "/grpc.health.v1.Health/Watch": Need.NOTHING,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Need.TOKEN,
    f"{_OWN}SchedulerService/SubmitTasks": Need.NAMESPACE,
    f"{_OWN}SchedulerService/WatchEvents": Need.NAMESPACE,
    f"{_OWN}SchedulerService/AckEvents": Need.NAMESPACE,
    f"{_OWN}SchedulerService/GetSubmission": Need.NAMESPACE,
    f"{_OWN}SchedulerService/ExplainTask": Need.NAMESPACE,
    f"{_OWN}SchedulerService/AbortSubmission": Need.NAMESPACE,
    f"{_OWN}SchedulerService/ResumeTraining": Need.NAMESPACE,
    f"{_OWN}SchedulerService/CollectResults": Need.NAMESPACE,
    f"{_OWN}SchedulerService/DrainSubmission": Need.NAMESPACE,
    f"{_OWN}SchedulerService/AckResults": Need.NAMESPACE,
    f"{_OWN}SchedulerService/DiscardSubmission": Need.NAMESPACE,
    f"{_OWN}SchedulerService/ListRunners": Need.TOKEN,
    f"{_OWN}SchedulerService/GetServerInfo": Need.TOKEN,
    f"{_OWN}PlacementService/AcquireLease": Need.NAMESPACE,
    f"{_OWN}PlacementService/RenewLease": Need.NAMESPACE,
    f"{_OWN}PlacementService/ReleaseLease": Need.NAMESPACE,
    f"{_OWN}PlacementService/GetCapacity": Need.TOKEN,
    f"{_OWN}PlacementService/ExplainPlacement": Need.TOKEN,
    f"{_OWN}RolloutService/ExecuteRollout": Need.STEPS,
    f"{_OWN}RolloutService/ExecuteEval": Need.STEPS,
    f"{_OWN}RolloutService/ReadSamples": Need.STEPS,
    f"{_OWN}GenerationService/PauseGeneration": Need.ENGINES,
    f"{_OWN}GenerationService/ContinueGeneration": Need.ENGINES,
    f"{_OWN}GenerationService/UpdateWeights": Need.ENGINES,
    f"{_OWN}GenerationService/ReportWeights": Need.ENGINES,
    f"{_OWN}GenerationService/SetEndpoints": Need.ENGINES,
    f"{_OWN}GenerationService/GetEndpoints": Need.ENGINES,
    f"{_OWN}GenerationService/GetGenerationState": Need.TOKEN,
}


class Access:
    """The rules of one server. tokens: None where whoever reaches the port may call.

    steps_namespace: the one that whole steps run in.
    """

    def __init__(self, tokens: BearerTokens | None, steps_namespace: str = DEFAULT_NAMESPACE) -> None:
        self._tokens = tokens
        self._steps_namespace = steps_namespace
        self._going_on: dict[asyncio.Task[Any], Caller] = {}
        """The tasks of open streams, and whose they are."""
        if tokens is not None:
            tokens.on_change.append(lambda _quotas: self._break_off())

    def caller_of(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Who makes this call. Raises UnauthenticatedError."""
        if self._tokens is None or NEEDS.get(method) is Need.NOTHING:
            return ANYBODY
        secret = _bearer_of(metadata)
        if secret is None:
            raise UnauthenticatedError(
                "this server wants a bearer token: SchedulerClient(..., token=...), --token-file FILE, or the metadata "
                "`authorization: Bearer TOKEN`"
            )
        caller = self._tokens.caller_of(secret)
        if caller is None:
            raise UnauthenticatedError(
                "the bearer token is not known here (any more): `py-scheduler token new` makes one"
            )
        return caller

    def check(self, caller: Caller, method: str, request: Any) -> None:
        """Raises PermissionDeniedError."""
        if self._tokens is None:
            return
        need = NEEDS.get(method)
        if need is Need.NAMESPACE:
            self._check_namespace(caller, _namespace_of(request))
        elif need is Need.STEPS:
            self._check_namespace(caller, self._steps_namespace)
        elif need is Need.ENGINES and not caller.controls_engines:
            raise PermissionDeniedError(
                f"the token of {caller.name!r} may not change what every namespace generates with: "
                "controls_engines = true in its line of the tokens file allows it"
            )
        elif need is None:
            raise PermissionDeniedError(f"nobody may call {method}")

    def check_in_force(self, caller: Caller) -> None:
        """For calls that go on. Raises UnauthenticatedError once the caller's token was taken back or changed."""
        if not self._is_in_force(caller):
            raise _taken_back(caller)

    @contextmanager
    def while_in_force(self, caller: Caller) -> Iterator[None]:
        """For the time of one stream, in its own task: breaks it off as soon as it is known that the caller's token was
        taken back or changed, although nothing is to be sent. Raises UnauthenticatedError then.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._going_on[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task in self._going_on:
                raise
            task.uncancel()
            raise _taken_back(caller) from None
        finally:
            self._going_on.pop(task, None)

    def _break_off(self) -> None:
        """Streams whose caller could not call now; the one that has found it out ends by itself."""
        current = asyncio.current_task()
        for task, caller in tuple(self._going_on.items()):
            is_over = task is not current and not self._is_in_force(caller)
            if is_over and self._going_on.pop(task, None) is not None:
                task.cancel()

    def _is_in_force(self, caller: Caller) -> bool:
        return self._tokens is None or caller is ANYBODY or self._tokens.is_in_force(caller)

    def _check_namespace(self, caller: Caller, namespace: str) -> None:
        if not caller.may_use(namespace):
            raise PermissionDeniedError(
                f"the token of {caller.name!r} is not for namespace {namespace!r}: name one of its own, "
                "or add this one to its line of the tokens file"
            )


def _taken_back(caller: Caller) -> UnauthenticatedError:
    return UnauthenticatedError(f"the token of {caller.name!r} was taken back or changed: call again")


def _bearer_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for key, value in metadata:
        if key == _AUTHORIZATION and isinstance(value, str):
            scheme, _, secret = value.partition(" ")
            return secret.strip() if scheme.lower() == _BEARER else None
    return None


def _namespace_of(request: Any) -> str:
    """Of a request that names one, itself or in its filter."""
    named = request.filter if "filter" in request.DESCRIPTOR.fields_by_name else request
    return named.namespace or DEFAULT_NAMESPACE


def log_refusal(caller: Caller | None, peer: str, method: str, code: str, reason: str) -> None:
    """One line for whoever looks after the server. Says who, never with which token."""
    audit_log.warning(
        "refused: caller=%s peer=%s method=%s code=%s: %s",
        "-" if caller is None else caller.name,
        peer,
        ascii(method[:_MAX_LOGGED]),
        code,
        _in_one_line(reason[:_MAX_LOGGED]),
    )


def _in_one_line(text: str) -> str:
    """What nobody can take for a line of the log's own, wherever parts of it come from."""
    return "".join([sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text])
