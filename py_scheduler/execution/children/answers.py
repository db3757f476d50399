"""What a child asks of the episode that it runs, and the answers that are on their way.

Invariants
  1. The sample's HandlerEpisode answers each question, and it alone records. So caps, pauses, rids, aborts and partial
     tokens are what they are for a handler in the loop. Without an episode a question is refused.
  2. Every question gets exactly one answer or refusal.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import Generation, little_endian, token_ids_of
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
    Refused,
    Show,
    encode,
    raw,
)
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import FailedPreconditionError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.runners.frames import Question

_NO_EPISODE = "no episode is running: what it left running can use it no more"


class ChildAnswers:
    """To one child. episode: what its questions are about; None: they are refused."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.episode: Episode | None = None
        self._send = send
        self._under_way: dict[int, asyncio.Task[object]] = {}

    def asked(self, ask: Ask) -> None:
        """Raises ValueError for a number that is still under way."""
        episode, question = self.episode, ask.question
        if ask.call_no in self._under_way:
            raise ValueError(f"call {ask.call_no} twice")
        if episode is None:
            self._refuse(ask.call_no, FailedPreconditionError(_NO_EPISODE))
        elif isinstance(question, Look | LookAtContext | Observe | Show):
            try:
                self._answer(ask.call_no, _known_at_once(episode, question))
            except Exception as error:  # noqa: BLE001 -- it is the child's, which gets it
                self._refuse(ask.call_no, error)
        else:
            task = asyncio.get_running_loop().create_task(_found_in_time(episode, question))
            self._under_way[ask.call_no] = task
            # Not within the task: one that is cancelled before its first step runs none of its code.
            task.add_done_callback(partial(self._found, ask.call_no))

    def withdraw(self, call_no: int) -> None:
        """Cancels the work on an answer that nobody waits for any more; an answer is sent all the same."""
        if (task := self._under_way.get(call_no)) is not None:
            _cancel_once(task)

    def cancel(self) -> None:
        """Cancels the work on all answers."""
        for task in self._under_way.values():
            _cancel_once(task)

    async def until_none_is_under_way(self) -> None:
        if self._under_way:
            await asyncio.wait([*self._under_way.values()])

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def _found(self, call_no: int, task: asyncio.Task[object]) -> None:
        del self._under_way[call_no]
        try:
            self._answer(call_no, task.result())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- as above
            self._refuse(call_no, error)

    def _answer(self, call_no: int, value: object) -> None:
        self._send(encode(Answer(call_no=call_no, value=raw(value))))

    def _refuse(self, call_no: int, error: BaseException) -> None:
        partial = error.partial if isinstance(error, GenerationError) else None
        self._send(
            encode(
                Refused(
                    call_no=call_no,
                    kind=type(error).__name__,
                    message=safe_text(str(error)),
                    partial=partial if isinstance(partial, Generation) else None,
                )
            )
        )


def _cancel_once(task: asyncio.Task[object]) -> None:
    """A second cancellation would strike the episode while it gathers what the backend has made."""
    if not task.cancelling():
        task.cancel()


def _known_at_once(episode: Episode, question: Look | LookAtContext | Observe | Show) -> object:
    if isinstance(question, Observe):
        episode.observe(token_ids_of(question.token_id_bytes), question.text)
        return None
    if isinstance(question, Show):
        episode.show(question.key, question.value)
        return None
    if isinstance(question, LookAtContext):
        return little_endian(id_array(episode.token_ids[question.start :]))
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
