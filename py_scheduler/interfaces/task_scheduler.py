"""The TaskScheduler of seed 1: drives the steps of a training loop over an engine, in-process.

    async with TaskScheduler(engine, source=source, settings=settings) as scheduler:
        for rollout_id in range(scheduler.next_rollout_id, 5):
            result = await scheduler.execute_rollout(rollout_id)
            train_on(result.samples)
            print((await scheduler.execute_eval(rollout_id)).metrics)

A step makes four moves, each a method that a subclass may override: `fetch`, `distribute`, `batch` and `run_each`.
"""

from __future__ import annotations

import inspect
import os
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Self

import msgspec

from py_scheduler.batching import BatchingStrategy, fifo_batching, interleave
from py_scheduler.domain.task import DEFAULT_NAMESPACE, SubmissionKey
from py_scheduler.domain.training.iteration import checked_rollout_id
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.interfaces.artifact_folder import ArtifactFolder
from py_scheduler.interfaces.eval_step import EvalStep
from py_scheduler.interfaces.rollout_step import RolloutStep
from py_scheduler.interfaces.task_run import WINDOW_SAMPLES, RunTerms, TaskRun, Trace, acceptance_order, windows_of
from py_scheduler.interfaces.training_loop import TrainingLoop
from py_scheduler.rollout.settings import RolloutSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from py_scheduler.domain.task import Batch, BatchId, Task
    from py_scheduler.domain.training.data import DataSource
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.interfaces.step_results import EvalResult, RolloutResult
    from py_scheduler.rollout.groups import Group
    from py_scheduler.scheduler.engine import Engine

    OnTaskDone = Callable[[Group], Awaitable[None] | None]

_OPEN_PER_RUNNING = 2
"""Samples that are open for each that can run at once: as many again wait, so that room is never without a taker."""
_EVENTS_PER_SAMPLE = 4
"""More than a sample makes with its share of its task's: events of what is open are retained until they are read."""
STEP_EVENTS = _EVENTS_PER_SAMPLE * WINDOW_SAMPLES
"""An engine has to retain, so that a window of a step can be read."""


