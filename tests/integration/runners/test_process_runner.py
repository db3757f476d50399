"""What a handler in a process of its own sees of its episode: what one in the loop sees."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.api.generation_http import GenerationHttp
from py_scheduler.config import GatewaySettings
from py_scheduler.domain.generation import (
    STUDENT,
    OnWeightUpdate,
    PauseMode,
    SamplingParams,
    StoppingCriteria,
    WeightUpdate,
)
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import Outcome, TaskState
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from tests.support.agents.child_handlers import OddAgent
from tests.support.buffers import forbid_lists
from tests.support.fake_clock import settle
from tests.support.handlers import gpu_spec, spec_of, two_nodes
from tests.support.harness import run_one, running_engine, task_of
from tests.support.models.controlled_model import ControlledModel
from tests.support.models.scripted_model import ScriptedModel
from tests.support.runners.children import Pipe, children, is_there, runner_settings

if TYPE_CHECKING:
    from pathlib import Path


async def test_children_stay_and_play_one_sample_after_the_other() -> None:
    async with children() as harness:
        pids = harness.pids
        assert len(pids) == 1, "one was started with the engine"
        samples = await harness.samples(await harness.submit([task_of("fine") for _ in range(20)]))
        assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 20, samples
        used = {sample.reward.details["pid"] for sample in samples}
        # One that was ready when all were played has played none.
        assert used <= set(harness.pids)
        assert len(harness.pids) <= 2, "max_runners"
        assert samples[0].reward.details["answer"] == "hello"


async def test_an_episode_looks_the_same_from_a_child() -> None:
    task = Task(
        config=TaskConfig(task_type="agent", repeat_times=2, stopping=StoppingCriteria(max_turns=5)),
        prompt="look",
        metadata={"row": [1, 2]},
    )
    spec: dict[str, Any] = {"default_sampling": SamplingParams(temperature=0.25), "run_timeout_seconds": 60.0}
    seen = []
    async with children(spec=spec) as harness:
        reply = await harness.submit([task], iteration=IterationContext(rollout_id=3, beta=0.0))
        seen.append(sorted(sample.termination_reason for sample in await harness.samples(reply)))
    async with running_engine(spec_of(OddAgent(), **spec)) as inline:
        reply = await inline.submit([task], iteration=IterationContext(rollout_id=3, beta=0.0))
        seen.append(sorted(sample.termination_reason for sample in await inline.samples(reply)))
    assert seen[0] == seen[1]
    assert json.loads(seen[0][1])["sample"] == [1, 1, {"row": [1, 2]}]


@pytest.mark.parametrize("prompt", ["generate 3", "raise", "overflow", "misuse", "keep_the_context"])
async def test_records_and_outcomes_are_those_of_a_handler_in_the_loop(prompt: str) -> None:
    changes: dict[str, Any] = {"default_stopping": StoppingCriteria(max_context_len=24)} if prompt == "overflow" else {}
    async with children(generation_backends={"student": ScriptedModel("one", "two")}, spec=changes) as harness:
        there = await run_one(harness, prompt)
    engines = {"student": ScriptedModel("one", "two")}
    async with running_engine(spec_of(OddAgent(), **changes), generation_backends=engines) as inline:
        here = await run_one(inline, prompt)
    for name in ("outcome", "trajectory", "termination_reason", "error", "phase"):
        assert getattr(there, name) == getattr(here, name), name
    assert len(there.trajectory) == len(here.trajectory)


async def test_what_a_handler_keeps_of_its_context_holds_nothing_up() -> None:
    """An array of numpy over the growing context would make the next turn fail."""
    async with children(generation_backends={"student": ScriptedModel("one")}) as harness:
        there = await run_one(harness, "keep_the_context")
    assert there.error == ""
    context = there.trajectory.token_ids.tolist()
    assert len(context) > 3
    assert json.loads(there.termination_reason) == [[], [7, 8], [7, 8], len(context)]


async def test_the_server_makes_no_objects_of_the_tokens_that_a_child_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_lists(monkeypatch)
    async with children(generation_backends={"student": ScriptedModel("one", "two")}) as harness:
        sample = await run_one(harness, "generate 2")
    assert (sample.outcome, sample.trajectory.generated_tokens) == (Outcome.SOLVED, 8)


async def test_the_environment_of_a_child_is_what_the_server_says_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_HANDED_ON", "yes")
    monkeypatch.setenv("TEST_KEPT_BACK", "secret")
    monkeypatch.setenv("LD_AUDIT", "")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    settings = runner_settings(max_runners=1, environment=("TEST_HANDED_ON", "PATH", "LD_AUDIT", "PYTHONSTARTUP"))
    async with children(settings=settings) as harness:
        asked = "say TEST_HANDED_ON TEST_KEPT_BACK STACX_ROLLOUT_ID STACX_DAGGER_BETA"
        for rollout_id in (4, 5):
            iteration = IterationContext(rollout_id=rollout_id, beta=0.5)
            reply = await harness.submit([task_of(asked)], batch_id=rollout_id, iteration=iteration)
            (sample,) = await harness.samples(reply)
            said = json.loads(sample.termination_reason)
            assert said["TEST_HANDED_ON"] == "yes"
            assert said["TEST_KEPT_BACK"] is None
            assert (said["STACX_ROLLOUT_ID"], said["STACX_DAGGER_BETA"]) == (str(rollout_id), "0.5")
        said = json.loads((await run_one(harness, asked, is_eval=True)).termination_reason)
        assert said["STACX_ROLLOUT_ID"] is None, "a sample of no iteration sees none, in the same child"
        assert not [name for name in said["all"] if name.startswith(("LD_", "PYTHON"))]
    assert "STACX_ROLLOUT_ID" not in os.environ


async def test_a_child_sees_the_gpus_of_its_token_and_no_other() -> None:
    pool = two_nodes()
    spec = gpu_spec(OddAgent(), 1.0)
    changes = {name: getattr(spec, name) for name in ("resource", "run_resource", "eval_resource", "batch_size")}
    settings = runner_settings(max_runners=4)
    async with children(pool=pool, spec=changes, settings=settings, first_key=("", ())) as harness:
        samples = await harness.samples(await harness.submit([task_of("say CUDA_VISIBLE_DEVICES") for _ in range(12)]))
        for sample in samples:
            seen = json.loads(sample.termination_reason)["CUDA_VISIBLE_DEVICES"]
            assert seen == ",".join(map(str, sample.gpu_ids)) != ""
        await settle()
    assert pool.free_tokens_for(Resource(gpu=1.0)) == 16


async def test_a_stop_reaches_the_child_and_what_it_was_generating_is_kept() -> None:
    model = ControlledModel()
    async with children(generation_backends={STUDENT: model}, settings=runner_settings(max_runners=1)) as harness:
        reply = await harness.submit([task_of("generate 1")])
        (pid,) = harness.pids
        await model.asked()
        await model.step(3)
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        (sample,) = await harness.samples(reply)
        assert sample.outcome is Outcome.ABORTED
        assert sample.trajectory.generated_tokens == 3
        assert not model.flights
        assert (await run_one(harness, "fine")).reward.details["pid"] == pid, "who obeys a stop goes on"


async def test_a_turn_that_the_handler_gives_up_is_in_the_record_before_the_next() -> None:
    model = ControlledModel()
    async with children(generation_backends={STUDENT: model}) as harness:
        reply = await harness.submit([task_of("give_up_a_turn")])
        await model.asked()
        await model.step(2)
        await model.asked(2)
        await model.step(16)
        (sample,) = await harness.samples(reply)
    assert sample.termination_reason == "19"
    assert [turn.finish_reason for turn in sample.trajectory.turns] == [None, "abort", "length"]


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
async def test_new_weights_while_a_child_generates(mode: PauseMode) -> None:
    """Pause, update, continue: the child notices nothing, and its tokens say by which weights they were made."""
    model = ControlledModel(default_max_new_tokens=10)
    spec = {"on_weight_update": OnWeightUpdate.RESUME}
    async with children(generation_backends={STUDENT: model}, spec=spec) as harness:
        reply = await harness.submit([task_of("keep_at_it x")])
        gateway = harness.engine.generation
        await model.asked()
        await model.step(4)
        await gateway.pause(STUDENT, mode)
        await gateway.update_weights(STUDENT, WeightUpdate(model_path="/w", weight_version="v1"))
        assert (await gateway.states(STUDENT))[0].pause_mode is mode
        await gateway.resume(STUDENT)
        await model.asked(2 if mode is PauseMode.ABORT else 1)
        await model.step(10)
        (sample,) = await harness.samples(reply)
    assert sample.termination_reason == "10"
    assert [(span.version, span.start, span.end) for span in sample.trajectory.weight_spans] == [
        ("v0", 3, 7),
        ("v1", 7, 13),
    ]


async def test_a_client_of_openais_api_inside_a_child() -> None:
    model = ScriptedModel("one", "two")
    front = GenerationHttp(GatewaySettings(listen="127.0.0.1:0"), {STUDENT: model}, LoopClock())
    chatting = children(
        "tests.support.agents.child_handlers:ChattingChild", generation_backends={STUDENT: model}, api_front=front
    )
    async with front, chatting as harness:
        sample = await run_one(harness, "fine")
    assert sample.outcome is Outcome.SOLVED, sample.error
    assert sample.trajectory.generated_turns
    assert sample.termination_reason == f"{len(sample.trajectory)} tokens"
    assert len(front._keys) == 0


async def test_groups_are_scored_in_a_child() -> None:
    async with children("tests.support.agents.child_handlers:RankingChild") as harness:
        reply = await harness.submit([task_of("fine", repeat_times=3)])
        (done,) = (await harness.done(reply)).values()
        assert [reward.score for reward in done.rewards] == [0.0, 0.1, 0.2]
        assert {reward.details["pid"] for reward in done.rewards} <= set(harness.pids)
        assert os.getpid() not in harness.pids
        reply = await harness.submit([task_of("fine exit")])
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.FAILED
        assert "exit status 1" in done.reason


async def test_a_handler_that_blocks_does_not_hold_up_the_server(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path / "pipe")
    async with children() as harness:
        reply = await harness.submit([task_of(f"block {pipe}")])
        child = await pipe.told()
        await asyncio.sleep(0)
        assert harness.engine.submission(harness.selector(reply)).running_attempts == 1, "the server answers"
        assert is_there(child), "which blocks for an hour"
        assert (await run_one(harness, "fine")).outcome is Outcome.SOLVED, "and so do other children"
        (busy,) = [view for view in harness.runner.views() if view.state == "busy"]
        assert (busy.task_id, busy.sample_no, busy.attempt_no) == (reply.task_ids[0], 0, 1)
        assert busy.running_seconds > 0
        assert busy.evaluator_id == "agent"
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))


async def test_what_an_episode_left_running_ends_with_it() -> None:
    async with children(settings=runner_settings(max_runners=1)) as harness:
        assert (await run_one(harness, "leave_a_task")).outcome is Outcome.SOLVED
        assert (await run_one(harness, "fine")).outcome is Outcome.SOLVED


async def test_children_are_started_together_and_no_more_of_them_than_is_said() -> None:
    async with children(settings=runner_settings(max_runners=3, min_runners=3)) as harness:
        assert len(harness.pids) == 3
        samples = await harness.samples(await harness.submit([task_of("fine") for _ in range(30)]))
        assert {sample.reward.details["pid"] for sample in samples} <= set(harness.pids)


async def test_a_stop_may_ask_for_another_child() -> None:
    model = ControlledModel()
    async with children(generation_backends={STUDENT: model}, settings=runner_settings(max_runners=1)) as harness:
        reply = await harness.submit([task_of("generate 1")])
        await model.asked()
        (pid,) = harness.pids
        request = AbortRequest(selector=harness.selector(reply), wait=True, restart_runners=True)
        await harness.engine.abort(request)
        assert (await run_one(harness, "fine")).reward.details["pid"] != pid


async def test_samples_of_one_sub_task_are_one_childs() -> None:
    async with children() as harness:
        samples = await harness.samples(
            await harness.submit([task_of("fine", repeat_times=6, max_samples_per_subtask=3)])
        )
        pids = [sample.reward.details["pid"] for sample in sorted(samples, key=lambda sample: sample.sample_no)]
        assert len(set(pids[:3])) == 1
        assert len(set(pids[3:])) == 1
