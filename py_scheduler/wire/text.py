"""Text that can travel."""

from __future__ import annotations


def safe_text(text: str) -> str:
    """What UTF-8 can carry of a text that a handler made: lone surrogates become question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def words_of(error: BaseException) -> str:
    """What an exception says, whatever its own `__str__` does."""
    name = type(error).__name__
    try:
        return safe_text(f"{name}: {error}")
    except Exception:  # noqa: BLE001 - it may come from a handler
        return name
