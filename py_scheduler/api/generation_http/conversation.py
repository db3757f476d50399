"""An episode's one conversation: what of a request is new is appended to the context, and answered.

Invariants: the context is what was recorded here, token for token, and nothing else; what was recorded is compared with
what a client repeats, and never tokenised again.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.api.generation_http.refusals import BAD_REQUEST, CONFLICT, RefusedError
from py_scheduler.domain.episodes.cascade import resolve_sampling
from py_scheduler.domain.episodes.chat_turns import following_tokens, text_of
from py_scheduler.domain.generation import ChatMessage, SamplingParams
from py_scheduler.domain.limits import check_sampling
from py_scheduler.errors import TurnLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.api.generation_http.chat import ChatAsked
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.generation import Generation

_SHOWN = 40
_NO_OTHER = "an episode has one conversation, which only grows"


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the model said. completion_id: where it is to be found among the samples. prompt_tokens: what it read."""

    generation: Generation
    completion_id: str
    prompt_tokens: int


class Conversation:
    """What was said so far, the model's answers as it gave them."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._said: list[ChatMessage] = []
        self._context_len = 0
        self._was_cut = False
        self._turns = 0

    async def answer(self, asked: ChatAsked, role: str) -> Answer:
        """Raises RefusedError for what does not continue the conversation, and what the episode raises."""
        self._check_context()
        new = self._continuation(asked.messages)
        sampling = self._bounded(asked.sampling)
        if new:
            await self._observe(new)
        try:
            generation = await self._episode.generate(role=role, sampling=sampling)
        finally:
            self._was_cut = len(self._episode.token_ids) != self._context_len
        prompt_tokens = self._context_len
        self._was_cut = False
        self._context_len = len(self._episode.token_ids)
        self._said.append(ChatMessage("assistant", generation.text))
        sample, turn = self._episode.sample, self._turns
        self._turns += 1
        completion_id = f"chatcmpl-{sample.task_id}-{sample.sample_no}-{self._episode.attempt_no}-{turn}"
        return Answer(generation, completion_id, prompt_tokens)

    async def _observe(self, new: Sequence[ChatMessage]) -> None:
        episode = self._episode
        token_ids = await (following_tokens(episode, new) if self._said else episode.encode_chat(new))
        try:
            episode.observe(token_ids, text_of(new))
        except ValueError as error:
            raise RefusedError(BAD_REQUEST, f"messages: {error}", "invalid_value", param="messages") from error
        self._said.extend(new)
        self._context_len = len(episode.token_ids)

    def _check_context(self) -> None:
        if self._was_cut:
            raise _differs("the last answer was cut short: its tokens are recorded, and nobody has read it to its end")
        if len(self._episode.token_ids) != self._context_len:
            raise _differs("the handler itself has added to the context, which these messages do not tell of")
        limit = self._episode.stopping.max_turns
        if limit is not None and self._turns >= limit:
            raise TurnLimitError(f"max_turns is {limit}, and as many were generated")

    def _continuation(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """The messages behind those that were recorded. Raises RefusedError that says what differs."""
        for number, (recorded, given) in enumerate(zip(self._said, messages, strict=False)):
            place = f"messages[{number}]"
            if given.role != recorded.role:
                raise _differs(f"is the {given.role}'s, where the {recorded.role}'s is recorded", f"{place}.role")
            if given.content != recorded.content:
                raise _differs(_difference(recorded, given), f"{place}.content")
        if len(messages) < len(self._said):
            missing = self._said[len(messages)]
            raise _differs(
                f"ends after {len(messages)} of {len(self._said)} recorded messages; the next one is the "
                f"{missing.role}'s {_shown(missing.content)}",
                "messages",
            )
        new = messages[len(self._said) :]
        if new and self._said and self._said[-1].role != "assistant":
            raise _differs(
                "is new, and the message before it still waits for its answer", f"messages[{len(self._said)}]"
            )
        return new

    def _bounded(self, said: SamplingParams) -> SamplingParams:
        """What a client may have of what it asks for: not longer than the cascade allows, and stopped at least there
        where the cascade stops.
        """
        ours = self._episode.sampling
        if said.max_new_tokens is not None and ours.max_new_tokens is not None:
            longest = min(said.max_new_tokens, ours.max_new_tokens)
            said = msgspec.structs.replace(said, max_new_tokens=longest)
        if said.stop and ours.stop:
            said = msgspec.structs.replace(said, stop=tuple(dict.fromkeys((*ours.stop, *said.stop))))
        if said.stop_token_ids and ours.stop_token_ids:
            both = tuple(dict.fromkeys((*ours.stop_token_ids, *said.stop_token_ids)))
            said = msgspec.structs.replace(said, stop_token_ids=both)
        for fault in check_sampling(resolve_sampling((said, ours))):
            message = f"{fault} (with what the task's own sampling says)"
            raise RefusedError(BAD_REQUEST, message, "invalid_value", param=fault.field)
        return said


def _differs(what: str, place: str = "") -> RefusedError:
    message = f"{place}: {what}" if place else what
    return RefusedError(CONFLICT, f"{message} ({_NO_OTHER})", "conversation_differs", param=place or None)


def _difference(recorded: ChatMessage, given: ChatMessage) -> str:
    pairs = zip(recorded.content, given.content, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    author = "what the model wrote" if recorded.role == "assistant" else "what was recorded"
    return (
        f"differs from {author} at character {same}: {_shown(given.content[same:])} instead of "
        f"{_shown(recorded.content[same:])}"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
