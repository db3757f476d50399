"""Saved samples: Parquet, `.pt` where torch is installed, and what is never read."""

from __future__ import annotations

import base64
import io
import os
import sys
import weakref
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from py_scheduler.domain.generation import WeightSpan
from py_scheduler.domain.results import Outcome
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from py_scheduler.rollout.files.store import RolloutStore, read_samples, replay_path
from py_scheduler.rollout.training import TrainingSample, pad_groups, training_group
from tests.support import strategies
from tests.support.steps.samples import SOLVED, WRONG, done_sample, group_with, trajectory_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from py_scheduler.domain.trajectory import Trajectory

NAME = "trajectory_sft_samples"
TURNS = (("environment", 4), ("teacher", 2), ("environment", 1), ("student", 3))


def groups(mark: str = "a", count: int = 2) -> list[list[TrainingSample]]:
    """Groups of a finished sample of two sources, one that the infrastructure ended, and a dummy for padding."""
    made = [
        training_group(
            group_with(
                done_sample(SOLVED, trajectory=trajectory_of(*TURNS), task_id=f"{mark}-{number}"),
                Outcome.INFRA_CONN,
                WRONG,
                task_id=f"{mark}-{number}",
                metadata={"level": number, "text": "é"},
            )
        )
        for number in range(count)
    ]
    return pad_groups(made, count + 1)


def formats() -> list[Any]:
    try:
        import torch  # noqa: F401, PLC0415
    except ImportError:
        return ["parquet", pytest.param("pt", marks=pytest.mark.skip("torch is not installed"))]
    return ["parquet", "pt"]


@pytest.mark.parametrize("file_format", formats())
def test_what_is_read_is_what_was_written(tmp_path: Path, file_format: Any) -> None:
    store = RolloutStore(tmp_path / "new", file_format=file_format)
    written = groups()
    path = store.save(3, written)
    assert path.name == f"{NAME}.{file_format}"
    read = list(store.load())
    assert read == written
    sample = read[0][0]
    arrays = (sample.token_ids, sample.log_probs, sample.loss_mask)
    assert [array.dtype.name for array in arrays] == ["int32", "float32", "uint8"]
    assert sample.teacher_mask.sum() == 2
    assert [one.remove_sample for one in read[1]] == [False, True, False]
    assert read[0][1].metadata["_abort"]["node_ip"] == "10.0.0.1"
    names = sorted(entry.name for entry in store.root.iterdir())
    assert names == [f"{NAME}.{file_format}", f"{NAME}_iter_003.{file_format}"]
    assert list(read_samples(store.iteration_path(3))) == read


