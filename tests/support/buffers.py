"""What makes sure that tokens stay buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.generation import Generation

if TYPE_CHECKING:
    import pytest


def forbid_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on whoever reads a generation's token ids or log-probs as a list, in this process, fails."""

    def read(_: Generation) -> None:
        raise AssertionError("somebody made objects of the tokens")

    for name in ("token_ids", "log_probs"):
        monkeypatch.setattr(Generation, name, property(read))
