"""Where commands print."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 160


def standard_console() -> Console:
    """A pipe has no width; what reads it had rather have whole lines."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)