def storable(trajectory: Trajectory) -> Trajectory:
    """Positions as large as arrays are: 32 bits with a sign."""
    turns = [msgspec.structs.replace(turn, start=turn.start // 2, end=turn.end // 2) for turn in trajectory.turns]
    spans = [WeightSpan(span.version, span.start // 2, span.end // 2) for span in trajectory.weight_spans]
    return msgspec.structs.replace(trajectory, turns=tuple(turns), weight_spans=tuple(spans))


training_samples = strategies.training_samples.map(
    lambda sample: msgspec.structs.replace(sample, trajectory=storable(sample.trajectory))
)


@pytest.mark.parametrize("file_format", formats())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(written=st.lists(st.lists(training_samples, min_size=1, max_size=3), max_size=4))
def test_any_arrays_come_back_bit_by_bit(tmp_path: Path, file_format: Any, written: list[list[TrainingSample]]) -> None:
    store = RolloutStore(tmp_path, file_format=file_format)
    store.save(0, written)
    assert list(store.load()) == written


def test_a_file_is_written_while_its_groups_are_made(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    peak = 0

    class Marked(list[TrainingSample]):
        """A list that can be watched."""

        __hash__ = object.__hash__  # type: ignore[assignment]

    def one_by_one() -> Iterator[list[TrainingSample]]:
        nonlocal peak
        for number in range(300):
            group = Marked(training_group(group_with(*[SOLVED] * 8, task_id=f"t-{number}")))
            alive.add(group)
            yield group
            peak = max(peak, len(alive))

    store = RolloutStore(tmp_path)
    path = store.save(0, one_by_one())
    metadata = pq.read_metadata(path)
    assert (metadata.num_rows, metadata.num_row_groups) == (2_400, 5)
    assert peak <= 2
    assert len(next(store.load())) == 8


def test_each_iteration_keeps_its_file_and_the_newest_is_the_last(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for rollout_id in range(3):
        store.save(rollout_id, groups(f"iteration{rollout_id}"))
    assert [next(store.load(number))[0].task_id for number in (0, 1, 2)] == [f"iteration{n}-0" for n in range(3)]
    assert next(store.load())[0].task_id == "iteration2-0"
    # Two names of one file, which are never written to: what is replaced is the name.
    assert store.newest_path.samefile(store.iteration_path(2))


def test_without_files_of_its_own_only_the_newest_iteration_is_there(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.save(4, groups(), per_iteration=False)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{NAME}.parquet"]
    assert list(store.load(4)) == groups()
    with pytest.raises(NotFoundError, match=r"iteration 0 are not in .*STACX_SAVE_PER_ITER_PT=1"):
        store.load(0)


def test_nothing_was_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="roll out first"):
        RolloutStore(tmp_path).load()
    with pytest.raises(NotFoundError, match="iteration 0"):
        RolloutStore(tmp_path).load(0)


def test_a_broken_write_leaves_the_file_before_it(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.save(0, groups())

    def breaking() -> Iterator[list[TrainingSample]]:
        yield groups("b")[0]
        raise RuntimeError("the stream broke")

    for per_iteration in (True, False):
        with pytest.raises(RuntimeError, match="broke"):
            store.save(1, breaking(), per_iteration=per_iteration)
    assert list(store.load()) == groups()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"{NAME}.parquet", f"{NAME}_iter_000.parquet"]


def test_a_file_system_without_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = RolloutStore(tmp_path)
    store.save(0, groups())
    assert list(store.load()) == groups()
    assert not store.newest_path.samefile(store.iteration_path(0))


# Checkpoints


def test_a_finished_group_is_written_at_once_and_dropped_with_the_iteration(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    (group, *_) = groups()
    path = store.checkpoint_group(3, "s1-42", group)
    assert path == tmp_path / "partial" / "iter_003" / "s1-42.parquet"
    assert list(read_samples(path)) == [group]
    store.checkpoint_group(4, "s1-43", group)
    store.drop_checkpoints(3)
    store.drop_checkpoints(9)
    assert [entry.name for entry in (tmp_path / "partial").iterdir()] == ["iter_004"]


@pytest.mark.parametrize(
    "task_id", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b", "-rf", ".hidden", "x" * 129, "é"]
)
def test_names_come_from_server_ids_alone(tmp_path: Path, task_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no id of a server's"):
        RolloutStore(tmp_path).checkpoint_group(0, task_id, groups()[0])
    assert list(tmp_path.iterdir()) == []


def test_iterations_count_from_0(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="count from 0"):
        RolloutStore(tmp_path).save(-1, groups())
    with pytest.raises(InvalidArgumentError, match="count from 0"):
        RolloutStore(tmp_path).drop_checkpoints(-1)


def test_links_below_the_root_are_refused(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "file").write_text("safe")
    store = RolloutStore(root)
    (root / "partial").symlink_to(outside)
    (root / f"{NAME}.parquet").symlink_to(outside / "file")
    (root / f"{NAME}_iter_001.parquet").symlink_to(root / "nowhere")
    with pytest.raises(InvalidArgumentError, match="symbolic link"):
        store.checkpoint_group(0, "t-1", groups()[0])
    with pytest.raises(InvalidArgumentError, match="symbolic link"):
        store.drop_checkpoints(0)
    with pytest.raises(InvalidArgumentError, match="symbolic link"):
        store.load()
    with pytest.raises(InvalidArgumentError, match="symbolic link"):
        store.save(1, groups())
    assert [entry.name for entry in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "safe"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    RolloutStore(tmp_path / "root").save(0, groups())
    assert (tmp_path / "real" / f"{NAME}.parquet").exists()


# Replay


def test_a_folder_is_replayed_in_order(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for rollout_id in (10, 2, 7):
        store.save(rollout_id, groups(f"it{rollout_id}"))
    (tmp_path / "notes.txt").write_text("not one of them")
    replayed = [next(read_samples(replay_path(tmp_path, n)))[0].task_id for n in range(3)]
    assert replayed == ["it2-0", "it7-0", "it10-0"]
    with pytest.raises(FailedPreconditionError, match=r"iteration 3 has nothing to replay: .* has 3 files"):
        replay_path(tmp_path, 3)


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    for number in (999, 1_000, 2):
        (tmp_path / f"{NAME}_iter_{number:03d}.parquet").touch()
    assert replay_path(tmp_path, 2).name == f"{NAME}_iter_1000.parquet"


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot be replayed"):
        replay_path(tmp_path / "nowhere", 0)
    (tmp_path / "elsewhere").touch()
    (tmp_path / f"{NAME}_iter_000.parquet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError, match="has no trajectory_sft_samples_iter_NNN"):
        replay_path(tmp_path, 0)
    (tmp_path / f"{NAME}_iter_001.parquet").touch()
    (tmp_path / f"{NAME}_iter_001.pt").touch()
    with pytest.raises(FailedPreconditionError, match="both iteration 1"):
        replay_path(tmp_path, 0)


# What is refused


CODE = b"cposix\nsystem\n(S'touch %s'\ntR."
"""A pickle that runs a command when it is unpickled."""


def pickled(marker: Path) -> bytes:
    return CODE % str(marker).encode()


def zipped(marker: Path) -> bytes:
    """As torch.save would write it: an archive with a pickle in it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker))
        archive.writestr("archive/version", "3\n")
    return content.getvalue()


@pytest.mark.parametrize("make", [pickled, zipped])
@pytest.mark.parametrize("suffix", [".parquet", ".pt"])
def test_a_file_with_code_is_refused_and_nothing_of_it_runs(tmp_path: Path, make: Any, suffix: str) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / f"{NAME}{suffix}"
    path.write_bytes(make(marker))
    with pytest.raises((InvalidArgumentError, FailedPreconditionError)):
        list(read_samples(path))
    assert not marker.exists()
    store = RolloutStore(tmp_path, file_format=suffix.removeprefix("."))  # type: ignore[arg-type]
    with pytest.raises((InvalidArgumentError, FailedPreconditionError)):
        list(store.load())
    assert not marker.exists()


def test_the_code_of_these_tests_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    import pickle  # noqa: PLC0415

    pickle.loads(pickled(tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(InvalidArgumentError, match=r"other\.parquet has no column dataset, group_no"):
        list(read_samples(path))
    with pytest.raises(InvalidArgumentError, match=r"neither \.parquet nor \.pt"):
        read_samples(tmp_path / "other.bin")


def test_arrays_of_unequal_length_are_refused(tmp_path: Path) -> None:
    path = RolloutStore(tmp_path).save(0, groups())
    table = pq.read_table(path)
    short = pa.array([[1]] * table.num_rows, pa.list_(pa.uint8()))
    pq.write_table(
        table.set_column(table.schema.get_field_index("loss_mask"), "loss_mask", short), tmp_path / "bad.parquet"
    )
    with pytest.raises(InvalidArgumentError, match=r"bad\.parquet is no file of saved samples: the arrays of sample 0"):
        list(read_samples(tmp_path / "bad.parquet"))


def test_without_torch_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    store = RolloutStore(tmp_path, file_format="pt")
    with pytest.raises(FailedPreconditionError, match=r"\.pt files need torch .*install it, or use Parquet"):
        store.save(0, groups())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{NAME}.pt").write_bytes(base64.b64decode("UEsDBA=="))
    with pytest.raises(FailedPreconditionError, match=r"\.pt files need torch"):
        list(store.load())


def test_a_torch_whose_weights_only_can_be_fooled_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldTorch:
        __version__ = "2.5.1+cpu"

    monkeypatch.setitem(sys.modules, "torch", OldTorch())
    with pytest.raises(FailedPreconditionError, match=r"2\.6 or newer, this is 2\.5\.1\+cpu"):
        list(read_samples(tmp_path / "x.pt"))


def test_without_pyarrow_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FailedPreconditionError, match=r"install the extra 'parquet' of py-scheduler"):
        RolloutStore(tmp_path).save(0, groups())


# With the real torch


def test_a_pt_file_holds_tensors_that_any_reader_can_load(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = RolloutStore(tmp_path, file_format="pt").save(5, groups())
    content = torch.load(path, weights_only=True)
    assert (content["rollout_id"], content["token_ids"].dtype) == (5, torch.int32)
    assert (content["log_probs"].dtype, content["loss_mask"].dtype) == (torch.float32, torch.uint8)
    start, end = content["offsets"][:2].tolist()
    assert content["token_ids"][start:end].tolist() == groups()[0][0].token_ids.tolist()


def test_a_pt_file_that_needs_unpickling_is_refused_with_the_reason(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "objects.pt"
    torch.save({"samples": [training_group(group_with(SOLVED))[0]]}, path)
    with pytest.raises(InvalidArgumentError, match=r"objects\.pt is refused: .*weights_only, which unpickles nothing"):
        list(read_samples(path))


@pytest.mark.parametrize("change", ["format", "offsets", "described", "missing"])
def test_a_pt_file_of_another_kind_is_refused(tmp_path: Path, change: str) -> None:
    torch = pytest.importorskip("torch")
    path = RolloutStore(tmp_path, file_format="pt").save(0, groups())
    content = torch.load(path, weights_only=True)
    if change == "missing":
        del content["token_ids"]
    elif change == "format":
        content["format"] = "someone's own"
    else:
        content[change] = content[change][:-1]
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(InvalidArgumentError, match=r"changed\.pt is no file of saved samples"):
        list(read_samples(tmp_path / "changed.pt"))
