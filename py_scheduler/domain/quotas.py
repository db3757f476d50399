"""What a namespace may hold at most, and what it weighs beside others."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Limit = Annotated[int, msgspec.Meta(ge=1)] | None


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one namespace; None: none of its own, beside those of the server."""

    max_queued_tasks: _Limit = None
    """Open tasks."""
    max_running_samples: _Limit = None
    """Samples that run, and tokens that schedulers outside hold."""
    max_retained_bytes: _Limit = None
    """Of its events that nobody has acknowledged."""

    def within(self, other: Quota) -> Quota:
        """The stricter of both, limit by limit."""
        return Quota(**{field: _least(getattr(self, field), getattr(other, field)) for field in _FIELDS})


_FIELDS = Quota.__struct_fields__
UNLIMITED = Quota()


class NamespaceSettings(Quota, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[namespace.NAME]` table."""

    weight: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] = 1.0
    """Its share of the room where others want it too: beside one that weighs 1, a namespace that weighs 3 gets three
    quarters. A namespace without a table weighs 1."""


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
