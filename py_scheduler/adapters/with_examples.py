"""A teacher out of any backend: the same model, with worked examples in its context that the asker does not see.

The examples go in front of the conversation as the model's own chat template writes them. What a template does is known
only by its outcome, so it is asked twice: for a conversation as it is (`plain`) and for the same one after the examples
(`taught`). Both end alike. A request that begins like the former is made to begin like the latter, from the last place
on at which all three agree, and so is exactly what the template makes of the examples and that conversation.

Invariant: what comes back is the base's answer to that, untouched: positions count from its first token.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.generation import ChatMessage
from py_scheduler.domain.ports import ProbedBackend, base_of
from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import ConfigError, EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from py_scheduler.domain.generation import Generation, GenerationRequest, ModelInfo
    from py_scheduler.domain.ports import GenerationBackend

logger = logging.getLogger(__name__)

_ANY = "?"


class WorkedExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question, and the answer as the teacher is to give it."""

    prompt: str
    answer: str


class WithExamplesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the base model is shown before each question."""

    base: str
    """The role of the backend that answers."""
    examples: tuple[WorkedExample, ...] | str = ()
    """A list, or the path of a file with one JSON object a line."""
    instruction: str = ""
    """A system message in front of the examples; it takes the place of the template's own."""


def load_examples(path: Path, key: str) -> tuple[WorkedExample, ...]:
    """One `{"prompt": ..., "answer": ...}` to a line. Raises ConfigError under `key`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key) from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(msgspec.json.decode(line, type=WorkedExample))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}", key) from error
    return tuple(examples)


class _Opening(msgspec.Struct, frozen=True):
    """How conversations of one kind begin: as they are, and after the examples.

    least: how much of `plain` a request must begin with to be of that kind; from there on both are the same.
    """

    plain: list[int]
    taught: list[int]
    least: int

    @property
    def added(self) -> int:
        """Tokens that a request becomes longer by."""
        return len(self.taught) - len(self.plain)

    def teach(self, token_ids: Prompt) -> Prompt | None:
        """The request after the examples; None when it begins otherwise."""
        shared = _common(token_ids, self.plain)
        if shared < self.least:
            return None
        return Prompt.of(self.taught[: self.added + shared]).grown(token_ids[shared:])


class WithExamplesBackend:
    """A GenerationBackend that asks `base`, which is started and closed by whoever owns it, and started before this."""

    def __init__(
        self, base: GenerationBackend, *, examples: Sequence[WorkedExample] = (), instruction: str = ""
    ) -> None:
        self._base = base
        self._lesson = [ChatMessage("system", instruction)] if instruction else []
        for example in examples:
            self._lesson += [ChatMessage("user", example.prompt), ChatMessage("assistant", example.answer)]
        self._openings: list[_Opening] = []
        self._learning = asyncio.Lock()

    @property
    def base(self) -> GenerationBackend:
        return self._base

    async def start(self) -> None:
        """Learns what the examples are in tokens; where the base has no server yet, its first user waits for that.

        Raises EngineUnavailableError when they leave no room.
        """
        root = base_of(self._base)
        if not isinstance(root, ProbedBackend) or root.is_up:
            await self._learnt()

    async def close(self) -> None:
        """The base is closed in its own role."""

    async def model_info(self) -> ModelInfo:
        """The base's, with the room that the examples leave."""
        info = await self._base.model_info()
        room = info.context_length - _most_added(await self._learnt())
        return msgspec.structs.replace(info, name=f"{info.name} with examples", context_length=room)

    async def encode(self, text: str) -> list[int]:
        return await self._base.encode(text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Without the examples: they are nobody's business but this backend's."""
        return await self._base.encode_chat(messages)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend. The examples count towards the base's context.

        Raises EngineRejectedError for a context that does not begin as the model's chat template does.
        """
        prompt = Prompt.of(request.token_ids)
        for opening in await self._learnt():
            taught = opening.teach(prompt)
            if taught is not None:
                return await self._base.generate(msgspec.structs.replace(request, token_ids=taught))
        raise EngineRejectedError(
            "examples can stand before a conversation only, and this context does not begin as one under the model's "
            "chat template: encode it with encode_chat"
        )

    async def abort(self, rid: str) -> None:
        await self._base.abort(rid)

    async def _learnt(self) -> list[_Opening]:
        async with self._learning:
            if not self._openings:
                openings = await self._learn()
                context_length = (await self._base.model_info()).context_length
                if (added := _most_added(openings)) >= context_length:
                    raise EngineUnavailableError(
                        f"the examples take {added} of {context_length} tokens of the context: "
                        "use fewer or shorter ones"
                    )
                self._openings = openings
        return self._openings

    async def _learn(self) -> list[_Opening]:
        question = ChatMessage("user", _ANY)
        openings = [await self._opening([question])]
        try:
            # Where the template has a system message of its own, conversations that bring theirs begin otherwise.
            openings.append(await self._opening([ChatMessage("system", _ANY), question]))
        except GenerationError as error:
            logger.warning("examples cannot stand before a system message under this chat template: %s", error)
        return openings

    async def _opening(self, conversation: list[ChatMessage]) -> _Opening:
        plain = await self._base.encode_chat(conversation)
        taught = await self._base.encode_chat([*self._lesson, *conversation])
        return _Opening(plain, taught, len(plain) - _common(plain[::-1], taught[::-1]))


def _most_added(openings: list[_Opening]) -> int:
    return max([opening.added for opening in openings])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
