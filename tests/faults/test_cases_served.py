"""The cases of docs/faults.md that concern a whole service: a server in a process of its own, asked over gRPC."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone
from py_scheduler.domain.leases import Shortage
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import AlreadyExistsError, CursorExpiredError
from tests.support.runners.children import Pipe
from tests.support.servers.served_process import served_process
from tests.support.watching import events_until

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from py_scheduler.client import Submission
    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
[scheduler]
stop_grace_seconds = 0.5
{scheduler}
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1, 2, 3, 4, 5, 6, 7], cpu = 64, memory_gb = 64 }}
"10.0.0.2" = {{ gpus = [0, 1, 2, 3, 4, 5, 6, 7], cpu = 64, memory_gb = 64 }}
"""
EVALUATOR = """
[[evaluator]]
evaluator_id = "{name}"
handler = "{handler}"
{more}
"""
PROCESS = 'resource = { gpu = 1.0, concurrency = 1 }\nrun_resource = { gpu = 1.0 }\nrunner = "process"\n'
SMALL = "resource = { gpu = 1.0, concurrency = 4 }\nrun_resource = { gpu = 0.25 }\n"


def serving(
    folder: Path, handler: str, more: str = SMALL, *, scheduler: str = "", has_gate: bool = False
) -> AbstractAsyncContextManager[ServedProcess]:
    """One evaluator, "agent"; `handler`: of case_handlers, if it has no module."""
    config = folder / "scheduler.toml"
    name = handler if ":" in handler else f"tests.faults.case_handlers:{handler}"
    if has_gate:
        more += f'handler_args = {{ gate = "{folder}/gate" }}\n'
    evaluator = EVALUATOR.format(name="agent", handler=name, more=more)
    config.write_text(CONFIG.format(folder=folder, scheduler=scheduler) + evaluator)
    return served_process(config)


def client_of(folder: Path) -> SchedulerClient:
    return SchedulerClient(f"unix:{folder}/s.sock", reconnect_seconds=60.0)


def tasks(count: int, prompt: str = "", client_key: str = "", **config: Any) -> list[Task]:
    return [
        Task(config=TaskConfig(task_type="agent", **config), prompt=prompt, client_key=client_key) for _ in range(count)
    ]


async def ends(client: SchedulerClient, submission: Submission) -> dict[str, TaskDone]:
    """How each task ended, which it did once."""
    events = await events_until(client, submission, TaskDone, len(submission.task_ids))
    done = [event for event in events if isinstance(event, TaskDone)]
    assert sorted(event.task_id for event in done) == sorted(submission.task_ids)
    return {event.task_id: event for event in done}


async def kill(served: ServedProcess) -> None:
    served.process.kill()
    await served.process.wait()


# Rollouts


async def test_a_wait_for_128_groups_of_which_3_never_finish_ends_and_names_them(tmp_path: Path) -> None:
    """Case 1 of the faults, also when the server was killed meanwhile."""
    prompted = "tests.support.agents.collected_handlers:Prompted"
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        async with serving(tmp_path, prompted) as served:
            groups = tasks(128, "solve", repeat_times=4)
            for number in (0, 77, 127):
                (groups[number],) = tasks(1, "hang", repeat_times=4)
            submission = await client.submit(groups, 1, delivery=Delivery.COLLECT)
            await events_until(client, submission, TaskDone, 125)
            await kill(served)
        async with serving(tmp_path, prompted):
            begun = time.monotonic()
            reply = await client.collect(1, timeout_seconds=1.0)
            assert time.monotonic() - begun < 20
            assert reply.is_timed_out
            assert len(reply.results) == 125
            never = [submission.task_ids[number] for number in (0, 77, 127)]
            assert [unfinished.task_id for unfinished in reply.unfinished] == never
            assert all("timeout_seconds" in unfinished.reason for unfinished in reply.unfinished)
            assert not await client.has_step(1)


@pytest.mark.parametrize("policy", ["run_timeout_seconds", "task_deadline_seconds"])
async def test_a_group_of_which_one_run_sleeps_for_ever_ends_by_its_policy_also_after_a_restart(
    tmp_path: Path, policy: str
) -> None:
    """Case 2 of the faults."""
    is_run = policy == "run_timeout_seconds"
    more = SMALL + f"run_timeout_seconds = {2.0 if is_run else 600.0}\n"
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        async with serving(tmp_path, "OneSleeps", more) as served:
            wanted = tasks(2, repeat_times=4, task_deadline_seconds=None if is_run else 4.0)
            submission = await client.submit(wanted, 1)
            events = await events_until(client, submission, AttemptEnded, 6)
            assert not any(isinstance(event, TaskDone) for event in events)
            await kill(served)
        async with serving(tmp_path, "OneSleeps", more):
            for done in (await ends(client, submission)).values():
                assert done.state is TaskState.PARTIAL
                assert done.outcomes == {Outcome.SOLVED: 3, Outcome.AGENT_TIMEOUT: 1}
                assert policy in done.reason
            again = await client.submit(tasks(1, repeat_times=1), 2)
            assert [done.state for done in (await ends(client, again)).values()] == [TaskState.SUCCEEDED]


