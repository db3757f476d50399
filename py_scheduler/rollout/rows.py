"""Rows of files by number: what is in memory is the place of each row, or one row group, never the file."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO


class Rows(Protocol):
    """Rows of a data set by number, from 0."""

    prompt_key: str
    """The key of the prompt where the settings name none; empty when rows have no prompt."""

    def __len__(self) -> int: ...

    def row(self, row_no: int) -> Mapping[str, Any]:
        """Raises InvalidArgumentError that says where the fault is, FailedPreconditionError for a changed file."""
        ...

    def where(self, row_no: int) -> str:
        """The row's place, for a person: "train.jsonl, line 3"."""
        ...

    @property
    def blocks(self) -> Sequence[range]:
        """Row numbers that are cheap to read together; each is shuffled within, and they among themselves."""
        ...

    @property
    def fingerprint(self) -> str:
        """Differs when the rows do, as far as is cheap to tell."""
        ...


class JsonLines:
    """One JSON object a line; empty lines count as lines but not as rows.

    Opened for each read: a source has no end at which it would close its file.
    """

    prompt_key = "prompt"

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._offsets = array("Q")
        with self._opened() as file:
            offset = 0
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
        self._bytes = offset

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def blocks(self) -> Sequence[range]:
        return [range(len(self))]

    @property
    def fingerprint(self) -> str:
        return f"{len(self)} rows, {self._bytes} bytes"

    def row(self, row_no: int) -> Mapping[str, Any]:
        with self._opened() as file:
            _check_unchanged(file, self._bytes, self._name, self._path)
            file.seek(self._offsets[row_no])
            line = file.readline()
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(f"is no JSON: {error}", self._field(row_no)) from error
        if not isinstance(row, dict):
            raise InvalidArgumentError(f"is a {type(row).__name__}, must be a JSON object", self._field(row_no))
        return row

    def where(self, row_no: int) -> str:
        """Counts lines only now, when somebody has to find one."""
        left, line_no = self._offsets[row_no], 1
        with self._opened() as file:
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                line_no += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self._path.name}, line {line_no}"

    def _field(self, row_no: int) -> str:
        return f"data set {self._name!r}, {self.where(row_no)}"

    def _opened(self) -> BinaryIO:
        return _open(self._path, self._name)


class ParquetRows:
    """Rows of a Parquet file, one row group in memory at a time. Raises FailedPreconditionError without pyarrow."""

    prompt_key = "prompt"

    def __init__(self, path: Path, name: str, columns: Sequence[str] | None = None) -> None:
        try:
            import pyarrow.parquet as pq  # noqa: PLC0415 (an optional extra)
            from pyarrow import ArrowInvalid  # noqa: PLC0415
        except ImportError as error:
            raise FailedPreconditionError(
                f"data set {name!r}: Parquet needs pyarrow ({error}): install py-scheduler[parquet]"
            ) from error
        self._path = path
        self._name = name
        self._parquet_file = pq.ParquetFile
        with _open(path, name) as file:
            self._bytes = os.fstat(file.fileno()).st_size
            try:
                with pq.ParquetFile(file) as opened:
                    metadata, known = opened.metadata, opened.schema_arrow.names
            except (ArrowInvalid, OSError) as error:
                raise InvalidArgumentError(f"{path.name} is no Parquet file: {error}", f"data set {name!r}") from error
        for column in columns or ():
            if column not in known:
                raise InvalidArgumentError(
                    f"{path.name} has no column {column!r}, it has {', '.join(map(repr, known))}", f"data set {name!r}"
                )
        self._columns = None if columns is None else list(columns)
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(sizes))
        self._held: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def blocks(self) -> Sequence[range]:
        return [range(start, end) for start, end in zip([0, *self._ends], self._ends, strict=False)]

    @property
    def fingerprint(self) -> str:
        return f"{len(self)} rows in {len(self._ends)} row groups, {self._bytes} bytes"

    def row(self, row_no: int) -> Mapping[str, Any]:
        number = bisect_right(self._ends, row_no)
        if self._held is None or self._held[0] != number:
            self._held = None  # The old group goes before the new one comes.
            self._held = (number, self._read(number))
        start = self._ends[number - 1] if number else 0
        (row,) = self._held[1].slice(row_no - start, 1).to_pylist()
        return dict(row)

    def where(self, row_no: int) -> str:
        return f"{self._path.name}, row {row_no}"

    def _read(self, number: int) -> Any:
        with _open(self._path, self._name) as file:
            _check_unchanged(file, self._bytes, self._name, self._path)
            with self._parquet_file(file) as opened:
                return opened.read_row_group(number, columns=self._columns)


def _open(path: Path, name: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidArgumentError(
            f"{path.name} cannot be read: {error.strerror or error}", f"data set {name!r}"
        ) from error


def _check_unchanged(file: BinaryIO, size: int, name: str, path: Path) -> None:
    now = os.fstat(file.fileno()).st_size
    if now != size:
        raise FailedPreconditionError(
            f"data set {name!r}: {path.name} has {now} bytes and had {size} when it was opened: open the source anew"
        )
