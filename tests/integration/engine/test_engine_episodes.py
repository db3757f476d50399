"""What an episode has beside its tokens: the iteration, who generates, a folder, the agent's last words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import (
    STUDENT,
    TEACHER,
    ChatMessage,
    FinishReason,
    Generation,
    LogProbKind,
    ModelInfo,
)
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, StubbornAgent, hangs, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.generation import GenerationRequest

STEP = IterationContext(rollout_id=3, beta=0.3, t_max=7)


class Words:
    """A language model of one word."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.calls = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="words",
            vocab_size=10,
            context_length=10_000,
            weight_version="1",
            log_prob_kind=LogProbKind.SAMPLED,
        )

    async def encode(self, text: str) -> list[int]:
        return [len(text)]

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return [len(messages)]

    async def generate(self, request: GenerationRequest) -> Generation:
        self.calls += 1
        return Generation.of(token_ids=[self.token_id], log_probs=[-0.5], text="w", finish_reason=FinishReason.STOP)

    async def abort(self, rid: str) -> None: ...


class MixingAgent(BaseAgent):
    """Plays as many turns as its prompt says, each by whoever is chosen."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0])
        for _ in range(int(episode.sample.task.prompt.partition(" ")[0])):
            await episode.generate(role=episode.choose_role())
        if episode.attempt_no < episode.sample.task.config.retry.max_failure_retries + 1:
            raise TimeoutError
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


# The iteration


async def test_every_episode_sees_the_iteration_of_its_submission_also_when_it_is_tried_again() -> None:
    seen: list[tuple[int, IterationContext | None]] = []

    async def look(episode: Episode) -> AgentResult:
        seen.append((episode.attempt_no, episode.iteration))
        if episode.attempt_no == 1:
            raise TimeoutError
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(look=look))) as harness:
        tasks = [task_of("look", retry=RetryPolicy(max_failure_retries=1))]
        await harness.done(await harness.submit(tasks, 1, iteration=STEP))
        await harness.done(await harness.submit(tasks, 2))
    assert seen == [(1, STEP), (2, STEP), (1, None), (2, None)]


async def test_the_iteration_survives_a_restart() -> None:
    journal, seen = SurvivingJournal(), []
    async with running_engine(spec_of(GatedAgent()), journal=journal) as harness:
        reply = await harness.submit([task_of("look", repeat_times=2)], iteration=STEP)
        await harness.until_started(reply, 2)

    async def look(episode: Episode) -> AgentResult:
        seen.append(episode.iteration)
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(look=look)), journal=journal) as harness:
        await harness.done(reply)
    assert seen == [STEP, STEP]


async def test_the_same_request_of_another_iteration_is_another_request() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        first = await harness.submit([task_of()], request_id="r", iteration=STEP)
        assert await harness.submit([task_of()], request_id="r", iteration=STEP) == first
        with pytest.raises(AlreadyExistsError):
            await harness.submit([task_of()], request_id="r")


@pytest.mark.parametrize(
    ("iteration", "field"),
    [
        (IterationContext(rollout_id=-1), "iteration.rollout_id"),
        (IterationContext(rollout_id=2**63), "iteration.rollout_id"),
        (IterationContext(rollout_id=0, beta=1.5), "iteration.beta"),
        (IterationContext(rollout_id=0, beta=math.nan), "iteration.beta"),
        (IterationContext(rollout_id=0, t_max=-1), "iteration.t_max"),
    ],
)
async def test_an_iteration_that_cannot_be_is_refused(iteration: IterationContext, field: str) -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        with pytest.raises(InvalidArgumentError) as raised:
            await harness.submit([task_of()], iteration=iteration)
        assert [violation.field for violation in raised.value.violations] == [field]
        assert harness.engine.last_sequence == 0


# Who generates


async def sources(beta: float | None, *tasks: Task, rollout_id: int = 0) -> list[list[str]]:
    """Who generated each turn of each sample."""
    engines = {STUDENT: Words(1), TEACHER: Words(2)}
    iteration = None if beta is None else IterationContext(rollout_id=rollout_id, beta=beta)
    async with running_engine(spec_of(MixingAgent()), generation_backends=engines) as harness:
        reply = await harness.submit(tasks, iteration=iteration)
        samples = sorted(await harness.samples(reply), key=lambda s: (reply.task_ids.index(s.task_id), s.sample_no))
    turns = [[turn.source for turn in sample.trajectory.turns][1:] for sample in samples]
    for sample, made in zip(samples, turns, strict=True):
        said = {1: STUDENT, 2: TEACHER}
        assert [said[token] for token in sample.trajectory.token_ids.tolist()[1:]] == made
    attempts = tasks[0].config.retry.max_failure_retries + 1
    assert engines[TEACHER].calls == attempts * sum(turn == TEACHER for made in turns for turn in made)
    return turns


def share(turns: list[list[str]]) -> float:
    flat = [turn for made in turns for turn in made]
    return flat.count(TEACHER) / len(flat)


@pytest.mark.parametrize("beta", [0.05, 0.3, 0.5, 0.9])
async def test_a_turn_is_the_teachers_with_probability_beta(beta: float) -> None:
    turns = await sources(beta, *(task_of(f"20 problem {number}", repeat_times=4) for number in range(50)))
    count = sum(map(len, turns))
    assert count == 4_000
    deviation = math.sqrt(beta * (1 - beta) / count)
    assert abs(share(turns) - beta) < 4 * deviation
    # Neither the place of a turn nor the sample decides.
    assert all(abs(share([[made[turn] for made in turns]]) - beta) < 4 * deviation * math.sqrt(20) for turn in (0, 19))
    assert len({tuple(made) for made in turns}) > 20


async def test_beta_0_never_asks_the_teacher_and_beta_1_nobody_else() -> None:
    tasks = [task_of(f"10 problem {number}") for number in range(20)]
    assert share(await sources(0.0, *tasks)) == 0
    assert share(await sources(None, *tasks)) == 0
    assert share(await sources(1.0, *tasks)) == 1


async def test_the_draw_is_fixed_by_step_prompt_data_sample_and_turn() -> None:
    task = task_of("30 problem", repeat_times=2)
    again = task_of("30 problem", repeat_times=2, retry=RetryPolicy(max_failure_retries=1))
    with_data = Task(config=TaskConfig(task_type="agent"), prompt="30 problem", data=b"other")
    (first, second) = await sources(0.5, task)
    assert first != second
    assert await sources(0.5, again) == [first, second], "an attempt made again mixes alike"
    assert (await sources(0.5, task, rollout_id=1))[0] != first
    assert (await sources(0.5, with_data))[0] != first
    assert (await sources(0.5, task_of("30 other")))[0] != first


async def test_evals_are_the_students_unless_their_iteration_says_otherwise() -> None:
    evals = [task_of(f"10 problem {number}", is_eval=True) for number in range(10)]
    assert share(await sources(0.0, *evals)) == 0
    assert share(await sources(1.0, *evals)) == 1


async def test_a_teacher_that_is_missing_is_a_clear_error() -> None:
    engines = {STUDENT: Words(1)}
    async with running_engine(spec_of(MixingAgent()), generation_backends=engines) as harness:
        reply = await harness.submit([task_of("3")], iteration=IterationContext(rollout_id=0, beta=1e-9))
        (sample,) = await harness.samples(reply)
        fine = await harness.submit([task_of("3")], 1, iteration=IterationContext(rollout_id=0))
        assert [s.outcome for s in await harness.samples(fine)] == [Outcome.SOLVED]
    assert (sample.outcome, sample.phase) == (Outcome.INFRA_OTHER, "run")
    assert "add [generation.teacher]" in sample.error


# A folder


async def test_a_workdir_is_made_when_it_is_asked_for_and_gone_after_the_episode(tmp_path: Path) -> None:
    seen: list[Path] = []

    async def works(episode: Episode) -> AgentResult:
        folder = episode.workdir
        assert folder is episode.workdir
        assert list(folder.iterdir()) == []
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        seen.append(folder)
        if episode.sample.sample_no == 1:
            raise ValueError("half way")
        return AgentResult()

    agent = ScriptedAgent(works=works)
    settings = EngineSettings(workdir_root=str(tmp_path / "root"))
    async with running_engine(spec_of(agent), settings=settings) as harness:
        plain = await harness.submit([task_of("plain")])
        await harness.done(plain)
        assert not (tmp_path / "root").exists(), "nobody asked"
        reply = await harness.submit([task_of("works", repeat_times=3)], 1)
        await harness.done(reply)
    assert len(set(seen)) == 3
    assert all(folder.name.startswith(reply.task_ids[0]) for folder in seen)
    assert all(tmp_path / "root" in folder.parents for folder in seen)
    assert not any(folder.exists() for folder in seen)
    assert list((tmp_path / "root").iterdir()) == []


async def test_two_engines_under_one_root_do_not_meet(tmp_path: Path) -> None:
    folders: list[Path] = []

    async def works(episode: Episode) -> AgentResult:
        folders.append(episode.workdir)
        return AgentResult()

    settings = EngineSettings(workdir_root=str(tmp_path))
    for _ in range(2):
        async with running_engine(spec_of(ScriptedAgent(works=works)), settings=settings) as harness:
            await harness.done(await harness.submit([task_of("works")]))
    assert folders[0].parent != folders[1].parent


async def test_an_aborted_episode_leaves_no_folder_and_one_that_is_over_makes_none(tmp_path: Path) -> None:
    episodes: list[Episode] = []

    async def works(episode: Episode) -> AgentResult:
        (episode.workdir / "file").write_text("x")
        return await hangs(episode)

    async def leaks(episode: Episode) -> AgentResult:
        episodes.append(episode)
        return AgentResult()

    clock = FakeClock()
    spec = spec_of(ScriptedAgent(works=works, leaks=leaks), run_timeout_seconds=10.0)
    async with running_engine(spec, clock=clock, settings=EngineSettings(workdir_root=str(tmp_path))) as harness:
        await harness.done(await harness.submit([task_of("leaks")]))
        with pytest.raises(FailedPreconditionError, match="over"):
            _ = episodes[0].workdir
        reply = await harness.submit([task_of("works")], 1)
        await harness.until_started(reply, 1)
        await settle()
        await clock.advance(11)
        await harness.done(reply)
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240 - one look at a local folder


# What is recorded


async def test_the_agents_own_reason_is_kept_when_it_raises_or_is_stopped() -> None:
    async def gives_up(episode: Episode) -> AgentResult:
        episode.termination_reason = "tool_loop"
        raise ConnectionResetError("gone")

    async def stops(episode: Episode) -> AgentResult:
        episode.termination_reason = "waiting"
        return await hangs(episode)

    async def says_nonsense(episode: Episode) -> AgentResult:
        episode.termination_reason = 7  # type: ignore[assignment]
        raise ConnectionResetError("gone")

    async def says_both(episode: Episode) -> AgentResult:
        episode.termination_reason = "asked"
        return AgentResult(termination_reason="returned")

    clock = FakeClock()
    agent = ScriptedAgent(gives_up=gives_up, stops=stops, says_nonsense=says_nonsense, says_both=says_both)
    async with running_engine(spec_of(agent, run_timeout_seconds=10.0), clock=clock) as harness:
        reply = await harness.submit([task_of(p) for p in ("gives_up", "stops", "says_nonsense", "says_both")])
        await harness.until_started(reply, 4)
        await settle()
        await clock.advance(11)
        samples = {sample.task_id: sample for sample in await harness.samples(reply)}
    said = [(samples[task_id].outcome, samples[task_id].termination_reason) for task_id in reply.task_ids]
    assert said == [
        (Outcome.INFRA_CONN, "tool_loop"),
        (Outcome.AGENT_TIMEOUT, "waiting"),
        (Outcome.INFRA_CONN, ""),
        (Outcome.SOLVED, "returned"),
    ]


async def test_a_reason_outlives_a_scorer_that_raises() -> None:
    class BrokenScorer(ScriptedAgent):
        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            raise ValueError("no verdict")

    async def runs(_: Episode) -> AgentResult:
        return AgentResult(termination_reason="max_turns")

    async with running_engine(spec_of(BrokenScorer(runs=runs))) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("runs")]))
    assert (sample.phase, sample.termination_reason, sample.outcome) == ("eval", "max_turns", Outcome.INFRA_OTHER)


@pytest.mark.parametrize("generates", [True, False])
async def test_a_second_conversation_in_one_context_is_refused(*, generates: bool) -> None:
    """It would stand behind the first one as another, which no template of the model describes."""

    async def twice(episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", "first")])
        if generates:
            await episode.generate()
        await episode.observe_chat([ChatMessage("user", "second")])
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(twice=twice)), generation_backends={STUDENT: Words(1)}) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("twice")]))
    assert sample.outcome is Outcome.INFRA_OTHER
    assert "FailedPreconditionError" in sample.error
    assert "observe_reply(episode, text) from py_scheduler.integrations.chat_turns" in sample.error
    assert len(sample.trajectory.turns) == 1 + generates


async def test_samples_say_when_they_began() -> None:
    clock, agent = FakeClock(), StubbornAgent(hangs=hangs)
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None, run_timeout_seconds=10.0)
    async with running_engine(spec, clock=clock, settings=EngineSettings(stop_grace_seconds=5.0)) as harness:
        began = clock.unix_time()
        reply = await harness.submit([task_of("hangs"), task_of("plain"), task_of("stubborn"), task_of("hangs")])
        await settle()
        await clock.advance(10)
        await clock.advance(15)
        await harness.engine.drain(0)
        samples = {sample.task_id: sample for sample in await harness.samples(reply)}
        agent.free.set()
        await settle()
    times = [samples[task_id].started_unix_seconds - began for task_id in reply.task_ids]
    assert times[:3] == [0.0, 10.0, 10.0], "the last is of one that had to be given up"
