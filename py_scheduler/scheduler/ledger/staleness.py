"""How far generation may run ahead of training: the rule alone.

A sample that the n-th update after its oldest token trains on is n - 1 changes of weights behind. So at any moment
there may be as many samples as max_staleness + 1 updates use up: those of the next update, and of max_staleness more.

    admit while accepted + running < (max_staleness + 1 + epoch - epoch_at_resume) * step_size

An example: with max_staleness 1 and a step_size of 256, 512 samples are admitted at first. The first update changes the
weights, and 256 more are admitted; without it the 513th sample waits.

Words: `accepted` are the samples that ended since the resume and can be trained on (`SampleDone.is_trainable`);
`running` are those that were let through and have not ended. The resume is the last moment at which nothing accepted
was left to train on: the first event of the store; a change of weights by which the updates have used up what was
accepted; or when the trainer says so. Counting starts there, because an update for which nothing was accepted would be
credit for ever: a trainer that resumes at version 100 would be sent a hundred steps at once.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class StalenessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one namespace's training may run ahead."""

    max_staleness: Annotated[int, msgspec.Meta(ge=0)]
    """Changes of weights that a sample may lie behind the update that trains on it. 0: on-policy."""
    step_size: Annotated[int, msgspec.Meta(ge=1)]
    """Samples that one update uses up, those included that the trainer takes and drops."""


class StalenessWindow(msgspec.Struct):
    """What was accepted since the resume, and how many weights ago that was.

    Invariant: 0 <= epoch_at_resume <= epoch, and where these differ, more is accepted than the updates between have
    used up.
    """

    settings: StalenessSettings
    accepted: int = 0
    epoch: int = 0
    epoch_at_resume: int = 0

    @property
    def limit(self) -> int:
        """What accepted and running samples may come to."""
        settings = self.settings
        return (settings.max_staleness + 1 + self.epoch - self.epoch_at_resume) * settings.step_size

    def admits(self, running: int) -> bool:
        return self.accepted + running < self.limit

    def weights_changed(self, epoch: int) -> None:
        self.epoch = epoch
        if self.accepted <= (epoch - self.epoch_at_resume) * self.settings.step_size:
            self.resume()

    def resume(self) -> None:
        """Counting starts here: nothing accepted is left to train on."""
        self.accepted = 0
        self.epoch_at_resume = self.epoch

    def describe(self, running: int) -> str:
        """Why what it does not admit waits."""
        settings = self.settings
        return (
            f"held back: {self.accepted + running} samples are accepted or running at weight_epoch {self.epoch} "
            f"({self.accepted} and {running}, counted from epoch {self.epoch_at_resume}), max_staleness "
            f"{settings.max_staleness} allows {self.limit} (step_size {settings.step_size}): it waits for the next "
            "update of the weights"
        )
