"""The plot of a simulation."""

from __future__ import annotations

import sys
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from py_scheduler.cli import main
from py_scheduler.commands.views.simulate_plots import lanes_of
from py_scheduler.simulation.simulate import SimulationSettings, simulate
from py_scheduler.simulation.workload import DrawnWorkload
from tests.support.simulated import cluster

if TYPE_CHECKING:
    from pathlib import Path

SPECS = """
[cluster.layout]
"n0" = { gpus = [0, 1], cpu = 64, memory_gb = 512 }

[[evaluator]]
evaluator_id = "math"
resource = { gpu = 2, concurrency = 2 }
run_resource = { gpu = 0.5 }
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    specs = tmp_path / "specs.toml"
    specs.write_text(SPECS)
    return ["simulate", str(specs), "--groups=6", "--steps=2", "--eval-groups=2", "--png", str(tmp_path / "drawn.png")]


def test_no_sample_lies_upon_another_and_there_are_no_more_lines_than_places() -> None:
    workload = DrawnWorkload(steps=3, groups=20, samples=4, eval_groups=5)
    spans = simulate(cluster(nodes=3), workload, SimulationSettings(ahead=1)).spans
    on_lane = defaultdict(list)
    lanes = lanes_of(spans)
    for lane, node, start, held in zip(lanes, spans.node, spans.started, spans.held, strict=True):
        on_lane[lane].append((start, start + held, node))
    assert set(lanes) == set(range(3 * 16))
    for samples in on_lane.values():
        samples.sort()
        assert all(end <= start + 1e-6 for (_, end, _), (start, _, _) in pairwise(samples))
        assert len({node for _, _, node in samples}) == 1


def test_the_same_run_gives_the_same_file(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = set()
    for more in ([], [], ["--compare=concurrency=1,2"]):
        assert main([*words, *more]) == 0
        assert f"wrote {tmp_path / 'drawn.png'}" in capsys.readouterr().out
        drawn.add((tmp_path / "drawn.png").read_bytes())
    assert len(drawn) == 2
    assert all(png.startswith(b"\x89PNG") for png in drawn)


def test_json_alone_goes_into_the_pipe(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_what_cannot_be_drawn_is_told_before_anything_runs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--compare=concurrency=1,2", "--compare=batch_size=1,2,3,4"]) == 2
    assert "--png: draws 6 runs at most, 8 are compared" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words) == 1
    shown, said = capsys.readouterr()
    assert (shown, "install the extra 'report'" in said) == ("", True)


def test_a_folder_that_takes_no_file(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "drawn.png").mkdir()
    assert main(words) == 1
    assert "drawn.png cannot be written" in capsys.readouterr().err
