"""The server's end of a child: plays a handler that lives there, and answers what its episode asks.

Invariants
  1. At most one phase (run, eval, eval_group) is under way; it ends by the child's word or by the child's end.
  2. What the child asks of an episode is answered by that sample's HandlerEpisode, which alone records: so caps,
     pauses, rids, aborts and partial tokens are what they are for a handler in the loop.
  3. A phase that did not return leaves nothing under way: what it was generating is aborted, and its tokens are in the
     record before the phase ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import Generation
from py_scheduler.domain.plain import safe_text
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.runner_frames import (
    PROTOCOL,
    AgentSaid,
    Answer,
    Ask,
    Cancel,
    Encode,
    EncodeChat,
    Generate,
    Hello,
    Leave,
    Leaving,
    Look,
    LookAtContext,
    MakeHandler,
    Observe,
    ObserveChat,
    Ping,
    PlayEval,
    PlayGroup,
    PlayRun,
    Pong,
    Raised,
    Ready,
    Refused,
    Returned,
    RewardSaid,
    ServerFrame,
    Show,
    TokenSaid,
    Unfit,
    Withdraw,
    encode,
    raw,
    read_child_frame,
)
from py_scheduler.errors import FailedPreconditionError, GenerationError, RunnerLostError, RunnerStartError
from py_scheduler.execution.outcomes import ReportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.iteration import IterationContext
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.runner_frames import Question
    from py_scheduler.domain.runners import Child, HandlerPlan
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.workers import Worker

    Variables = Callable[[IterationContext], Mapping[str, str]]

logger = logging.getLogger(__name__)

FrameT = TypeVar("FrameT")

_NO_EPISODE = "no episode is being played: what it left running can use it no more"


class ChildSession(BaseAgent):
    """One live child. To `execution.play` it is the handler.

    worker: whose task a stop cancels; set by whoever plays. resident_mib: what the child said of itself last.
    """

    def __init__(self, child: Child, variables: Variables, on_end: Callable[[ChildSession], None]) -> None:
        self.child = child
        self.how_it_ended = ""
        self.resident_mib = 0.0
        self.worker: Worker | None = None
        self.over = asyncio.Event()
        self._variables = variables
        self._on_end = on_end
        self._episode: Episode | None = None
        self._awaited: asyncio.Future[Any] | None = None
        self._awaited_kinds: tuple[type, ...] = ()
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._last_words = ""
        child.listen(self._on_frame, self._ended)

    @property
    def is_alive(self) -> bool:
        return not self.how_it_ended and self.child.is_alive

    # Life

    async def prepare(self, plan: HandlerPlan, import_path: Sequence[str]) -> None:
        """Lets the child make the handler. Raises RunnerStartError."""
        said = MakeHandler(name=plan.name, arguments=plan.arguments, key=plan.key, import_path=[*import_path])
        try:
            answer = await self._next(said, (Ready, Unfit))
        except RunnerLostError as error:
            raise RunnerStartError(f"the runner ended before it was ready: {error}") from error
        if isinstance(answer, Unfit):
            raise RunnerStartError(answer.message)

    async def ping(self) -> bool:
        """Whether it is alive and its loop turns. Waits for as long as that takes."""
        try:
            self.resident_mib = (await self._next(Ping(), (Pong,))).resident_mib
        except RunnerLostError:
            return False
        return True

    def retire(self) -> None:
        """Lets it end by itself."""
        self.child.send(encode(Leave()))

    def kill(self, why: str) -> None:
        self.child.kill(why)

    def forget_episode(self) -> None:
        """The sample is over: what the child asks for it from now on is refused."""
        self._episode = None

    # Plays, as a BaseAgent does

    async def run(self, episode: Episode) -> AgentResult:
        self._episode, token, iteration = episode, episode.token, episode.iteration
        answer = await self._play(
            PlayRun(
                sample=episode.sample,
                attempt_no=episode.attempt_no,
                token=None if token is None else TokenSaid(node_ip=token.node_ip, gpu_ids=list(token.gpu_ids)),
                iteration=iteration,
                variables=dict(self._variables(iteration)) if iteration is not None else {},
            )
        )
        said = msgspec.msgpack.decode(answer, type=AgentSaid)
        return AgentResult(
            termination_reason=said.termination_reason, answer=said.answer, metrics=said.metrics, payload=said.payload
        )

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002 -- the child has the result
        answer = await self._play(PlayEval())
        await self.quiet()
        self._episode = None
        return _reward_of(msgspec.msgpack.decode(answer, type=RewardSaid))

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        answer = await self._play(PlayGroup(task=task, samples=[*samples]))
        return [_reward_of(said) for said in msgspec.msgpack.decode(answer, type=list[RewardSaid])]

    async def _play(self, frame: ServerFrame) -> msgspec.Raw:
        try:
            said = await self._next(frame, (Returned, Raised), passes_stops=True)
        except RunnerLostError:
            await self.quiet()
            raise
        self.resident_mib = said.resident_mib
        if isinstance(said, Returned):
            return said.value
        await self.quiet()
        if self._episode is not None:
            self._episode.termination_reason = said.termination_reason
        if said.is_cancelled:
            raise asyncio.CancelledError
        raise ReportedError(said.error, said.outcome, said.shown)

    async def quiet(self) -> None:
        """Ends what is being done for the child, and waits until its tokens are recorded."""
        while self._answering:
            for task in self._answering.values():
                _cancel_once(task)
            try:
                await asyncio.wait([*self._answering.values()])
            except asyncio.CancelledError:
                if self._is_closing:
                    raise

    async def _next(self, frame: ServerFrame, kinds: tuple[type, ...], *, passes_stops: bool = False) -> Any:
        """Sends, and waits for the word that ends it, which is one of these kinds. Raises RunnerLostError.

        passes_stops: a cancellation is the child's to obey, and this still waits for its word.
        """
        encoded = encode(frame)
        if self.how_it_ended:
            raise RunnerLostError(self.how_it_ended)
        assert self._awaited is None, "one thing at a time"
        awaited = self._awaited = asyncio.get_running_loop().create_future()
        self._awaited_kinds = kinds
        self.child.send(encoded)
        try:
            while not awaited.done():
                try:
                    await asyncio.wait([awaited])
                except asyncio.CancelledError:
                    if not passes_stops:
                        raise
                    if self._is_closing:
                        self.child.kill("the server is ending")
                        raise
                    self._pass_stop_on()
        finally:
            self._awaited = None
        return awaited.result()

    @property
    def _is_closing(self) -> bool:
        return self.worker is not None and self.worker.is_closing

    def _pass_stop_on(self) -> None:
        for task in self._answering.values():
            _cancel_once(task)
        self.child.send(encode(Cancel()))

    # What the child says

    def _on_frame(self, data: bytes) -> None:
        try:
            frame = read_child_frame(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.child.kill(f"it said what no runner says: {error}")
            return
        match frame:
            case Ask():
                self._asked(frame)
            case Withdraw():
                if (task := self._answering.get(frame.call_no)) is not None:
                    _cancel_once(task)
            case Leaving():
                self._last_words = frame.how
            case Hello():
                if frame.protocol != PROTOCOL:
                    self.child.kill(f"it speaks protocol {frame.protocol}, not {PROTOCOL}: install the same version")
            case Ready() | Unfit() | Pong() | Returned() | Raised():
                # What nobody waits for any more, such as a late Pong, is no answer to anything else.
                if self._awaited is not None and not self._awaited.done() and isinstance(frame, self._awaited_kinds):
                    self._awaited.set_result(frame)

    def _ended(self, how: str) -> None:
        self.how_it_ended = how if self._last_words in how else f"{self._last_words} ({how})"
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(RunnerLostError(self.how_it_ended))
        self.over.set()
        self._on_end(self)

    # What it asks

    def _asked(self, ask: Ask) -> None:
        episode, question = self._episode, ask.question
        if ask.call_no in self._answering:
            self.child.kill(f"it said what no runner says: call {ask.call_no} twice")
        elif episode is None:
            self._refuse(ask.call_no, FailedPreconditionError(_NO_EPISODE))
        elif isinstance(question, Look | LookAtContext | Observe | Show):
            try:
                self._answer(ask.call_no, _known_at_once(episode, question))
            except Exception as error:  # noqa: BLE001 -- it is the child's, who gets it
                self._refuse(ask.call_no, error)
        else:
            task = asyncio.get_running_loop().create_task(self._answer_in_time(ask.call_no, episode, question))
            self._answering[ask.call_no] = task

    async def _answer_in_time(self, call_no: int, episode: Episode, question: Question) -> None:
        try:
            self._answer(call_no, await _found_in_time(episode, question))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- as above
            self._refuse(call_no, error)
        finally:
            self._answering.pop(call_no, None)

    def _answer(self, call_no: int, value: object) -> None:
        self.child.send(encode(Answer(call_no=call_no, value=raw(value))))

    def _refuse(self, call_no: int, error: BaseException) -> None:
        partial = error.partial if isinstance(error, GenerationError) else None
        self.child.send(
            encode(
                Refused(
                    call_no=call_no,
                    kind=type(error).__name__,
                    message=safe_text(str(error)),
                    partial=partial if isinstance(partial, Generation) else None,
                )
            )
        )


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second cancellation would strike the episode while it gathers what the engine has made."""
    if not task.cancelling():
        task.cancel()


