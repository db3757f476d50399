"""The composition root of a child: connects to its server, makes the handler, runs the phases that it is given.

Invariants
  1. It runs one sample at a time, of one handler, and holds nothing of the server's: no engine, no clock, no record.
  2. It ends with the server, whatever its handler does: by the kernel's signal where there is one, and because a thread
     of its own sees the end of the connection.
  3. A handler's SystemExit ends it, with that status: code that runs in a process of its own may do so.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.children.episode_client import Calls, EpisodeClient
from py_scheduler.adapters.children.frames import FrameSocket
from py_scheduler.domain.runners.frames import (
    AgentSaid,
    Answer,
    Cancel,
    ChildFrame,
    EvalGroup,
    EvalSample,
    Hello,
    Leave,
    Leaving,
    MakeHandler,
    Ping,
    Pong,
    Raised,
    Ready,
    Refused,
    Returned,
    RewardSaid,
    RunSample,
    ServerFrame,
    Unfit,
    encode,
    raw,
    read_server_frame,
)
from py_scheduler.domain.values.plain import details_json, safe_text
from py_scheduler.errors import ConfigError
from py_scheduler.execution.outcomes import classify_abort, describe
from py_scheduler.execution.run_sample import checked_result, checked_reward, checked_rewards
from py_scheduler.handlers.loading import make_handler
from py_scheduler.handlers.parts import HANDLER_PARTS

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from py_scheduler.domain.evaluator import BaseAgent
    from py_scheduler.domain.results import AgentResult, Reward

_MIB = 1 << 20
_MAX_SHOWN = 16_384


def main(descriptor: int) -> None:
    """A `process` runner's child, on a socket that it inherited."""
    os.set_inheritable(descriptor, False)
    serve(socket.socket(fileno=descriptor))


