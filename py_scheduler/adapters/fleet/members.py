"""Which servers are in a fleet, named by whoever names them last.

Invariants

- `endpoints` holds those that are named, each once, and those that were removed and are not idle yet: these drain.
- A server that is named again while it drains goes on as it was, with all that it runs.
- A removed one is closed once it is idle, and not before `may_leave` says so: one whose server was told to pause is to
  hear the end.
- What a server is, is its address with those of the workers behind it: a router with other workers is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.generation import Endpoints
from py_scheduler.domain.limits import check_endpoints
from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.adapters.fleet.endpoint import Endpoint

_Key = tuple[str, tuple[str, ...]]


class Members:
    """The endpoints of a fleet. Whoever else has the list `endpoints` sees every change of it.

    make: an endpoint at an address, with the addresses of the workers behind it. named_again: is told of one that goes
    on. let_go: of one that has left, to be closed.
    """

    def __init__(
        self,
        configured: Endpoints,
        *,
        make: Callable[[str, tuple[str, ...]], Endpoint],
        may_leave: Callable[[Endpoint], bool],
        named_again: Callable[[Endpoint], None],
        let_go: Callable[[Endpoint], None],
    ) -> None:
        """Raises InvalidArgumentError."""
        self.endpoints: list[Endpoint] = []
        self.named = configured
        self.are_set = False
        """Whether they are others than the configuration's."""
        self._configured = configured
        self._make = make
        self._may_leave = may_leave
        self._named_again = named_again
        self._let_go = let_go
        self._are_started = False
        self.name(None)

    def start(self) -> None:
        self._are_started = True
        for endpoint in self.endpoints:
            endpoint.start()

    def name(self, wanted: Endpoints | None) -> None:
        """These and no others; None: those of the configuration. Raises InvalidArgumentError, and changes nothing."""
        named = self._configured if wanted is None else wanted
        if faults := list(check_endpoints(named)):
            raise InvalidArgumentError(faults)
        self.named, self.are_set = named, wanted is not None
        keys = _keys(named)
        present = {_key_of(endpoint): endpoint for endpoint in self.endpoints}
        again = [endpoint for key, endpoint in present.items() if endpoint.is_draining and key in keys]
        for key, endpoint in present.items():
            endpoint.set_named(key in keys)
        for key in keys:
            if key not in present:
                self._add(self._make(*key))
        # Only now, when all of them are as they are to be: whoever hears of it may place generations.
        for endpoint in again:
            self._named_again(endpoint)
        self.let_go_of_idle()

    def _add(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        if self._are_started:
            endpoint.start()

    def let_go_of_idle(self) -> None:
        for endpoint in [each for each in self.endpoints if each.is_draining and each.is_idle]:
            if self._may_leave(endpoint):
                self.endpoints.remove(endpoint)
                self._let_go(endpoint)


def _keys(endpoints: Endpoints) -> list[_Key]:
    workers = tuple([url.rstrip("/") for url in endpoints.control_urls])
    return [(url.rstrip("/"), workers) for url in endpoints.urls]


def _key_of(endpoint: Endpoint) -> _Key:
    return endpoint.base_url, endpoint.backend.control_urls
