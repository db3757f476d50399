"""A runner that is a process of its own: what a workflow blocks or exits there is that process alone.

Invariants
  1. A child runs for one TrinityProcessRunner, from `prepare` to `kill`; it is killed with all that it has started.
  2. Tasks go there pickled, and nothing comes back so: a child's words are decoded as strictly as any other input.
"""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251 -- the caller's own objects on their way to the caller's own child
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from py_scheduler.domain.runners.runner import ANYWHERE, HandlerPlan, RunnerSettings
from py_scheduler.domain.task import Sample, Task, TaskConfig
from py_scheduler.domain.values.plain import words_of
from py_scheduler.errors import InvalidArgumentError, RunnerLostError, RunnerStartError
from py_scheduler.execution.children.session import ChildSession
from py_scheduler.interfaces.trinity.config import ProcessConfig
from py_scheduler.interfaces.trinity.runners.agent import STATE, WorkflowAgent, WorkflowSaid
from py_scheduler.interfaces.trinity.runners.workflow_runner import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.runners.runner import ChildHost
    from py_scheduler.interfaces.trinity.protocols import TrinityConfig

_ALIVE_SECONDS = 30.0
"""How long an idle child may take to say that it is alive."""
_END_SECONDS = 5.0
"""How long the kernel may take to end a killed one."""
_HANDLER = f"{WorkflowAgent.__module__}:{WorkflowAgent.__qualname__}"


def is_of_processes(config: TrinityConfig) -> bool:
    """Whether its runners are processes, if its kind of configuration has such a choice."""
    return bool(getattr(config.explorer, "runner", "inline") == "process")


def pickled(value: object, field: str) -> bytes:
    """Raises InvalidArgumentError, which names the field."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # what is pickled says how, and may raise anything
        reason = f"cannot be sent to a process runner ({words_of(error)}): classes and functions must be importable"
        raise InvalidArgumentError(reason, field) from error


class TrinityProcessRunner:
    """Implements `protocols.TrinityRunner` by a child process."""

    def __init__(
        self,
        host: ChildHost,
        config: TrinityConfig,
        rollout_model_id: int,
        auxiliary_model_ids: Sequence[int],
        runner_id: int,
    ) -> None:
        self.unfit_because = ""
        self._host = host
        self._process: ProcessConfig = getattr(config.explorer, "process", ProcessConfig())
        self._plan = HandlerPlan(
            name=_HANDLER,
            arguments={
                "config": pickled(config, "config"),
                "rollout_model_id": rollout_model_id,
                "auxiliary_model_ids": list(auxiliary_model_ids),
                "runner_id": runner_id,
                "main_path": str(getattr(sys.modules["__main__"], "__file__", None) or ""),
            },
            key=f"runner {runner_id}",
        )
        self._session: ChildSession | None = None
        self._state: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Of the child; 0 before it was started."""
        return 0 if self._session is None else self._session.child.pid

    async def prepare(self) -> None:
        """Returns when the child has opened its models. Raises RunnerStartError; then no child is left."""
        settings = RunnerSettings(environment=self._process.environment)
        try:
            async with asyncio.timeout(self._process.start_seconds):
                child = await self._host.launch(ANYWHERE, settings)
                self._session = ChildSession(child, lambda _: {}, lambda _: None)
                await self._session.prepare(self._plan, ())
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                reason = f"it was not ready within process.start_seconds ({self._process.start_seconds:g})"
                raise RunnerStartError(reason) from error
            raise

    async def run_task(
        self, task: Any, batch_id: str, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> tuple[Status, bytes]:
        """A cancellation is passed on to the child, and leaves here when the child's work has ended.

        Raises RunnerLostError, InvalidArgumentError.
        """
        session = self._live_session()
        arguments = (task, batch_id, repeat_times, run_id_base, collect_partial_runs)
        call = _Call(pickled(arguments, "task"), self._show)
        try:
            result = await session.run(cast("Episode", call))
        finally:
            session.forget_episode()
        said = msgspec.msgpack.decode(result.payload, type=WorkflowSaid)
        self.unfit_because = said.unfit_because or self._too_large(session.resident_mib)
        return Status(said.completed_runs, said.total_runs, [*said.metrics], said.message), said.experiences

    async def get_runner_state(self) -> dict[str, Any]:
        """As the child said last: it says so when a task begins and ends, and each second in between."""
        return dict(self._state)

    async def confirm_alive(self) -> None:
        """Raises RunnerLostError."""
        session = self._live_session()
        try:
            async with asyncio.timeout(_ALIVE_SECONDS):
                if not await session.ping():
                    raise RunnerLostError(session.how_it_ended)
        except TimeoutError:
            raise RunnerLostError(f"the child did not answer within {_ALIVE_SECONDS:g} s") from None

    def kill(self) -> None:
        """Ends the child and what it has started, at once."""
        if self._session is not None:
            self._session.kill("the scheduler ended it")

    async def ended(self) -> None:
        """Of a killed child: returns when it is gone."""
        if self._session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._session.over.wait()

    def _live_session(self) -> ChildSession:
        if self._session is None:
            raise RunnerLostError("its child was not started")
        if not self._session.is_alive:
            raise RunnerLostError(self._session.how_it_ended or "its child has ended")
        return self._session

    def _too_large(self, resident_mib: float) -> str:
        limit = self._process.max_resident_mib
        if limit is None or resident_mib <= limit:
            return ""
        return f"it held {resident_mib:.0f} MiB after a task, process.max_resident_mib is {limit:g}"

    def _show(self, state: str) -> None:
        self._state = msgspec.json.decode(state, type=dict[str, Any])


class _Call:
    """As much of an Episode as a ChildSession needs to have a task run: its agent asks for nothing else."""

    token = iteration = None
    attempt_no = 1
    termination_reason = ""

    def __init__(self, data: bytes, on_state: Callable[[str], None]) -> None:
        self.sample = Sample(task_id="", sample_no=0, task=Task(config=TaskConfig(task_type=""), data=data))
        self._on_state = on_state

    def show(self, key: str, value: object) -> None:
        if key == STATE:
            self._on_state(str(value))