def serve(connected: socket.socket, secret: str = "") -> None:
    """Serves until the server says Leave; ends the process when the connection ends or the handler exits."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    executor = ChildExecutor(FrameSocket(connected), loop)
    try:
        loop.run_until_complete(executor.serve(secret))
    except SystemExit as error:
        executor.leave(error)
    except ConnectionError:
        pass  # The server has ended: there is nobody to tell.


class ChildExecutor:
    """Frames in, frames out; at most one phase of one sample is under way."""

    def __init__(self, frames: FrameSocket, loop: asyncio.AbstractEventLoop) -> None:
        self._frames = frames
        self._loop = loop
        self._calls = Calls(frames.send)
        self._handler: BaseAgent | None = None
        self._episode: EpisodeClient | None = None
        self._result: AgentResult | None = None
        self._before: dict[str, str | None] = {}
        self._own_tasks: set[asyncio.Task[Any]] = set()
        self._phase: asyncio.Task[msgspec.Raw] | None = None
        self._order_no = 0
        self._left = asyncio.Event()

    async def serve(self, secret: str) -> None:
        """Returns when the server has said Leave."""
        self._send(Hello(pid=os.getpid(), secret=secret))
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        self._own_tasks = asyncio.all_tasks()
        await self._left.wait()

    def leave(self, error: SystemExit) -> None:
        """Ends the process as the handler asked."""
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        self._send(Leaving(how=f"exit status {status & 0xFF}"))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)

    def _send(self, frame: ChildFrame) -> None:
        self._frames.send(encode(frame))

    def _read(self) -> None:
        """In a thread: reads frames. Ends the process when the server is gone."""
        try:
            while (data := self._frames.receive()) is not None:
                frame = read_server_frame(data)
                if isinstance(frame, Answer | Refused):
                    self._calls.answered(frame)
                else:
                    self._loop.call_soon_threadsafe(self._on_frame, frame)
        except (RuntimeError, OSError):  # The loop is closed; the connection broke.
            pass
        except BaseException:  # noqa: BLE001 -- whatever it is, a child that hears nothing is of no use
            traceback.print_exc()
        if not self._left.is_set():
            os._exit(1)

    def _on_frame(self, frame: ServerFrame) -> None:
        with self._speaking():
            self._obey(frame)

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """The server waits for a word: if none can be said, ends the process, which the server sees."""
        try:
            yield
        except ConnectionError:
            pass  # The server has ended; the thread that reads sees that too.
        except Exception:  # noqa: BLE001 -- whatever it is
            traceback.print_exc()
            os._exit(1)

    def _obey(self, frame: ServerFrame) -> None:
        match frame:
            case MakeHandler():
                self._make(frame)
            case Ping():
                self._send(Pong(order_no=frame.order_no, resident_mib=resident_mib()))
            case RunSample():
                self._begin(frame.order_no, self._run(frame))
            case EvalSample():
                self._begin(frame.order_no, self._eval())
            case EvalGroup():
                self._begin(frame.order_no, self._eval_group(frame))
            case Cancel() if self._phase is not None:
                self._phase.cancel()
            case Leave():
                self._left.set()

    def _make(self, asked: MakeHandler) -> None:
        sys.path.extend(folder for folder in asked.import_path if folder not in sys.path)
        try:
            self._handler = make_handler(asked.name, asked.arguments, asked.key, HANDLER_PARTS)
        except ConfigError as error:
            self._send(Unfit(order_no=asked.order_no, message=safe_text(str(error))))
        else:
            self._send(Ready(order_no=asked.order_no))

    def _begin(self, order_no: int, phase: Coroutine[Any, Any, msgspec.Raw]) -> None:
        self._order_no = order_no
        self._phase = self._loop.create_task(phase)
        self._phase.add_done_callback(self._ended)

    def _ended(self, phase: asyncio.Task[msgspec.Raw]) -> None:
        """The one place where a handler's exceptions become frames. Those that end a process have ended it by now."""
        self._phase = None
        error = asyncio.CancelledError() if phase.cancelled() else phase.exception()
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return
        with self._speaking():
            if error is None:
                try:
                    self._send(Returned(order_no=self._order_no, value=phase.result(), resident_mib=resident_mib()))
                    return
                except ValueError as too_long:
                    error = too_long
            said = self._raised(error)
            self._end_episode()
            self._send(said)

    def _raised(self, error: BaseException) -> Raised:
        reason: object = self._episode.termination_reason if self._episode is not None else ""
        return Raised(
            order_no=self._order_no,
            outcome=classify_abort(error),
            error=describe(error),
            shown=safe_text("".join(traceback.format_exception(error)))[-_MAX_SHOWN:],
            is_cancelled=isinstance(error, asyncio.CancelledError),
            termination_reason=safe_text(reason) if isinstance(reason, str) else "",
            resident_mib=resident_mib(),
        )

    async def _run(self, asked: RunSample) -> msgspec.Raw:
        assert self._handler is not None
        self._end_episode()
        self._set_variables(asked.variables)
        self._episode = EpisodeClient(self._calls, asked)
        self._result = checked_result(await self._handler.run(self._episode), self._handler)
        reason, answer = self._result.termination_reason, self._result.answer
        return raw(
            AgentSaid(
                termination_reason=safe_text(reason),
                answer=safe_text(answer),
                metrics=self._result.metrics,
                payload=self._result.payload,
            )
        )

    async def _eval(self) -> msgspec.Raw:
        assert self._handler is not None
        assert self._episode is not None
        assert self._result is not None
        reward = checked_reward(await self._handler.eval(self._episode, self._result), self._handler, "eval")
        self._end_episode()
        return raw(_said(reward))

    async def _eval_group(self, asked: EvalGroup) -> msgspec.Raw:
        assert self._handler is not None
        rewards = await self._handler.eval_group(asked.task, asked.samples)
        return raw([_said(reward) for reward in checked_rewards(rewards, len(asked.samples), self._handler)])

    def _end_episode(self) -> None:
        """Tasks that the last episode has left running can use it no more, and are cancelled."""
        if self._episode is not None:
            self._episode.close()
        self._episode = self._result = None
        self._set_variables({})
        for task in asyncio.all_tasks() - self._own_tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _set_variables(self, variables: Mapping[str, str]) -> None:
        for name, before in self._before.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)


def _said(reward: Reward) -> RewardSaid:
    return RewardSaid(score=reward.score, details=details_json(reward.details))


def resident_mib() -> float:
    """What this process holds of the machine's memory; 0 when its handler has left no file descriptor to look."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
