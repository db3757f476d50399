"""How long a hundred thousand tasks take to be where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benches.restore import GOAL_SECONDS, make_store, restore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow]

TASKS = 100_000


async def test_a_hundred_thousand_tasks_are_restored_within_two_seconds(tmp_path: Path) -> None:
    """From a closed store to a full ready queue; of processor time, since others may use this machine too."""
    await make_store(tmp_path, TASKS, finished=False, checkpoint=False)
    _, cpu_seconds, _, _ = await restore(tmp_path, TASKS, finished=False)
    assert cpu_seconds < GOAL_SECONDS
