"""What a handler works with while it runs one sample. Implements `domain.evaluator.Episode`.

The episode gives a handler access to the language models; `execution/record.py` keeps the tokens that come of it, and
`execution/turns.py` knows what a single turn may be.
"""

from __future__ import annotations

import hashlib
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
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, Trajectory
from py_scheduler.errors import (
    FailedPreconditionError,
    GenerationAbortedError,
    GenerationError,
)
from py_scheduler.execution.record import EpisodeRecord
from py_scheduler.execution.turns import generate_turn, turn_sampling
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

_OVER = "this episode is over: its handler has returned"


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
        "_is_generating",
        "_is_over",
        "_record",
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
        """Gets the folder that this episode makes; the evaluator removes it."""
        self._workdir: Path | None = None
        self._api: ApiAccess | None = None
        self.generate_seconds = 0.0
        self._is_generating = False
        self._is_over = False
        self._record: EpisodeRecord | None = None
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
    def token_ids(self) -> list[int]:
        return self._record.token_ids if self._record is not None else []

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
        """Uniform in [0, 1), and the same whenever this turn of this sample runs again."""
        sample = self.sample
        turn = self._record.turns_generated if self._record is not None else 0
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
        self._opened_record().begin_conversation()
        text = "\n".join(f"{message.role}: {message.content}" for message in messages)
        self.observe(await self.encode_chat(messages), text)

    def observe(self, token_ids: Iterable[int], text: str = "") -> None:
        self._check_free()
        self._opened_record().observe(token_ids, text)

    async def generate(
        self, *, role: str = STUDENT, max_new_tokens: int | None = None, sampling: SamplingParams | None = None
    ) -> Generation:
        self._check_free()
        record, gateway, session_id = self._opened_record(), self._services.gateway, self._session_id
        started = self._services.clock.monotonic()
        self._is_generating = True
        try:
            request = GenerationRequest(
                rid=f"{session_id}-{record.turns_generated}",
                token_ids=record.prompt(),
                sampling=await turn_sampling(
                    gateway,
                    role,
                    self.sampling if sampling is None else resolve_sampling((sampling, self.sampling)),
                    self.stopping,
                    record.token_count,
                    max_new_tokens,
                ),
                session_id=session_id,
            )
            resumes = self._spec.on_weight_update is OnWeightUpdate.RESUME
            generation = await generate_turn(gateway, role, request, record, clock=self._attempt, resumes=resumes)
        except GenerationError as error:
            record.keep(error.partial, role)
            raise
        finally:
            self._is_generating = False
            self.generate_seconds += self._services.clock.monotonic() - started
        record.append(generation, role)
        if generation.finish_reason is FinishReason.ABORT:
            raise GenerationAbortedError("the generation was aborted at the engine", generation)
        return generation

    def close(self) -> None:
        """From now on tasks that the handler has left running cannot use the episode."""
        self._is_over = True
        if self._api is not None:
            self._api.end()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can be recorded any more. False while a request of a client is still being cut short."""
        return self._api is None or self._api.is_quiet

    async def wait_quiet(self) -> None:
        if self._api is not None:
            await self._api.wait_quiet()

    @property
    def client_failure(self) -> GenerationError | None:
        """The error of the last request of a client, if it failed: the end of its agent is due to that."""
        return None if self._api is None else self._api.failure

    def _check_free(self) -> None:
        """A context grows by one turn at a time: the model never sees tokens that are added while it generates."""
        if self._is_over:
            raise FailedPreconditionError(_OVER)
        if self._is_generating:
            raise FailedPreconditionError("this episode is generating: wait for it before anything else is added")

    @property
    def weight_epoch(self) -> int | None:
        """See `EpisodeRecord.weight_epoch`."""
        return self._record.weight_epoch if self._record is not None else None

    @property
    def staleness(self) -> int:
        """See `EpisodeRecord.staleness`."""
        return self._record.staleness if self._record is not None else 0

    def trajectory(self) -> Trajectory:
        if self._record is None:
            return EMPTY_TRAJECTORY
        return self._record.trajectory(mask_off_policy_prefix=self._spec.mask_off_policy_prefix)

    @property
    def _session_id(self) -> str:
        return f"{self.sample.task_id}-{self.sample.sample_no}-{self.attempt_no}"

    def _opened_record(self) -> EpisodeRecord:
        """Made when something is first to be recorded."""
        if self._record is None:
            self._record = EpisodeRecord(self._services.gateway)
        return self._record
