"""TrainingSamples as Parquet, one row a sample, and as `.pt` where torch is installed.

Invariants

- What is read equals what was written, bit by bit.
- Reading never executes anything: Parquet holds data only, and `.pt` is read with `weights_only`, by a torch that is
  known to mean it.
- Groups are written and read one after the other. So Parquet needs memory for some groups only; `.pt`, whose tensors
  are whole, needs it for all.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from py_scheduler.domain.generation import WeightSpan
from py_scheduler.domain.trajectory import Trajectory, Turn
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.files.parquet import load_pyarrow, trajectory_columns
from py_scheduler.rollout.training import SampleStatus, TrainingSample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

_ROWS_PER_GROUP = 512
_ROWS_PER_READ = 64
_NEEDS = "a file of saved samples"
_PT_FORMAT = "py-scheduler samples 1"
_OLDEST_TORCH = (2, 6)
"""Before it `weights_only` could be made to run code (CVE-2025-32434)."""


class SavedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample with its place: the iteration and the number of its group in it."""

    rollout_id: int
    group_no: int
    sample: TrainingSample


def write_parquet(sink: BinaryIO, rollout_id: int, groups: Iterable[Sequence[TrainingSample]]) -> int:
    """Writes the groups as they come; how many samples there were. Raises FailedPreconditionError without pyarrow."""
    pa, pq = load_pyarrow(_NEEDS)
    schema = _schema(pa)
    rows: list[dict[str, Any]] = []
    count = 0
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for group_no, group in enumerate(groups):
            rows.extend(_row(rollout_id, group_no, sample) for sample in group)
            count += len(group)
            if len(rows) >= _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return count


def read_parquet(path: Path) -> Iterator[SavedSample]:
    """The samples in the order of writing. Raises InvalidArgumentError for a file of another kind."""
    pa, pq = load_pyarrow(_NEEDS)
    try:
        with pq.ParquetFile(path) as file:
            missing = set(_schema(pa).names) - set(file.schema_arrow.names)
            if missing:
                raise InvalidArgumentError(f"{path.name} has no column {', '.join(sorted(missing))}", "file")
            for batch in file.iter_batches(batch_size=_ROWS_PER_READ):
                yield from _samples(batch)
    except (pa.ArrowInvalid, msgspec.DecodeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path.name} is no file of saved samples: {error}", "file") from error


def write_torch(sink: BinaryIO, rollout_id: int, groups: Iterable[Sequence[TrainingSample]]) -> int:
    """As tensors: all samples' tokens one after the other, `offsets` between them, and the rest as JSON in a tensor.

    Raises FailedPreconditionError without torch.
    """
    torch = require_torch()
    saved = [(group_no, sample) for group_no, group in enumerate(groups) for sample in group]
    lengths = np.array([0, *(len(sample.trajectory) for _, sample in saved)], dtype=np.int64)
    described = msgspec.json.encode([_described(rollout_id, group_no, sample) for group_no, sample in saved])

    def flat(arrays: list[Any], dtype: str) -> Any:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False))

    content = {
        "format": _PT_FORMAT,
        "rollout_id": rollout_id,
        "token_ids": flat([sample.token_ids for _, sample in saved], "int32"),
        "log_probs": flat([sample.log_probs for _, sample in saved], "float32"),
        "loss_mask": flat([sample.loss_mask for _, sample in saved], "uint8"),
        "offsets": torch.from_numpy(np.cumsum(lengths)),
        "described": torch.from_numpy(np.frombuffer(described, dtype=np.uint8).copy()),
    }
    torch.save(content, sink)
    return len(saved)


def read_torch(path: Path) -> Iterator[SavedSample]:
    """Raises InvalidArgumentError for a file that needs unpickling or is of another kind."""
    torch = require_torch()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common root for what it says of a refused, torn or foreign file
        raise InvalidArgumentError(
            f"{path.name} is refused: it holds more than tensors and plain values, or is damaged. It is read with "
            f"weights_only, which unpickles nothing ({str(error).splitlines()[0] if str(error) else error!r})",
            "file",
        ) from error
    try:
        if content["format"] != _PT_FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        arrays = {
            name: content[name].numpy().astype(dtype, copy=False)
            for name, dtype in (("token_ids", "<i4"), ("log_probs", "<f4"), ("loss_mask", "u1"), ("offsets", "<i8"))
        }
        described = msgspec.json.decode(content["described"].numpy().tobytes(), type=list[_Described])
        yield from _assembled(arrays, described)
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.DecodeError) as error:
        raise InvalidArgumentError(f"{path.name} is no file of saved samples: {error!r}", "file") from error


def grouped(saved: Iterable[SavedSample]) -> Iterator[list[TrainingSample]]:
    """Group after group, as they were written."""
    for _, members in groupby(saved, key=lambda one: one.group_no):
        yield [one.sample for one in members]


