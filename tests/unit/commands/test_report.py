"""`py-scheduler report`: what it makes of the files that iterations really write, and of damaged and foreign ones."""

from __future__ import annotations

import builtins
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from py_scheduler.cli import main
from py_scheduler.commands.report import as_markdown, as_table, sheets
from py_scheduler.commands.views.report_data import read_report
from py_scheduler.commands.views.report_plots import OUTCOME_COLOURS, TIME_COLOURS, draw_report
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError, NotFoundError
from py_scheduler.rollout.files.iteration_summary import read_summary
from tests.support.steps.iterations import group, random_groups, write_iteration

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.commands.report import Sheet

S, W = Outcome.SOLVED, Outcome.WRONG_ANSWER
PLOTS = ["outcomes", "reward", "pass_at_k", "time", "placement", "slowest"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two training steps and an eval of two data sets."""
    dropped = FilterReport(
        filter="rejection",
        kept_groups=1,
        kept_samples=2,
        dropped_groups=3,
        dropped_samples=6,
        group_reasons={"spread": 3},
    )
    write_iteration(tmp_path, "train", 0, [group("t1", [S, W]), group("t2", [S, Outcome.INFRA_CONN])], beta=1.0)
    write_iteration(
        tmp_path,
        "train",
        10,
        [group("t3", [S, S, Outcome.MAX_TURNS], node=2, seconds=2.0)],
        beta=0.5,
        filters=[dropped],
        warnings=["only 1 of 4 groups survived"],
    )
    evals = [group("e1", [S, W]), group("e2", [S, S], "math|500", node=2), group("e3", [W, W])]
    write_iteration(tmp_path, "eval", 10, evals)
    return tmp_path


def found(root: Path) -> dict[str, Sheet]:
    return {sheet.title: sheet for sheet in sheets(read_report(root))}


def columns(sheet: Sheet, *headings: str) -> list[tuple[str, ...]]:
    places = [sheet.headings.index(heading) for heading in headings]
    return [tuple(row[place] for place in places) for row in sheet.rows]


# Tables


def test_training_steps_in_order_with_rates_over_model_results_alone(root: Path) -> None:
    sheet = found(root)["Training"]
    assert columns(sheet, "iteration", "beta", "groups", "samples") == [
        ("0", "1.00", "2", "4"),
        ("10", "0.50", "1", "3"),
    ]
    assert columns(sheet, "solved %", "mean reward", "teacher %", "dummies", "seconds") == [
        ("66.7", "0.667", "0.0", "1", "10.0"),
        ("66.7", "0.667", "0.0", "0", "10.0"),
    ]


def test_only_the_outcomes_that_occurred_are_shown(root: Path) -> None:
    sheet = found(root)["How samples ended"]
    assert sheet.headings == ("iteration", "solved", "wrong answer", "max turns", "infra conn")
    assert sheet.rows == [("0", "2", "1", "0", "1"), ("10", "2", "0", "1", "0"), ("eval 10", "3", "3", "0", "0")]


def test_evals_and_their_data_sets(root: Path) -> None:
    sheet = found(root)["Data sets"]
    assert columns(sheet, "iteration", "data set", "solved %", "pass@1 %", "pass@2 %", "pass@3 %") == [
        ("0", "gsm8k", "66.7", "75.0", "100.0", "-"),
        ("10", "gsm8k", "66.7", "66.7", "100.0", "100.0"),
        ("eval 10", "gsm8k", "25.0", "25.0", "50.0", "-"),
        ("eval 10", "math|500", "100.0", "100.0", "100.0", "-"),
    ]


def test_time_placement_filters_slowest_and_warnings(root: Path) -> None:
    sheets_found = found(root)
    time = columns(sheets_found["Time of a sample, mean"], "iteration", "wait s", "generate s", "tool s", "verify s")
    # Samples take 1 and 2 seconds in step 0; 2, 4 and 6 in step 10.
    assert time[:2] == [("0", "1.50", "0.75", "0.38", "0.38"), ("10", "4.00", "2.00", "1.00", "1.00")]
    assert columns(sheets_found["Placement"], "node", "samples", "sample·seconds") == [
        ("10.0.0.2", "5", "15.0"),
        ("10.0.0.1", "8", "12.0"),
    ]
    assert sheets_found["Filters"].rows == [("10", "rejection", "groups: spread 3", "1", "3", "2", "6")]
    slowest = columns(sheets_found["Slowest samples"], "iteration", "task", "sample", "outcome", "held s")
    assert slowest[:2] == [("10", "t3", "2", "max turns", "6.00"), ("10", "t3", "1", "solved", "4.00")]
    assert len(slowest) == 10
    assert sheets_found["Warnings"].rows == [("10", "only 1 of 4 groups survived")]


def test_a_table_and_its_markdown_say_the_same(root: Path) -> None:
    sheet = found(root)["Data sets"]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(as_table(sheet))
    assert "math|500" in capture.get()
    lines = as_markdown(sheet).splitlines()
    assert lines[:2] == ["## Data sets", ""]
    assert lines[3].startswith("| --- | --- | ---: |")
    assert len(lines) == 4 + len(sheet.rows)
    assert "math\\|500" in lines[-1]


# Files that are not as they should be


def test_damaged_and_foreign_files_are_named_and_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details = root / "eval_details"
    (details / "train_1.summary.json").write_bytes((details / "train_0.summary.json").read_bytes()[:200])
    (details / "train_2.summary.json").write_bytes(b"")
    (details / "train_3.summary.json").write_text('{"figures": 3}')
    (details / "train_4.summary.json").write_text('{"kind": "train", "rollout_id": "four"}')
    (details / "5.summary.json").mkdir()
    (details / "6.jsonl").write_bytes(b'{"task_id": "a"}\n{"task_id": "b"}\n{"task_')
    (details / "notes.txt").write_text("not ours")
    report = read_report(root)
    assert [one.rollout_id for one in report.training] == [0, 10]
    names = ["5.summary.json", *(f"train_{number}.summary.json" for number in (1, 2, 3, 4)), "6.jsonl"]
    assert [trouble.split(" ")[0].rstrip(":") for trouble in report.troubles] == [str(details / name) for name in names]
    assert "would be named train_0.summary.json" in report.troubles[3]
    assert report.troubles[-1].endswith("2 samples without a summary: broken off, or still under way")
    assert main(["report", str(root), "--no-plots"]) == 0
    shown = capsys.readouterr()
    assert [line.startswith("py-scheduler: left out: ") for line in shown.err.splitlines()] == [True] * 6
    assert "Training" in shown.out


def test_what_is_no_file_or_nested_too_deep_neither_hangs_nor_ends_the_report(root: Path) -> None:
    details = root / "eval_details"
    os.mkfifo(details / "train_1.summary.json")
    (details / "train_2.summary.json").symlink_to("/dev/zero")
    (details / "train_3.summary.json").write_text('{"x": ' + "[" * 5_000 + "]" * 5_000 + "}")
    os.mkfifo(details / "7.jsonl")
    report = read_report(root)
    assert [one.rollout_id for one in report.training] == [0, 10]
    told = [
        "train_1.summary.json is no summary",
        "train_2.summary.json is no summary",
        "train_3.summary.json is no summary",
        "no regular file",
    ]
    assert len(report.troubles) == 4
    assert all(words in trouble for words, trouble in zip(told, report.troubles, strict=True))


def test_names_that_would_drive_a_terminal_are_shown_and_not_sent(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    details = root / "eval_details"
    summary = read_summary(details / "train_0.summary.json")
    evil = "\x1b[2J\x1b]0;evil\x07\u202e"
    summary = msgspec.structs.replace(summary, warnings=(evil,), datasets={evil: summary.total, "b": summary.total})
    (details / "train_0.summary.json").write_bytes(msgspec.json.encode(summary))
    (details / f"{evil}.summary.json").write_text("{}")
    for how in ([], ["--markdown"]):
        assert main(["report", str(root), "--no-plots", *how]) == 0
        shown = capsys.readouterr()
        assert not set("\x1b\x07\u202e") & set(shown.out + shown.err)
        assert "\\x1b]0;evil" in shown.out
        assert "\\x1b]0;evil" in shown.err


def test_plots_are_not_drawn_over_a_link(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / "report").symlink_to(elsewhere)
    assert main(["report", str(root)]) == 1
    assert "report is a symbolic link: name the folder that it leads to by --out" in capsys.readouterr().err
    kept = elsewhere / "kept"
    kept.write_text("mine")
    (root / "plots").mkdir()
    (root / "plots" / "outcomes.png").symlink_to(kept)
    assert main(["report", str(root), "--out", str(root / "plots")]) == 0
    assert kept.read_text() == "mine"
    assert list(elsewhere.iterdir()) == [kept]


def test_what_a_newer_version_added_is_shown_or_passed_over(root: Path) -> None:
    path = root / "eval_details" / "train_0.summary.json"
    path.write_text(path.read_text().replace('"infra_conn"', '"infra_moon"').replace("{", '{"moon": 1,', 1))
    sheet = found(root)["How samples ended"]
    assert sheet.headings[1:] == ("solved", "wrong answer", "max turns", "infra moon")
    assert len(draw_report(read_report(root), root / "out")) == len(PLOTS)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), r"a rollout writes eval_details/\*\.summary\.json"),
        (
            lambda folder: (
                (folder / "eval_details").mkdir(parents=True)
                or (folder / "eval_details" / "1.summary.json").write_text("{")
            ),
            r"1\.summary\.json is no summary",
        ),
    ],
)
def test_a_folder_without_a_summary(tmp_path: Path, make: Any, reason: str) -> None:
    folder = tmp_path / "rollouts"
    make(folder)
    with pytest.raises(NotFoundError, match=rf"there is no summary to report in .*rollouts: .*{reason}"):
        read_report(folder)
    assert main(["report", str(folder)]) == 1


# Plots


def size(path: Path) -> tuple[int, int]:
    """Of a PNG file, in pixels."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("iterations", [1, 5, pytest.param(60, marks=pytest.mark.slow)])
def test_every_plot_of_few_and_of_many_iterations(tmp_path: Path, iterations: int) -> None:
    for number in range(iterations):
        rate = 0.2 + 0.6 * number / iterations
        write_iteration(tmp_path, "train", number, random_groups(number, 6, ["train"], rate), beta=1 - rate)
        if number % 2 == 0:
            groups = random_groups(1000 + number, 6, ["gsm8k", "aime", "code/of/a/long/name/that/goes/on"], rate)
            write_iteration(tmp_path, "eval", number, groups)
    drawn = draw_report(read_report(tmp_path), tmp_path / "report")
    assert [path.stem for path in drawn] == PLOTS
    for path in drawn:
        width, height = size(path)
        assert 400 < width < 2_000
        assert 250 < height < 2_000


def test_the_same_figures_give_the_same_files(root: Path) -> None:
    first, again = (draw_report(read_report(root), root / name) for name in ("first", "again"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_no_plot_without_figures(tmp_path: Path) -> None:
    write_iteration(tmp_path, "train", 0, [])
    assert draw_report(read_report(tmp_path), tmp_path / "report") == []


def test_every_outcome_has_a_colour_of_its_own() -> None:
    assert set(OUTCOME_COLOURS) == {outcome.value for outcome in Outcome}
    colours = [*OUTCOME_COLOURS.values(), *(colour for _, colour in TIME_COLOURS.values())]
    assert len(set(colours)) == len(colours)


def test_without_matplotlib(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(FailedPreconditionError, match="No module named 'matplotlib'"):
        draw_report(read_report(root), root / "report")
    assert main(["report", str(root)]) == 1
    assert "install the extra 'report' of py-scheduler, or say --no-plots" in capsys.readouterr().err
    assert main(["report", str(root), "--no-plots"]) == 0
    assert not (root / "report").exists()


# The command


def test_the_command_prints_tables_and_writes_plots(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(root)]) == 0
    shown = capsys.readouterr().out
    for title in ("Training", "Evals", "Data sets", "Time of a sample", "Filters", "Placement", "Slowest", "Warnings"):
        assert f"\n{title}" in f"\n{shown}"
    assert shown.splitlines()[-6:] == [f"wrote {root}/report/{name}.png" for name in PLOTS]
    assert sorted(path.stem for path in (root / "report").iterdir()) == sorted(PLOTS)


def test_the_command_as_markdown_into_another_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = root / "elsewhere"
    assert main(["report", str(root / "eval_details"), "--markdown", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "## Training\n\n| iteration | beta |" in shown
    assert f"![pass at k]({out}/pass_at_k.png)" in shown
    assert (out / "pass_at_k.png").is_file()
