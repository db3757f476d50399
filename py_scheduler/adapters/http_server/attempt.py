"""One try at a generation: what is sent, how long its server may be silent, and what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.domain.generation import Generation


class AttemptFailedError(Exception):
    """Nothing of this attempt was received; the next may do better."""


class Silence(NamedTuple):
    """Seconds that a server may be silent before the first event, and from one to the next."""

    first_seconds: float
    next_seconds: float

    @classmethod
    def of(cls, first: int, between: int, settings: ServerSettings) -> Silence:
        """first, between: tokens that are made before the first event, and from one to the next."""
        speed = settings.least_tokens_per_second
        return cls(
            settings.first_token_timeout_seconds + first / speed, settings.idle_read_timeout_seconds + between / speed
        )


class Output(Protocol):
    """What a server has sent of one generation so far."""

    def add(self, payload: bytes) -> None:
        """Takes the next event. Raises EngineUnavailableError for one that cannot be read or does not fit."""
        ...

    def settle(self) -> bool:
        """Reads what is left to read; False when there was no event at all. Raises as `add` does."""
        ...

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status, as in HTTP, and message of what the server says went wrong, which is nobody's abort."""
        ...

    def whole(self) -> Generation:
        """After the last event. Raises EngineUnavailableError when something is missing."""
        ...

    def partial(self) -> Generation:
        """What came of a generation that did not end properly."""
        ...


class Attempt(NamedTuple):
    """`body` goes to `path`. The answer is a stream of events, or one body."""

    path: str
    body: dict[str, Any]
    is_stream: bool
    silence: Silence
    output: Output
