"""A real server dies in the midst of a rollout, misses an update of the weights meanwhile, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.results import Outcome, SampleDone
from tests.sglang.asking import (
    FIRST_VERSION,
    MAX_RUNNING,
    PROMPT,
    TRAINED_VERSION,
    RealSglang,
    assert_exact,
)
from tests.sglang.conftest import TRAINED_MODEL
from tests.sglang.fleets import TalkingAgent, fleet_on, up
from tests.sglang.training import training

if TYPE_CHECKING:
    from examples.sglang.serve_cpu import CpuServer
    from py_scheduler.adapters.sglang.fleet import SglangFleet
    from tests.sglang.asking import Reference

LONG = 300
SLOW_SECONDS = 0.05
COME_BACK_SECONDS = 300.0
"""It loads its model in that time, for which a busy machine may need minutes."""


async def test_a_server_that_dies_misses_an_update_and_comes_back(
    servers: list[CpuServer], pair: list[RealSglang], reference: Reference
) -> None:
    dying, living = pair
    agent = TalkingAgent(1, LONG)
    async with (
        fleet_on(dying.base_url, living.base_url) as fleet,
        training(fleet, agent, SamplingParams(ignore_eos=True)) as here,
    ):
        for real in pair:
            await real.slow_down(SLOW_SECONDS)
        rollout = asyncio.create_task(here.samples(3 * MAX_RUNNING))
        for real in pair:
            await real.until(lambda load: load["num_waiting_reqs"] == MAX_RUNNING // 2)
        await dying.until_running(MAX_RUNNING, tokens=MAX_RUNNING * 10)
        # Its model's process is killed, as by the kernel for memory; the rest of the server then goes too.
        os.kill(model_process(servers[0].pid), signal.SIGKILL)
        await living.slow_down(None)
        check_samples_of_the_loss(await rollout)
        assert up(fleet) == [False, True]

        async with here.trainer.paused():
            await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
        assert await living.weight_version() == TRAINED_VERSION
        assert up(fleet) == [False, True]

        servers[0].stop()
        servers[0].start()
        taken = fleet._endpoints[0].taken
        # Somebody who begins only now waits for a server that is still loading its model.
        async with asyncio.timeout(COME_BACK_SECONDS), fleet_on(dying.base_url) as late:
            assert up(late) == [True]
            await until_all_are_up(fleet)
        assert fleet._endpoints[0].taken == taken, "it got nothing before it was up"
        assert await dying.weight_version() == TRAINED_VERSION

        agent.turn_tokens = 16
        samples = await here.samples(8)
        assert fleet._endpoints[0].taken > taken
        for sample in samples:
            assert {span.version for span in sample.trajectory.weight_spans} == {TRAINED_VERSION}
            assert_exact(sample, reference, 1.0)


def check_samples_of_the_loss(samples: list[SampleDone]) -> None:
    """What ran there failed with its tokens, by the infrastructure; what still queued had nothing to lose and moved."""
    ended = [sample for sample in samples if sample.outcome is Outcome.INFRA_CONN]
    assert len(ended) == MAX_RUNNING
    for sample in ended:
        assert 0 < sample.trajectory.generated_tokens < LONG
        assert sample.trajectory.turns[-1].finish_reason == "abort"
        assert [span.version for span in sample.trajectory.weight_spans] == [FIRST_VERSION]
        assert sample.trajectory.token_ids[: len(PROMPT)].tolist() == list(PROMPT)
        assert sample.reward.score == 0.0
    moved = [sample for sample in samples if sample.outcome is Outcome.SOLVED]
    assert len(moved) == 2 * MAX_RUNNING
    assert {sample.trajectory.generated_tokens for sample in moved} == {LONG}


async def until_all_are_up(fleet: SglangFleet) -> None:
    while not all(up(fleet)):
        fleet._changed.clear()
        await fleet._changed.wait()


def model_process(group: int) -> int:
    """Of the processes of a server's group the one that has the model."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if os.getpgid(int(folder.name)) == group and b"scheduler" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except (ProcessLookupError, FileNotFoundError):
                continue
    raise AssertionError("the server has no model process")
