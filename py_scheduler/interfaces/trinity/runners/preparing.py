"""Runners made ready for work: a few at a time, all or none, each with so many further tries."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.errors import RunnerStartError, first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from py_scheduler.interfaces.trinity.protocols import TrinityExplorerConfig
    from py_scheduler.interfaces.trinity.runners.pooled import PooledRunner

logger = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 30.0


async def prepared_runners(
    make: Callable[[int], PooledRunner], runner_ids: Iterable[int], explorer: TrinityExplorerConfig
) -> list[PooledRunner]:
    """In the order of the ids. Raises RunnerStartError; then no runner is left."""
    limit = asyncio.Semaphore(explorer.runner_prepare_concurrency)
    made: list[PooledRunner] = []

    async def prepare(runner_id: int) -> None:
        async with limit:
            await _prepare(runner_id, make, explorer.runner_prepare_max_retries, made)

    try:
        async with asyncio.TaskGroup() as group:
            for runner_id in runner_ids:
                group.create_task(prepare(runner_id))
    except BaseException as error:
        await end_all(made)
        if isinstance(error, ExceptionGroup):
            first = first_of(error)
            raise RunnerStartError(f"the runners could not be started: {first}") from first
        raise
    return sorted(made, key=lambda runner: runner.runner_id)


def wait_seconds(failures: int) -> float:
    """Before the next try, after so many on end that came to nothing."""
    return backoff_seconds(failures, _FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)


async def end_all(runners: Iterable[PooledRunner]) -> None:
    """Whatever they are at."""
    for runner in runners:
        runner.kill()
    await asyncio.gather(*[runner.ended() for runner in runners])


async def _prepare(
    runner_id: int, make: Callable[[int], PooledRunner], max_retries: int, made: list[PooledRunner]
) -> None:
    runner: PooledRunner | None = None
    for failures in range(1, max_retries + 2):
        try:
            if runner is None:
                runner = make(runner_id)
                made.append(runner)
                await runner.prepare()
            else:
                await runner.restart_runner()
            return
        except Exception as error:
            if failures > max_retries:
                raise RunnerStartError(f"runner {runner_id} could not be prepared: {error}") from error
            wait = wait_seconds(failures)
            logger.warning("runner %d could not be prepared, again in %.2g s: %s", runner_id, wait, error)
        await asyncio.sleep(wait)
