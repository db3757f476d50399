"""Rows of files by number: what is in memory is the place of each row, or one row group, never the file."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.files.parquet import load_pyarrow
from py_scheduler.rollout.files.paths import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BufferedReader
    from pathlib import Path


_DIGEST_BYTES = 8
_FOOTER_END_BYTES = 8
"""At the very end of a Parquet file: the footer's length and "PAR1"."""


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
        content = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        with self._opened() as file:
            self._stamp = _Stamp.of(file)
            offset = 0
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
                content.update(line)
        self._bytes, self._digest = offset, content.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def blocks(self) -> Sequence[range]:
        return [range(len(self))]

    @property
    def fingerprint(self) -> str:
        return f"{len(self)} rows, {self._bytes} bytes, digest {self._digest}"

    def row(self, row_no: int) -> Mapping[str, Any]:
        with self._opened() as file:
            self._refuse_another(file)
            file.seek(self._offsets[row_no])
            line = file.readline()
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(f"is no JSON: {error}", self._field(row_no)) from error
        except RecursionError as error:
            raise InvalidArgumentError("is nested too deep: make it flatter", self._field(row_no)) from error
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

    def _opened(self) -> BufferedReader:
        return _open(self._path, self._name)

    def _refuse_another(self, file: BufferedReader) -> None:
        """A file that was only touched, or copied from where it came, is read once more and then is the same."""
        stamp = _Stamp.of(file)
        if stamp != self._stamp:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
            if content.hexdigest() != self._digest:
                raise _has_changed(self._path, self._name)
            self._stamp = stamp


class ParquetRows:
    """Rows of a Parquet file, one row group in memory at a time. Raises FailedPreconditionError without pyarrow."""

    prompt_key = "prompt"

    def __init__(self, path: Path, name: str, columns: Sequence[str] | None = None) -> None:
        self._pa, self._pq = pa, pq = load_pyarrow(f"data set {name!r}, a Parquet file,")
        self._path = path
        self._name = name
        with _open(path, name) as file:
            self._stamp = _Stamp.of(file)
            try:
                with pq.ParquetFile(file) as opened:
                    metadata, known = opened.metadata, opened.schema_arrow.names
            except (pa.ArrowException, OSError, ValueError) as error:
                raise InvalidArgumentError(f"{path.name} is no Parquet file: {error}", f"data set {name!r}") from error
            self._digest = _digest_of_footer(file)
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
        return f"{len(self)} rows in {len(self._ends)} row groups, {self._stamp.size} bytes, digest {self._digest}"

    def row(self, row_no: int) -> Mapping[str, Any]:
        number = bisect_right(self._ends, row_no)
        if self._held is None or self._held[0] != number:
            self._held = None  # The old group goes before the new one comes.
            self._held = (number, self._read(number))
        table = self._held[1].slice(row_no - self._rows_before(number), 1)
        return {
            column: self._said(values, column, row_no)
            for column, values in zip(table.column_names, table.columns, strict=True)
        }

    def _said(self, values: Any, column: str, row_no: int) -> Any:
        """The one value as Python says it. What Arrow can hold and Python cannot comes to light only here."""
        try:
            (value,) = values.to_pylist()
        except (self._pa.ArrowException, ValueError, OverflowError, KeyError) as error:
            field = f"data set {self._name!r}, {self.where(row_no)}, column {column!r}"
            told = f"is a {values.type} that cannot be read ({error}): write it as text, or name other metadata_keys"
            raise InvalidArgumentError(told, field) from error
        return value

    def where(self, row_no: int) -> str:
        return f"{self._path.name}, row {row_no}"

    def _rows_before(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _read(self, number: int) -> Any:
        with _open(self._path, self._name) as file:
            stamp = _Stamp.of(file)
            if stamp != self._stamp and (stamp.size, _digest_of_footer(file)) != (self._stamp.size, self._digest):
                raise _has_changed(self._path, self._name)
            self._stamp = stamp
            file.seek(0)
            try:
                with self._pq.ParquetFile(file) as opened:
                    table = opened.read_row_group(number, columns=self._columns)
                exact = self._pa.schema([_in_microseconds(self._pa, field) for field in table.schema])
                return table if exact == table.schema else table.cast(exact, safe=False)
            except (self._pa.ArrowException, OSError, ValueError) as error:
                told = " ".join(str(error).split())
                rows = f"rows {self._rows_before(number)} to {self._ends[number] - 1}"
                raise InvalidArgumentError(
                    f"cannot be read, the file is damaged ({told}): write it anew",
                    f"data set {self._name!r}, {self._path.name}, row group {number} ({rows})",
                ) from error


def _in_microseconds(pa: Any, field: Any) -> Any:
    """The field with times as exact as Python's: nanoseconds, which are what pandas writes, it cannot say."""
    kind = field.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return field.with_type(pa.timestamp("us", kind.tz))
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return field.with_type(pa.duration("us"))
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return field.with_type(pa.time64("us"))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_in_microseconds(pa, kind.value_field)))
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_in_microseconds(pa, one) for one in kind]))
    return field


class _Stamp(msgspec.Struct, frozen=True):
    """What tells cheaply that a file is the one that was opened, and was not written to."""

    size: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, file: BufferedReader) -> _Stamp:
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def _digest_of_footer(file: BufferedReader) -> str:
    """Of the part of a Parquet file that says where its pages lie, how long they are and what they range over."""
    file.seek(-_FOOTER_END_BYTES, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-min(length + _FOOTER_END_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
    return hashlib.blake2b(file.read(length), digest_size=_DIGEST_BYTES).hexdigest()


def _open(path: Path, name: str) -> BufferedReader:
    try:
        return open_regular(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"{path.name} cannot be read: {error.strerror or error}", f"data set {name!r}"
        ) from error


def _has_changed(path: Path, name: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"data set {name!r}: {path.name} has changed since it was opened: bring it back, or open the source anew"
    )
