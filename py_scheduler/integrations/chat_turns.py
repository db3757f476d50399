"""Conversations that go on after the model has spoken, for handlers of several turns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import ChatMessage
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

_ASKED = ChatMessage("user", "?")
_SAID = "ok"

_MARKER = re.compile(
    r"<(?=[|\uff5c][^\s<>|\uff5c]{1,64}[|\uff5c]>|(?:/?s|bos|eos|pad|unk|(?:start|end)_of_turn)>)"
    r"|\[(?=(?:/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)|TOOL_CALLS)\])"
)
"""What opens a special token in the chat templates of today's models: ChatML, Llama, Gemma, Mistral, DeepSeek."""


def without_markers(text: str) -> str:
    """The text with a space in every marker of a chat template, so that no tokenizer reads it as one.

    Engines encode a conversation as their template writes it, special tokens and all: a program whose output holds
    `<|im_end|>` would end its own message and begin another in whatever role it likes.
    """
    return _MARKER.sub(r"\g<0> ", text)


async def observe_reply(episode: Episode, content: str) -> None:
    """Appends a user's message behind what the model said: the end of its turn, the message, the opening of the next.

    What stands in the context stays as it is, token for token. A chat template only encodes whole conversations, so a
    short one is encoded, and what stands behind its answer is taken. Markers in the content are taken apart
    (`without_markers`), because it is mostly what some tool has printed. Raises FailedPreconditionError when the
    template changes an answer that is followed by something, since then no template of this model describes the
    context.
    """
    content = without_markers(content)
    before = [*await episode.encode_chat([_ASKED]), *await episode.encode(_SAID)]
    whole = await episode.encode_chat([_ASKED, ChatMessage("assistant", _SAID), ChatMessage("user", content)])
    if whole[: len(before)] != before:
        raise FailedPreconditionError(
            "this model's chat template rewrites earlier answers: use a template without that for several turns"
        )
    added = whole[len(before) :]
    # A model that ended its turn by itself has already given the token that ends it.
    if added and episode.token_ids and episode.token_ids[-1] == added[0]:
        del added[0]
    episode.observe(added, f"user: {content}")
