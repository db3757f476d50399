"""Which weights a backend has had, as far as that was noticed (design word: weight epoch).

Invariants: `epoch` never falls, and rises by one with every change. A version that was seen before is a change only
when an update confirms it: answers arrive late and out of order.
"""

from __future__ import annotations

import msgspec

_REMEMBERED_VERSIONS = 64


class WeightHistory(msgspec.Struct):
    """epoch: changes so far; 0 for the first weights that were seen. version: empty while none were.

    noticed: of the versions that were noticed last, in that order, the epoch in which each was.
    """

    version: str = ""
    epoch: int = 0
    noticed: dict[str, int] = {}

    def next_epoch(self, version: str, *, is_confirmed: bool) -> int | None:
        """The epoch that begins with these weights; None when they are no change, or have no name.

        is_confirmed: whether an update is known to have loaded them; else they were only seen.
        """
        if not version or version == self.version:
            return None
        if is_confirmed:
            return self.epoch + 1
        if version in self.noticed:
            return None
        return self.epoch + 1 if self.version else self.epoch

    def became(self, version: str, epoch: int) -> None:
        """The fact that `next_epoch` foresaw."""
        self.version, self.epoch = version, epoch
        self.noticed.pop(version, None)
        self.noticed[version] = epoch
        if len(self.noticed) > _REMEMBERED_VERSIONS:
            del self.noticed[next(iter(self.noticed))]

    def epoch_of(self, version: str) -> int:
        """The epoch of tokens that these weights generated. Weights that are forgotten count as the oldest known; what
        has no name is taken for the present.
        """
        if not version:
            return self.epoch
        known = self.noticed.get(version)
        return min(self.noticed.values(), default=self.epoch) if known is None else known
