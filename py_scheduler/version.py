"""Which py-scheduler this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Of the installed distribution."""
    try:
        return metadata.version("py-scheduler")
    except metadata.PackageNotFoundError:
        return "0+source"
