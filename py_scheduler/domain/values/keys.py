"""Secrets by which somebody is known: API keys of episodes, what an actor says when it connects.

Invariant: a key is known from its issue until it is revoked; of one that was revoked nothing is remembered.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Generic, TypeVar

HolderT = TypeVar("HolderT")

_RANDOM_BYTES = 32


class Keys(Generic[HolderT]):
    """Found by digest, so that how long a look-up takes tells nothing about a key that is nearly right.

    prefix: what every key begins with, so that people see what it is.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._holders: dict[bytes, tuple[str, HolderT]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def issue(self, holder: HolderT) -> str:
        key = self._prefix + secrets.token_urlsafe(_RANDOM_BYTES)
        self._holders[_digest(key)] = (key, holder)
        return key

    def find(self, key: str) -> HolderT | None:
        """Whose key that is; None for one that is unknown or dead."""
        known, holder = self._holders.get(_digest(key), ("", None))
        return holder if hmac.compare_digest(known.encode(), _encoded(key)) else None

    def revoke(self, key: str) -> None:
        self._holders.pop(_digest(key), None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(_encoded(key)).digest()


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogatepass")