class TaskScheduler:
    """Steps over an engine. Use as `async with`: an engine that is not running is started, and ends with the block.

    on_task_done: a plain or an async function that gets each task's Group as it completes; what it raises ends the run.
    settings, source, eval_sources: what steps need; `run_all` needs none of them. Each eval source has a name of its
    own, and an end.
    artifact_root: the folder of everything that steps write, and of where the loop stands. Nobody else may use it
    meanwhile. None: nothing is kept.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batching_strategy: BatchingStrategy = fifo_batching,
        on_task_done: OnTaskDone | None = None,
        settings: RolloutSettings = RolloutSettings(),
        source: DataSource | None = None,
        eval_sources: Sequence[DataSource] = (),
        artifact_root: Path | None = None,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> None:
        self.engine = engine
        self.settings = msgspec.structs.replace(settings, reuse=settings.reuse.defaulting_to("auto"))
        self.eval_sources = tuple(eval_sources)
        self.folder = ArtifactFolder(artifact_root)
        self.namespace = namespace
        self.training_loop = TrainingLoop(source, self.folder)
        self.on_task_done = on_task_done
        self.leaves_tasks = False
        """Whether a step that is cancelled leaves its tasks to the engine, which is about to end."""
        self._batching_strategy = batching_strategy
        self._eval_starts = [source.state() for source in self.eval_sources]
        self._evals = 0
        self._under_way: set[str] = set()
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if not self.engine.is_running:
            await self._exit.enter_async_context(self.engine)
        self._exit.callback(self.folder.release)
        try:
            if self.training_loop.source is not None or self.eval_sources:
                self.folder.hold()
            self.training_loop.restore()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exit.aclose()

    @property
    def artifact_root(self) -> Path | None:
        """The artifact folder, with links followed."""
        return self.folder.root

    @property
    def next_rollout_id(self) -> int:
        """Where the loop stands: the iteration to be executed next, an unfinished one first."""
        return self.training_loop.next_rollout_id

    # The four moves

    def fetch(self, count: int) -> list[Task]:
        """Pulls tasks from the source: `count`, fewer only at its end. Called again while too few groups survive."""
        source = self.training_loop.source
        return [] if source is None else source.take(count)

    def distribute(self, datasets: Sequence[Iterable[Task]], *, samples: int | None = None) -> Iterator[Task]:
        """Gives each task what the step says of it, and several data sets the order ABCABC.

        samples: repeats of each task; None: its own.
        """
        refills = self.settings.refill_aborted
        for task in interleave(datasets):
            config = task.config
            if samples is not None:
                config = msgspec.structs.replace(config, repeat_times=samples)
            if refills and not config.retry.max_infra_refills:
                retry = msgspec.structs.replace(config.retry, max_infra_refills=refills)
                config = msgspec.structs.replace(config, retry=retry)
            yield task if config is task.config else msgspec.structs.replace(task, config=config)

    def batch(self, tasks: Sequence[Task]) -> list[Batch]:
        """What the strategy makes of the tasks of one window, or of a whole list."""
        return self._batching_strategy(tasks, self.engine.specs)

    async def run_each(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId | None = None,
        round_no: int = 0,
        request_prefix: str = "",
        iteration: IterationContext | None = None,
        trace: Trace | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Runs any number of tasks and yields each one's Group as it completes; memory holds what is open, no more.

        Leaving early aborts what is open. The same tasks under the same batch_id and round_no are run once: again, they
        give what they gave, as far as the engine's journal remembers. batch_id None: a fresh one. request_prefix: in
        place of what these two make. Raises UnplaceableError, before anything is launched if `tasks` is a list;
        InvalidArgumentError, AlreadyExistsError, FailedPreconditionError.
        """
        if batch_id is None:
            batch_id = f"run-{os.urandom(4).hex()}"
        terms = RunTerms(
            key=SubmissionKey(batch_id, self.namespace),
            request_prefix=request_prefix or f"run/{batch_id}/{round_no}",
            max_open_samples=self._max_open_samples(),
            iteration=iteration,
        )
        # What was begun before a restart goes on, also where fewer nodes are left: its windows were guarded then.
        was_begun = self.engine.has_taken_in(self.namespace, terms.request_id(0))
        windows = windows_of(tasks, self.batch, None if was_begun else self.engine.guard)
        run = TaskRun(self.engine, windows, terms, trace, may_abort=lambda: not self.leaves_tasks)
        async with aclosing(run.groups()) as groups:
            async for group in groups:
                if self.on_task_done is not None:
                    told = self.on_task_done(group)
                    if inspect.isawaitable(told):
                        await told
                yield group

    def _max_open_samples(self) -> int:
        engine = self.engine
        wanted = _OPEN_PER_RUNNING * max(engine.max_running_samples, WINDOW_SAMPLES)
        return min(wanted, engine.settings.retained_events // _EVENTS_PER_SAMPLE)

    async def run_all(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId | None = None,
        round_no: int = 0,
        iteration: IterationContext | None = None,
    ) -> list[Group]:
        """`run_each` with all groups in one list, in the order in which the strategy put their tasks."""
        run = self.run_each(tasks, batch_id=batch_id, round_no=round_no, iteration=iteration)
        async with aclosing(run) as groups:
            return sorted([group async for group in groups], key=acceptance_order)

    # Steps

    async def execute_rollout(
        self, rollout_id: int, *, groups: int | None = None, samples: int | None = None, trace: Trace | None = None
    ) -> RolloutResult:
        """One training step. groups, samples: in place of the settings'. trace: for who follows the step's events.

        An iteration that was under way when the process was killed gets the same tasks again. Cancelling it aborts its
        tasks; it may be executed again. Raises FailedPreconditionError (no source, another iteration is unfinished, no
        group survived) and what `run_each` raises.
        """
        with self._only_one("a rollout", rollout_id):
            finished = self.training_loop.claim(rollout_id)
            if finished is not None:
                return finished
            step = RolloutStep(self, rollout_id, groups, samples, trace or Trace(self.engine.last_sequence))
            return await step.execute()

    async def execute_eval(
        self, rollout_id: int, *, samples: int | None = None, trace: Trace | None = None
    ) -> EvalResult:
        """Evaluates every prompt of every eval data set; may run beside a training step, under the same limits.

        samples: copies of each prompt, in place of the settings'. Raises FailedPreconditionError (no eval data set) and
        what `run_each` raises.
        """
        self.check_has_eval_sources()
        with self._only_one("an eval", rollout_id):
            for source, start in zip(self.eval_sources, self._eval_starts, strict=True):
                source.restore(start)
            self._evals += 1
            step = EvalStep(self, rollout_id, samples, trace or Trace(self.engine.last_sequence))
            return await step.execute(f"eval/{rollout_id}/{self._evals}")

    def check_has_source(self) -> None:
        """Raises FailedPreconditionError when there is nothing to roll out."""
        if self.training_loop.source is None:
            raise FailedPreconditionError(
                "there is no data source: give the TaskScheduler one; a server has one with a [[dataset]] table"
            )

    def check_has_eval_sources(self) -> None:
        """Raises FailedPreconditionError when there is nothing to evaluate."""
        if not self.eval_sources:
            raise FailedPreconditionError(
                "there is no eval data set: give the TaskScheduler one; a server has one with an [[eval_dataset]] table"
            )

    @contextmanager
    def _only_one(self, what: str, rollout_id: int) -> Iterator[None]:
        """Two steps at once would take turns at one source."""
        checked_rollout_id(rollout_id)
        if what in self._under_way:
            raise FailedPreconditionError(f"{what} is under way already: wait for it, or cancel it")
        self._under_way.add(what)
        try:
            self.folder.hold()
            yield
        finally:
            self._under_way.remove(what)
