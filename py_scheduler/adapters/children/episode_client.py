"""A child's end of an episode: what a handler sees there. Implements `domain.evaluator.Episode`.

Invariant: nothing is recorded, generated or timed here. The client asks the server for all of that
(`domain/runners/frames.py`), so an episode means the same wherever its handler runs.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from py_scheduler import errors
from py_scheduler.domain.generation import (
    STUDENT,
    Generation,
    SamplingParams,
    StoppingCriteria,
    little_endian,
    token_ids_of,
)
from py_scheduler.domain.prompt import id_array
from py_scheduler.domain.runners.frames import (
    Answer,
    Ask,
    Encode,
    EncodeChat,
    Generate,
    Look,
    LookAtContext,
    Observe,
    ObserveChat,
    Question,
    Refused,
    Show,
    Withdraw,
    encode,
    read_child_frame,
)
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import FailedPreconditionError, GenerationError, LeaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from py_scheduler.domain.generation import ChatMessage
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.frames import RunSample, TokenSaid
    from py_scheduler.domain.task import Sample
    from py_scheduler.domain.training.iteration import IterationContext

T = TypeVar("T")

_OVER = "this episode is over: its handler has returned"
_PLAIN_ERRORS: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        OverflowError,
        TimeoutError,
        asyncio.CancelledError,
        errors.FailedPreconditionError,
        errors.InvalidArgumentError,
        errors.ResourceExhaustedError,
    )
}
_GENERATION_ERRORS: dict[str, type[GenerationError]] = {
    error.__name__: error
    for error in (
        errors.GenerationError,
        errors.EngineUnavailableError,
        errors.EngineRejectedError,
        errors.ContextOverflowError,
        errors.TurnLimitError,
        errors.GenerationAbortedError,
    )
}


class Calls:
    """Questions to the server, and their answers. One thread of the child reads the answers."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last_no = 0
        self._open: dict[int, Callable[[Answer | Refused], None]] = {}

    def answered(self, frame: Answer | Refused) -> None:
        """For the thread that reads: an answer has come."""
        with self._lock:
            told = self._open.pop(frame.call_no, None)
        if told is not None:
            told(frame)

    def ask(self, question: Question) -> msgspec.Raw:
        """Waits for the answer and holds up its own thread: for questions that the server answers at once."""
        arrived = threading.Event()
        answers: list[Answer | Refused] = []

        def told(frame: Answer | Refused) -> None:
            answers.append(frame)
            arrived.set()

        self._begin(question, told)
        arrived.wait()
        return _value_of(answers[0])

    async def ask_soon(self, question: Question) -> msgspec.Raw:
        """Waits for the answer in its loop. A cancellation cancels the server's work on the answer too, and the tokens
        that this work has made are in the record before the call ends.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer | Refused] = loop.create_future()

        def told(frame: Answer | Refused) -> None:
            loop.call_soon_threadsafe(_settle, answer, frame)

        call_no = self._begin(question, told)
        try:
            return _value_of(await asyncio.shield(answer))
        except asyncio.CancelledError:
            if not answer.done():
                self._send(encode(Withdraw(call_no=call_no)))
                await asyncio.wait([answer])
            raise

    def _begin(self, question: Question, told: Callable[[Answer | Refused], None]) -> int:
        with self._lock:
            self._last_no += 1
            call_no = self._last_no
            self._open[call_no] = told
        try:
            self._send(_readable(Ask(call_no=call_no, question=question)))
        except BaseException:
            with self._lock:
                self._open.pop(call_no, None)
            raise
        return call_no


def _readable(ask: Ask) -> bytes:
    """Raises TypeError for a question that the server would take for a broken child's."""
    frame = encode(ask)
    try:
        read_child_frame(frame)
    except msgspec.ValidationError as error:
        raise TypeError(f"{type(ask.question).__name__}: {error}") from error
    return frame


def _settle(answer: asyncio.Future[Answer | Refused], frame: Answer | Refused) -> None:
    if not answer.done():
        answer.set_result(frame)


def _value_of(frame: Answer | Refused) -> msgspec.Raw:
    if isinstance(frame, Answer):
        return frame.value
    if kind := _GENERATION_ERRORS.get(frame.kind):
        raise kind(frame.message, frame.partial)
    if plain := _PLAIN_ERRORS.get(frame.kind):
        raise plain(frame.message)
    raise RuntimeError(f"{frame.kind}: {frame.message}")


