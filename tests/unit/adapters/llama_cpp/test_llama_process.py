"""What the parent hears of the embedded engine's child process."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.llama_cpp import process as llama_process
from py_scheduler.adapters.llama_cpp.process import LlamaProcess
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from pathlib import Path


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> LlamaProcess:
    script = tmp_path / "child.py"
    script.write_text(f"import sys\n{code}")
    monkeypatch.setattr(llama_process, "SCRIPT", script)
    assert sys.executable
    return LlamaProcess({})


async def test_lines_of_any_length_are_read_and_never_stop_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than a stream reader's line and a pipe can hold together; only a child that is heard gets to its address.
    code = (
        "for _ in range(8): sys.stderr.write('x' * 100_000)\n"
        "sys.stderr.write('the end\\nanother line\\n')\n"
        "print('address', flush=True)\n"
        "sys.stdin.read()\n"
        "sys.stderr.write('last words without a line end')\n"
    )
    process = child(tmp_path, monkeypatch, code)
    assert await process.start(30.0) == "address"
    async with asyncio.timeout(30):
        await process.close()
    assert process.ended
    said = process.last_words.split("; ")
    assert said[0].endswith("xxxthe end")
    assert len(said[0]) < 2_000
    assert said[1:] == ["another line", "last words without a line end"]


async def test_a_child_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = child(tmp_path, monkeypatch, "sys.exit('no such model: ' + 'x' * 70_000 + '!')")
    with pytest.raises(EngineUnavailableError, match=r"ended with code 1: x+!$"):
        await process.start(30.0)


async def test_without_its_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = child(tmp_path, monkeypatch, "import xllamacpp_that_nobody_has\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailableError, match=r"needs xllamacpp: install the extra 'embedded' of py-scheduler$"):
        await process.start(30.0)
