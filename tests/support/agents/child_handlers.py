"""A handler for children: what it does is said by the task's prompt, word by word.

What the test waits for comes through a named pipe, so that nobody sleeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from py_scheduler.adapters.children import frames as _frames
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import ChatMessage
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.errors import ContextOverflowError, GenerationError
from tests.support.agents.chat_client import ChatClient, converse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task

_MIB = 1 << 20
TOLD_BYTES = 8
LEAKED: list[bytes] = []


def tell(pipe: str) -> None:
    """Which process it is that has come here."""
    Path(pipe).write_text(f"{os.getpid():{TOLD_BYTES}}", encoding="ascii")


def open_descriptors() -> list[int]:
    """A child's socket has the number that it had in the server: any, where that has much open."""
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


class OddAgent(BaseAgent):
    """The name of the constructor's argument `fault` says what is wrong with it."""

    def __init__(self, greeting: str = "hello", fault: str = "") -> None:
        self.greeting = greeting
        self.played = 0
        if fault == "raises":
            raise ValueError("a model file is missing")
        if fault == "exits":
            os._exit(7)
        if fault == "hangs":
            time.sleep(3600)
        if fault.startswith("until:"):
            there = Path(fault.removeprefix("until:"))
            if there.with_suffix(".kills").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if not there.exists():
                raise ValueError("not yet")

    async def run(self, episode: Episode) -> AgentResult:
        name, *words = episode.sample.task.prompt.split()
        self.played += 1
        said = await getattr(self, f"do_{name}")(episode, *words)
        if isinstance(said, AgentResult):
            return said
        return AgentResult(termination_reason=said or "", answer=self.greeting, reward_inputs={"odd": object()})

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        assert set(result.reward_inputs) == {"odd"}, "it never left the child"
        return Reward(score=1.0, details={"pid": os.getpid(), "played": self.played, "answer": result.answer})

    async def do_fine(self, episode: Episode, *_: str) -> str:
        return ""

    async def do_say(self, episode: Episode, *names: str) -> str:
        return json.dumps({name: os.environ.get(name) for name in names} | {"all": sorted(os.environ)})

    async def do_wait(self, episode: Episode, pipe: str) -> None:
        await asyncio.to_thread(tell, pipe)
        await asyncio.Event().wait()

    async def do_wait_once(self, episode: Episode, pipe: str, mark: str) -> str:
        if Path(mark).exists():
            return f"attempt {episode.attempt_no}"
        Path(mark).touch()
        await self.do_wait(episode, pipe)
        return ""

    async def do_exit(self, episode: Episode, status: str) -> None:
        sys.exit(int(status))

    async def do_exit_in_a_task(self, episode: Episode) -> None:
        async def leave() -> None:
            sys.exit(1)

        await asyncio.create_task(leave())

    async def do_exit_hard(self, episode: Episode, status: str) -> None:
        os._exit(int(status))

    async def do_die(self, episode: Episode) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def do_block(self, episode: Episode, pipe: str) -> None:
        tell(pipe)
        time.sleep(3600)

    async def do_refuse_to_stop(self, episode: Episode, pipe: str) -> None:
        tell(pipe)  # Not in a thread: a stop that came while it is waited for would be obeyed.
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    async def do_return_late(self, episode: Episode) -> AgentResult:
        """Attempt 1 takes its stop for a reason to return."""
        said = f"attempt {episode.attempt_no}"
        try:
            await asyncio.sleep(3600 if episode.attempt_no == 1 else 0)
        except asyncio.CancelledError:
            pass
        return AgentResult(
            termination_reason=said,
            reward_inputs={"odd": object()},
            metrics={"attempt": float(episode.attempt_no)},
            payload=said.encode(),
        )

    async def do_leave_a_daemon(self, episode: Episode, status: str) -> None:
        """It has a session of its own, where no kill of its parent's reaches it, and holds what that had open."""
        if os.fork() == 0:
            os.setsid()
            signal.alarm(20)
            signal.pause()
        os._exit(int(status))

    async def do_say_too_much(self, episode: Episode) -> str:
        vars(_frames)["MAX_FRAME_BYTES"] = 2_000
        return "word " * 1_000

    async def do_open_nothing_more(self, episode: Episode) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    async def do_close_everything(self, episode: Episode) -> None:
        os.closerange(0, max(open_descriptors()) + 1)
        await asyncio.Event().wait()

    async def do_talk_nonsense(self, episode: Episode, frame: str) -> None:
        for descriptor in open_descriptors():
            try:
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, bytes.fromhex(frame))
            except OSError:
                pass
        await asyncio.Event().wait()

    async def do_print(self, episode: Episode) -> None:
        os.write(1, b"on its own standard output")
        sys.stdout.write("likewise")

    async def do_speak_oddly(self, episode: Episode) -> None:
        class OddError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("it has no words")

        raise OddError

    async def do_show_second(self, episode: Episode, pipe: str) -> None:
        if episode.sample.sample_no == 1:
            episode.show("turn", 3)
            episode.show("mood", "\ud800 odd")
            await self.do_wait(episode, pipe)

    async def do_leak(self, episode: Episode, mib: str) -> None:
        LEAKED.append(os.urandom(_MIB) * int(mib))

    async def do_grow(self, episode: Episode) -> None:
        while True:
            LEAKED.append(os.urandom(_MIB) * 16)
            await asyncio.sleep(0.01)

    async def do_raise(self, episode: Episode) -> None:
        episode.termination_reason = "gave up"
        raise ValueError("the handler is broken")

    async def do_generate(self, episode: Episode, turns: str) -> str:
        await episode.observe_chat([ChatMessage("user", "hello")])
        for _ in range(int(turns)):
            await episode.generate(role=episode.choose_role())
            episode.observe([7], "tool")
        return f"{len(episode.token_ids)} tokens, {episode.remaining_seconds}"

    async def do_overflow(self, episode: Episode) -> None:
        try:
            await episode.generate()
        except ContextOverflowError as error:
            raise RuntimeError("wrapped") from error

    async def do_give_up_a_turn(self, episode: Episode) -> str:
        """A turn that takes too long is cancelled by the handler itself; the next one is made."""
        episode.observe([1])
        try:
            async with asyncio.timeout(0.05):
                await episode.generate()
        except TimeoutError:
            pass
        await episode.generate()
        return str(len(episode.token_ids))

    async def do_keep_the_context(self, episode: Episode) -> str:
        """As code that takes token ids may, before the context grows on."""
        seen = episode.token_ids
        episode.observe([7, 8])
        kept = np.asarray(episode.token_ids)
        await episode.generate()
        episode.observe([9])
        found = [seen, kept.tolist(), episode.token_ids[:2], len(episode.token_ids)]
        return json.dumps(found)

    async def do_misuse(self, episode: Episode) -> str:
        faults: list[str] = []
        for wrong in ([-1], [1 << 40], ["x"]):
            try:
                episode.observe(wrong)  # type: ignore[arg-type]
            except (ValueError, TypeError, OverflowError) as error:
                faults.append(type(error).__name__)
        misuses: list[Callable[[], None]] = [
            lambda: episode.observe([1], 5),  # type: ignore[arg-type]
            lambda: episode.show(5, "a"),  # type: ignore[arg-type]
            lambda: episode.show("\n", "a"),
        ]
        for number, misuse in enumerate(misuses):
            try:
                misuse()
            except (ValueError, TypeError):
                faults.append(f"{number} refused")
        try:
            await episode.generate(role="nobody")
        except Exception as error:  # noqa: BLE001
            faults.append(f"{type(error).__name__}: {error}")
        return json.dumps(faults)

    async def do_look(self, episode: Episode) -> str:
        said: dict[str, Any] = {
            "sampling": episode.sampling.temperature,
            "stopping": episode.stopping.max_turns,
            "workdir": episode.workdir.is_dir(),
            "remaining": episode.remaining_seconds is not None,
            "token": episode.token and [episode.token.node_ip, *episode.token.gpu_ids],
            "iteration": episode.iteration and episode.iteration.rollout_id,
            "sample": [episode.sample.sample_no, episode.attempt_no, episode.sample.task.metadata],
        }
        return json.dumps(said)

    async def do_keep_at_it(self, episode: Episode, pipe: str) -> str:
        episode.observe([0, 1, 2])
        try:
            generation = await episode.generate()
        except GenerationError as error:
            return f"{type(error).__name__}"
        return f"{len(generation.token_ids)}"

    async def do_leave_a_task(self, episode: Episode) -> None:
        async def later() -> None:
            while True:
                await asyncio.sleep(0.001)

        episode.leftover = asyncio.create_task(later())  # type: ignore[attr-defined]


