"""`py-scheduler fetch-model`: the embedded engine's default model, into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.adapters.llama_cpp.model_store import fetch_smollm2
from py_scheduler.commands.common import standard_console

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="another folder than the user's cache")


def run(options: argparse.Namespace) -> int:
    path = fetch_smollm2(options.cache_dir)
    standard_console().print(f"model ready: {path} ({path.stat().st_size / 1e6:.0f} MB)", soft_wrap=True)
    return 0
