"""What an iteration or an eval leaves behind for people. Source: seed 1, section 5 (eval outputs).

    {root}/eval_details/3.jsonl               a line for each sample of the eval of iteration 3
    {root}/eval_details/3.placement.jsonl     a line for each turn: where it ran, who wrote it, how many tokens
    {root}/eval_details/3.summary.json        its figures
    {root}/eval_details/train_3.summary.json  the figures of the iteration itself

Invariants

- Lines are appended as groups finish. Only sums and the slowest samples are kept, so memory does not grow with the
  number of tasks.
- Rates are over model results alone.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.rollout.figures import Figures
from py_scheduler.rollout.files.iteration_summary import (
    DETAILS_FOLDER,
    PLACEMENT_SUFFIX,
    SUMMARY_SUFFIX,
    DatasetSummary,
    IterationSummary,
    NodeUse,
    RewardStats,
    SlowSample,
    TimeSplit,
    ToldContext,
    file_stem,
)
from py_scheduler.rollout.files.paths import atomic_file, resolve_under
from py_scheduler.rollout.metrics import SolveTally, eval_metrics
from py_scheduler.rollout.training import is_trainable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.domain.training.steps import FilterReport
    from py_scheduler.rollout.files.iteration_summary import Kind
    from py_scheduler.rollout.groups import Group

SLOWEST = 10
"""Samples that a summary names as the slowest."""


class DetailsWriter:
    """Takes the groups of one iteration or eval as they finish. One thread at a time.

    root: None for figures alone, without a file. samples: whether the two .jsonl files are written, anew; the summary
    always is. Its calls block on the disk: an event loop makes them in a thread.
    """

    def __init__(
        self,
        root: Path | None,
        kind: Kind,
        rollout_id: int,
        *,
        samples: bool = False,
        started_unix_seconds: float = 0.0,
    ) -> None:
        self._kind: Kind = kind
        self._rollout_id = rollout_id
        self._started_unix_seconds = started_unix_seconds
        self._total = _Tally()
        self._datasets: dict[str, _Tally] = {}
        self._nodes: dict[str, _Node] = {}
        self._slowest: list[tuple[float, int, SlowSample]] = []
        self._seen = self._dummies = 0
        self._summary_path = None if root is None else _path(root, kind, rollout_id, SUMMARY_SUFFIX)
        self._lines = _Lines(root, kind, rollout_id) if root is not None and samples else None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of this iteration, the summary's last."""
        lines = () if self._lines is None else self._lines.paths
        return lines if self._summary_path is None else (*lines, self._summary_path)

    def add(self, group: Group) -> None:
        """Writes the group's lines and adds it to the figures."""
        dataset = self._datasets.setdefault(group.dataset, _Tally())
        for tally in (self._total, dataset):
            tally.add(group)
        for sample in group.judged:
            self._seen += 1
            self._dummies += not is_trainable(sample)
            self._nodes.setdefault(sample.node_ip, _Node()).add(sample)
            self._keep_if_slow(sample, group.dataset)
        if self._lines is not None:
            self._lines.write(group)

    def close(
        self,
        ended_unix_seconds: float,
        *,
        context: IterationContext | None = None,
        filters: Iterable[FilterReport] = (),
        dummies: int | None = None,
        reuse: str = "",
        warnings: Iterable[str] = (),
        keeps_existing: bool = False,
    ) -> IterationSummary:
        """Writes the summary, atomically. dummies: of what was handed out; None: of all that came.

        keeps_existing: not where there is one.
        """
        tallies = sorted(self._datasets.items())
        is_eval = self._kind == "eval"
        summary = IterationSummary(
            kind=self._kind,
            rollout_id=self._rollout_id,
            context=None if context is None else ToldContext(beta=context.beta, t_max=context.t_max),
            reuse=reuse,
            started_unix_seconds=self._started_unix_seconds,
            ended_unix_seconds=ended_unix_seconds,
            total=self._total.summary(),
            datasets={name: tally.summary() for name, tally in tallies},
            nodes={node_ip: node.use() for node_ip, node in sorted(self._nodes.items()) if node_ip},
            slowest=tuple(slow for _, _, slow in sorted(self._slowest, reverse=True)),
            filters=tuple(filters),
            metrics=eval_metrics((name, tally.solves) for name, tally in tallies) if is_eval else {},
            dummies=self._dummies if dummies is None else dummies,
            warnings=tuple(warnings),
        )
        if self._summary_path is not None and not (keeps_existing and self._summary_path.exists()):
            with atomic_file(self._summary_path) as sink:
                sink.write(msgspec.json.format(msgspec.json.encode(summary)))
        return summary

    def _keep_if_slow(self, sample: SampleDone, dataset: str) -> None:
        held = sample.timings.held_seconds
        if len(self._slowest) == SLOWEST and held <= self._slowest[0][0]:
            return
        slow = SlowSample(
            task_id=sample.task_id,
            sample_no=sample.sample_no,
            dataset=dataset,
            outcome=sample.outcome.value,
            node_ip=sample.node_ip,
            held_seconds=held,
            generate_seconds=sample.timings.generate_seconds,
            turns=len(sample.trajectory.generated_turns),
        )
        # The number settles ties, since samples themselves have no order.
        heapq.heappush(self._slowest, (held, -self._seen, slow))
        if len(self._slowest) > SLOWEST:
            heapq.heappop(self._slowest)


