"""Where a server keeps what it has to find again."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py_scheduler.config import Config


def state_dir_of(config: Config, config_file: Path) -> Path | None:
    """The folder of the journal; None when there is to be none."""
    if not config.journal.enabled:
        return None
    located = config.located(config_file.resolve().parent).journal.state_dir
    return Path(located) if located else default_state_dir(config_file)


def default_state_dir(config_file: Path) -> Path:
    """One for each configuration file, so that servers of different ones never meet, and each finds its own again."""
    home = os.environ.get("XDG_STATE_HOME")
    # The rule of XDG: what is not absolute counts as not set.
    root = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    place = config_file.resolve()
    return root / "py-scheduler" / f"{place.stem}-{zlib.crc32(os.fsencode(place)):08x}"
