"""Generation by several SGLang servers of one model, behind one GenerationBackend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.adapters.fleet.fleet import Fleet, tried_twice
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.fleet.settings import FleetSettings
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.domain.ports import Clock


class SglangFleet(Fleet):
    """See Fleet."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        control_urls: Sequence[str] = (),
        settings: SglangSettings | None = None,
        fleet: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        settings = tried_twice(settings or SglangSettings())

        def make(base_url: str, workers: tuple[str, ...], encoded: EncodedPrompts) -> SglangBackend:
            return SglangBackend(base_url, control_urls=workers, settings=settings, encoded=encoded)

        super().__init__(
            base_urls, control_urls=control_urls, make_backend=make, settings=settings, fleet=fleet, clock=clock
        )
