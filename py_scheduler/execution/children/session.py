"""The server's end of a child: runs a handler that lives there, and answers what its episode asks.

Invariants
  1. At most one order is under way. A phase (run, eval, eval_group) ends by the child's word or by the child's end.
  2. A word bears the number of the order that it answers. So a late word answers no other order.
  3. A phase that did not return leaves nothing under way: its generation is aborted, and the tokens of that are in the
     record before the phase ends.
  4. A child that says what no child says is killed, and nothing that a killed child says is heard.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.runners.frames import (
    PROTOCOL,
    AgentSaid,
    Ask,
    Cancel,
    EvalGroup,
    EvalSample,
    Hello,
    Leave,
    Leaving,
    MakeHandler,
    Order,
    Ping,
    Pong,
    Raised,
    Ready,
    Returned,
    RewardSaid,
    RunSample,
    TokenSaid,
    Unfit,
    Withdraw,
    Word,
    encode,
    read_child_frame,
)
from py_scheduler.errors import RunnerLostError, RunnerStartError
from py_scheduler.execution.children.answers import ChildAnswers
from py_scheduler.execution.outcomes import ReportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.runners.runner import Child, HandlerPlan
    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.execution.workers import Worker

    Variables = Callable[[IterationContext], Mapping[str, str]]

T = TypeVar("T")

_ODD = "it said what no runner says"


class ChildSession(BaseAgent):
    """One live child. To `execution.run_sample` it is the handler.

    worker: the one that runs the sample, while one does: its task is what a stop cancels. resident_mib: what the child
    said of itself last. how_it_ended: once it is over.
    """

    def __init__(self, child: Child, variables: Variables, on_end: Callable[[ChildSession], None]) -> None:
        self.child = child
        self.how_it_ended = ""
        self.resident_mib = 0.0
        self.worker: Worker | None = None
        self.over = asyncio.Event()
        self._variables = variables
        self._on_end = on_end
        self._answers = ChildAnswers(child.send)
        self._last_order_no = 0
        self._awaited: asyncio.Future[Any] | None = None
        self._awaited_kinds: tuple[type, ...] = ()
        self._last_words = ""
        self._is_killed = False
        child.listen(self._on_frame, self._ended)

    @property
    def is_alive(self) -> bool:
        return not (self._is_killed or self.over.is_set()) and self.child.is_alive

    # Its life

    async def prepare(self, plan: HandlerPlan, import_path: Sequence[str]) -> None:
        """Has the child make its handler. Raises RunnerStartError."""
        order = MakeHandler(
            order_no=self._next_no(), name=plan.name, arguments=plan.arguments, key=plan.key, import_path=[*import_path]
        )
        try:
            word = await self._word_for(order, (Ready, Unfit))
        except RunnerLostError as error:
            raise RunnerStartError(f"the runner ended before it was ready: {error}") from error
        if isinstance(word, Unfit):
            raise RunnerStartError(word.message)

    async def ping(self) -> bool:
        """Whether it is alive and its loop turns. Waits for as long as that takes."""
        try:
            self.resident_mib = (await self._word_for(Ping(order_no=self._next_no()), (Pong,))).resident_mib
        except RunnerLostError:
            return False
        return True

    def retire(self) -> None:
        """Lets it end by itself."""
        self.child.send(encode(Leave()))

    def kill(self, why: str) -> None:
        self._is_killed = True
        self.child.kill(why)

    def forget_episode(self) -> None:
        """The sample is over: from now on its questions are refused."""
        self._answers.episode = None

    # As a BaseAgent

    async def run(self, episode: Episode) -> AgentResult:
        self._answers.episode, token, iteration = episode, episode.token, episode.iteration
        value = await self._execute(
            RunSample(
                order_no=self._next_no(),
                sample=episode.sample,
                attempt_no=episode.attempt_no,
                token=None if token is None else TokenSaid(node_ip=token.node_ip, gpu_ids=list(token.gpu_ids)),
                iteration=iteration,
                variables=dict(self._variables(iteration)) if iteration is not None else {},
            )
        )
        said = self._read(value, AgentSaid)
        return AgentResult(
            termination_reason=said.termination_reason, answer=said.answer, metrics=said.metrics, payload=said.payload
        )

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002 -- the child has the result
        value = await self._execute(EvalSample(order_no=self._next_no()))
        await self._quiet()
        self.forget_episode()
        return self._reward_of(self._read(value, RewardSaid))

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        value = await self._execute(EvalGroup(order_no=self._next_no(), task=task, samples=[*samples]))
        return [self._reward_of(said) for said in self._read(value, list[RewardSaid])]

    async def _execute(self, order: RunSample | EvalSample | EvalGroup) -> msgspec.Raw:
        try:
            word = await self._word_for(order, (Returned, Raised), passes_stops=True)
        except RunnerLostError:
            await self._quiet()
            raise
        self.resident_mib = word.resident_mib
        if isinstance(word, Returned):
            return word.value
        await self._quiet()
        if self._answers.episode is not None:
            self._answers.episode.termination_reason = word.termination_reason
        if word.is_cancelled:
            raise asyncio.CancelledError
        raise ReportedError(word.error, word.outcome, word.shown)

    async def _quiet(self) -> None:
        """Cancels the answers that are on their way, and waits until their tokens are recorded."""
        while self._answers.are_under_way:
            self._answers.cancel()
            try:
                await self._answers.until_none_is_under_way()
            except asyncio.CancelledError:
                if self._is_closing:
                    raise

    def _next_no(self) -> int:
        self._last_order_no += 1
        return self._last_order_no

    async def _word_for(self, order: Order, kinds: tuple[type, ...], *, passes_stops: bool = False) -> Any:
        """Sends an order, and waits for the word of one of these kinds that answers it. Raises RunnerLostError.

        passes_stops: tells the child of a cancellation, and goes on waiting for its word.
        """
        assert self._awaited is None, "one thing at a time"
        if self.over.is_set():
            raise RunnerLostError(self.how_it_ended)
        awaited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited, self._awaited_kinds = awaited, kinds
        try:
            self.child.send(encode(order))
            while not awaited.done():
                try:
                    await asyncio.wait([awaited])
                except asyncio.CancelledError:
                    if not passes_stops:
                        raise
                    if self._is_closing:
                        self.kill("the server is ending")
                        raise
                    self._answers.cancel()
                    self.child.send(encode(Cancel()))
            return awaited.result()
        finally:
            self._awaited = None

    @property
    def _is_closing(self) -> bool:
        return self.worker is not None and self.worker.is_closing

    # What the child says

    def _on_frame(self, data: bytes) -> None:
        if self._is_killed:
            return
        try:
            frame = read_child_frame(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.kill(f"{_ODD}: {error}")
            return
        match frame:
            case Ask():
                try:
                    self._answers.asked(frame)
                except ValueError as error:
                    self.kill(f"{_ODD}: {error}")
            case Withdraw():
                self._answers.withdraw(frame.call_no)
            case Leaving():
                self._last_words = frame.how
            case Hello():
                if frame.protocol != PROTOCOL:
                    self.kill(f"it speaks protocol {frame.protocol}, not {PROTOCOL}: install the same version")
            case Ready() | Unfit() | Pong() | Returned() | Raised():
                self._on_word(frame)

    def _on_word(self, word: Word) -> None:
        if self._awaited is None or self._awaited.done() or word.order_no != self._last_order_no:
            return  # To what nobody waits for any more.
        if isinstance(word, self._awaited_kinds):
            self._awaited.set_result(word)
        else:
            self.kill(f"{_ODD}: {type(word).__name__} to an order of another kind")

    def _read(self, value: msgspec.Raw, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._lost_over(error) from error

    def _reward_of(self, said: RewardSaid) -> Reward:
        try:
            return Reward(score=said.score, details=msgspec.json.decode(said.details, type=dict[str, Any]))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._lost_over(error) from error

    def _lost_over(self, error: Exception) -> RunnerLostError:
        why = f"{_ODD}: {error}"
        self.kill(why)
        return RunnerLostError(why)

    def _ended(self, how: str) -> None:
        self.how_it_ended = how if self._last_words in how else f"{self._last_words} ({how})"
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(RunnerLostError(self.how_it_ended))
        self._answers.cancel()
        self.over.set()
        self._on_end(self)
