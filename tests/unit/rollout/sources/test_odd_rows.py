"""Rows of files that Python or JSON cannot say as they stand, and files that are damaged or none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.sources.sources import open_source
from tests.support.steps.rows import numbered, of, prompts, write_parquet

if TYPE_CHECKING:
    from pathlib import Path


def test_times_of_a_parquet_file_are_said_in_iso_also_those_of_pandas(tmp_path: Path) -> None:
    nanoseconds = [1_700_000_000_123_456_789]
    table = pa.table(
        {
            "prompt": ["p"],
            "at": pa.array(nanoseconds, pa.timestamp("ns")),
            "there": pa.array(nanoseconds, pa.timestamp("ns", tz="Europe/Berlin")),
            "took": pa.array([1_500_000_001], pa.duration("ns")),
            "turns": pa.array([[{"at": nanoseconds[0]}]], pa.list_(pa.struct({"at": pa.timestamp("ns")}))),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    (task,) = open_source(of("parquet"), tmp_path).take(1)
    del task.metadata["_dataset_cfg"]
    assert task.metadata == {
        "at": "2023-11-14T22:13:20.123456",
        "there": "2023-11-14T23:13:20.123456+01:00",
        "took": "PT1.5S",
        "turns": [{"at": "2023-11-14T22:13:20.123456"}],
    }


BAD_TEXT = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xfe")]
)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()), "date32"),
        (pa.array([1, 2], pa.timestamp("us", tz="Mars/Phobos")), "timestamp"),
        (pa.array([1, 2**62], pa.timestamp("ms")), "timestamp"),
        (pa.array([1, 2**62], pa.duration("s")), "duration"),
        (BAD_TEXT, "string"),
    ],
)
def test_a_value_that_python_cannot_say_is_named(tmp_path: Path, values: Any, kind: str) -> None:
    pq.write_table(pa.table({"prompt": ["p", "q"], "x": values}), tmp_path / "rows.parquet")
    told = (
        rf"data set 'math', rows\.parquet, row [01], column 'x': is a {kind}.* that cannot be read .*write it as text"
    )
    with pytest.raises(InvalidArgumentError, match=told):
        open_source(of("parquet"), tmp_path).take(2)
    assert prompts(open_source(of("parquet", metadata_keys=[]), tmp_path).take(2)) == ["p", "q"]


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, numbered(40))
    content = bytearray(path.read_bytes())
    second = pq.ParquetFile(path).metadata.row_group(1).column(0)
    at = second.dictionary_page_offset or second.data_page_offset
    content[at : at + 20] = b"\xff" * 20
    path.write_bytes(content)
    source = open_source(of("parquet"), tmp_path)
    assert prompts(source.take(4)) == ["p0", "p1", "p2", "p3"]
    with pytest.raises(InvalidArgumentError, match=r"rows\.parquet, row group 1 \(rows 4 to 7\): .*write it anew"):
        source.take(1)


def test_a_line_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n{"x": ' + "[" * 5_000 + "]" * 5_000 + "}\n")
    with pytest.raises(InvalidArgumentError, match=r"rows\.jsonl, line 2: is nested too deep"):
        open_source(of(), tmp_path).take(2)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_pipe_is_no_data_set_and_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / f"rows.{kind}")
    with pytest.raises(InvalidArgumentError, match=r"cannot be read: it is no regular file"):
        open_source(of(kind), tmp_path)