class _Tally:
    """Sums over groups."""

    def __init__(self) -> None:
        self.solves = SolveTally()
        self._groups = 0
        self._figures = Figures()
        self._tokens: Counter[str] = Counter()
        self._tool_seconds = 0.0
        self._reward = _Moments()

    def add(self, group: Group) -> None:
        self._groups += 1
        self.solves.add(group.outcomes)
        for sample in group.judged:
            self._figures.add(sample)
            if sample.outcome.is_model_result:
                self._reward.add(sample.reward.score)
            # The clock of run goes round tools and generations alike.
            self._tool_seconds += max(0.0, sample.timings.run_seconds - sample.timings.generate_seconds)
            for turn in sample.trajectory.turns:
                self._tokens[turn.source] += turn.end - turn.start

    def summary(self) -> DatasetSummary:
        figures = self._figures
        return DatasetSummary(
            groups=self._groups,
            samples=figures.samples,
            model_results=figures.model_results,
            outcomes={outcome.value: count for outcome, count in sorted(figures.outcomes.items())},
            accuracy=self.solves.accuracy,
            pass_at_k={str(k): rate for k, rate in self.solves.pass_rates().items()},
            reward=self._reward.stats(),
            time=TimeSplit(
                wait_seconds=figures.wait_seconds,
                generate_seconds=figures.generate_seconds,
                tool_seconds=self._tool_seconds,
                verify_seconds=figures.eval_seconds,
            ),
            tokens=dict(sorted(self._tokens.items())),
        )


class _Moments:
    """Mean and deviation of what comes by, after Welford: no large sums that cancel."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, value: float) -> None:
        self._count += 1
        distance = value - self._mean
        self._mean += distance / self._count
        self._squares += distance * (value - self._mean)
        self._least, self._most = min(self._least, value), max(self._most, value)

    def stats(self) -> RewardStats:
        if not self._count:
            return RewardStats()
        std = math.sqrt(max(0.0, self._squares / self._count))
        return RewardStats(count=self._count, mean=self._mean, std=std, min=self._least, max=self._most)


class _Node:
    """Sums over what ran on a node."""

    def __init__(self) -> None:
        self._samples = 0
        self._held_seconds = 0.0
        self._gpu_seconds: dict[str, float] = {}

    def add(self, sample: SampleDone) -> None:
        held = sample.timings.held_seconds
        self._samples += 1
        self._held_seconds += held
        for gpu_id in sample.gpu_ids:
            self._gpu_seconds[str(gpu_id)] = self._gpu_seconds.get(str(gpu_id), 0.0) + held

    def use(self) -> NodeUse:
        gpus = dict(sorted(self._gpu_seconds.items()))
        return NodeUse(samples=self._samples, held_seconds=self._held_seconds, gpu_seconds=gpus)


class _Lines:
    """The two files of lines. Opened for each group, so that nothing is left open when an iteration is broken off."""

    def __init__(self, root: Path, kind: Kind, rollout_id: int) -> None:
        self.paths = tuple(_path(root, kind, rollout_id, suffix) for suffix in (".jsonl", PLACEMENT_SUFFIX))
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")

    def write(self, group: Group) -> None:
        samples = [_sample_line(group, sample) for sample in group.judged]
        turns = [line for sample in group.samples for line in _turn_lines(group, sample)]
        for path, lines in zip(self.paths, (samples, turns), strict=True):
            with path.open("ab") as sink:
                sink.write(msgspec.json.Encoder().encode_lines(lines))


def _path(root: Path, kind: Kind, rollout_id: int, suffix: str) -> Path:
    return resolve_under(root, f"{DETAILS_FOLDER}/{file_stem(kind, rollout_id)}{suffix}")


def _sample_line(group: Group, sample: SampleDone) -> dict[str, Any]:
    return {
        "task_id": sample.task_id,
        "client_key": group.task.client_key,
        "dataset": group.dataset,
        "sample_no": sample.sample_no,
        "attempt_no": sample.attempt_no,
        "outcome": sample.outcome.value,
        "score": sample.reward.score,
        "details": sample.reward.details,
        "termination_reason": sample.termination_reason,
        "error": sample.error,
        "phase": sample.phase,
        "node_ip": sample.node_ip,
        "gpu_ids": sample.gpu_ids,
        "started_unix_seconds": sample.started_unix_seconds,
        **msgspec.structs.asdict(sample.timings),
        "turns": len(sample.trajectory.generated_turns),
        "tokens": len(sample.trajectory),
        "generated_tokens": sample.trajectory.generated_tokens,
        "prompt": group.task.prompt or sample.trajectory.read_text,
        "answer": sample.trajectory.written_text,
    }


def _turn_lines(group: Group, sample: SampleDone) -> Iterator[dict[str, Any]]:
    for turn_no, turn in enumerate(sample.trajectory.turns):
        yield {
            "task_id": sample.task_id,
            "sample_no": sample.sample_no,
            "attempt_no": sample.attempt_no,
            "dataset": group.dataset,
            "turn_no": turn_no,
            "source": turn.source,
            "start": turn.start,
            "tokens": turn.end - turn.start,
            "finish_reason": turn.finish_reason,
            "node_ip": sample.node_ip,
            "gpu_ids": sample.gpu_ids,
        }
