"""SampleDones as a Parquet file, one row a sample, so that a trainer can read them back without this package.

For a client that collects a rollout by itself; what a TaskScheduler hands out is saved by `store` (`sample_files`).

Invariants: `token_ids`, `log_probs` and `loss_mask` of a row have one entry per token, in context order; the mask is 1
exactly on generated tokens; weight spans and turns count positions in them. The file appears complete or not at all.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId
from py_scheduler.rollout.files.parquet import load_pyarrow, trajectory_columns
from py_scheduler.rollout.files.paths import atomic_file
from py_scheduler.version import version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task

_ROWS_PER_GROUP = 1_000


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a file's samples come from: columns that are the same in all of its rows."""

    batch_id: BatchId = ""
    namespace: str = DEFAULT_NAMESPACE
    model: str = ""


_NO_ORIGIN = Origin()


def write_trajectories(
    path: str | Path, samples: Iterable[SampleDone], tasks: Mapping[str, Task], origin: Origin = _NO_ORIGIN
) -> int:
    """Writes the samples and returns how many there were; `tasks` is keyed by task id.

    The file's own metadata say which py-scheduler wrote it, and when.
    Folders are made as needed. Raises FailedPreconditionError without pyarrow.
    """
    pa, pq = load_pyarrow("writing trajectories")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    schema = _schema(pa).with_metadata({"py_scheduler_version": version(), "created": created})
    constant = {"batch_id": str(origin.batch_id), "namespace": origin.namespace, "model": origin.model}
    rows = (constant | _row(sample, tasks.get(sample.task_id)) for sample in samples)
    count = 0
    with atomic_file(Path(path)) as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        while chunk := list(islice(rows, _ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count


def _schema(pa: Any) -> Any:
    return pa.schema(
        {
            "batch_id": pa.string(),
            "namespace": pa.string(),
            "task_id": pa.string(),
            "task_type": pa.string(),
            "client_key": pa.string(),
            "dataset": pa.string(),
            "sample_no": pa.int32(),
            "attempt_no": pa.int32(),
            "outcome": pa.string(),
            "reward": pa.float64(),
            "reward_details_json": pa.string(),
            "prompt": pa.string(),
            "answer": pa.string(),
            "model": pa.string(),
            "weight_version": pa.string(),
            **trajectory_columns(pa, has_texts=False),
            "termination_reason": pa.string(),
            "error": pa.string(),
            "phase": pa.string(),
            "node_ip": pa.string(),
            "gpu_ids": pa.list_(pa.int32()),
            "wait_seconds": pa.float64(),
            "run_seconds": pa.float64(),
            "generate_seconds": pa.float64(),
            "eval_seconds": pa.float64(),
        }
    )


def _row(sample: SampleDone, task: Task | None) -> dict[str, Any]:
    """`prompt` is what the model read and `answer` what it wrote, over all turns. `weight_version` is empty when the
    spans have several.
    """
    trajectory = sample.trajectory
    versions = {span.version for span in trajectory.weight_spans}
    return {
        "task_id": sample.task_id,
        "task_type": task.config.task_type if task else "",
        "client_key": task.client_key if task else "",
        "dataset": task.config.dataset if task else "",
        "sample_no": sample.sample_no,
        "attempt_no": sample.attempt_no,
        "outcome": sample.outcome.value,
        "reward": sample.reward.score,
        "reward_details_json": msgspec.json.encode(sample.reward.details).decode(),
        "prompt": trajectory.read_text,
        "answer": trajectory.written_text,
        "token_ids": trajectory.token_ids,
        "log_probs": trajectory.log_probs,
        "loss_mask": trajectory.loss_mask,
        "weight_version": versions.pop() if len(versions) == 1 else "",
        "weight_spans": [msgspec.structs.asdict(span) for span in trajectory.weight_spans],
        "turns": [msgspec.structs.asdict(turn) for turn in trajectory.turns],
        "termination_reason": sample.termination_reason,
        "error": sample.error,
        "phase": sample.phase,
        "node_ip": sample.node_ip,
        "gpu_ids": list(sample.gpu_ids),
        **msgspec.structs.asdict(sample.timings),
    }
