"""What files of trajectories have in common as Parquet: the optional dependency, and the columns of the tokens."""

from __future__ import annotations

from typing import Any

from py_scheduler.errors import FailedPreconditionError


def load_pyarrow(what: str) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet. Raises FailedPreconditionError that says what needs them."""
    try:
        import pyarrow as pa  # noqa: PLC0415 (an optional extra)
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise FailedPreconditionError(
            f"{what} needs pyarrow ({error}): install the extra 'parquet' of py-scheduler"
        ) from error
    return pa, pq


def trajectory_columns(pa: Any, *, has_texts: bool) -> dict[str, Any]:
    """Types by name. Weight spans and turns count positions in the arrays; has_texts: each turn with its text."""
    position = pa.int32()
    turn = {"start": position, "end": position, "source": pa.string()}
    if has_texts:
        turn["text"] = pa.string()
    turn |= {"finish_reason": pa.string(), "log_prob_kind": pa.string()}
    return {
        "token_ids": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.uint8()),
        "turns": pa.list_(pa.struct(turn)),
        "weight_spans": pa.list_(pa.struct({"version": pa.string(), "start": position, "end": position})),
    }
