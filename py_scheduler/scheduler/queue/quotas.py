"""What each namespace, and the whole server, may hold at most, as it is now: what the configuration says and what the
tokens' file says.

Invariant: the strictest of all that is said of a namespace holds. The configuration says 4 running samples of a
namespace, the tokens' file 8 of it and 2 of "*", of every namespace: 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.quotas import UNLIMITED, Quota

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVERY_NAMESPACE = "*"
_MAX_KNOWN = 10_000
"""Namespaces are what clients say they are: no end of them may be remembered."""


class Quotas:
    """configured: of namespaces that have a table."""

    def __init__(self, configured: Mapping[str, Quota]) -> None:
        self._configured = configured
        self._further: Mapping[str, Quota] = {}
        self._known: dict[str, Quota] = {}
        self.there_are_any = bool(configured)

    def of(self, namespace: str) -> Quota:
        if not self.there_are_any:
            return UNLIMITED
        quota = self._known.get(namespace)
        if quota is None:
            said = (self._configured.get(namespace), self._further.get(namespace), self._further.get(_EVERY_NAMESPACE))
            quota = UNLIMITED
            for limits in said:
                quota = quota if limits is None else quota.within(limits)
            if len(self._known) < _MAX_KNOWN:
                self._known[namespace] = quota
        return quota

    def limit_further(self, quotas: Mapping[str, Quota]) -> None:
        """In place of what was said so before; "*": for every namespace."""
        self._further = dict(quotas)
        self.there_are_any = bool(self._configured or self._further)
        self._known.clear()
