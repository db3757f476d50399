"""What a command needs to reach a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.client import ClientTls, SchedulerClient
from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it lets one in."""

    target: str
    token: str = ""
    tls: ClientTls | None = None

    def client(self, namespace: str) -> SchedulerClient:
        """One that says at once when nobody answers."""
        settings: dict[str, Any] = {"namespace": namespace, "reconnect_seconds": 0.0}
        return SchedulerClient(self.target, token=self.token, tls=self.tls, **settings)


def read_token(file: Path | None) -> str:
    """What a file holds that a client is told to take its token from. Raises ConfigError."""
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {file}: {error}", "token_file") from error