class TokenView:
    """The room that this sample has. Only the server gives it back."""

    def __init__(self, said: TokenSaid) -> None:
        self._said = said

    @property
    def node_ip(self) -> str:
        return self._said.node_ip

    @property
    def gpu_ids(self) -> list[int]:
        return self._said.gpu_ids

    def release(self) -> None:
        raise LeaseError("the server gives the token back when the sample ends")


class EpisodeClient:
    """One episode, from a `RunSample` to `close`."""

    def __init__(self, calls: Calls, said: RunSample) -> None:
        self._calls = calls
        self.sample: Sample = said.sample
        self.attempt_no = said.attempt_no
        self.token: PlacementToken | None = None if said.token is None else TokenView(said.token)
        self.iteration: IterationContext | None = said.iteration
        self.termination_reason = ""
        self._is_over = False
        self._token_ids = array("i")
        self._known: dict[str, Any] = {}

    def close(self) -> None:
        self._is_over = True

    @property
    def sampling(self) -> SamplingParams:
        return self._look_once("sampling", SamplingParams)

    @property
    def stopping(self) -> StoppingCriteria:
        return self._look_once("stopping", StoppingCriteria)

    @property
    def token_ids(self) -> list[int]:
        # A context only grows, and not by this handler alone: clients of the episode's API add to it too.
        answer = self._ask(LookAtContext(start=len(self._token_ids)))
        self._token_ids.extend(token_ids_of(msgspec.msgpack.decode(answer, type=bytes)))
        return self._token_ids.tolist()

    @property
    def remaining_seconds(self) -> float | None:
        return msgspec.msgpack.decode(self._ask(Look(name="remaining_seconds")), type=float | None)

    @property
    def workdir(self) -> Path:
        return Path(self._look_once("workdir", str))

    @property
    def api_base_url(self) -> str:
        return self._api[0]

    @property
    def api_key(self) -> str:
        return self._api[1]

    @property
    def api_socket(self) -> str:
        return self._api[2]

    @property
    def _api(self) -> tuple[str, str, str]:
        return self._look_once("api", tuple[str, str, str])

    def show(self, key: str, value: object) -> None:
        self._ask(Show(key=key, value=safe_text(str(value))))

    def choose_role(self) -> str:
        return msgspec.msgpack.decode(self._ask(Look(name="role")), type=str)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return msgspec.msgpack.decode(await self._ask_soon(EncodeChat(messages=[*messages])), type=list[int])

    async def encode(self, text: str) -> list[int]:
        return msgspec.msgpack.decode(await self._ask_soon(Encode(text=text)), type=list[int])

    async def observe_chat(self, messages: Sequence[ChatMessage]) -> None:
        await self._ask_soon(ObserveChat(messages=[*messages]))

    def observe(self, token_ids: Iterable[int], text: str = "") -> None:
        # The array takes what the record's own takes, and raises what that raises.
        ids = id_array(token_ids)
        given: object = text
        if not isinstance(given, str):
            raise ValueError(f"text must be a string, not {type(given).__name__}")  # noqa: TRY004 -- as in the loop
        self._ask(Observe(token_id_bytes=little_endian(ids), text=safe_text(text)))

    async def generate(
        self, *, role: str = STUDENT, max_new_tokens: int | None = None, sampling: SamplingParams | None = None
    ) -> Generation:
        question = Generate(role=role, max_new_tokens=max_new_tokens, sampling=sampling)
        return msgspec.msgpack.decode(await self._ask_soon(question), type=Generation)

    def _look_once(self, name: str, kind: type[T]) -> T:
        if name not in self._known:
            self._known[name] = msgspec.msgpack.decode(self._ask(Look(name=name)), type=kind)
        found: T = self._known[name]
        return found

    def _ask(self, question: Question) -> msgspec.Raw:
        self._check_open()
        return self._calls.ask(question)

    async def _ask_soon(self, question: Question) -> msgspec.Raw:
        self._check_open()
        return await self._calls.ask_soon(question)

    def _check_open(self) -> None:
        if self._is_over:
            raise FailedPreconditionError(_OVER)
