"""Fixtures of the tests of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.servers.command import Command, config_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts servers, from the text of a configuration, flags and variables; ends those that are left."""
    running: list[Command] = []

    def start(text: str, *flags: str, **environment: str) -> Command:
        command = Command("serve", "--config", str(config_file(tmp_path, text)), *flags, **environment)
        running.append(command)
        return command

    yield start
    for command in running:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()
