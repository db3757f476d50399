"""Conversations that go on after the model has spoken: what to append so that nothing is tokenised twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.generation import ChatMessage
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import Episode

_ASKED = ChatMessage("user", "?")
_SAID = "ok"


def text_of(messages: Sequence[ChatMessage]) -> str:
    """Messages as they stand in an episode's record."""
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


async def following_tokens(episode: Episode, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of messages behind what the model said: the end of its turn, the messages, the opening of the next.

    A chat template only encodes whole conversations, so a short one is encoded, and what stands behind its answer is
    taken. Raises FailedPreconditionError when the template changes an answer that is followed by something, since then
    no template of this model describes the context.
    """
    before = [*await episode.encode_chat([_ASKED]), *await episode.encode(_SAID)]
    whole = await episode.encode_chat([_ASKED, ChatMessage("assistant", _SAID), *messages])
    if whole[: len(before)] != before:
        raise FailedPreconditionError(
            "this model's chat template rewrites earlier answers: use a template without that for several turns"
        )
    added = whole[len(before) :]
    # A model that ended its turn by itself has already given the token that ends it.
    if added and episode.token_ids[-1:] == added[:1]:
        del added[0]
    return added
