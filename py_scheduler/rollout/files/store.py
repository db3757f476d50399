"""The saved samples of a training loop. Source: seed 1, section 5 (reuse and resume).

Invariants

- Everything lies under one root, and names are made of numbers and server ids alone.
- A symbolic link below the root is refused.
- A file appears complete or not at all.

    {root}/trajectory_sft_samples.parquet            the newest iteration that was rolled out
    {root}/trajectory_sft_samples_iter_003.parquet   each of them
    {root}/partial/iter_003/{task_id}.parquet        a group that has finished: for people and tools, never read here
"""

from __future__ import annotations

import os
import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from py_scheduler.domain.training.iteration import checked_rollout_id
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from py_scheduler.rollout.files.paths import atomic_file, resolve_under, sync_folder, unfinished_path
from py_scheduler.rollout.files.samples import grouped, read_parquet, read_torch, write_parquet, write_torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from py_scheduler.rollout.files.samples import SavedSample
    from py_scheduler.rollout.training import TrainingSample

FileFormat = Literal["parquet", "pt"]
STEM = "trajectory_sft_samples"
_ITERATION_FILE = re.compile(rf"{STEM}_iter_(\d+)\.(parquet|pt)")
_SERVER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RolloutStore:
    """One loop's folder. Its calls block on the disk: an event loop makes them in a thread."""

    def __init__(self, root: Path, *, file_format: FileFormat = "parquet") -> None:
        self._root = root
        self._format = file_format

    @property
    def root(self) -> Path:
        return self._root

    @property
    def newest_path(self) -> Path:
        return resolve_under(self._root, f"{STEM}.{self._format}")

    def iteration_path(self, rollout_id: int) -> Path:
        """Where this iteration's own file is, or would be."""
        return resolve_under(self._root, f"{STEM}_iter_{checked_rollout_id(rollout_id):03d}.{self._format}")

    def save(self, rollout_id: int, groups: Iterable[Sequence[TrainingSample]], *, per_iteration: bool = True) -> Path:
        """Writes an iteration's groups, one after the other; gives the path of the newest file, which they now are.

        per_iteration: a file of its own as well, a second name of the same content.
        """
        newest = self.newest_path
        path = self.iteration_path(rollout_id) if per_iteration else newest
        self._write(path, rollout_id, groups)
        if per_iteration:
            _give_second_name(path, newest)
        return newest

    def load(self, rollout_id: int | None = None) -> Iterator[list[TrainingSample]]:
        """The groups of the newest file, or of one iteration. Raises NotFoundError when that was not saved."""
        return read_samples(self.saved_path(rollout_id))

    def saved_path(self, rollout_id: int | None = None) -> Path:
        """The newest file, or the one with an iteration's groups. Raises NotFoundError when that was not saved."""
        if rollout_id is None:
            if not self.newest_path.exists():
                raise NotFoundError(f"there is no {self.newest_path.name} in {self._root.name!r}: roll out first")
            return self.newest_path
        path = self.iteration_path(rollout_id)
        if not path.exists() and self._newest_is_of(rollout_id):
            path = self.newest_path
        if not path.exists():
            raise NotFoundError(
                f"the samples of iteration {rollout_id} are not in {self._root.name!r}: roll it out, with a file for "
                "each iteration (STACX_SAVE_PER_ITER_PT=1)"
            )
        return path

    def checkpoint_group(self, rollout_id: int, task_id: str, samples: Sequence[TrainingSample]) -> Path:
        """Writes one finished group. Raises InvalidArgumentError for an id that no server made."""
        if not _SERVER_ID.fullmatch(task_id):
            raise InvalidArgumentError(f"is {task_id!r}, which is no id of a server's", "task_id")
        path = resolve_under(self._root, f"{_partial(rollout_id)}/{task_id}.{self._format}")
        self._write(path, rollout_id, [samples])
        return path

    def drop_checkpoints(self, rollout_id: int) -> None:
        """Removes the checkpoints of an iteration, which its saved file has made superfluous."""
        shutil.rmtree(resolve_under(self._root, _partial(rollout_id)), ignore_errors=True)

    def _write(self, path: Path, rollout_id: int, groups: Iterable[Sequence[TrainingSample]]) -> None:
        write = write_parquet if self._format == "parquet" else write_torch
        with atomic_file(path) as sink:
            write(sink, rollout_id, groups)

    def _newest_is_of(self, rollout_id: int) -> bool:
        if not self.newest_path.exists():
            return False
        first = next(_saved_samples(self.newest_path), None)
        return first is not None and first.rollout_id == rollout_id


def read_samples(path: Path) -> Iterator[list[TrainingSample]]:
    """The groups of one saved file, .parquet or .pt. Raises InvalidArgumentError for one that is neither."""
    return grouped(_saved_samples(path))


def saved_rollout_id(path: Path) -> int:
    """The iteration whose samples a file holds. Raises InvalidArgumentError for one that holds none."""
    first = next(_saved_samples(path), None)
    if first is None:
        raise InvalidArgumentError(f"{path.name} holds no samples", "file")
    return first.rollout_id


def replay_path(folder: Path, rollout_id: int) -> Path:
    """The file of `folder` that this iteration replays: file n, in the order of their numbers, for iteration n.

    Raises NotFoundError when the folder has no per-iteration file, FailedPreconditionError when it has too few.
    """
    numbered = sorted(
        (int(match[1]), path) for path in _entries(folder) if (match := _ITERATION_FILE.fullmatch(path.name))
    )
    if not numbered:
        raise NotFoundError(f"{folder} has no {STEM}_iter_NNN.parquet or .pt to replay")
    for (number, path), (after, other) in pairwise(numbered):
        if number == after:
            raise FailedPreconditionError(f"{path.name} and {other.name} are both iteration {number}: take one away")
    if checked_rollout_id(rollout_id) >= len(numbered):
        raise FailedPreconditionError(
            f"iteration {rollout_id} has nothing to replay: {folder} has {len(numbered)} files, for the iterations "
            f"0 to {len(numbered) - 1}"
        )
    return numbered[rollout_id][1]


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    except OSError as error:
        raise NotFoundError(f"{folder} cannot be replayed: {error.strerror or error}") from error


def _saved_samples(path: Path) -> Iterator[SavedSample]:
    if path.suffix == ".parquet":
        return read_parquet(path)
    if path.suffix == ".pt":
        return read_torch(path)
    raise InvalidArgumentError(f"{path.name} is neither .parquet nor .pt", "file")


def _partial(rollout_id: int) -> str:
    return f"partial/iter_{checked_rollout_id(rollout_id):03d}"


def _give_second_name(path: Path, name: Path) -> None:
    """Files are only ever replaced, never written to, so two names of one are as good as two files."""
    unfinished = unfinished_path(name)
    try:
        try:
            os.link(path, unfinished)
        except OSError:  # A file system without links.
            shutil.copyfile(path, unfinished)
        unfinished.replace(name)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(name.parent)
