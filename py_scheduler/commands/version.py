"""`py-scheduler version`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.commands.common import standard_console
from py_scheduler.version import version

if TYPE_CHECKING:
    import argparse


def add(_parser: argparse.ArgumentParser) -> None:
    """It takes no words."""


def run(_options: argparse.Namespace) -> int:
    standard_console().print(version())
    return 0
