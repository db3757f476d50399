"""Whatever a handler or a caller says, the journal carries it; and a journal that fails all the same says so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from py_scheduler.adapters.sqlite_journal.frames import draft_of
from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.errors import ResourceExhaustedError
from tests.support.handlers import GatedAgent, SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task

SURROGATE = "odd \ud800"


class Text(str):
    """No plain str, which is what encoders take."""

    __slots__ = ()


class SayingAgent(BaseAgent):
    """Returns, or raises, what it was told to."""

    def __init__(self, result: Any = None, reward: Any = None) -> None:
        self._result = AgentResult() if result is None else result
        self._reward = Reward(score=1.0) if reward is None else reward

    async def run(self, episode: Episode) -> AgentResult:
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return self._reward


class GroupAgent(SayingAgent):
    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> list[Reward]:
        return [self._reward for _ in samples]


ODD: dict[str, BaseAgent] = {
    "big integer in details": SayingAgent(reward=Reward(score=1.0, details={"n": 2**70, "deep": [{"n": -(2**64)}]})),
    "big integer in a group": GroupAgent(reward=Reward(score=1.0, details={"n": 2**70})),
    "big integer as score": SayingAgent(reward=Reward(score=2**70)),
    "key of details": SayingAgent(reward=Reward(score=1.0, details={SURROGATE: 1, "t": Text("x")})),
    "name of a metric": SayingAgent(AgentResult(metrics={SURROGATE: 1.0, Text("m"): 2**70})),
    "termination_reason": SayingAgent(AgentResult(termination_reason=Text(SURROGATE))),
    "plain subclass": SayingAgent(AgentResult(termination_reason=Text("stop"), answer=Text("a"))),
    "bytes of its own kind": SayingAgent(AgentResult(payload=bytearray(b"x"))),  # type: ignore[arg-type]
    "words of an error": SayingAgent(ValueError(SURROGATE)),
}


@pytest.mark.parametrize("odd", ODD)
async def test_what_a_handler_says_is_journalled_whatever_it_is(tmp_path: Path, odd: str) -> None:
    async with running_engine(spec_of(ODD[odd]), journal=SqliteJournal(tmp_path)) as harness, asyncio.timeout(20):
        reply = await harness.submit([task_of(repeat_times=2)])
        assert len(await harness.samples(reply)) == 2
        assert harness.engine.can_record


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just(2**64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    details=st.dictionaries(st.text(st.characters()), JSON_LIKE, max_size=3),
    metrics=st.dictionaries(st.text(st.characters()), st.floats() | st.integers(-(2**80), 2**80), max_size=3),
    reason=st.text(st.characters()),
)
def test_anything_that_looks_like_json_can_be_encoded(
    details: dict[str, Any], metrics: dict[str, float], reason: str
) -> None:
    handler = SayingAgent(AgentResult(metrics=metrics, termination_reason=reason), Reward(score=1.0, details=details))

    async def play() -> None:
        async with running_engine(spec_of(handler)) as harness:
            reply = await harness.submit([task_of()])
            draft_of(await harness.records_until_done(reply))

    asyncio.run(play())


async def test_a_reason_of_an_abort_is_journalled_whatever_it_says(tmp_path: Path) -> None:
    async with (
        running_engine(spec_of(GatedAgent()), journal=SqliteJournal(tmp_path)) as harness,
        asyncio.timeout(20),
    ):
        reply = await harness.submit([task_of()])
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), reason=SURROGATE))
        assert len(await harness.done(reply)) == 1


async def test_a_journal_that_fails_by_itself_refuses_everything_and_lets_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(tmp_path)) as harness, asyncio.timeout(20):
        first = await harness.submit([task_of()], batch_id="first")
        await harness.done(first)
        assert harness.engine.can_record

        def fails(*_: object) -> None:
            raise KeyError("of its own")

        monkeypatch.setattr("py_scheduler.adapters.sqlite_journal.writer.framed", fails)
        for batch_id in ("under way", "later"):
            with pytest.raises(ResourceExhaustedError, match=r"KeyError.*of its own.*restart the server") as refused:
                await harness.submit([task_of()], batch_id=batch_id)
            assert refused.value.retry_after_seconds is None
        assert not harness.engine.can_record
