"""Files of rows, and the settings of sources that read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from py_scheduler.rollout.sources.settings import SourceSettings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from py_scheduler.domain.task import Task


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 4) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "level": number} for number in range(count)]


def of(kind: str = "jsonl", **changes: Any) -> SourceSettings:
    values = {"name": "math", "kind": kind, "path": f"rows.{kind}", "task_type": "solve", **changes}
    return msgspec.convert(values, SourceSettings)


def prompts(tasks: Iterable[Task]) -> list[str]:
    return [task.prompt for task in tasks]
