"""What is true of the service as a whole and of no submission: weights and servers of the language models, what
training came to, how far it ran ahead.

These facts are the ledger's own: `Ledger.apply` alone changes them.

Invariant: each event counts once, and says all that is needed to count it. No record of a task or submission is asked,
because after a restart those records may be of a later moment than these facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.episodes.weight_history import WeightHistory
from py_scheduler.domain.events import (
    AttemptEnded,
    EndpointsSet,
    ResultsCollected,
    TaskDone,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.generation import STUDENT, Endpoints
from py_scheduler.domain.results import AttemptState, TaskState
from py_scheduler.scheduler.ledger.dynamic_timeout import TrainingHistory
from py_scheduler.scheduler.ledger.staleness import StalenessWindow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from py_scheduler.domain.events import Event
    from py_scheduler.scheduler.ledger.staleness import StalenessSettings


class ServiceFacts(msgspec.Struct):
    """weights: by role. windows: by namespace, of those whose staleness is limited. endpoints: by role, of those that
    were set in place of the configuration's.
    """

    weights: dict[str, WeightHistory] = {}
    history: TrainingHistory = msgspec.field(default_factory=TrainingHistory)
    windows: dict[str, StalenessWindow] = {}
    endpoints: dict[str, Endpoints] = {}

    def weights_of(self, roles: Iterable[str]) -> WeightHistory:
        """The history of the engine that these roles rest on. Where each had one of its own before, the longer one."""
        longest: WeightHistory | None = None
        for role in roles:
            history = self.weights.get(role)
            if history is not None and (longest is None or history.epoch > longest.epoch):
                longest = history
        return WeightHistory() if longest is None else longest

    @property
    def limits(self) -> dict[str, StalenessSettings]:
        """By namespace, the rule that its window is counted by."""
        return {namespace: window.settings for namespace, window in self.windows.items()}

    def limit(self, limits: Mapping[str, StalenessSettings]) -> None:
        """From now on these rules hold, and no others. What was counted stays; a window that is new begins here."""
        epoch = self.weights_of((STUDENT,)).epoch
        self.windows = {
            namespace: self.windows.get(namespace) or StalenessWindow(settings, 0, epoch, epoch)
            for namespace, settings in limits.items()
        }
        for namespace, settings in limits.items():
            self.windows[namespace].settings = settings

    def apply(self, event: Event, namespace: str) -> None:
        """namespace: of the event's record."""
        if type(event) is AttemptEnded:
            if not event.next_attempt_no and not event.is_eval:
                self._ended(event, namespace)
        elif type(event) is TaskDone:
            if event.state is not TaskState.ABORTED and not event.is_eval:
                self.history.finished_tasks += 1
        elif type(event) is ResultsCollected:
            self.history.completed_steps += event.completes_step
        elif type(event) is WeightsChanged:
            self._weights_changed(event)
        elif type(event) is EndpointsSet:
            for role in event.roles:
                if event.endpoints is None:
                    self.endpoints.pop(role, None)
                else:
                    self.endpoints[role] = event.endpoints
        elif type(event) is TrainingResumed and namespace in self.windows:
            self.windows[namespace].resume()

    def _ended(self, event: AttemptEnded, namespace: str) -> None:
        if event.state is not AttemptState.ABORTED:
            self.history.finished_subtasks += 1
            self.history.running_seconds += event.subtask_seconds
        if event.trainable_samples and (window := self.windows.get(namespace)) is not None:
            window.accepted += event.trainable_samples

    def _weights_changed(self, event: WeightsChanged) -> None:
        for role in event.roles:
            self.weights.setdefault(role, WeightHistory()).became(event.weight_version, event.epoch)
        if STUDENT in event.roles:
            for window in self.windows.values():
                window.weights_changed(event.epoch)