class _Described(msgspec.Struct, kw_only=True):
    """Everything about a sample but its arrays."""

    rollout_id: int
    group_no: int
    task_id: str
    sample_no: int
    dataset: str
    prompt: str
    reward: dict[str, Any]
    status: SampleStatus
    remove_sample: bool
    metadata: dict[str, Any]
    turns: tuple[Turn, ...]
    weight_spans: tuple[WeightSpan, ...]


def _described(rollout_id: int, group_no: int, sample: TrainingSample) -> _Described:
    return _Described(
        rollout_id=rollout_id,
        group_no=group_no,
        task_id=sample.task_id,
        sample_no=sample.sample_no,
        dataset=sample.dataset,
        prompt=sample.prompt,
        reward=sample.reward,
        status=sample.status,
        remove_sample=sample.remove_sample,
        metadata=sample.metadata,
        turns=sample.trajectory.turns,
        weight_spans=sample.trajectory.weight_spans,
    )


def _saved(said: _Described, token_ids: bytes, log_probs: bytes, loss_mask: bytes) -> SavedSample:
    if not len(token_ids) == len(log_probs) == 4 * len(loss_mask):
        raise ValueError(f"the arrays of sample {said.sample_no} of task {said.task_id} differ in length")
    sample = TrainingSample(
        task_id=said.task_id,
        sample_no=said.sample_no,
        dataset=said.dataset,
        prompt=said.prompt,
        reward=said.reward,
        status=said.status,
        remove_sample=said.remove_sample,
        metadata=said.metadata,
        trajectory=Trajectory(
            token_id_bytes=token_ids,
            log_prob_bytes=log_probs,
            loss_mask_bytes=loss_mask,
            turns=said.turns,
            weight_spans=said.weight_spans,
        ),
    )
    return SavedSample(rollout_id=said.rollout_id, group_no=said.group_no, sample=sample)


def _assembled(arrays: dict[str, Any], described: list[_Described]) -> Iterator[SavedSample]:
    offsets = arrays["offsets"].tolist()
    total = len(arrays["loss_mask"])
    if len(offsets) != len(described) + 1 or offsets[0] != 0 or offsets[-1] != total or offsets != sorted(offsets):
        raise ValueError("the offsets do not fit the samples")
    for said, start, end in zip(described, offsets, offsets[1:], strict=False):
        yield _saved(said, *(arrays[name][start:end].tobytes() for name in ("token_ids", "log_probs", "loss_mask")))


def _schema(pa: Any) -> Any:
    return pa.schema(
        {
            "rollout_id": pa.int64(),
            "group_no": pa.int32(),
            "task_id": pa.string(),
            "sample_no": pa.int32(),
            "dataset": pa.string(),
            "prompt": pa.string(),
            "reward_json": pa.string(),
            "status": pa.string(),
            "remove_sample": pa.bool_(),
            "metadata_json": pa.string(),
            **trajectory_columns(pa, has_texts=True),
        }
    )


def _row(rollout_id: int, group_no: int, sample: TrainingSample) -> dict[str, Any]:
    said = msgspec.structs.asdict(_described(rollout_id, group_no, sample))
    return {
        **said,
        "reward_json": msgspec.json.encode(said.pop("reward")).decode(),
        "metadata_json": msgspec.json.encode(said.pop("metadata")).decode(),
        "turns": [msgspec.structs.asdict(turn) for turn in sample.trajectory.turns],
        "weight_spans": [msgspec.structs.asdict(span) for span in sample.trajectory.weight_spans],
        "token_ids": sample.token_ids,
        "log_probs": sample.log_probs,
        "loss_mask": sample.loss_mask,
    }


def _samples(batch: Any) -> Iterator[SavedSample]:
    arrays = [
        (batch.column(name), dtype) for name, dtype in (("token_ids", "<i4"), ("log_probs", "<f4"), ("loss_mask", "u1"))
    ]
    rows = batch.drop_columns(["token_ids", "log_probs", "loss_mask"]).to_pylist()
    for number, row in enumerate(rows):
        row["reward"] = msgspec.json.decode(row.pop("reward_json"))
        row["metadata"] = msgspec.json.decode(row.pop("metadata_json"))
        yield _saved(
            msgspec.convert(row, _Described),
            # Not through Python lists: an episode may have tens of thousands of tokens.
            *(column[number].values.to_numpy(zero_copy_only=False).astype(dtype).tobytes() for column, dtype in arrays),
        )


def require_torch() -> Any:
    """The module. Raises FailedPreconditionError when it is missing or too old."""
    try:
        import torch  # noqa: PLC0415 (a trainer has it, this package does not ask for it)
    except ImportError as error:
        raise FailedPreconditionError(f".pt files need torch ({error}): install it, or use Parquet") from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise FailedPreconditionError(
            f".pt files need torch 2.6 or newer, this is {torch.__version__}: before it, weights_only could be made to "
            "run code. Update torch, or use Parquet"
        )
    return torch
