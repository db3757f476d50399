"""What a handler works with while it plays one sample. Implements `domain.evaluator.Episode`.

Invariant: every token the model read or wrote through the episode is in its trajectory, in context order, also when
it fails half way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.episodes.cascade import dataset_config, resolve_sampling, resolve_stopping
from py_scheduler.domain.generation import (
    STUDENT,
    TEACHER,
    FinishReason,
    Generation,
    GenerationRequest,
    OnWeightUpdate,
    SamplingParams,
    StoppingCriteria,
)
from py_scheduler.domain.runners.runner import shown_with
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, Trajectory, TrajectoryBuilder
from py_scheduler.errors import (
    FailedPreconditionError,
    GenerationAbortedError,
    GenerationError,
)
from py_scheduler.execution.generation.turn_sampling import turn_sampling
from py_scheduler.execution.workdirs import Workdirs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from py_scheduler.domain.episodes.api_access import ApiAccess, ApiFront
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.generation import ChatMessage
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.task import Sample
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.generation.gateway import GenerationGateway

logger = logging.getLogger(__name__)

_PARTIAL_SECONDS = 3.0
"""How long a stopped episode waits for the tokens of the generation that it interrupts.

Longer than adapters wait for a backend that does not react to an abort: what has arrived is kept even then.
"""


_MAX_TEXT = 1 << 20
_OVER = "this episode is over: its handler has returned"
_ONE_CONVERSATION = (
    "observe_chat begins a conversation, and this episode has one: give it all messages at once, and what comes after "
    "an answer to observe_reply(episode, text) from py_scheduler.integrations.chat_turns"
)


class EpisodeServices:
    """What all episodes of one scheduler share: the clock, the gateway to the language models, the server's cascade
    level, where their folders are, and what lets clients of OpenAI's API in.
    """

    __slots__ = ("api_front", "clock", "default_sampling", "default_stopping", "gateway", "workdirs")

    def __init__(
        self,
        clock: Clock,
        gateway: GenerationGateway,
        default_sampling: SamplingParams = SamplingParams(),
        default_stopping: StoppingCriteria = StoppingCriteria(),
        workdirs: Workdirs | None = None,
        api_front: ApiFront | None = None,
    ) -> None:
        self.clock = clock
        self.gateway = gateway
        self.default_sampling = default_sampling
        self.default_stopping = default_stopping
        self.workdirs = workdirs or Workdirs()
        self.api_front = api_front


class HandlerEpisode:
    """One handler execution for one sample."""

    __slots__ = (
        "_api",
        "_attempt",
        "_builder",
        "_has_conversation",
        "_is_generating",
        "_is_over",
        "_oldest_epoch",
        "_sampling",
        "_services",
        "_spec",
        "_stopping",
        "_workdir",
        "attempt_no",
        "generate_seconds",
        "iteration",
        "sample",
        "termination_reason",
        "token",
        "workdirs",
    )

    def __init__(
        self,
        services: EpisodeServices,
        spec: EvaluatorSpec,
        sample: Sample,
        attempt: RunningAttempt,
    ) -> None:
        self._services = services
        self._spec = spec
        self.sample = sample
        self._attempt = attempt
        self.attempt_no = attempt.ref.attempt_no
        self.token = attempt.token
        self.iteration = attempt.planned.iteration
        self.termination_reason = ""
        self.workdirs = attempt.workdirs
        """Gets the folder that this episode makes, for whoever removes it."""
        self._workdir: Path | None = None
        self._api: ApiAccess | None = None
        self.generate_seconds = 0.0
        self._has_conversation = False
        self._is_generating = False
        self._is_over = False
        self._oldest_epoch: int | None = None
        self._builder: TrajectoryBuilder | None = None
        self._sampling: SamplingParams | None = None
        self._stopping: StoppingCriteria | None = None

    @property
    def sampling(self) -> SamplingParams:
        """Resolved over the cascade when it is first read."""
        if self._sampling is None:
            task = self.sample.task
            self._sampling = resolve_sampling(
                (
                    dataset_config(task.metadata).sampling,
                    task.config.sampling,
                    self._spec.default_sampling,
                    self._services.default_sampling,
                )
            )
        return self._sampling

    @property
    def stopping(self) -> StoppingCriteria:
        """Resolved over the cascade when it is first read."""
        if self._stopping is None:
            task = self.sample.task
            self._stopping = resolve_stopping(
                (
                    dataset_config(task.metadata).stopping,
                    task.config.stopping,
                    self._spec.default_stopping,
                    self._services.default_stopping,
                )
            )
        return self._stopping

    @property
    def token_ids(self) -> Sequence[int]:
        return self._builder.token_ids if self._builder else ()

    @property
    def remaining_seconds(self) -> float | None:
        return self._attempt.remaining_seconds

    @property
    def workdir(self) -> Path:
        """Made when it is first read."""
        if self._workdir is None:
            if self._is_over:
                raise FailedPreconditionError(_OVER)
            self._workdir = self._services.workdirs.make(self._session_id)
            self.workdirs.append(self._workdir)
        return self._workdir

    @property
    def api_base_url(self) -> str:
        return self._opened_api().base_url

    @property
    def api_key(self) -> str:
        return self._opened_api().api_key

    @property
    def api_socket(self) -> str:
        return self._opened_api().socket_path

    def _opened_api(self) -> ApiAccess:
        """Made when it is first asked for."""
        if self._api is None:
            if self._is_over or self._attempt.stop_cause is not None:
                raise FailedPreconditionError(_OVER)
            if self._services.api_front is None:
                raise FailedPreconditionError(
                    'the generation gateway does not listen: set listen = "127.0.0.1:0" or a socket under [gateway]'
                )
            self._api = self._services.api_front.admit(self)
            self._attempt.on_stop = self._api.end
        return self._api

    def show(self, key: str, value: object) -> None:
        self._attempt.shown = shown_with(self._attempt.shown, key, value)

    def choose_role(self) -> str:
        """See `domain.evaluator.Episode.choose_role`."""
        if self.iteration is None or self.iteration.beta <= 0:
            return STUDENT
        if TEACHER not in self._services.gateway:
            raise FailedPreconditionError(
                f"the iteration's beta is {self.iteration.beta:g}, and no generation engine has the role {TEACHER!r}: "
                f"add [generation.{TEACHER}], or submit with beta 0"
            )
        return TEACHER if self._draw(self.iteration.rollout_id) < self.iteration.beta else STUDENT

    def _draw(self, rollout_id: int) -> float:
        """Uniform in [0, 1), and the same whenever this turn of this sample is played again."""
        sample = self.sample
        turn = self._builder.turns_generated if self._builder else 0
        task = sample.task
        said = f"{rollout_id} {sample.sample_no} {turn} {task.client_key} {task.prompt}".encode(errors="surrogatepass")
        digest = hashlib.blake2b(said + b"\0" + task.data, digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) / (1 << 53)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return await self._services.gateway.backend(STUDENT).encode_chat(messages)

    async def encode(self, text: str) -> list[int]:
        return await self._services.gateway.backend(STUDENT).encode(text)

    async def observe_chat(self, messages: Sequence[ChatMessage]) -> None:
        """See `domain.evaluator.Episode.observe_chat`."""
        if self._has_conversation or (self._builder and self._builder.turns_generated):
            raise FailedPreconditionError(_ONE_CONVERSATION)
        self._has_conversation = True
        text = "\n".join(f"{message.role}: {message.content}" for message in messages)
        self.observe(await self.encode_chat(messages), text)

    def observe(self, token_ids: Iterable[int], text: str = "") -> None:
        self._check_free()
        given: object = text
        if not isinstance(given, str) or len(given) > _MAX_TEXT:
            raise ValueError(f"text must be a string of at most {_MAX_TEXT} characters")
        self._recorder().append_environment(token_ids, text)

    async def generate(
        self, *, role: str = STUDENT, max_new_tokens: int | None = None, sampling: SamplingParams | None = None
    ) -> Generation:
        self._check_free()
        recorder = self._recorder()
        started = self._services.clock.monotonic()
        self._is_generating = True
        try:
            request = GenerationRequest(
                rid=f"{self._session_id}-{recorder.turns_generated}",
                token_ids=list(recorder.token_ids),
                sampling=await turn_sampling(
                    self._services.gateway,
                    role,
                    self.sampling if sampling is None else resolve_sampling((sampling, self.sampling)),
                    self.stopping,
                    len(recorder.token_ids),
                    max_new_tokens,
                ),
                session_id=self._session_id,
            )
            generation = await self._generate_or_abort(request, role)
        except GenerationError as error:
            self._keep(error.partial, role)
            raise
        finally:
            self._is_generating = False
            self.generate_seconds += self._services.clock.monotonic() - started
        self._append(generation, role)
        if generation.finish_reason is FinishReason.ABORT:
            raise GenerationAbortedError("the generation was aborted at the engine", generation)
        return generation

    def close(self) -> None:
        """What the handler left running can use the episode no more."""
        self._is_over = True
        if self._api is not None:
            self._api.end()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can be recorded any more: false while a client's request is still being cut short."""
        return self._api is None or self._api.is_quiet

    async def wait_quiet(self) -> None:
        if self._api is not None:
            await self._api.wait_quiet()

    @property
    def client_failure(self) -> GenerationError | None:
        """What the last request of a client ended with: what became of its agent is due to that."""
        return None if self._api is None else self._api.failure

    def _check_free(self) -> None:
        """One context grows by one turn at a time: what is added beside a generation was never seen by the model."""
        if self._is_over:
            raise FailedPreconditionError(_OVER)
        if self._is_generating:
            raise FailedPreconditionError("this episode is generating: wait for it before anything else is added")

    async def _generate_or_abort(self, request: GenerationRequest, role: str) -> Generation:
        """Generates; when the episode is stopped meanwhile, asks the backend for what it has made until then.

        The backend is given a moment for that. What it does not give in time is cancelled, which stops its work too.
        """
        gateway, resumes = self._services.gateway, self._spec.on_weight_update is OnWeightUpdate.RESUME
        flight = asyncio.ensure_future(gateway.generate(role, request, clock=self._attempt, resumes=resumes))
        try:
            return await asyncio.shield(flight)
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(_PARTIAL_SECONDS):
                    await gateway.abort(request.rid)
                    self._keep(await flight, role)
            except GenerationError as error:
                self._keep(error.partial, role)
            except TimeoutError:
                logger.warning("the engine gave no partial generation of %s in time", request.rid)
            raise
        finally:
            if not flight.done():
                flight.cancel()
                await asyncio.wait([flight])

    def _keep(self, partial: object, role: str) -> None:
        if isinstance(partial, Generation) and partial.token_ids:
            self._append(partial, role)

    def _append(self, generation: Generation, role: str) -> None:
        self._recorder().append_generation(generation, role)
        gateway = self._services.gateway
        if generation.token_ids and STUDENT in gateway and gateway.have_same_weights(role, STUDENT):
            history = gateway.weights(role)
            # Of weights without a name nothing is known but that they were there just now.
            epochs = [history.epoch_of(span.version) for span in generation.weight_spans] or [history.epoch]
            if self._oldest_epoch is not None:
                epochs.append(self._oldest_epoch)
            self._oldest_epoch = min(epochs)

    @property
    def weight_epoch(self) -> int | None:
        """Of the oldest weights that tokens of the student are of; None when it has none."""
        return self._oldest_epoch

    @property
    def staleness(self) -> int:
        """How often the student's weights have changed since those."""
        return 0 if self._oldest_epoch is None else self._services.gateway.weights(STUDENT).epoch - self._oldest_epoch

    def trajectory(self) -> Trajectory:
        if self._builder is None:
            return EMPTY_TRAJECTORY
        return self._builder.build(mask_off_policy_prefix=self._spec.mask_off_policy_prefix)

    @property
    def _session_id(self) -> str:
        return f"{self.sample.task_id}-{self.sample.sample_no}-{self.attempt_no}"

    def _recorder(self) -> TrajectoryBuilder:
        if self._builder is None:
            self._builder = TrajectoryBuilder()
        return self._builder
