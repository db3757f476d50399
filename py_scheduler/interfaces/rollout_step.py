"""One training step: fetch, distribute, batch, run; then filters, until enough groups survive; then files.

    reuse? -> loop state -> [ fetch -> distribute -> batch, run -> filter ] until enough -> files -> loop state

Invariants

- No step is handed out empty.
- The groups of a step are in the order in which they were fetched, whatever order they finished in.
- A step that is broken off leaves no task running and gives its tasks back to the source.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.domain.limits import check_step_samples
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError, NotFoundError
from py_scheduler.interfaces.step_results import RolloutResult, relative_files
from py_scheduler.interfaces.task_run import acceptance_order
from py_scheduler.rollout.environment import process_environment
from py_scheduler.rollout.files.details import DetailsWriter
from py_scheduler.rollout.files.store import RolloutStore, read_samples, replay_path, saved_rollout_id
from py_scheduler.rollout.filters import GroupFilter, NextMove, next_move, shortfall
from py_scheduler.rollout.reuse import ReuseAction, ReuseDecision, decide_reuse
from py_scheduler.rollout.training import pad_groups, training_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from py_scheduler.domain.task import Task
    from py_scheduler.interfaces.step_moves import StepMoves
    from py_scheduler.interfaces.task_run import Trace
    from py_scheduler.rollout.groups import Group

_log = logging.getLogger(__name__)

_FETCHED_AT_ONCE = 256
SURPLUS = "surplus"
"""The filter that drops what survived beyond the groups of a step."""


class RolloutStep:
    """One execution of an iteration. groups, samples: in place of the settings'."""

    def __init__(
        self, moves: StepMoves, rollout_id: int, groups: int | None, samples: int | None, trace: Trace
    ) -> None:
        self._moves = moves
        self._settings = moves.settings
        self._rollout_id = rollout_id
        self._wanted = groups or self._settings.groups_per_step
        self._samples = samples or self._settings.samples_per_group
        self._trace = trace
        fetched = math.ceil(self._wanted * self._settings.over_sampling)
        check_step_samples(fetched * (self._samples or 1), f"{fetched} groups of {self._samples or 1}", "samples")
        self._folder = moves.folder
        root = moves.artifact_root
        self._store = None if root is None else RolloutStore(root, file_format=self._settings.file_format)
        self._details = DetailsWriter(root, "train", rollout_id, started_unix_seconds=time.time())
        self._filter = GroupFilter(self._settings.filters)
        self._survivors: list[Group] = []
        self._rounds = 0

    async def execute(self) -> RolloutResult:
        """See TaskScheduler.execute_rollout."""
        loop = self._moves.training_loop
        decision = decide_reuse(
            self._rollout_id,
            os.environ,
            self._settings.reuse,
            loop.unfinished,
            first_is_saved=await self._folder.run(self._first_is_saved),
        )
        if decision.warning:
            _log.warning("%s", decision.warning)
        if decision.action in (ReuseAction.LOAD, ReuseAction.REPLAY):
            result = await self._folder.run(lambda: self._reuse(decision))
            self._trace.is_final = True
            await loop.skip(self._rollout_id, self._trace.request_id)
            return result
        self._moves.check_has_source()
        request_prefix = await loop.begin(self._rollout_id, self._trace.request_id)
        try:
            result = await self._roll_out(request_prefix, decision)
            self._trace.is_final = True
            await loop.finish(result)
        except BaseException:
            loop.give_back(ids_are_used=not self._moves.leaves_tasks)
            raise
        return result

    # Reuse

    def _first_is_saved(self) -> bool:
        """In a thread: it may read a file."""
        if self._store is None or self._settings.reuse.mode != "auto":
            return False
        try:
            self._store.saved_path(0)
        except NotFoundError:
            return False
        return True

    def _reuse(self, decision: ReuseDecision) -> RolloutResult:
        """In a thread: it reads files."""
        if decision.action is ReuseAction.REPLAY:
            path = replay_path(Path(decision.reuse_dir), self._rollout_id)
        elif self._store is not None:
            path = self._store.saved_path(decision.load_iteration)
        else:
            raise FailedPreconditionError(
                f"samples are to be reused ({decision.because}), but there is no artifact folder to read them from"
            )
        samples = tuple(tuple(group) for group in read_samples(path))
        if not samples:
            raise FailedPreconditionError(f"{path.name} holds no samples: roll out instead ({decision.because})")
        warnings = (decision.warning,) if decision.warning else ()
        # The summary of a rollout of this iteration, if there was one, tells more than this one can.
        files = [path for path in self._details.paths if not path.exists()]
        summary = self._details.close(
            time.time(),
            dummies=sum(sample.remove_sample for group in samples for sample in group),
            reuse=decision.action,
            warnings=warnings,
            keeps_existing=True,
        )
        return RolloutResult(
            rollout_id=self._rollout_id,
            samples=samples,
            summary=summary,
            files=relative_files(files, self._moves.artifact_root),
            reused_from=path.name,
            samples_of=saved_rollout_id(path) if decision.action is ReuseAction.LOAD else None,
            warnings=warnings,
        )

    # Rolling out

    async def _roll_out(self, request_prefix: str, decision: ReuseDecision) -> RolloutResult:
        context = self._context()
        with self._published(context):
            await self._run_rounds(request_prefix, context)
        groups = self._survivors[: self._wanted]
        return await self._folder.run(lambda: self._hand_out(groups, context, decision))

    def _context(self) -> IterationContext:
        schedule = self._settings.dagger
        return IterationContext(rollout_id=self._rollout_id) if schedule is None else schedule.context(self._rollout_id)

    def _published(self, context: IterationContext) -> AbstractContextManager[object]:
        return process_environment.training(context) if self._settings.export_environment else nullcontext()

    async def _run_rounds(self, request_prefix: str, context: IterationContext) -> None:
        """Fetches until enough groups survive, or until the settings say that it is enough of trying."""
        while True:
            missing = self._wanted - len(self._survivors)
            fetched = await self._fetch(math.ceil(missing * self._settings.over_sampling))
            if fetched:
                tasks = list(self._moves.distribute([fetched], samples=self._samples))
                planned = sum([task.config.repeat_times for task in tasks])
                check_step_samples(
                    planned, f"{len(tasks)} groups, as many samples each as their data set says,", "groups"
                )
                await self._run_round(tasks, f"{request_prefix}/{self._rounds}", context)
                self._rounds += 1
            move = next_move(
                len(self._survivors),
                self._wanted,
                self._settings.filters,
                self._filter.reports,
                fetches=max(0, self._rounds - 1),
                can_fetch=bool(fetched),
            )
            if move is not NextMove.FETCH:
                return

    async def _fetch(self, count: int) -> list[Task]:
        """Few at a time: a source reads files."""
        fetched: list[Task] = []
        while len(fetched) < count:
            more = self._moves.fetch(min(_FETCHED_AT_ONCE, count - len(fetched)))
            if not more:
                break
            fetched += more
            await asyncio.sleep(0)
        return fetched

    async def _run_round(self, tasks: list[Task], request_prefix: str, context: IterationContext) -> None:
        survivors: list[Group] = []
        run = self._moves.run_each(
            tasks, batch_id=self._rollout_id, request_prefix=request_prefix, iteration=context, trace=self._trace
        )
        async with aclosing(run) as groups:
            async for group in groups:
                await self._record(group)
                survivor = self._filter.admit(group)
                if survivor is not None:
                    survivors.append(survivor)
        survivors.sort(key=acceptance_order)
        self._survivors += survivors

    async def _record(self, group: Group) -> None:
        self._details.add(group)
        if self._store is not None:
            store, samples = self._store, training_group(group)
            await self._folder.run(lambda: store.checkpoint_group(self._rollout_id, group.task_id, samples))

    # Handing out

    def _hand_out(self, groups: list[Group], context: IterationContext, decision: ReuseDecision) -> RolloutResult:
        """In a thread: it writes files."""
        samples = pad_groups([training_group(group) for group in groups], self._wanted)
        ended = Counter(outcome for group in groups for outcome in group.outcomes)
        told = ", ".join(f"{outcome} {count}" for outcome, count in ended.items())
        if not any(outcome.is_model_result for outcome in ended):
            raise FailedPreconditionError(
                f"iteration {self._rollout_id}: no sample ran to its end ({told}): see what they failed of, and "
                "execute it again"
            )
        dummies = sum(sample.remove_sample for group in samples for sample in group)
        is_empty = dummies == sum(map(len, samples))
        warnings = tuple(self._warnings(len(groups), decision, told if is_empty else ""))
        for warning in warnings:
            _log.warning("%s", warning)
        summary = self._details.close(
            time.time(),
            context=context,
            filters=(*self._filter.reports, *self._surplus()),
            dummies=dummies,
            reuse=decision.action,
            warnings=warnings,
        )
        files = [*self._details.paths]
        if self._store is not None:
            files.append(self._store.save(self._rollout_id, samples, per_iteration=decision.saves_per_iteration))
            if decision.saves_per_iteration:
                files.append(self._store.iteration_path(self._rollout_id))
            self._store.drop_checkpoints(self._rollout_id)
        return RolloutResult(
            rollout_id=self._rollout_id,
            groups=tuple(groups),
            samples=tuple(map(tuple, samples)),
            summary=summary,
            submission_id=self._trace.submission_id,
            rounds=self._rounds,
            samples_of=None if self._store is None else self._rollout_id,
            files=relative_files(files, self._moves.artifact_root),
            warnings=warnings,
        )

    def _surplus(self) -> Iterator[FilterReport]:
        beyond = self._survivors[self._wanted :]
        if beyond:
            yield FilterReport(
                filter=SURPLUS,
                kept_groups=self._wanted,
                kept_samples=sum(len(group.samples) for group in self._survivors[: self._wanted]),
                dropped_groups=len(beyond),
                dropped_samples=sum(len(group.samples) for group in beyond),
                group_reasons={"more_than_wanted": len(beyond)},
                dropped_task_ids=tuple(group.task_id for group in beyond),
            )

    def _warnings(self, groups: int, decision: ReuseDecision, all_dummies: str) -> Iterator[str]:
        """all_dummies: how the samples ended, when there is none among them to learn from."""
        if decision.warning:
            yield decision.warning
        if groups < self._wanted:
            what = shortfall(groups, self._wanted, self._filter.reports)
            yield f"iteration {self._rollout_id}: {what}; dummies stand in for the rest"
        if all_dummies:
            yield (
                f"iteration {self._rollout_id}: not one sample can be learnt from ({all_dummies}): that takes tokens, "
                "which a handler generates or observes through its episode, and an end without an error"
            )
