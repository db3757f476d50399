"""Plays workflows, one task at a time: what a RunnerWrapper hosts where there is no Trinity."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.values.metrics import RUN_SECONDS, plain_metrics, task_metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.interfaces.trinity.protocols import TrinityConfig
    from py_scheduler.interfaces.trinity.workflows import Experience, Task, Workflow


@dataclass(frozen=True)
class Status:
    """How a task or sub-task went: runs that succeeded of those planned, their metrics, and why not all did."""

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    message: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every planned run succeeded."""
        return self.completed_runs == self.total_runs


class _Run(msgspec.Struct):
    """What one run came to; error: the traceback if it failed."""

    experiences: list[Experience] = []
    metrics: dict[str, float] = {}
    error: str = ""


class WorkflowRunner:
    """Lives in the loop of its scheduler: async workflows run there, others in threads.

    A thread cannot be stopped: one that outlives its task makes the runner unfit. Implements `protocols.TrinityRunner`.
    """

    def __init__(
        self, config: TrinityConfig, rollout_model_id: int, auxiliary_model_ids: Sequence[int] = (), runner_id: int = 0
    ) -> None:
        self.runner_id = runner_id
        self._explorer: Any = config.explorer
        self._model_ids = rollout_model_id, tuple(auxiliary_model_ids)
        self._model: Any = None
        self._auxiliary_models: list[Any] = []
        self._workflow: Workflow | None = None
        self._workflow_in_view: Workflow | None = None
        self.threads_at_work = 0
        self._no_thread = asyncio.Event()
        self._no_thread.set()
        self._state: dict[str, Any] = {"workflow_id": None, "model_version": None, "begin_time": 0, "terminate_time": 0}

    async def prepare(self) -> None:
        """Raises what opening the models raises."""
        self.open_models()

    def open_models(self) -> None:
        """Before the first task."""
        rollout_model_id, auxiliary_model_ids = self._model_ids
        self._model = _opened(self._explorer.rollout_model, rollout_model_id)
        self._auxiliary_models = [
            _opened(model, number)
            for model, number in zip(self._explorer.auxiliary_models, auxiliary_model_ids, strict=False)
        ]

    async def confirm_alive(self) -> None:
        """As alive as the loop that it lives in."""

    @property
    def unfit_because(self) -> str:
        """Of threads that outlived their task; empty when there are none."""
        return f"{self.threads_at_work} threads of an earlier task are still at work" if self.threads_at_work else ""

    def kill(self) -> None:
        """There is nothing that could be ended: it is left alone."""

    async def ended(self) -> None:
        """Threads that are at work are not waited for: they may be for ever."""

    async def threads_ended(self) -> None:
        """Returns when no thread of it is at work, whoever cancels meanwhile."""
        while self.threads_at_work:
            try:
                await self._no_thread.wait()
            except asyncio.CancelledError:
                continue

    async def get_runner_state(self) -> dict[str, Any]:
        """What it is at, and what the workflow says of itself."""
        said = getattr(self._workflow_in_view, "state", None) or {}
        return {**self._state, **said}

    async def run_task(
        self,
        task: Task,
        batch_id: str,
        repeat_times: int = 1,
        run_id_base: int = 0,
        collect_partial_runs: bool = False,
    ) -> tuple[Status, bytes]:
        """The status of these runs, and their experiences as bytes; none of an eval, nor of runs that do not count.

        Never raises for what a workflow does.
        """
        version = self._state["model_version"] = getattr(self._model, "model_version", 0)
        try:
            if task.workflow.can_repeat:
                runs = await self._repeat(task, batch_id, repeat_times, run_id_base)
            else:
                runs = await self._run_each(task, batch_id, repeat_times, run_id_base, collect_partial_runs)
            status = _status(runs, repeat_times)
            if task.is_eval or not (status.ok or collect_partial_runs):
                return status, b""
            return status, self._serialized(task, [made for run in runs for made in run.experiences], version)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:  # noqa: BLE001 -- the boundary at which what workflows raise becomes a status
            return _status([_Run(error=traceback.format_exc().rstrip())], repeat_times), b""

    def _serialized(self, task: Task, experiences: Sequence[Experience], version: int) -> bytes:
        """Of runs that count. Raises TypeError."""
        drift = getattr(self._model, "model_version", 0) - version
        for experience in experiences:
            experience.eid.batch = task.batch_id
            if experience.eid.task == "":
                experience.eid.task = task.task_id
            experience.metrics = plain_metrics(experience.metrics or {})
            experience.info = {**experience.info, "model_version": version, "model_version_drift": drift}
        try:
            return type(experiences[0]).serialize_many(experiences) if experiences else b""
        except Exception as error:
            raise TypeError(f"{_name_of(task.workflow)} made experiences that cannot be serialized") from error

    # One call for all runs

    async def _repeat(self, task: Task, batch_id: str, repeat_times: int, run_id_base: int) -> list[_Run]:
        """All or nothing. What experiences measured belongs to the run that they name."""
        workflow = self._reused(task)
        workflow.set_repeat_times(repeat_times, run_id_base)
        whole = await self._play(workflow, f"{batch_id}/{task.task_id}/{run_id_base}")
        if whole.error:
            return [whole]
        seconds = whole.metrics[RUN_SECONDS]
        runs = []
        for run_id in range(run_id_base, run_id_base + repeat_times):
            experiences = [experience for experience in whole.experiences if experience.eid.run == run_id]
            if not experiences:
                return [
                    _Run(error=f"{_name_of(task.workflow)} made no experience of run {run_id}, which it was asked for")
                ]
            runs.append(_Run(experiences=experiences, metrics={**_measured(experiences), RUN_SECONDS: seconds}))
        return runs

    # A call for each run

    async def _run_each(
        self, task: Task, batch_id: str, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> list[_Run]:
        run_ids = range(run_id_base, run_id_base + repeat_times)
        name = f"{batch_id}/{task.task_id}"
        mode = self._explorer.concurrent_mode
        if mode in ("asynchronous", "multi-threading"):
            in_threads = mode == "multi-threading"
            return await _at_once(
                [partial(self._run_one, self._new(task), name, run_id, in_threads) for run_id in run_ids],
                collect_partial_runs,
            )
        runs: list[_Run] = []
        for run_id in run_ids:
            run = await self._run_one(self._reused(task), name, run_id, in_thread=False)
            runs.append(run)
            if run.error and not collect_partial_runs:
                break
        return runs

    async def _run_one(self, workflow: Workflow, name: str, run_id: int, in_thread: bool) -> _Run:
        run = await self._play(workflow, f"{name}/{run_id}", in_thread=in_thread)
        for experience in run.experiences:
            experience.eid.run = run_id
        return run

    async def _play(self, workflow: Workflow, workflow_id: str, *, in_thread: bool = False) -> _Run:
        began_at = time.monotonic()
        self._workflow_in_view = workflow
        self._state.update(workflow_id=workflow_id, begin_time=time.time(), terminate_time=None)
        try:
            experiences = _checked(await self._call(workflow, in_thread), workflow)
            metrics = {**_measured(experiences), RUN_SECONDS: time.monotonic() - began_at}
            return _Run(experiences=experiences, metrics=metrics)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:  # noqa: BLE001 -- as above; a run that fails need not end the others
            return _Run(error=traceback.format_exc().rstrip())
        finally:
            self._state["terminate_time"] = time.time()

    async def _call(self, workflow: Workflow, in_thread: bool) -> list[Experience]:
        if workflow.is_async and not in_thread:
            return await workflow.run_async()
        run = (lambda: asyncio.run(workflow.run_async())) if workflow.is_async else workflow.run
        return await self._in_thread(run)

    async def _in_thread(self, run: Callable[[], list[Experience]]) -> list[Experience]:
        """Not in the loop's pool: that has a handful of threads for everybody, and those that block would use it up."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        ended: asyncio.Future[list[Experience]] = loop.create_future()

        def work() -> None:
            made, raised = None, None
            try:
                made = context.run(run)
            except BaseException as error:  # noqa: BLE001 -- it is raised where the thread is waited for
                raised = error
            with suppress(RuntimeError):  # The loop ended before the thread did.
                loop.call_soon_threadsafe(self._thread_ended, ended, made, raised)

        self.threads_at_work += 1
        self._no_thread.clear()
        # No process waits for it at its end.
        threading.Thread(target=work, name=f"workflow on runner {self.runner_id}", daemon=True).start()
        return await ended

    def _thread_ended(self, ended: asyncio.Future[Any], made: Any, raised: BaseException | None) -> None:
        self.threads_at_work -= 1
        if not self.threads_at_work:
            self._no_thread.set()
        if ended.done():
            return
        if raised is None:
            ended.set_result(made)
        elif isinstance(raised, StopIteration):
            ended.set_exception(RuntimeError(f"the workflow raised {raised!r}"))
        else:
            ended.set_exception(raised)

    def _new(self, task: Task) -> Workflow:
        return task.workflow(task=task, model=self._model, auxiliary_models=self._auxiliary_models)

    def _reused(self, task: Task) -> Workflow:
        """The workflow that ran before, where it can be used again."""
        workflow = self._workflow
        if type(workflow) is task.workflow and workflow.can_reset:
            workflow.reset(task)
        else:
            workflow = self._workflow = self._new(task)
        return workflow


async def _at_once(starts: Sequence[Callable[[], Awaitable[_Run]]], collect_partial_runs: bool) -> list[_Run]:
    """Runs in the order of their ids. Without partial collection the first that fails ends the others."""
    tasks = [asyncio.ensure_future(start()) for start in starts]
    try:
        for task in asyncio.as_completed(tasks):
            if (await task).error and not collect_partial_runs:
                break
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks if not task.cancelled()]


def _status(runs: Sequence[_Run], repeat_times: int) -> Status:
    good = [run for run in runs if not run.error]
    message = next((run.error for run in runs if run.error), None)
    if message is not None and good:
        message = f"{len(good)}/{repeat_times} runs completed successfully. First error: {message}"
    return Status(len(good), repeat_times, [run.metrics for run in good], message)


def _checked(made: object, workflow: Workflow) -> list[Experience]:
    """What a workflow returned, if it is experiences, one at least. Raises TypeError, ValueError."""
    name = _name_of(type(workflow))
    if not isinstance(made, list | tuple):
        raise TypeError(f"{name} returned {type(made).__name__}, not a list of experiences")
    if not made:
        raise ValueError(f"{name} returned no experience: a run has one at least")
    for experience in made:
        if not hasattr(experience, "eid"):
            raise TypeError(f"{name} returned {type(experience).__name__} among its experiences, which is none")
    return list(made)


def _name_of(workflow: object) -> str:
    return getattr(workflow, "__name__", "") or type(workflow).__name__


def _measured(experiences: Sequence[Experience]) -> dict[str, float]:
    measured = [plain_metrics(experience.metrics) for experience in experiences if experience.metrics]
    return task_metrics(measured, is_eval=False)


def _opened(model: Any, engine_id: int) -> Any:
    open_model = getattr(model, "open_model", None)
    return None if open_model is None else open_model(engine_id)
