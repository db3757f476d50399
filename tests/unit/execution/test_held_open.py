"""A context that is held open between calls of different tasks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from py_scheduler.execution.held_open import HeldOpen
from tests.support.fake_clock import settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Context:
    """Notes which tasks enter and leave it. `crash`: makes a task of its group fail. `failures`: entries to fail."""

    def __init__(self) -> None:
        self.crash = asyncio.Event()
        self.entries: list[asyncio.Task[object] | None] = []
        self.exits: list[asyncio.Task[object] | None] = []
        self.failures = 0
        self.gate = asyncio.Event()
        self.gate.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("no room")
        async with asyncio.TaskGroup() as tasks:
            self.entries.append(asyncio.current_task())
            crashing = tasks.create_task(self._crash())
            try:
                yield f"entry {len(self.entries)}"
            finally:
                crashing.cancel()
                self.exits.append(asyncio.current_task())

    async def _crash(self) -> None:
        await self.crash.wait()
        raise ValueError("a fault inside")


async def test_who_enters_leaves_and_is_nobodys_task() -> None:
    context = Context()
    held = HeldOpen(context.open, "held")
    opener = asyncio.create_task(held.open())
    assert await opener == "entry 1"
    assert await held.open() == "entry 1", "it is open"
    assert held.entered == "entry 1"
    await asyncio.create_task(held.close())
    assert not held.entered
    assert context.entries == context.exits
    assert opener not in context.entries
    assert await held.open() == "entry 2"
    await held.close()
    await held.close()


async def test_a_fault_inside_cancels_nobody_and_is_raised_at_the_close() -> None:
    context = Context()
    held = HeldOpen(context.open, "held")
    await held.open()
    context.crash.set()
    await settle()
    assert not held.entered
    with pytest.raises(ExceptionGroup) as ended:
        await held.close()
    assert ended.group_contains(ValueError, match="a fault inside")


async def test_an_entry_that_fails_says_so_to_all_and_may_be_repeated() -> None:
    context = Context()
    context.failures = 1
    context.gate.clear()
    held = HeldOpen(context.open, "held")
    openers = [asyncio.create_task(held.open()) for _ in range(2)]
    await settle()
    context.gate.set()
    for opener in openers:
        with pytest.raises(OSError, match="no room"):
            await opener
    assert not held.entered
    assert await held.open() == "entry 1"
    await held.close()


async def test_who_gives_up_while_it_opens_leaves_it_to_others() -> None:
    context = Context()
    context.gate.clear()
    held = HeldOpen(context.open, "held")
    opener = asyncio.create_task(held.open())
    await settle()
    opener.cancel()
    await settle()
    assert opener.cancelled()
    context.gate.set()
    assert await held.open() == "entry 1"
    await held.close()
    assert context.entries == context.exits
