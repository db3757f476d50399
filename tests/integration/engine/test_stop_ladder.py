"""The one stop ladder: every cause of a stop, at every moment, whatever the handler does, for attempts and for the
scores of groups.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.execution.run_sample import InlineRunner
from py_scheduler.scheduler.settings import EngineSettings
from py_scheduler.scheduler.supervisor import EVERYTHING
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from py_scheduler.domain.evaluator import Episode, EvaluatorSpec
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.attempt import AttemptReport, RunningAttempt, RunningGroup
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.workers import Worker
    from tests.support.harness import Harness

GRACE = 5.0
TIMEOUT = 20.0
"""Of a phase, and of the eval of a group."""
END = 100.0

Kind = Literal["run", "eval", "group"]
KINDS: tuple[Kind, ...] = ("run", "eval", "group")
Kill = Literal["none", "works", "fails"]
KILLS: tuple[Kill, ...] = ("none", "works", "fails")


@dataclass
class Case:
    """What happens, in seconds from the handler's begin.

    timeout: whether the phase has its limit. attempt_timeout, task_deadline: None for none. pause: of the generation
    backend, from and to. aborts, shutdown: when. returns_after: how long after it was told the handler comes back;
    None: never. kill: whether its runner can be killed, and whether that ends the handler.
    """

    kind: Kind
    timeout: bool = False
    attempt_timeout: float | None = None
    task_deadline: float | None = None
    pause: tuple[float, float] | None = None
    aborts: tuple[float, ...] = ()
    shutdown: float | None = None
    returns_after: float | None = None
    kill: Kill = "none"

    @property
    def stopped_at(self) -> float | None:
        """The first stop, which is the one that counts."""
        limits = [TIMEOUT] if self.timeout else []
        if self.kind != "group" and self.attempt_timeout is not None:
            limits.append(self.attempt_timeout)
        if self.kind != "group" and self.pause is not None:
            begins, ends = self.pause
            limits = [limit + (ends - begins) if begins < limit else limit for limit in limits]
        others = [when for when in (self.task_deadline, self.shutdown) if when is not None]
        return min([*limits, *self.aborts, *others], default=None)

    @property
    def killed_at(self) -> list[float]:
        """When its runner is killed, if it is."""
        if self.stopped_at is None or self.kill == "none" or (self.returns_after or GRACE) < GRACE:
            return []
        return [self.stopped_at + GRACE]

    @property
    def gone_at(self) -> float | None:
        """When nothing waits for the handler any more: it is back, or the ladder is at its end."""
        if self.stopped_at is None:
            return None
        whole = 2 * GRACE if self.kill == "fails" else GRACE
        return self.stopped_at + min(whole, whole if self.returns_after is None else self.returns_after)


class Deaf(SolvingAgent):
    """Stays in one of its methods until it is `released`, whoever cancels it. `told`: when it was cancelled."""

    def __init__(self, kind: Kind, clock: FakeClock) -> None:
        self.released = asyncio.Event()
        self.begun = asyncio.Event()
        self.told: list[float] = []
        self._kind = kind
        self._clock = clock

    async def _stay(self, kind: Kind) -> None:
        if kind != self._kind:
            return
        self.begun.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.told.append(self._clock.now)

    async def run(self, episode: Episode) -> AgentResult:
        await self._stay("run")
        return await super().run(episode)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        await self._stay("eval")
        return await super().eval(episode, result)


class DeafScorer(Deaf):
    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        await self._stay("group")
        return [Reward(score=1.0) for _ in samples]


class KillableRunner(InlineRunner):
    """Runs in the loop, and may be able to end its handler by force. `killed_at`: when it tried. is_obeyed: whether
    that helps.
    """

    def __init__(self, agent: Deaf, clock: FakeClock, *, can_kill: bool, is_obeyed: bool) -> None:
        self.killed_at: list[float] = []
        self.running: RunningAttempt | None = None
        self._agent = agent
        self._clock = clock
        self._can_kill = can_kill
        self._is_obeyed = is_obeyed

    def _kill(self) -> None:
        self.killed_at.append(self._clock.now)
        if self._is_obeyed:
            self._agent.released.set()

    def run(
        self, running: RunningAttempt, worker: Worker, spec: EvaluatorSpec, services: EpisodeServices
    ) -> Coroutine[Any, Any, AttemptReport]:
        self.running = running
        running.kill = self._kill if self._can_kill else None
        return super().run(running, worker, spec, services)

    async def score_group(
        self, group: RunningGroup, worker: Worker, spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        group.kill = self._kill if self._can_kill else None
        return await super().score_group(group, worker, spec)


@dataclass
class Seen:
    """What came of a case, in the same seconds."""

    told: list[float]
    killed_at: list[float]
    gone_at: float | None


async def seen_of(case: Case) -> Seen:
    """Runs it on an engine, to its end."""
    clock = FakeClock()
    agent = (DeafScorer if case.kind == "group" else Deaf)(case.kind, clock)
    runner = KillableRunner(agent, clock, can_kill=case.kill != "none", is_obeyed=case.kill == "works")
    limits: dict[str, Any] = {f"{'run' if case.kind == 'run' else 'eval'}_timeout_seconds": TIMEOUT}
    spec = spec_of(agent, **(limits if case.timeout else {}))
    engine_settings = EngineSettings(stop_grace_seconds=GRACE)
    async with running_engine(spec, clock=clock, runners={"agent": runner}, settings=engine_settings) as harness:
        config: dict[str, Any] = {
            "attempt_timeout_seconds": case.attempt_timeout,
            "task_deadline_seconds": case.task_deadline,
        }
        reply = await harness.submit([task_of(**config)])
        await agent.begun.wait()
        zero = clock.now
        gone = asyncio.ensure_future(_gone_at(harness, clock))
        abort = AbortRequest(selector=harness.selector(reply))
        for when, event in _events_of(case):
            while clock.now < zero + when:
                await _advance(clock, agent, case, zero + when)
            if event == "abort":
                await harness.engine.abort(abort)
            elif event == "shutdown":
                gone_after_drain = asyncio.ensure_future(harness.engine.drain(0.0))
                gone_after_drain.add_done_callback(asyncio.Task.result)
            elif runner.running is not None:
                (runner.running.stop_clock if event == "pause" else runner.running.start_clock)()
            await settle()
        seen = Seen(
            told=[when - zero for when in agent.told],
            killed_at=[when - zero for when in runner.killed_at],
            gone_at=gone.result() - zero if gone.done() else None,
        )
        gone.cancel()
        agent.released.set()
        await settle()
        await harness.engine._supervisor.wait_stopped(EVERYTHING)
        assert harness.engine._supervisor.unconfirmed(EVERYTHING) == ()
        return seen


async def _gone_at(harness: Harness, clock: FakeClock) -> float:
    await harness.engine._supervisor.wait_stopped(EVERYTHING)
    return clock.now


def _events_of(case: Case) -> list[tuple[float, str]]:
    events = [(when, "abort") for when in case.aborts]
    if case.shutdown is not None:
        events.append((case.shutdown, "shutdown"))
    if case.pause is not None:
        events += [(case.pause[0], "pause"), (case.pause[1], "resume")]
    return [*sorted(events), (END, "end")]


async def _advance(clock: FakeClock, agent: Deaf, case: Case, target: float) -> None:
    """Moves on, and lets the handler come back in between if that is when it does."""
    step = 0.25
    await clock.advance(min(step, target - clock.now))
    if case.returns_after is not None and agent.told and clock.now >= agent.told[0] + case.returns_after:
        agent.released.set()
        await settle()


def check(case: Case) -> None:
    seen = asyncio.run(seen_of(case))
    assert seen.told == ([] if case.stopped_at is None else [case.stopped_at]), "told once, by the first stop"
    assert (seen.killed_at, seen.gone_at) == (case.killed_at, case.gone_at)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [10.0, 15.0, 19.5, 20.0])
def test_an_abort_near_a_timeout_leaves_the_handler_its_whole_grace(kind: Kind, at: float) -> None:
    check(Case(kind, timeout=True, aborts=(at,), returns_after=4.75))
    check(Case(kind, timeout=True, aborts=(at,), kill="works"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_during_which_aborts_and_a_shutdown_come_keeps_its_own_grace(kind: Kind) -> None:
    check(Case(kind, timeout=True, aborts=(21.0, 24.5), shutdown=24.75, kill="fails"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_deadline_near_a_timeout_leaves_the_whole_grace_and_so_does_a_shutdown(kind: Kind) -> None:
    check(Case(kind, timeout=True, task_deadline=19.5, returns_after=4.5))
    check(Case(kind, timeout=True, shutdown=19.5, returns_after=4.5))


@pytest.mark.parametrize("kind", ["run", "eval"])
def test_a_phase_whose_clock_goes_on_while_it_stops_shortens_nothing(kind: Kind) -> None:
    check(Case(kind, timeout=True, pause=(18.0, 20.0), aborts=(19.0,), returns_after=4.75))


times = st.sampled_from([0.5, 9.5, 14.75, 15.0, 15.25, 18.0, 19.5, 20.0, 20.25, 22.0, 24.75, 25.0, 29.5, 30.0])
cases = st.builds(
    Case,
    st.sampled_from(KINDS),
    timeout=st.booleans(),
    attempt_timeout=st.none() | times,
    task_deadline=st.none() | times,
    pause=st.none() | st.tuples(times, times).filter(lambda pause: pause[0] < pause[1]),
    aborts=st.lists(times, max_size=3).map(tuple),
    shutdown=st.none() | times,
    returns_after=st.none() | st.sampled_from([0.25, 2.0, 4.75]),
    kill=st.sampled_from(KILLS),
)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_the_first_stop_has_its_whole_grace_whatever_else_happens(case: Case) -> None:
    check(case)


class DeafOnce(DeafScorer):
    """Does not come back from the group of "deaf", and scores every other."""

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        if task.prompt == "deaf":
            await self._stay("group")
        return [Reward(score=1.0) for _ in samples]


async def test_a_group_score_that_is_given_up_leaves_its_worker_s_place_to_the_next() -> None:
    clock = FakeClock()
    agent = DeafOnce("group", clock)
    engine_settings = EngineSettings(stop_grace_seconds=GRACE, max_running_samples=1)
    async with running_engine(spec_of(agent), clock=clock, settings=engine_settings) as harness:
        deaf = await harness.submit([task_of("deaf")])
        await agent.begun.wait()
        await harness.engine.abort(AbortRequest(selector=harness.selector(deaf)))
        other = await harness.submit([task_of("other")], batch_id=1)
        await clock.advance(GRACE)
        try:
            async with asyncio.timeout(10):
                (done,) = (await harness.done(other)).values()
        finally:
            was_released = agent.released.is_set()
            agent.released.set()
        assert not was_released
        assert [reward.score for reward in done.rewards] == [1.0]


class StopsSlowly(SolvingAgent):
    """Cleans up when it is cancelled, until it may end. `was_disturbed`: cancelled once more as it did."""

    def __init__(self) -> None:
        self.begun, self.cleaning_up, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.was_disturbed = False

    async def run(self, episode: Episode) -> AgentResult:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaning_up.set()
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.was_disturbed = True
                raise
        raise AssertionError("unreachable")


async def test_a_handler_that_is_stopping_as_the_engine_closes_is_not_told_again() -> None:
    agent = StopsSlowly()
    async with running_engine(spec_of(agent)) as harness:
        reply = await harness.submit([task_of(), task_of("waits")])
        await agent.begun.wait()
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply)))
        await agent.cleaning_up.wait()
        asyncio.get_running_loop().call_later(0.05, agent.may_end.set)
    assert not agent.was_disturbed
    assert harness.engine.stranded_workers == 0
