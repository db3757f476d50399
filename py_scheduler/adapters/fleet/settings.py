"""How a fleet is driven."""

from __future__ import annotations

import msgspec

from py_scheduler.adapters.settings_checks import check_numbers


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. How each server is spoken to stands in ServerSettings."""

    max_concurrency: int | None = None
    """Generations at one endpoint at once; further ones wait here, first come first served. None: no limit."""
    load_interval_seconds: float = 1.0
    """Between two questions to one endpoint for its load; own generations are counted in between."""
    warm_up_seconds: float = 600.0
    """How long after the start an endpoint that does not answer yet is taken to be loading its model."""
    no_endpoint_seconds: float = 120.0
    """How long a generation waits while no endpoint is up."""
    set_aside_base_seconds: float = 0.5
    """Before an endpoint that failed is probed for the first time; the wait doubles with each failure in a row, and of
    each up to a half is left out at random."""
    set_aside_max_seconds: float = 30.0
    """The longest of these waits."""
    max_attempts: int = 4
    """Endpoints that one generation is tried at, counting an endpoint again when it comes back to it."""
    sticky_load_ratio: float = 1.5
    """A session stays with its endpoint, and so with its prefix cache, up to that many times the least load."""
    remembered_sessions: int = 100_000
    """Sessions whose endpoint is known, those that generated last."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.set_aside_max_seconds < self.set_aside_base_seconds:
            raise ValueError("set_aside_max_seconds is less than set_aside_base_seconds")
