"""What each namespace, and the whole server, may hold at most, as it is now: what the configuration says and what the
tokens' file says.

Invariant: the strictest of all that is said of a namespace holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.quotas import UNLIMITED, Quota
from py_scheduler.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from py_scheduler.domain.task import Task
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.settings import EngineSettings

_RETRY_AFTER_SECONDS = 1.0
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

    def check_tasks(self, namespace: str, are_open: int, more: int) -> None:
        """Raises ResourceExhaustedError when so many more tasks would be too many."""
        limit = self.of(namespace).max_queued_tasks
        if limit is not None and are_open + more > limit:
            raise ResourceExhaustedError(
                f"{are_open} tasks of namespace {namespace!r} are open, {more} more would exceed its quota of "
                f"max_queued_tasks ({limit}): wait for some to finish",
                _RETRY_AFTER_SECONDS,
            )

    def check_retained(self, namespace: str, unread_bytes: Callable[[str], int]) -> None:
        """Raises ResourceExhaustedError while too much waits to be acknowledged."""
        limit = self.of(namespace).max_retained_bytes
        if limit is not None and (unread := unread_bytes(namespace)) > limit:
            raise ResourceExhaustedError(
                f"{unread} bytes of events of namespace {namespace!r} wait to be acknowledged, over its quota of "
                f"max_retained_bytes ({limit}): read them and call AckEvents",
                _RETRY_AFTER_SECONDS,
            )

    def limit_further(self, quotas: Mapping[str, Quota]) -> None:
        """In place of what was said so before; "*": for every namespace."""
        self._further = dict(quotas)
        self.there_are_any = bool(self._configured or self._further)
        self._known.clear()


class IntakeLimits:
    """What may be open, unread or kept when more tasks come."""

    def __init__(self, quotas: Quotas, ledger: LedgerState, event_log: EventLog, settings: EngineSettings) -> None:
        self._quotas = quotas
        self._ledger = ledger
        self._event_log = event_log
        self._settings = settings

    def check(self, tasks: Sequence[Task], namespace: str, *, keeps_results: bool) -> None:
        """Raises ResourceExhaustedError while these tasks would be too many. keeps_results: theirs are collected."""
        ledger, settings = self._ledger, self._settings
        self._quotas.check_tasks(namespace, ledger.open_tasks_in(namespace), len(tasks))
        self._quotas.check_retained(namespace, self._event_log.unread_bytes)
        samples = sum([task.config.repeat_times for task in tasks])
        for what, are_open, more, limit in (
            ("tasks", ledger.open_tasks, len(tasks), settings.max_queued_tasks),
            ("samples", ledger.open_samples, samples, settings.max_queued_samples),
        ):
            if are_open + more > limit:
                raise ResourceExhaustedError(
                    f"{are_open} {what} are open, {more} more would exceed max_queued_{what} ({limit}):"
                    " wait for some to finish",
                    _RETRY_AFTER_SECONDS,
                )
        if keeps_results:
            self._check_kept()

    def _check_kept(self) -> None:
        kept, limit = self._ledger.results.kept_bytes, self._settings.max_kept_bytes
        if kept >= limit:
            raise ResourceExhaustedError(
                f"results of {kept} bytes wait to be collected or acknowledged, max_kept_bytes is {limit}:"
                " collect, acknowledge or discard some",
                _RETRY_AFTER_SECONDS,
            )