class RankingChild(OddAgent):
    """Scores groups, by how late a sample is in its group, and says where."""

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        if task.prompt == "fine exit":
            sys.exit(1)
        if task.prompt.startswith("fine block"):
            tell(task.prompt.split()[2])
            time.sleep(3600)
        return [Reward(score=sample.sample_no / 10, details={"pid": os.getpid()}) for sample in samples]


class ChattingChild(OddAgent):
    """Generates as a client of OpenAI's API, which is in this child and reaches the server over the loopback."""

    async def do_fine(self, episode: Episode, *_: str) -> str:
        async with ChatClient.of(episode) as client:
            await converse(client, "student", ["Hello", "And now?"])
        return f"{len(episode.token_ids)} tokens"


class RayAgent(OddAgent):
    """Knows which node of the Ray cluster it is on."""

    async def do_return_when_let(self, episode: Episode, pipe: str, *leaves: str) -> AgentResult:
        """Each attempt blocks until its own file is there."""
        tell(pipe)
        while not Path(leaves[episode.attempt_no - 1]).exists():
            time.sleep(0.01)
        said = f"attempt {episode.attempt_no}"
        return AgentResult(termination_reason=said, reward_inputs={"odd": object()}, payload=said.encode())

    async def do_wait_first(self, episode: Episode, pipe: str) -> None:
        if episode.attempt_no == 1:
            await self.do_wait(episode, pipe)

    async def do_where(self, episode: Episode) -> str:
        import ray  # noqa: PLC0415 -- only where it is installed

        context = ray.get_runtime_context()
        labels = context.get_node_labels()
        return json.dumps({"node": labels["py-scheduler/node"], "gpus": os.environ["CUDA_VISIBLE_DEVICES"]})
