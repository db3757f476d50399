"""Every exception that py-scheduler raises on purpose, in one tree.

    SchedulerError
    |-- InvalidArgumentError      a value can never be right; names each faulty field
    |   |-- ConfigError           ... in the server's configuration file
    |   |-- ClusterLayoutError    ... in the cluster layout
    |   `-- CursorMismatchError   ... a cursor that belongs to another filter
    |-- UnplaceableError          well formed, but no pool state could ever place it
    |-- AlreadyExistsError        an id that is taken, with another content
    |-- NotFoundError             an id that nobody knows
    |-- UnauthenticatedError      no bearer token, or one that the server does not know
    |-- PermissionDeniedError     a bearer token that is not for this namespace or call
    |-- CursorExpiredError        a cursor of another store, or older than what is retained
    |-- ResourceExhaustedError    a limit is reached for now; says when to come back
    |-- FailedPreconditionError   not in this state; says which state would do
    |-- LeaseError                a placement token or lease that is not held (any more)
    |-- GenerationError           the generation backend did not deliver; "engine" in these names, as on the wire
    |   |-- EngineUnavailableError     not reachable, or failing on its side (retried, then infra_conn)
    |   |-- EngineRejectedError        the backend refuses this request (not retried)
    |   |   |-- ContextOverflowError   ... because it is longer than the context
    |   |   `-- TurnLimitError         ... because the episode has had its turns
    |   `-- GenerationAbortedError     aborted while running
    |-- SandboxError              a sandbox could not be set up, or broke down (infra_sandbox)
    |-- RunnerError               a runner outside the server's loop
    |   |-- RunnerStartError          ... could not be started
    |   `-- RunnerLostError           ... died under its work; says how it ended
    |-- JournalError              a store cannot be used as it is: locked, unreadable, of another format
    |   `-- JournalDamagedError        ... because what it held is no longer all there
    |-- ModelFetchError           a model file could not be brought here
    `-- ServerError               the client's face of a failed call that has no better class

"Full for now" is never an exception: it is `None` (placement) or a queued batch with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class SchedulerError(Exception):
    """Root of the tree. `str(error)` is fit for a user: it says what is wrong and the way out."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One faulty field: its path (`tasks[3].config.repeat_times`) and what would be right."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidArgumentError(SchedulerError, ValueError):
    """Values that can never be right. `violations` holds every fault found, not only the first."""

    def __init__(self, violations: Iterable[FieldViolation] | str, field: str = "") -> None:
        if isinstance(violations, str):
            violations = [FieldViolation(field, violations)]
        self.violations = tuple(violations)
        super().__init__("; ".join(str(v) if v.field else v.description for v in self.violations))


class ConfigError(InvalidArgumentError):
    """A fault in the server's configuration; `field` is the dotted key of the TOML file."""


class ClusterLayoutError(InvalidArgumentError):
    """Faults in a cluster layout, all of them at once; `field` is the node."""


class CursorMismatchError(InvalidArgumentError):
    """A cursor presented with another filter than the one it was made for."""


class UnplaceableError(SchedulerError):
    """A demand that the pool could not meet even when empty: it fails at once instead of waiting for ever."""


class AlreadyExistsError(SchedulerError):
    """A request id or client key that is in use for something else."""


class NotFoundError(SchedulerError):
    """An id that this server does not know (any more)."""


class UnauthenticatedError(SchedulerError):
    """A call without a bearer token that this server knows."""


class PermissionDeniedError(SchedulerError):
    """A call that its bearer token is not good for; the message names the namespace or the right that is missing."""


class CursorExpiredError(SchedulerError):
    """A cursor whose events are gone: another store, or compacted away.

    `oldest_sequence` is the first one that can still be read.
    """

    def __init__(self, message: str, oldest_sequence: int) -> None:
        super().__init__(message)
        self.oldest_sequence = oldest_sequence


class ResourceExhaustedError(SchedulerError):
    """A limit is reached. `retry_after_seconds` is None when waiting alone will not help."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class FailedPreconditionError(SchedulerError):
    """The call is right but the state is not; the message names the state that would do."""


class LeaseError(SchedulerError):
    """A placement token or lease that is not held: given back, expired, or held under another fencing token."""


class GenerationError(SchedulerError):
    """The generation backend did not deliver a complete generation.

    `partial` is the `domain.generation.Generation` of the tokens that had arrived, if any; it is never complete.
    """

    def __init__(self, message: str, partial: object | None = None) -> None:
        super().__init__(message)
        self.partial = partial


class EngineUnavailableError(GenerationError):
    """The generation backend cannot be reached, timed out or failed on its side, after all bounded retries.

    `partial` is the `domain.generation.Generation` of the tokens received before that, finish reason ABORT, or None.
    """


class EngineRejectedError(GenerationError):
    """The generation backend (or the check in front of it) refuses this request; trying again gives the same."""


class ContextOverflowError(EngineRejectedError):
    """Prompt plus requested tokens exceed the model's context."""


class TurnLimitError(EngineRejectedError):
    """The episode's `max_turns` generations were made."""


class GenerationAbortedError(GenerationError):
    """The generation was aborted while it ran."""


class SandboxError(SchedulerError):
    """The sandbox that a handler works in failed; what ran inside it, and how that ended, is no such failure."""


class RunnerError(SchedulerError):
    """A runner outside the server's loop (a process, an actor) failed."""


class RunnerStartError(RunnerError):
    """A runner could not be started, after all retries; nothing of it was left running."""


class RunnerLostError(RunnerError):
    """A runner died under its work: the attempt is LOST. Says how it ended."""


class JournalError(SchedulerError):
    """A store that cannot be used as it is; nothing in it was changed."""


class JournalDamagedError(JournalError):
    """A store that no longer holds all that was acknowledged. `py-scheduler journal recover` says what is lost."""


class ModelFetchError(SchedulerError):
    """A model file that could not be brought here, and why; nothing half-made was left behind."""


class ServerError(SchedulerError):
    """A call failed on the server for a reason that has no class of its own; `code` is the gRPC status name."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def first_of(error: BaseException) -> BaseException:
    """The first exception in a group, however many groups it lies in; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