async def test_of_five_prompts_in_batches_of_four_the_tail_is_delivered(tmp_path: Path) -> None:
    """Case 10 of the faults: to who watches, and to who takes four at a time. There is room for one batch at once."""
    more = "resource = { gpu = 16.0, concurrency = 4 }\nrun_resource = { gpu = 4.0 }\nbatch_size = 4\n"
    async with serving(tmp_path, "Counted", more, has_gate=True), client_of(tmp_path) as client, asyncio.timeout(60):
        watched = await client.submit(tasks(5), 1)
        started = await events_until(client, watched, AttemptStarted, 4)
        assert sum(isinstance(event, AttemptStarted) for event in started) == 4
        (waiting,) = (await client.get_submission(1)).waiting
        assert waiting.task_ids == watched.task_ids[4:]
        collected = await client.submit(tasks(5), 2, delivery=Delivery.COLLECT)
        (tmp_path / "gate").touch()
        assert {done.state for done in (await ends(client, watched)).values()} == {TaskState.SUCCEEDED}
        first = await client.collect(2, min_num=4, max_num=4)
        assert len(first.results) == 4
        tail = await client.collect(2, min_num=4)
        assert len(tail.results) == 1
        assert {result.task_id for reply in (first, tail) for result in reply.results} == set(collected.task_ids)
        assert not await client.has_step(2)


async def test_an_abort_between_the_last_sample_and_the_score_of_the_group_ends_it_cleanly(tmp_path: Path) -> None:
    """Case 14 of the faults: once, with its samples and without their rewards as the group's; also for who restarts."""
    demand = Resource(gpu=0.25)
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        async with (
            serving(tmp_path, "GatedScore", has_gate=True) as served,
            PlacementClient(f"unix:{tmp_path}/s.sock") as placement,
        ):
            submission = await client.submit(tasks(2, repeat_times=4), 1)
            await events_until(client, submission, AttemptEnded, 8)
            reply = await client.abort(1)
            assert not reply.still_stopping
            for done in (await ends(client, submission)).values():
                assert done.state is TaskState.ABORTED
                assert not done.rewards
                assert done.outcomes == {Outcome.SOLVED: 4}
            capacity = await placement.capacity(demand)
            assert capacity.free_tokens == capacity.max_tokens == 64
            (tmp_path / "gate").touch()
            after = await client.submit(tasks(1, repeat_times=4), 2)
            (done,) = (await ends(client, after)).values()
            assert (done.state, [reward.score for reward in done.rewards]) == (TaskState.SUCCEEDED, [2.0] * 4)
            await kill(served)
        async with serving(tmp_path, "GatedScore", has_gate=True):
            assert {done.state for done in (await ends(client, submission)).values()} == {TaskState.ABORTED}
            view = await client.get_submission(1)
            assert (view.open_tasks, view.aborted_tasks) == (0, 2)


