"""One evaluation: every prompt and copy of every eval data set, interleaved (ABCABC), in one run; then split apart.

    sources -> distribute: prompt x copy, ABCABC -> batch, run -> a group to a prompt -> by data set -> metrics, files

A copy is a task of its own, so that the copies of all data sets mix; its metadata say of which data set and prompt.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.limits import check_step_samples
from py_scheduler.domain.results import Outcome, TaskState
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.interfaces.step_results import EvalResult, relative_files
from py_scheduler.rollout.environment import eval_context, process_environment
from py_scheduler.rollout.files.details import DetailsWriter
from py_scheduler.rollout.groups import Group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from py_scheduler.domain.results import Reward, SampleDone
    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.data import DataSource
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.interfaces.step_moves import StepMoves
    from py_scheduler.interfaces.task_run import Trace

DATASET_NAME = "_eval_dataset_name"
PROMPT_NO = "_eval_prompt_no"
COPY_NO = "_eval_copy_no"

_TAKEN_AT_ONCE = 256
MAX_PROMPTS = 100_000
"""Of one eval data set; a source that begins anew at its end would never be read to it."""


def eval_copies(source: DataSource, copies: int) -> Iterator[Task]:
    """Each prompt of a data set, to its end, `copies` times in a row, as eval tasks of one sample.

    Raises InvalidArgumentError for a data set that does not seem to end, or is too much for one eval.
    """
    prompt_no = 0
    while tasks := source.take(_TAKEN_AT_ONCE):
        prompts = prompt_no + len(tasks)
        check_step_samples(
            prompts * copies, f"{prompts} prompts or more of data set {source.name!r}, {copies} times each,", "samples"
        )
        for task in tasks:
            config = msgspec.structs.replace(task.config, repeat_times=1, is_eval=True, dataset=source.name)
            for copy_no in range(copies):
                metadata = {**task.metadata, DATASET_NAME: source.name, PROMPT_NO: prompt_no, COPY_NO: copy_no}
                client_key = f"{source.name}/{prompt_no}/{copy_no}"
                yield msgspec.structs.replace(task, config=config, metadata=metadata, client_key=client_key)
            prompt_no += 1
        if prompt_no > MAX_PROMPTS:
            raise InvalidArgumentError(
                f"has more than {MAX_PROMPTS} prompts: an eval is read to its end, so give a source that stops there",
                f"data set {source.name!r}",
            )


class EvalStep:
    """One execution of an eval. samples: copies of each prompt, in place of the settings'."""

    def __init__(self, moves: StepMoves, rollout_id: int, samples: int | None, trace: Trace) -> None:
        self._moves = moves
        self._settings = moves.settings
        self._rollout_id = rollout_id
        self._copies = samples or self._settings.n_samples_per_eval_prompt
        self._trace = trace
        self._open: dict[tuple[str, int], list[Group]] = {}
        self._prompts: dict[str, dict[int, Group]] = {source.name: {} for source in moves.eval_sources}
        self._folder = moves.folder
        with self._folder.telling():
            self._details = DetailsWriter(
                moves.artifact_root,
                "eval",
                rollout_id,
                samples=self._settings.save_eval_details,
                started_unix_seconds=time.time(),
            )

    async def execute(self, request_prefix: str) -> EvalResult:
        """See TaskScheduler.execute_eval."""
        moves = self._moves
        with self._published() as context:
            run = moves.run_each(
                await self._tasks(),
                batch_id=f"{self._rollout_id}/eval",
                request_prefix=request_prefix,
                iteration=context,
                trace=self._trace,
            )
            async with aclosing(run) as groups:
                async for group in groups:
                    await self._take(group)
        if not any(self._prompts.values()):
            raise FailedPreconditionError("the eval data sets hold no prompt: there is nothing to evaluate")
        summary = await self._folder.run(lambda: self._details.close(time.time(), context=context))
        return EvalResult(
            rollout_id=self._rollout_id,
            datasets={name: tuple(prompts[no] for no in sorted(prompts)) for name, prompts in self._prompts.items()},
            metrics=summary.metrics,
            summary=summary,
            submission_id=self._trace.submission_id,
            files=relative_files(self._details.paths, moves.artifact_root),
        )

    def _published(self) -> AbstractContextManager[IterationContext]:
        eval_beta = self._settings.eval_beta
        if self._settings.export_environment:
            return process_environment.evaluation(self._rollout_id, eval_beta)
        return nullcontext(eval_context(self._rollout_id, os.environ, eval_beta))

    async def _tasks(self) -> list[Task]:
        """All of them, few at a time: a source reads files."""
        datasets = [eval_copies(source, self._copies) for source in self._moves.eval_sources]
        tasks: list[Task] = []
        for task in self._moves.distribute(datasets):
            tasks.append(task)
            if len(tasks) % _TAKEN_AT_ONCE == 0:
                check_step_samples(
                    len(tasks), f"the prompts of {len(datasets)} eval data sets and their copies", "samples"
                )
                await asyncio.sleep(0)
        return tasks

    async def _take(self, copy: Group) -> None:
        """Keeps a copy until all of its prompt are there."""
        name, prompt_no = copy.task.metadata[DATASET_NAME], copy.task.metadata[PROMPT_NO]
        copies = self._open.setdefault((name, prompt_no), [])
        copies.append(copy)
        if len(copies) == self._copies:
            del self._open[name, prompt_no]
            prompt = self._prompts[name][prompt_no] = joined(copies)
            await self._folder.run(lambda: self._details.add(prompt))


def joined(copies: list[Group]) -> Group:
    """The copies of one prompt as one group, a sample to a copy, numbered by it; each sample keeps its own task_id."""
    copies.sort(key=lambda group: int(group.task.metadata[COPY_NO]))
    samples: list[SampleDone] = []
    rewards: list[Reward] = []
    outcomes: list[Outcome] = []
    for number, group in enumerate(copies):
        samples += [msgspec.structs.replace(sample, sample_no=number) for sample in group.samples]
        rewards += group.rewards
        outcomes += group.outcomes
    is_group_scored = any(group.done.rewards for group in copies)
    states = {group.done.state for group in copies}
    first = copies[0]
    done = msgspec.structs.replace(
        first.done,
        state=states.pop() if len(states) == 1 else TaskState.PARTIAL,
        planned_samples=len(copies),
        outcomes={outcome: outcomes.count(outcome) for outcome in Outcome if outcome in outcomes},
        reason="; ".join(dict.fromkeys(group.done.reason for group in copies if group.done.reason)),
        rewards=tuple(rewards) if is_group_scored else (),
        group_outcomes=tuple(outcomes) if is_group_scored else (),
    )
    metadata = {key: value for key, value in first.task.metadata.items() if key != COPY_NO}
    config = msgspec.structs.replace(first.task.config, repeat_times=len(copies))
    task = msgspec.structs.replace(first.task, config=config, metadata=metadata, client_key="")
    return Group(task_id=first.task_id, task=task, samples=tuple(samples), done=done)
