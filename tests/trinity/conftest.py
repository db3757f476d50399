"""Trinity-RFT itself on one Ray node. `make test-trinity` says so; without it nothing of this folder is collected."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from py_scheduler.integrations.trinity import Scheduler

collect_ignore_glob = [] if os.environ.get("TEST_TRINITY") else ["test_*.py", "dummies.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Ray, and the actors of two dummy models."""
    import ray  # noqa: PLC0415 -- only in the environment of these tests

    from tests.trinity.dummies import NAMESPACE, start_models  # noqa: PLC0415

    # Not the cluster of somebody else who tests on this machine.
    ray.init(
        "local",
        num_cpus=2,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    models = start_models()
    yield
    del models
    ray.shutdown()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scheduler(cluster: None) -> AsyncIterator[Scheduler]:
    """Of 4 runners that split by 2, for tests that leave it as they found it: an actor takes seconds to start."""
    from py_scheduler.integrations.trinity import Scheduler  # noqa: PLC0415
    from tests.trinity.dummies import new_config  # noqa: PLC0415

    scheduler = Scheduler(new_config(max_repeat_times_per_runner=2))
    await scheduler.start()
    yield scheduler
    await scheduler.close()