LIMITS = {
    "of a batch": ("resource = { concurrency = 128 }\nbatch_size = 64\n", ""),
    "of the service": ("resource = { concurrency = 8 }\nbatch_size = 1\n", "max_running_samples = 128"),
    "of the room": ("resource = { gpu = 1.0, concurrency = 8 }\nrun_resource = { gpu = 0.125 }\nbatch_size = 1\n", ""),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_concurrency_of_128_with_groups_of_8_is_128_live_samples(tmp_path: Path, limit: str) -> None:
    """Case 18 of the faults: neither 128 groups nor 1 024 samples."""
    more, scheduler = LIMITS[limit]
    async with (
        serving(tmp_path, "Counted", more, scheduler=scheduler, has_gate=True),
        client_of(tmp_path) as client,
        asyncio.timeout(90),
    ):
        submission = await client.submit(tasks(64, repeat_times=8), 1)
        await events_until(client, submission, AttemptStarted, 128)
        assert (await client.get_submission(1)).running_attempts == 128
        (tmp_path / "gate").touch()
        events = await events_until(client, submission, TaskDone, 64)
    samples = [sample for event in events if isinstance(event, AttemptEnded) for sample in event.samples]
    assert len(samples) == 512
    assert {sample.outcome for sample in samples} == {Outcome.SOLVED}
    assert max(sample.reward.details["most"] for sample in samples if sample.reward) == 128


async def test_a_client_key_in_use_is_refused_and_counts_nothing_also_after_a_restart(tmp_path: Path) -> None:
    """Case 20 of the faults."""
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        async with serving(tmp_path, "Counted", has_gate=True) as served:
            await client.submit(tasks(1, client_key="k"), 1)
            before = await client.get_submission(1)
            with pytest.raises(AlreadyExistsError, match="client_key"):
                await client.submit([*tasks(2), *tasks(1, client_key="k")], 1)
            after = await client.get_submission(1)
            assert (after.open_tasks, after.scheduled_tasks) == (before.open_tasks, before.scheduled_tasks) == (1, 1)
            await kill(served)
        async with serving(tmp_path, "Counted", has_gate=True):
            with pytest.raises(AlreadyExistsError, match="client_key"):
                await client.submit(tasks(1, client_key="k"), 1)
            assert (await client.get_submission(1)).open_tasks == 1
            await client.abort(1)
            await client.submit(tasks(1, client_key="k"), 1)


async def test_what_ran_under_four_kills_of_its_server_is_delivered_once(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        submission = None
        for number in range(1, 5):
            async with serving(tmp_path, "Counted", has_gate=True) as served:
                submission = submission or await client.submit(tasks(8, repeat_times=8), 1)
                await events_until(client, submission, AttemptStarted, 32 * number)
                await kill(served)
        assert submission is not None
        (tmp_path / "gate").touch()
        async with serving(tmp_path, "Counted", has_gate=True):
            events = await events_until(client, submission, TaskDone, 8)
    ended = [event for event in events if isinstance(event, AttemptEnded)]
    assert sum(event.state is AttemptState.LOST for event in ended) >= 4 * 32
    assert {event.state for event in events if isinstance(event, TaskDone)} == {TaskState.SUCCEEDED}
    samples = [(sample.task_id, sample.sample_no) for event in ended for sample in event.samples]
    assert len(samples) == len(set(samples)) == 64


async def test_kills_of_the_server_use_up_no_retry(tmp_path: Path) -> None:
    """A third lost worker would quarantine it: here the server is killed four times, and its child once."""
    pipe = Pipe(tmp_path / "pipe")
    child = ("tests.support.agents.child_handlers:OddAgent", PROCESS)
    async with client_of(tmp_path) as client, asyncio.timeout(90):
        submission = None
        for attempt_no in range(1, 5):
            async with serving(tmp_path, *child) as served:
                submission = submission or await client.submit(tasks(1, f"wait {pipe}"), 1)
                await pipe.told()
                # A child may be at work before its attempt is on disk: the next server would know nothing of that one.
                await events_until(client, submission, AttemptStarted, attempt_no)
                await kill(served)
        assert submission is not None
        async with serving(tmp_path, *child):
            os.kill(await pipe.told(), signal.SIGKILL)
            await pipe.told()
            await client.abort(1)
            events = await events_until(client, submission, TaskDone, 1)
    ended = [event for event in events if isinstance(event, AttemptEnded)]
    assert [event.state for event in ended] == [AttemptState.LOST] * 5 + [AttemptState.ABORTED]
    assert [event.next_attempt_no for event in ended] == [2, 3, 4, 5, 6, 0]


# Placement


async def test_shares_that_fit_are_all_leased_and_what_only_totals_hold_is_fragmentation(tmp_path: Path) -> None:
    """Cases 21 and 22 of the faults, over gRPC."""
    more = "resource = { gpu = 0.5, concurrency = 1 }\nrun_resource = { gpu = 0.5 }\n"
    async with (
        serving(tmp_path, "OneSleeps", more),
        client_of(tmp_path) as client,
        PlacementClient(f"unix:{tmp_path}/s.sock") as placement,
        asyncio.timeout(60),
    ):
        small = await placement.acquire(Resource(gpu=0.18), 80, wait=False)
        assert (len(small.tokens), (await placement.capacity(Resource(gpu=0.18))).free_tokens) == (80, 0)
        await placement.release(small)
        lease = await placement.acquire(Resource(gpu=0.6), 16, wait=False)
        assert len(lease.tokens) == 16
        explained = await placement.explain(Resource(gpu=0.5))
        assert (explained.free_tokens, explained.max_tokens) == (0, 32)
        assert {node.short for node in explained.nodes} == {(Shortage.FRAGMENTATION,)}
        await client.submit(tasks(1), 1)
        (waiting,) = (await client.get_submission(1)).waiting
        assert "fragmentation" in waiting.reason
        await placement.release(lease)


# The service


async def test_under_a_new_store_an_old_cursor_is_refused_and_swallows_nothing(tmp_path: Path) -> None:
    """Case 31 of the faults: the new store has as many events, so that only its epoch tells it apart."""
    async with client_of(tmp_path) as client, asyncio.timeout(60):
        async with serving(tmp_path, "OneSleeps") as served:
            old = await client.submit(tasks(3), 1)
            await ends(client, old)
            cursor = (await anext(client.watch())).cursor
            await kill(served)
        shutil.rmtree(tmp_path / "state")
        async with serving(tmp_path, "OneSleeps"):
            new = await client.submit(tasks(3), 1)
            await ends(client, new)
            for watch in (
                client.watch(cursor=cursor),
                client.watch(submission_id=new.submission_id, cursor=old.cursor),
            ):
                with pytest.raises(CursorExpiredError) as refused:
                    await anext(watch)
                assert refused.value.oldest_sequence == 1
            with pytest.raises(CursorExpiredError):
                await client.ack(cursor)
            assert len((await anext(client.watch())).records) == 10, "and nothing was dropped by it"
