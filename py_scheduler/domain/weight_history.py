"""Which weights an engine has had, as far as that was noticed (design word: weight epoch).

Invariants: `epoch` never falls, and rises by one with every change. A version that was seen before is a change only
when an update confirms it: answers arrive late and out of order.
"""

from __future__ import annotations

_REMEMBERED_VERSIONS = 64


class WeightHistory:
    """epoch: changes so far; 0 for the first weights that were seen. version: empty while none were."""

    __slots__ = ("_epochs", "epoch", "version")

    def __init__(self) -> None:
        self.version = ""
        self.epoch = 0
        self._epochs: dict[str, int] = {}
        """Of the versions that were noticed last, the epoch in which each was last noticed."""

    def next_epoch(self, version: str, *, is_confirmed: bool) -> int | None:
        """The epoch that begins with these weights; None when they are no change, or have no name.

        is_confirmed: whether an update is known to have loaded them; else they were only seen.
        """
        if not version or version == self.version:
            return None
        if is_confirmed:
            return self.epoch + 1
        if version in self._epochs:
            return None
        return self.epoch + 1 if self.version else self.epoch

    def became(self, version: str, epoch: int) -> None:
        """The fact that `next_epoch` foresaw."""
        self.version, self.epoch = version, epoch
        self._epochs.pop(version, None)
        self._epochs[version] = epoch
        if len(self._epochs) > _REMEMBERED_VERSIONS:
            del self._epochs[next(iter(self._epochs))]

    def epoch_of(self, version: str) -> int:
        """The epoch of tokens that these weights generated. Weights that are forgotten count as the oldest known; what
        has no name is taken for the present.
        """
        if not version:
            return self.epoch
        known = self._epochs.get(version)
        return min(self._epochs.values(), default=self.epoch) if known is None else known