def _known_at_once(episode: Episode, question: Look | LookAtContext | Observe | Show) -> object:
    if isinstance(question, Observe):
        episode.observe(question.token_ids, question.text)
        return None
    if isinstance(question, Show):
        episode.show(question.key, question.value)
        return None
    if isinstance(question, LookAtContext):
        return list(episode.token_ids[question.start :])
    match question.name:
        case "sampling":
            return episode.sampling
        case "stopping":
            return episode.stopping
        case "remaining_seconds":
            return episode.remaining_seconds
        case "workdir":
            return str(episode.workdir)
        case "api":
            return (episode.api_base_url, episode.api_key, episode.api_socket)
        case "role":
            return episode.choose_role()
    raise FailedPreconditionError(f"an episode has no {question.name!r}")


async def _found_in_time(episode: Episode, question: Question) -> object:
    match question:
        case Encode():
            return await episode.encode(question.text)
        case EncodeChat():
            return await episode.encode_chat(question.messages)
        case ObserveChat():
            await episode.observe_chat(question.messages)
            return None
        case Generate():
            return await episode.generate(
                role=question.role, max_new_tokens=question.max_new_tokens, sampling=question.sampling
            )
    raise AssertionError("answered at once")


def _reward_of(said: RewardSaid) -> Reward:
    return Reward(score=said.score, details=msgspec.json.decode(said.details, type=dict[str, Any]))
