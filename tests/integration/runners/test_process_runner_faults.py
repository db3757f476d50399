"""Children that die, exit, block, leak and fail to start: an attempt is lost with them, no task and no capacity."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.generation import STUDENT
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children import runners as child_runner
from py_scheduler.placement import PlacementPool
from tests.support.fake_clock import FakeClock, settle
from tests.support.harness import run_one, samples_in, task_of
from tests.support.models.controlled_model import ControlledModel
from tests.support.runners.children import Children, Pipe, children, is_there, quick, runner_settings
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from py_scheduler.domain.requests import SubmitReply

ONE = runner_settings(max_runners=1)


async def attempts_of(harness: Children, reply: SubmitReply) -> list[tuple[AttemptState, str]]:
    records = await harness.records_until_done(reply)
    return [(r.event.state, r.event.message) for r in records if isinstance(r.event, AttemptEnded)]


async def test_a_child_killed_in_mid_task_costs_an_attempt_and_not_the_next_task(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with children(settings=ONE) as harness:
        reply = await harness.submit([task_of(f"wait_once {pipe} {tmp_path / 'mark'}"), task_of("fine")])
        pid = await pipe.told()
        os.kill(pid, signal.SIGKILL)
        records = await harness.records_until_done(reply)
        ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
        lost, *others = ended
        assert (lost.state, lost.message, lost.next_attempt_no) == (AttemptState.LOST, "signal SIGKILL", 2)
        assert {event.state for event in others} == {AttemptState.SUCCEEDED}
        samples = samples_in(records)
        assert {sample.termination_reason for sample in samples} == {"attempt 2", ""}
        assert pid not in harness.pids
        (view,) = harness.runner.views()
        assert view.restarts == 1
        assert "signal SIGKILL" in view.message


@pytest.mark.parametrize(
    ("prompt", "how"),
    [
        ("exit 1", "exit status 1"),
        ("exit_in_a_task", "exit status 1"),
        ("exit_hard 3", "exit status 3"),
        ("die", "signal SIGKILL"),
    ],
)
async def test_what_kills_its_runner_each_time_is_quarantined_and_its_siblings_finish(prompt: str, how: str) -> None:
    async with children() as harness:
        reply = await harness.submit([task_of(prompt), *(task_of("fine") for _ in range(6))])
        records = await harness.records_until_done(reply)
        ended = [r.event for r in records if isinstance(r.event, AttemptEnded)]
        poison = [event for event in ended if event.task_id == reply.task_ids[0]]
        assert [event.state for event in poison] == [AttemptState.LOST] * 3
        messages = [event.message for event in poison]
        assert messages == [how, how, f"quarantined, it lost its worker 3 times: {how}"]
        (sample,) = poison[-1].samples
        assert (sample.outcome, sample.error) == (Outcome.INFRA_OTHER, how), "never the model's failure"
        done = await harness.done(reply)
        assert sum(task.state is TaskState.SUCCEEDED for task in done.values()) == 6


@pytest.mark.parametrize(
    ("prompt", "state", "told"),
    [
        ("leave_a_daemon 5", AttemptState.LOST, "exit status 5"),
        ("close_everything", AttemptState.LOST, ""),
        ("talk_nonsense 0000000568656c6c6f", AttemptState.LOST, "it said what no runner says"),
        ("talk_nonsense ffffffff00", AttemptState.LOST, "it began a message of 4294967295 bytes"),
        ("say_too_much", AttemptState.FAILED, "at most 2000 can be sent"),
        ("speak_oddly", AttemptState.FAILED, "OddError"),
        ("open_nothing_more", AttemptState.SUCCEEDED, ""),
        ("print", AttemptState.SUCCEEDED, ""),
    ],
)
async def test_whatever_a_handler_does_to_its_process_its_attempt_ends_and_the_next_is_played(
    prompt: str, state: AttemptState, told: str
) -> None:
    async with asyncio.timeout(30), children(settings=ONE) as harness:
        none = RetryPolicy(max_loss_retries=0)
        odd, *others = await attempts_of(harness, await harness.submit([task_of(prompt, retry=none), task_of("fine")]))
        assert (odd[0], others[0][0]) == (state, AttemptState.SUCCEEDED)
        assert told in odd[1]


async def test_a_child_that_stands_still_is_replaced_before_it_is_given_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_runner, "_PING_SECONDS", 0.3)
    async with children(settings=ONE) as harness:
        (pid,) = harness.pids
        os.kill(pid, signal.SIGSTOP)
        running = asyncio.create_task(run_one(harness, "fine"))
        await eventually(lambda: not is_there(pid), pause_seconds=0.01)
        # Who comes in its place may take its time.
        monkeypatch.setattr(child_runner, "_PING_SECONDS", 60.0)
        assert (await running).outcome is Outcome.SOLVED
        (view,) = harness.runner.views()
        assert "it did not say that it was alive" in view.message


async def test_a_busy_child_that_stands_still_is_killed_at_its_timeout(tmp_path: Path) -> None:
    pipe, clock = Pipe(tmp_path / "pipe"), FakeClock()
    async with children(settings=ONE, spec={"run_timeout_seconds": 1.0}, clock=clock) as harness:
        reply = await harness.submit([task_of(f"wait {pipe}"), task_of("fine")])
        os.kill(await pipe.told(), signal.SIGSTOP)
        await clock.advance(1.0)
        await clock.advance(0.5)
        states = [state for state, _ in await attempts_of(harness, reply)]
        assert states == [AttemptState.TIMED_OUT, AttemptState.SUCCEEDED]


async def test_a_child_killed_while_it_idles_costs_nothing() -> None:
    async with children(settings=ONE) as harness:
        for _ in range(3):
            (pid,) = harness.pids
            os.kill(pid, signal.SIGKILL)
            # At once, before anybody can have noticed.
            reply = await harness.submit([task_of("fine")])
            assert [state for state, _ in await attempts_of(harness, reply)] == [AttemptState.SUCCEEDED]
            assert harness.pids != [pid]


@pytest.mark.parametrize("prompt", ["block", "refuse_to_stop"])
async def test_a_child_that_ignores_a_stop_is_killed_and_its_token_comes_back(tmp_path: Path, prompt: str) -> None:
    pipe, clock = Pipe(tmp_path / "pipe"), FakeClock()
    pool = PlacementPool([NodeResource(node_ip="10.0.0.1", gpus=[], cpu=1, memory_gb=1)])
    spec = {"run_resource": Resource(cpu=1.0), "resource": Resource(cpu=1.0, concurrency=1)}
    async with children(settings=ONE, pool=pool, spec=spec, first_key=("", ()), clock=clock) as harness:
        reply = await harness.submit([task_of(f"{prompt} {pipe}")])
        pid = await pipe.told()
        later = await harness.submit([task_of("fine")], batch_id=1)
        stop = AbortRequest(selector=harness.selector(reply), wait=True)
        stopping = asyncio.create_task(harness.engine.abort(stop))
        await settle()
        await clock.advance(0.5)
        answer = await stopping
        assert answer.still_stopping == (), "nothing is stranded"
        assert not is_there(pid)
        (sample,) = await harness.samples(reply)
        assert sample.outcome is Outcome.ABORTED
        assert [state for state, _ in await attempts_of(harness, later)] == [AttemptState.SUCCEEDED]
    assert harness.engine.stranded_workers == 0


async def test_a_blocking_handler_times_out_and_its_retry_runs_in_another_child(tmp_path: Path) -> None:
    pipe, clock = Pipe(tmp_path / "pipe"), FakeClock()
    spec, at_once = {"run_timeout_seconds": 1.5}, quick(retry_backoff_seconds=0.0)
    async with children(settings=ONE, spec=spec, clock=clock, engine_settings=at_once) as harness:
        retry = RetryPolicy(max_failure_retries=1)
        reply = await harness.submit([task_of(f"block {pipe}", retry=retry)])
        pids = []
        for _ in range(2):
            pids.append(await pipe.told())
            await clock.advance(1.5)
            await clock.advance(0.5)
        assert len(set(pids)) == 2
        assert [state for state, _ in await attempts_of(harness, reply)] == [AttemptState.TIMED_OUT] * 2
        (sample,) = await harness.samples(reply)
        assert sample.outcome is Outcome.AGENT_TIMEOUT


async def test_a_group_scorer_that_blocks_is_killed(tmp_path: Path) -> None:
    pipe, clock = Pipe(tmp_path / "pipe"), FakeClock()
    spec, ranking = {"eval_timeout_seconds": 1.0}, "tests.support.agents.child_handlers:RankingChild"
    async with children(ranking, settings=ONE, spec=spec, clock=clock) as harness:
        reply = await harness.submit([task_of(f"fine block {pipe}")])
        pid = await pipe.told()
        await clock.advance(1.0)
        await clock.advance(0.5)
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.FAILED
        assert "eval_timeout_seconds" in done.reason
        (done,) = (await harness.done(await harness.submit([task_of("fine")], batch_id=1))).values()
        assert done.state is TaskState.SUCCEEDED
        assert not is_there(pid)


# Memory


async def test_a_child_that_has_leaked_is_replaced_after_its_attempt() -> None:
    async with children(settings=runner_settings(max_runners=1, max_resident_mib=150)) as harness:
        first = await run_one(harness, "fine")
        assert (await run_one(harness, "fine")).reward.details["pid"] == first.reward.details["pid"]
        assert (await run_one(harness, "leak 200")).outcome is Outcome.SOLVED, "its attempt counts"
        reply = await harness.submit([task_of("fine")], batch_id=9)
        assert [state for state, _ in await attempts_of(harness, reply)] == [AttemptState.SUCCEEDED]
        (sample,) = await harness.samples(reply)
        assert sample.reward.details["pid"] != first.reward.details["pid"]
        (view,) = harness.runner.views()
        assert view.restarts == 1
        assert "max_resident_mib" in view.message


async def test_a_child_that_grows_without_end_is_killed_in_mid_attempt() -> None:
    settings = runner_settings(max_runners=1, hard_resident_mib=300)
    async with children(settings=settings) as harness:
        reply = await harness.submit([task_of("grow", retry=RetryPolicy(max_loss_retries=0))])
        ((state, message),) = await attempts_of(harness, reply)
        assert state is AttemptState.LOST
        assert "hard_resident_mib is 300 (signal SIGKILL)" in message
        assert (await run_one(harness, "fine")).outcome is Outcome.SOLVED


# Starts


@pytest.mark.parametrize(
    ("fault", "told"),
    [("raises", "a model file is missing"), ("exits", "exit status 7"), ("hangs", "start_seconds (1)")],
)
async def test_an_engine_whose_runners_cannot_start_does_not_start(fault: str, told: str) -> None:
    settings = runner_settings(start_seconds=1.0 if fault == "hangs" else 30.0, prepare_max_retries=1)
    with pytest.raises(RunnerStartError, match=r"evaluator 'agent': no runner could be started") as refused:
        async with children(arguments={"fault": fault}, settings=settings):
            pass
    assert told in str(refused.value)


async def test_a_restart_that_fails_is_shown_and_tried_again_until_it_works(tmp_path: Path) -> None:
    """The handler's constructor fails from the first death on until a file is there."""
    there = tmp_path / "there"
    there.touch()
    settings = runner_settings(max_runners=1, prepare_max_retries=1)
    pool = PlacementPool([NodeResource(node_ip="10.0.0.1", gpus=[], cpu=1, memory_gb=1)])
    spec = {"run_resource": Resource(cpu=1.0), "resource": Resource(cpu=1.0, concurrency=1)}
    arguments = {"fault": f"until:{there}"}
    async with children(arguments=arguments, settings=settings, pool=pool, spec=spec, first_key=("", ())) as harness:
        there.unlink()
        reply = await harness.submit([task_of("die", retry=RetryPolicy(max_loss_retries=0)), task_of("fine")])
        await eventually(lambda: [view.state for view in harness.runner.views()] == ["failed"], pause_seconds=0.01)
        (view,) = harness.runner.views()
        assert "not yet" in view.message
        assert view.pid == 0
        there.touch()
        done = await harness.done(reply)
        assert [task.state for task in done.values()] == [TaskState.FAILED, TaskState.SUCCEEDED]
    assert pool.free_tokens_for(Resource(cpu=1.0)) == 1


