"""How long to wait before what failed is tried again: one rule, for attempts, connections, children and requests."""

from __future__ import annotations

import random

_MAX_DOUBLINGS = 62


def backoff_seconds(failures: int, first_seconds: float, longest_seconds: float) -> float:
    """The wait after so many failures on end (from 1): it doubles from the first to the longest, less up to half of it
    by chance, because what failed together would come back together.
    """
    whole = min(longest_seconds, first_seconds * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
    return whole * random.uniform(0.5, 1.0)
