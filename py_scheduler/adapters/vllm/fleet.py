"""Generation by several vLLM servers of one model, behind one GenerationBackend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.adapters.fleet.fleet import Fleet, tried_twice
from py_scheduler.adapters.http_server.settings import ServerSettings
from py_scheduler.adapters.vllm.backend import VllmBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.fleet.settings import FleetSettings
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.domain.ports import Clock


class VllmFleet(Fleet):
    """See Fleet."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        control_urls: Sequence[str] = (),
        settings: ServerSettings | None = None,
        fleet: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        settings = tried_twice(settings or ServerSettings())

        def make(base_url: str, workers: tuple[str, ...], encoded: EncodedPrompts) -> VllmBackend:
            return VllmBackend(base_url, control_urls=workers, settings=settings, encoded=encoded)

        super().__init__(
            base_urls, control_urls=control_urls, make_backend=make, settings=settings, fleet=fleet, clock=clock
        )
