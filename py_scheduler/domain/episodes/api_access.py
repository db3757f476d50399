"""How an episode is reached over the API that clients of OpenAI speak; `api/` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.errors import GenerationError


class ApiAccess(Protocol):
    """One episode's way in. Its key opens nothing else, and nothing any more after `end`."""

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def socket_path(self) -> str:
        """Of the unix socket; empty when there is none."""
        ...

    @property
    def failure(self) -> GenerationError | None:
        """What the last generation ended with; None when it was answered."""
        ...

    def end(self) -> None:
        """The key is dead from now on, and a request that is under way is cut short."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether no request is under way any more."""
        ...

    async def wait_quiet(self) -> None: ...


class ApiFront(Protocol):
    """Lets episodes in."""

    def admit(self, episode: Episode) -> ApiAccess: ...
