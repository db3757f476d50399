"""Text that can travel."""

from __future__ import annotations


def safe_text(text: str) -> str:
    """What UTF-8 can carry of a text that a handler made: lone surrogates become question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()
