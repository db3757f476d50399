"""A server that wants bearer tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.client import SchedulerClient
from py_scheduler.commands.token import new_token

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contract.conftest import Served


class Guarded:
    """A server with tokens for namespaces "a" and "b", one for all, and the file that they are in."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.secrets: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        for name, namespaces in (("alice", ["a"]), ("bob", ["b"]), ("root", ["*"])):
            self.secrets[name], self.lines[name] = new_token(name, namespaces, controls_engines=name == "root")
        self.write()
        self.served: Served

    def write(self) -> None:
        """As an operator's tool would: whole, under the name at once."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text("\n".join(self.lines.values()) + "\n")
        fresh.rename(self.file)

    def client(self, name: str, **settings: Any) -> SchedulerClient:
        settings = {"namespace": "a", "reconnect_seconds": 0.0, **settings}
        return SchedulerClient(self.served.address, token=self.secrets.get(name, ""), **settings)
