"""The record of one sample: what its model read and wrote, and of which weights it was.

Invariant: every token is in the record in context order, also the tokens of a generation that failed half way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.generation import STUDENT, Generation
from py_scheduler.domain.trajectory import Trajectory, TrajectoryBuilder
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.domain.prompt import Prompt
    from py_scheduler.execution.generation.gateway import GenerationGateway

_MAX_TEXT = 1 << 20
_ONE_CONVERSATION = (
    "observe_chat begins a conversation, and this episode has one: give it all messages at once, and what comes after "
    "an answer to observe_reply(episode, text) from py_scheduler.integrations.chat_turns"
)


class EpisodeRecord:
    """Grows by one turn at a time. `gateway` knows which weights each role has had."""

    __slots__ = ("_builder", "_gateway", "_has_conversation", "_oldest_epoch")

    def __init__(self, gateway: GenerationGateway) -> None:
        self._gateway = gateway
        self._builder = TrajectoryBuilder()
        self._has_conversation = False
        self._oldest_epoch: int | None = None

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return self._builder.token_count

    @property
    def token_ids(self) -> list[int]:
        """See `TrajectoryBuilder.token_ids`."""
        return self._builder.token_ids

    def prompt(self) -> Prompt:
        """See `TrajectoryBuilder.prompt`."""
        return self._builder.prompt()

    @property
    def turns_generated(self) -> int:
        return self._builder.turns_generated

    def begin_conversation(self) -> None:
        """Raises FailedPreconditionError for a second one, or after a generated turn."""
        if self._has_conversation or self._builder.turns_generated:
            raise FailedPreconditionError(_ONE_CONVERSATION)
        self._has_conversation = True

    def observe(self, token_ids: Iterable[int], text: str) -> None:
        """Adds tokens that the model reads. Raises ValueError."""
        given: object = text
        if not isinstance(given, str) or len(given) > _MAX_TEXT:
            raise ValueError(f"text must be a string of at most {_MAX_TEXT} characters")
        self._builder.append_environment(token_ids, text)

    def append(self, generation: Generation, role: str) -> None:
        """Adds tokens that the backend in this role generated."""
        self._builder.append_generation(generation, role)
        gateway = self._gateway
        if generation.token_count and STUDENT in gateway and gateway.have_same_weights(role, STUDENT):
            history = gateway.weights(role)
            # Weights without a name are known only to have been there just now.
            epochs = [history.epoch_of(span.version) for span in generation.weight_spans] or [history.epoch]
            if self._oldest_epoch is not None:
                epochs.append(self._oldest_epoch)
            self._oldest_epoch = min(epochs)

    def keep(self, partial: object, role: str) -> None:
        """Adds what a generation that was cut short has made, if it has made any."""
        if isinstance(partial, Generation) and partial.token_count:
            self.append(partial, role)

    @property
    def weight_epoch(self) -> int | None:
        """Of the oldest weights that wrote tokens of the student; None when it has none."""
        return self._oldest_epoch

    @property
    def staleness(self) -> int:
        """How often the student's weights have changed since those.

        Tokens of epochs 3 and 4, and weights of epoch 6 by now: the staleness is 3.
        """
        return 0 if self._oldest_epoch is None else self._gateway.weights(STUDENT).epoch - self._oldest_epoch

    def trajectory(self, *, mask_off_policy_prefix: bool) -> Trajectory:
        return self._builder.build(mask_off_policy_prefix=mask_off_policy_prefix)
