"""A server that is killed under its clients; `make chaos` does so a thousand times."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from tests.faults.chaos import CONFIG, REACHED_WITHIN, TRAINERS, Death, Round
from tests.faults.failpoints import EXIT_STATUS, POINTS, Order
from tests.faults.forker import warm_forker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow]


@pytest.mark.timeout(400)
async def test_a_kill_at_each_point_loses_nothing(tmp_path: Path) -> None:
    """Not the first time that it is reached, where that is often."""
    deaths = [
        Death(after_seconds=30.0, point=Order(point, "kill", "", 3 if most > 2 else 1))
        for point, most in REACHED_WITHIN.items()
    ]
    async with warm_forker() as forker:
        killing = Round(tmp_path, 1, forker)
        assert await killing.run(deaths) == []
    assert set(REACHED_WITHIN) == set(POINTS)
    assert killing.ends == dict.fromkeys([f"at {point}" for point in POINTS], 1)


async def test_random_kills_of_servers_and_clients_lose_nothing(tmp_path: Path) -> None:
    async with warm_forker() as forker:
        killing = Round(tmp_path, 7, forker)
        assert await killing.run(killing.deaths(8)) == []
    assert killing.ends.total() == 8


async def test_without_a_journal_the_checker_says_what_was_lost(tmp_path: Path) -> None:
    """The proof is worth something only if it fails where something is lost."""
    config = CONFIG.replace('state_dir = "state"', "enabled = false")
    async with warm_forker() as forker:
        wrong = await Round(tmp_path, 3, forker, config).run([Death(after_seconds=0.5)] * 2)
    assert any("was accepted 0 times" in fault for fault in wrong), wrong


async def test_a_seed_always_means_the_same_deaths(tmp_path: Path) -> None:
    async with warm_forker() as forker:
        first, second, other = (Round(tmp_path, seed, forker) for seed in (5, 5, 6))
    deaths = first.deaths(200)
    assert deaths == second.deaths(200) != other.deaths(200)
    assert {death.by for death in deaths} == {"kill", "term", "stop"}
    assert any(death.early for death in deaths)
    assert {death.client for death in deaths} == {None, *range(TRAINERS)}


async def test_the_forker_tells_how_its_children_ended(tmp_path: Path) -> None:
    async with warm_forker() as forker, asyncio.timeout(60):
        bad = await forker.fork("tests.faults.served", ["serve", "--config", "none"], tmp_path / "log", {})
        assert await bad.ended() == 2
        (tmp_path / "scheduler.toml").write_text(CONFIG.format(folder=tmp_path, share=0.5))
        serve = ["serve", "--config", str(tmp_path / "scheduler.toml")]
        for order, status in (("before_restart:exit", EXIT_STATUS), ("after_restart:kill", -signal.SIGKILL)):
            child = await forker.fork("tests.faults.served", serve, tmp_path / "log", {"FAILPOINTS": order})
            assert await child.ended() == status
