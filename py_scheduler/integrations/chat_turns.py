"""Conversations that go on after the model has spoken, for handlers of several turns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from py_scheduler.domain.episodes.chat_turns import following_tokens, text_of
from py_scheduler.domain.generation import ChatMessage

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

_MARKER = re.compile(
    r"<(?=[|\uff5c][^\s<>|\uff5c]{1,64}[|\uff5c]>|(?:/?s|bos|eos|pad|unk|(?:start|end)_of_turn)>)"
    r"|\[(?=(?:/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)|TOOL_CALLS)\])"
)
"""What opens a special token in the chat templates of today's models: ChatML, Llama, Gemma, Mistral, DeepSeek."""


def without_markers(text: str) -> str:
    """The text with a space in every marker of a chat template, so that no tokenizer reads it as one.

    Backends encode a conversation as their template writes it, special tokens and all: a program whose output holds
    `<|im_end|>` would end its own message and begin another in whatever role it likes.
    """
    return _MARKER.sub(r"\g<0> ", text)


async def observe_reply(episode: Episode, content: str) -> None:
    """Appends a user's message behind what the model said: the end of its turn, the message, the opening of the next.

    What stands in the context stays as it is, token for token. Markers in the content are taken apart
    (`without_markers`), because it is mostly what some tool has printed. Raises FailedPreconditionError as
    `following_tokens`.
    """
    reply = [ChatMessage("user", without_markers(content))]
    episode.observe(await following_tokens(episode, reply), text_of(reply))
