"""The file of tokens: read at the start, and again whenever it changes under a running server."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from py_scheduler.commands.token import new_token
from py_scheduler.errors import (
    ConfigError,
    UnauthenticatedError,
)
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import tasks

if TYPE_CHECKING:
    pass
from tests.support.servers.guarded import Guarded

SHA256 = f'sha256 = "{"0" * 64}"'


async def test_a_token_that_is_taken_back_ends_its_calls_and_its_open_streams(guarded: Guarded) -> None:
    engine = guarded.served.engine
    async with guarded.client("alice") as alice, guarded.client("root") as root, asyncio.timeout(20):
        watch = alice.watch()
        await anext(watch)
        del guarded.lines["alice"]
        guarded.write()
        await root.submit(tasks(1), 7)
        with pytest.raises(UnauthenticatedError, match="taken back"):
            await anext(watch)
        with pytest.raises(UnauthenticatedError):
            await alice.server_info()
        await engine.until(lambda: engine.open_watches == 0)


async def test_a_token_that_is_added_works_without_a_restart(guarded: Guarded) -> None:
    guarded.secrets["carol"], guarded.lines["carol"] = new_token("carol", ["c"])
    async with guarded.client("carol", namespace="c") as client:
        with pytest.raises(UnauthenticatedError):
            await client.server_info()
        guarded.write()
        await client.submit(tasks(1), 7)


async def test_a_file_that_is_broken_while_it_is_edited_changes_nothing(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded.client("alice") as client:
        guarded.file.write_text("alice = {")
        await client.submit(tasks(1), 7)
        assert "the tokens stay as they were" in caplog.text
        guarded.file.unlink()
        await client.submit(tasks(1), 8)


@pytest.mark.parametrize("how", ["permissions", "write bit"])
async def test_a_file_that_could_not_be_taken_is_taken_once_it_can_be_although_it_was_not_written_to_since(
    guarded: Guarded, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its modification time is the same all the while; who is taken out must not stay in for that."""
    async with guarded.client("alice") as client:
        await client.server_info()
        del guarded.lines["alice"]
        if how == "write bit":
            guarded.file.chmod(0o666)
            guarded.file.write_text("\n".join(guarded.lines.values()))
        else:
            guarded.write()
            with monkeypatch.context() as context:
                context.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
                await client.server_info()
                await client.server_info()
        await client.server_info() if how == "write bit" else None
        assert caplog.text.count("the tokens stay as they were") == 1, "once, not for each call"
        guarded.file.chmod(0o600)
        with pytest.raises(UnauthenticatedError):
            await client.server_info()


async def test_a_file_that_was_put_back_with_its_old_times_counts(guarded: Guarded) -> None:
    was = guarded.file.stat()
    secret, line = new_token("alice", ["a"])
    guarded.lines["alice"] = line
    guarded.file.write_text("\n".join(guarded.lines.values()) + "\n")
    os.utime(guarded.file, ns=(was.st_atime_ns, was.st_mtime_ns))
    async with guarded.client("alice") as client:
        with pytest.raises(UnauthenticatedError):
            await client.server_info()
    guarded.secrets["alice"] = secret
    async with guarded.client("alice") as client:
        await client.server_info()


async def test_an_empty_token_lets_nobody_in_although_a_line_is_of_it(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(f'a = {{ sha256 = "{hashlib.sha256().hexdigest()}", namespaces = ["*"] }}')
    with pytest.raises(ConfigError, match="of an empty token"):
        await serve(FakeEngine(), tokens_file=str(tmp_path / "tokens.toml"))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('a = { sha256 = "00", namespaces = ["a"] }', "sha256.*64 hexadecimal"),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = [] }}', "namespaces.*is empty"),
        (
            f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"] }}\nb = {{ sha256 = "{"0" * 64}", namespaces = ["a"] }}',
            "'a' too",
        ),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"], max_queued_tasks = 0 }}', "max_queued_tasks"),
        (f'a = {{ sha256 = "{"0" * 64}", namespaces = ["a"], zzz = 1 }}', "zzz.*unknown key"),
        ("a = 1", "Expected|must be"),
        ("a =", "not TOML"),
        ("a = " + 3_000 * "[" + 3_000 * "]", "nested too deeply"),
        (f'a = {{ {SHA256}, namespaces = ["a"] }}\na = {{ {SHA256}, namespaces = ["b"] }}', "not TOML"),
        (f'"a\\nrefused: caller=b" = {{ {SHA256}, namespaces = ["a"] }}', "cannot be printed"),
    ],
)
async def test_a_faulty_file_is_an_error_at_the_start(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "tokens.toml").write_text(line)
    with pytest.raises(ConfigError, match=fault):
        await serve(FakeEngine(), tokens_file=str(tmp_path / "tokens.toml"))


async def test_what_is_no_file_is_refused_at_the_start(tmp_path: Path) -> None:
    """Reading a pipe would wait for whoever writes to it."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"server\.tokens_file"):
            await serve(FakeEngine(), tokens_file=str(place))


async def test_a_file_that_anybody_may_write_is_refused(guarded: Guarded) -> None:
    guarded.file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        await serve(FakeEngine(), tokens_file=str(guarded.file))
