"""What a handler is and how it is bound to resources (design words: Handler, Episode, Evaluator).

Handlers are configured on the server; nothing that comes from a client is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from py_scheduler.domain.generation import (
    STUDENT,
    ChatMessage,
    Generation,
    OnWeightUpdate,
    SamplingParams,
    StoppingCriteria,
)
from py_scheduler.domain.resources import PlacementToken, Resource
from py_scheduler.domain.results import AgentResult, Reward, SampleDone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from py_scheduler.domain.task import Sample, Task
    from py_scheduler.domain.training.iteration import IterationContext


class Episode(Protocol):
    """One handler execution for one sample. It records every token that is observed or generated through it."""

    sample: Sample
    attempt_no: int
    token: PlacementToken | None
    iteration: IterationContext | None
    """What the training loop says about the step; None when it said nothing."""
    termination_reason: str
    """Why the agent ends, in its own words, for the record when it raises; `run`'s result says it otherwise."""

    @property
    def sampling(self) -> SamplingParams:
        """What the cascade says for this sample."""
        ...

    @property
    def stopping(self) -> StoppingCriteria: ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The context so far: everything observed and generated. Each look makes a list of the caller's own."""
        ...

    @property
    def remaining_seconds(self) -> float | None:
        """Time left in this phase; None without a limit."""
        ...

    @property
    def workdir(self) -> Path:
        """A folder of this episode's own, made when it is first asked for and removed after the episode."""
        ...

    @property
    def api_base_url(self) -> str:
        """For clients of OpenAI's API, as an agent that this handler runs may be one: where this episode's conversation
        goes on, with the same record. Opened when it is first asked for, and closed with the episode.

        Raises FailedPreconditionError when the gateway does not listen.
        """
        ...

    @property
    def api_key(self) -> str:
        """This episode's own, for `api_base_url` and `api_socket`; dead as soon as the episode is over."""
        ...

    @property
    def api_socket(self) -> str:
        """Path of the unix socket on which `api_base_url` is to be had too; empty when there is none."""
        ...

    def show(self, key: str, value: object) -> None:
        """Lets people see something of this attempt where they look at runners (`py-scheduler runners`, ListRunners).

        Raises ValueError for more than a few keys.
        """
        ...

    def choose_role(self) -> str:
        """Who generates the next turn: the teacher with probability `iteration.beta`, else the student.

        The draw is fixed by the step, the task's client_key, prompt and data, the sample and the turn, so that an
        attempt made again mixes alike. Raises FailedPreconditionError when a teacher is wanted and none is configured.
        """
        ...

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation under the model's own chat template, ready for the answer."""
        ...

    async def encode(self, text: str) -> list[int]: ...

    async def observe_chat(self, messages: Sequence[ChatMessage]) -> None:
        """Encodes a conversation and appends it to the context, with its text for the record.

        Once in an episode: the template writes whole conversations, so a second one would stand behind the first as
        another conversation. What comes after an answer is for `integrations.chat_turns.observe_reply`. Raises
        FailedPreconditionError.
        """
        ...

    def observe(self, token_ids: Iterable[int], text: str = "") -> None:
        """Appends environment tokens (loss mask 0) to the context."""
        ...

    async def generate(
        self, *, role: str = STUDENT, max_new_tokens: int | None = None, sampling: SamplingParams | None = None
    ) -> Generation:
        """Continues the context; the new tokens (loss mask 1) are appended to it.

        `sampling`: what this turn says itself; where it is silent, `self.sampling` holds.

        Raises ContextOverflowError, EngineUnavailableError, GenerationAbortedError; partial tokens are recorded too.
        """
        ...


class BaseAgent:
    """Owns the episode: subclass it and name it in the server's configuration as `module:Class`."""

    async def run(self, episode: Episode) -> AgentResult:
        """Runs the episode."""
        raise NotImplementedError

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        """Scores what `run` returned."""
        raise NotImplementedError

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        """Optional: scores all samples of a task together, before its TaskDone.

        Gets them in the order of sample_no, those that failed too, and returns one Reward to each. Called only when it
        is overridden, and only for tasks of which a sample ran to its end; under `eval_timeout_seconds`, and
        without a placement token.
        """
        raise NotImplementedError

    @property
    def scores_groups(self) -> bool:
        """Whether `eval_group` is overridden."""
        return type(self).eval_group is not BaseAgent.eval_group

    @property
    def handler_name(self) -> str:
        """As `module:Class`, for people to read."""
        return f"{type(self).__module__}:{type(self).__qualname__}"


class HandlerElsewhere(BaseAgent):
    """Stands in the server for a handler that only its runners make."""

    def __init__(self, name: str, *, scores_groups: bool) -> None:
        self._name = name
        self._scores_groups = scores_groups

    @property
    def scores_groups(self) -> bool:
        return self._scores_groups

    @property
    def handler_name(self) -> str:
        return self._name


class EvaluatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Binds a handler to a resource model."""

    evaluator_id: str
    handler: BaseAgent
    resource: Resource
    """The budget of one evaluator (one batch); its concurrency is the ceiling of samples running at once."""
    run_resource: Resource
    """What one sample holds while it runs."""
    eval_resource: Resource
    """What it holds while it is scored."""
    batch_size: int | None = 1
    """Tasks to a batch; None: no limit."""
    default_stopping: StoppingCriteria = StoppingCriteria()
    default_sampling: SamplingParams = SamplingParams()
    run_timeout_seconds: float | None = None
    """Of one sample's run; None: no limit."""
    eval_timeout_seconds: float | None = None
    """Of one sample's scoring; None: no limit."""
    solve_threshold: float = 1.0
    """A finished sample with at least this score is `solved`."""
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESTART
    """What becomes of a turn that is being generated when a pause aborts it."""
    mask_off_policy_prefix: bool = False
    """Takes tokens of older weights than a sample's newest out of its loss mask."""
    admits_subtasks_alone: bool = False
    """Each SubTask is admitted by itself as soon as one token is free, and not its whole batch."""
    runner: str = "inline"
    """Where samples run: `inline` (in the loop), `process` or `ray`, by a `HandlerElsewhere` as the handler."""

    @property
    def sample_resource(self) -> Resource:
        """The peak that one sample holds: run and eval never overlap, and the token is kept through both."""
        return self.run_resource.field_max(self.eval_resource)
