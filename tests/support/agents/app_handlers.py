"""Handlers that the tests of the command name in configurations."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from py_scheduler.domain.evaluator import BaseAgent, Episode, EvaluatorSpec
from py_scheduler.domain.results import AgentResult, Reward, SampleDone
from py_scheduler.domain.task import Batch, Task


def last_first(tasks: Sequence[Task], specs: Mapping[str, EvaluatorSpec]) -> list[Batch]:
    """A batching strategy: each task by itself, in the opposite order."""
    assert tasks[0].config.task_type in specs
    return [Batch(task.config.task_type, [task]) for task in reversed(tasks)]


NO_STRATEGY = "not to be called"


def made_rows(epoch: int, *, count: int) -> Iterator[dict[str, object]]:
    """A data set: rows that say which epoch they are of."""
    for number in range(count):
        yield {"prompt": f"{epoch}.{number}", "level": number}


class Echo(BaseAgent):
    """Answers its prompt, after `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def run(self, episode: Episode) -> AgentResult:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return AgentResult(answer=episode.sample.task.prompt)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={"answer": result.answer})


class Recording(Echo):
    """Has tokens to learn from, without a language model."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([1, 2, 3], episode.sample.task.prompt)
        return await super().run(episode)


class Gated(Echo):
    """Waits until there is a file `gate`."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self._gate = Path(gate)

    async def run(self, episode: Episode) -> AgentResult:
        while not self._gate.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return await super().run(episode)


class StepTeller(BaseAgent):
    """Tells back what it was told of the step, and gives each sample of a group its number.

    "unlucky": each first attempt fails for want of a connection. "unscorable": the group's score fails.
    """

    async def run(self, episode: Episode) -> AgentResult:
        if episode.sample.task.prompt == "unlucky" and episode.attempt_no == 1:
            raise ConnectionRefusedError
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        said = {} if episode.iteration is None else msgspec.structs.asdict(episode.iteration)
        return Reward(score=1.0, details={**said, "is_eval": episode.sample.task.config.is_eval})

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        if task.prompt == "unscorable":
            message = "no judge"
            raise ValueError(message)
        return [Reward(score=float(sample.sample_no), details={"of": len(samples)}) for sample in samples]


class Deaf(Echo):
    """Ignores every cancel."""

    async def run(self, episode: Episode) -> AgentResult:
        while True:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                continue


class Generating(Echo):
    """Asks the student once."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0, 1, 2])
        await episode.generate()
        return AgentResult()


class Stubborn(Echo):
    """Ignores every cancel until it is let go."""

    _may_end = False

    @classmethod
    def let_go(cls) -> None:
        cls._may_end = True

    async def run(self, episode: Episode) -> AgentResult:
        while not self._may_end:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return AgentResult()


class Exiting(Echo):
    """Ends the process from a child task, or tries to."""

    async def run(self, episode: Episode) -> AgentResult:
        async def child() -> None:
            await asyncio.sleep(0)
            sys.exit(3)

        if episode.sample.task.prompt == "exit":
            await asyncio.gather(child())
        return AgentResult(answer=episode.sample.task.prompt)


class Blocking(Echo):
    """Holds the whole event loop, once it has made the file that its prompt names."""

    async def run(self, episode: Episode) -> AgentResult:
        Path(episode.sample.task.prompt).touch()  # noqa: ASYNC240 - blocking is what this handler is for
        time.sleep(3_600)  # noqa: ASYNC251 - what this handler is for
        return AgentResult()


class Unreachable(Blocking):
    """The thread that it blocks hears of no signal, as when one came just before."""

    async def run(self, episode: Episode) -> AgentResult:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return await super().run(episode)


class Broken(Echo):
    def __init__(self) -> None:
        message = "no licence"
        raise RuntimeError(message)


NOT_A_CLASS = 7


class Failing(Echo):
    """Raises, whatever it is asked."""

    async def run(self, episode: Episode) -> AgentResult:
        raise ValueError(episode.sample.task.prompt)


class Large(Echo):
    """As many tokens as its prompt says."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(range(int(episode.sample.task.prompt)))
        return AgentResult()


class Napping(Echo):
    """Holds the event loop for as many seconds as its prompt says."""

    async def run(self, episode: Episode) -> AgentResult:
        time.sleep(float(episode.sample.task.prompt))  # noqa: ASYNC251 - what this handler is for
        return AgentResult()


class NoAgent:
    pass


class Delivering(Echo):
    """Has tokens and a payload. "generate": tokens of the language model too; "slow": but for its first sample, over
    when there is a file `gate`.
    """

    def __init__(self, gate: str = "") -> None:
        super().__init__()
        self._gate = Path(gate)

    async def run(self, episode: Episode) -> AgentResult:
        prompt = episode.sample.task.prompt
        episode.observe([1, 2, 3 + episode.sample.sample_no], prompt)
        if prompt == "generate":
            await episode.generate()
        while prompt == "slow" and episode.sample.sample_no and not self._gate.exists():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        return AgentResult(answer=prompt, payload=f"{prompt} {episode.sample.sample_no};".encode())