# The server's own end


async def test_children_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Also one whose handler blocks, and what it has started."""
    pipe = Pipe(tmp_path / "pipe")
    code = (
        "import asyncio\n"
        "from tests.support.runners.children import children\n"
        "from tests.support.harness import task_of\n"
        "async def main():\n"
        "    async with children() as harness:\n"
        f"        await harness.submit([task_of('block {pipe}')])\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    child = await pipe.told()
    assert is_there(child)
    server.kill()
    await server.wait()
    await eventually(lambda: not is_there(child), pause_seconds=0.01)


async def test_a_child_ends_with_a_server_that_is_killed_while_it_still_imports(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    package = tmp_path / "py_scheduler"
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "import os, time\n"
        f"with open({str(pipe)!r}, 'w') as pipe:\n"
        "    pipe.write(f'{os.getpid()}\\n')\n"
        "time.sleep(1_000_000)\n"
    )
    code = (
        "import asyncio, sys\n"
        "from tests.support.runners.children import children\n"
        "from tests.support.harness import task_of\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "async def main():\n"
        "    async with children():\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    child = await pipe.told()
    assert is_there(child)
    server.kill()
    await server.wait()
    await eventually(lambda: not is_there(child), pause_seconds=0.01)


async def test_an_engine_ends_at_once_with_children_that_block(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with asyncio.timeout(20):
        async with children(engine_settings=quick(stop_grace_seconds=5.0)) as harness:
            await harness.submit([task_of(f"block {pipe}")])
            pid = await pipe.told()
    assert not is_there(pid)
    assert harness.engine.stranded_workers == 0


async def test_a_child_killed_while_it_generates_leaves_nothing_at_the_engine(tmp_path: Path) -> None:
    model = ControlledModel()
    async with children(generation_backends={STUDENT: model}, settings=ONE) as harness:
        reply = await harness.submit([task_of("keep_at_it x", retry=RetryPolicy(max_loss_retries=0))])
        await model.asked()
        await model.step(3)
        (pid,) = harness.pids
        os.kill(pid, signal.SIGKILL)
        (sample,) = await harness.samples(reply)
        assert sample.outcome is Outcome.INFRA_OTHER
        assert sample.trajectory.generated_tokens == 3, "what was made is in the record"
        assert not model.flights


async def test_deaths_leave_no_descriptor_and_no_place_behind() -> None:
    async with children(settings=runner_settings(max_runners=2)) as harness:
        descriptors = open_descriptors()
        for number in range(8):
            tasks = [task_of("exit_hard 1", retry=RetryPolicy(max_loss_retries=0)), task_of("fine"), task_of("fine")]
            done = await harness.done(await harness.submit(tasks, batch_id=number))
            assert sum(task.state is TaskState.SUCCEEDED for task in done.values()) == 2
        assert len(harness.runner.views()) <= 2
        assert open_descriptors() <= descriptors + 4


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("prompt", ["block", "refuse_to_stop"])
async def test_a_child_that_is_stopping_as_the_engine_ends_is_killed_and_not_counted_as_stranded(
    tmp_path: Path, prompt: str
) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with children(settings=ONE, engine_settings=quick(stop_grace_seconds=0.5)) as harness:
        reply = await harness.submit([task_of(f"{prompt} {pipe}")])
        pid = await pipe.told()
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=False))
    assert not is_there(pid)
    assert harness.engine.stranded_workers == 0
