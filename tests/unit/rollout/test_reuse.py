"""Which iterations are rolled out and which reuse saved samples: the whole table."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.files.loop_state import LoopState, read_loop_state, write_loop_state
from py_scheduler.rollout.reuse import ReuseAction, ReuseDecision, ReuseSettings, decide_reuse

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH, REUSE, FOLDER, SAVE = (
    "STACX_FORCE_FRESH_ROLLOUT",
    "STACX_REUSE_ROLLOUT",
    "STACX_REUSE_PER_ITER_DIR",
    "STACX_SAVE_PER_ITER_PT",
)
AUTO, NEVER = ReuseSettings(mode="auto"), ReuseSettings(mode="never")


def by_the_book(
    rollout_id: int, environment: dict[str, str], mode: str, unfinished: int | None
) -> tuple[ReuseAction, int | None] | None:
    """seed_behaviour.md, Reuse and resume, word for word; None for an error. With it the iteration of LOAD."""
    fresh, reuse = environment.get(FRESH) == "1", environment.get(REUSE) == "1"
    if fresh and (reuse or environment.get(FOLDER)):
        return None
    if unfinished is not None:
        return ReuseAction.FINISH, None
    if fresh:
        return ReuseAction.ROLL_OUT, None
    if reuse:
        return ReuseAction.LOAD, None
    if environment.get(FOLDER):
        return ReuseAction.REPLAY, None
    return (ReuseAction.LOAD, 0) if mode == "auto" and rollout_id > 0 else (ReuseAction.ROLL_OUT, None)


TABLE = list(product((0, 1, 5), (None, "0", "1"), (None, "0", "1"), (None, "", "/dumps"), ("auto", "never"), (None, 3)))


def test_the_table_is_whole() -> None:
    assert len(TABLE) == 3 * 3 * 3 * 3 * 2 * 2


@pytest.mark.parametrize(("rollout_id", "fresh", "reuse", "folder", "mode", "unfinished"), TABLE)
def test_the_order_of_reuse(
    rollout_id: int, fresh: str | None, reuse: str | None, folder: str | None, mode: str, unfinished: int | None
) -> None:
    said = {FRESH: fresh, REUSE: reuse, FOLDER: folder}
    environment = {name: value for name, value in said.items() if value is not None}
    settings = AUTO if mode == "auto" else NEVER
    expected = by_the_book(rollout_id, environment, mode, unfinished)
    if expected is None:
        with pytest.raises(InvalidArgumentError, match=FRESH):
            decide_reuse(rollout_id, environment, settings, unfinished)
        return
    decision = decide_reuse(rollout_id, environment, settings, unfinished)
    assert (decision.action, decision.load_iteration) == expected
    assert decision.saves_per_iteration == (decision.action in (ReuseAction.ROLL_OUT, ReuseAction.FINISH))
    assert decision.reuse_dir == ("/dumps" if decision.action is ReuseAction.REPLAY else "")
    # The one way of reusing that nobody asked for in so many words is the one that warns.
    assert bool(decision.warning) == (decision.load_iteration == 0)


def test_each_interface_has_a_default_of_its_own_which_a_said_mode_beats() -> None:
    unsaid = ReuseSettings()
    assert (unsaid.defaulting_to("auto"), unsaid.defaulting_to("never")) == (AUTO, NEVER)
    assert (AUTO.defaulting_to("never"), NEVER.defaulting_to("auto")) == (AUTO, NEVER)


def test_the_automatic_reuse_names_the_way_out() -> None:
    warning = decide_reuse(2, {}, AUTO).warning
    assert "iteration 2" in warning
    assert FRESH in warning
    assert '"never"' in warning


@pytest.mark.parametrize(
    ("text", "saves"), [(None, True), ("", True), ("1", True), ("0", False), ("false", False), ("TRUE", True)]
)
def test_a_file_for_each_iteration_unless_it_is_not_wanted(text: str | None, saves: bool) -> None:
    environment = {FRESH: "1"} | ({} if text is None else {SAVE: text})
    decision = decide_reuse(4, environment, NEVER)
    assert decision.saves_per_iteration is saves
    finishing = decide_reuse(4, environment, NEVER, unfinished=4)
    assert finishing.saves_per_iteration is saves


def test_settings_say_what_variables_do_not() -> None:
    assert decide_reuse(1, {}, ReuseSettings(reuse_rollout=True)).action is ReuseAction.LOAD
    assert decide_reuse(1, {REUSE: "0"}, ReuseSettings(reuse_rollout=True)).action is ReuseAction.ROLL_OUT
    assert decide_reuse(1, {}, ReuseSettings(reuse_dir="dumps")).reuse_dir == "dumps"
    assert decide_reuse(1, {FOLDER: "/other"}, ReuseSettings(reuse_dir="dumps")).reuse_dir == "/other"
    assert decide_reuse(1, {FOLDER: ""}, ReuseSettings(reuse_dir="dumps")).reuse_dir == "dumps"
    assert decide_reuse(1, {}, ReuseSettings(mode="auto", force_fresh=True)).action is ReuseAction.ROLL_OUT
    assert not decide_reuse(1, {}, ReuseSettings(save_per_iteration=False)).saves_per_iteration
    missing = decide_reuse(1, {}, AUTO, first_is_saved=False)
    assert (missing.action, missing.warning) == (ReuseAction.ROLL_OUT, "")
    with pytest.raises(InvalidArgumentError, match="take one of them away"):
        decide_reuse(1, {}, ReuseSettings(force_fresh=True, reuse_rollout=True))


def test_a_variable_beats_the_setting_that_it_excludes() -> None:
    """As for a server, whose file it beats."""
    assert decide_reuse(1, {REUSE: "1"}, ReuseSettings(force_fresh=True)).action is ReuseAction.LOAD
    for reusing in (ReuseSettings(reuse_rollout=True), ReuseSettings(reuse_dir="dumps")):
        assert decide_reuse(1, {FRESH: "1"}, reusing).action is ReuseAction.ROLL_OUT


def test_a_folder_that_a_variable_names_counts_from_where_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert decide_reuse(1, {FOLDER: "dumps"}, NEVER).reuse_dir == str(tmp_path / "dumps")


def test_a_variable_that_is_no_switch_is_named_and_all_of_them_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decide_reuse(0, {FRESH: "maybe", SAVE: "2"}, NEVER)
    assert [violation.field for violation in caught.value.violations] == [FRESH, SAVE]


def test_a_decision_says_because_of_what() -> None:
    because = [
        decide_reuse(1, {FRESH: "1"}, NEVER, unfinished=0).because,
        decide_reuse(1, {FRESH: "1"}, NEVER).because,
        decide_reuse(1, {REUSE: "1"}, NEVER).because,
        decide_reuse(1, {FOLDER: "x"}, NEVER).because,
    ]
    assert because == ["iteration 0 is unfinished", FRESH, REUSE, FOLDER]
    assert isinstance(decide_reuse(0, {}, NEVER), ReuseDecision)


# The state of the loop, which says what is unfinished


STATE = LoopState(rollout_id=3, source_state={"source": "math", "cursor": 7, "epoch": 0}, loop_id="loop")


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loop.json"
    assert read_loop_state(path) is None
    write_loop_state(path, STATE)
    assert read_loop_state(path) == STATE
    assert STATE.unfinished == 3
    finished = LoopState(rollout_id=3, source_state={}, is_finished=True)
    write_loop_state(path, finished)
    assert read_loop_state(path) == finished
    assert finished.unfinished is None
    assert [entry.name for entry in path.parent.iterdir()] == ["loop.json"]


def test_a_newer_version_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "loop.json"
    path.write_text('{"rollout_id": 1, "source_state": {}, "invented_later": true}')
    assert read_loop_state(path) == LoopState(rollout_id=1, source_state={})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"rollout_id": "x", "source_state": {}}',
        '{"rollout_id": -5, "source_state": {}}',
        '{"rollout_id": 9223372036854775807, "source_state": {}}',
        '{"rollout_id": 0, "source_state": {"a": ' + "[" * 5_000 + "]" * 5_000 + "}}",
        "[]",
    ],
)
def test_a_damaged_state_is_told_and_the_way_out(tmp_path: Path, content: str) -> None:
    path = tmp_path / "loop.json"
    path.write_text(content)
    with pytest.raises(FailedPreconditionError, match="take it away to begin anew"):
        read_loop_state(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_state(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "loop.json")
    with pytest.raises(FailedPreconditionError, match="is no state of a training loop"):
        read_loop_state(tmp_path / "loop.json")


def test_a_failed_write_leaves_the_state_before_it(tmp_path: Path) -> None:
    path = tmp_path / "loop.json"
    write_loop_state(path, STATE)
    with pytest.raises(TypeError):
        write_loop_state(path, LoopState(rollout_id=4, source_state={"bad": object()}))
    assert read_loop_state(path) == STATE
    assert [entry.name for entry in tmp_path.iterdir()] == ["loop.json"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (tmp_path / "loop.json").symlink_to(victim)
    write_loop_state(tmp_path / "loop.json", STATE)
    assert victim.read_text() == "safe"
    assert not (tmp_path / "loop.json").is_symlink()
