"""Runners as people read them: one flat dict each, and all of them as a table of columns of equal width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from py_scheduler.domain.runners.runner import RunnerView


def runner_state(view: RunnerView) -> dict[str, Any]:
    """What a runner is at, and whatever its workflow has set besides; only what is known of it."""
    state: dict[str, Any] = {
        "kind": view.kind,
        "state": str(view.state),
        "evaluator_id": view.evaluator_id,
        "node_ip": view.node_ip,
        "gpu_ids": ",".join(map(str, view.gpu_ids)),
        "pid": view.pid,
        "task_id": view.task_id,
        "restarts": view.restarts,
        "message": view.message,
    }
    if view.sample_no >= 0:
        state["sample_no"] = view.sample_no
        state["attempt_no"] = view.attempt_no
        state["running_time"] = round(view.running_seconds, 3)
        state["begin_time"] = view.begun_unix_seconds
    return {key: value for key, value in state.items() if value not in {"", 0} or key == "restarts"} | view.keys


def runner_table(views: Iterable[RunnerView]) -> str:
    """A line for each runner under one for the names; columns without any value are left out."""
    states = [(view.runner_id, runner_state(view)) for view in views]
    keys = list(dict.fromkeys(key for _, state in states for key in state))
    rows = [["runner_id", *keys]]
    rows += [[runner_id, *(_one_line(state.get(key, "-")) for key in keys)] for runner_id, state in states]
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each row, and a rule under the first, which names the columns. Every row has a cell for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        yield " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if number == 0:
            yield "-+-".join("-" * width for width in widths)


def _one_line(value: object) -> str:
    return " ".join(str(value).split()) or "-"
