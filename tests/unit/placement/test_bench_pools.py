"""What the benchmarks compare with must be right, or the comparison is worth nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from benches.bench_placement import expected
from benches.compare_placement import (
    Comparison,
    Figure,
    core_ratios,
    criterion_figures,
    markdown,
    put_between_marks,
    python_figures,
    python_ratios,
    ray_figures,
    service_figures,
    short_table,
    thread_figures,
)
from benches.count_instructions import read, short
from benches.heap_pool import Demand, HeapPool, Token
from tests.support import reference_pool
from tests.support.reference_pool import MICRO, ReferencePool

if TYPE_CHECKING:
    from pathlib import Path

DEMANDS = [Demand(330_000, 1_000, 1_024), Demand(600_000, 500, 0), Demand(2 * MICRO, 2_000, 512), Demand(0, 3_000, 0)]
STEPS = st.lists(st.tuples(st.integers(0, len(DEMANDS) - 1), st.integers(1, 9), st.booleans()), max_size=25)


@given(st.integers(1, 4), STEPS)
@settings(max_examples=150, deadline=None)
def test_the_heap_pool_places_as_the_reference(nodes: int, steps: list[tuple[int, int, bool]]) -> None:
    heap, reference = HeapPool(nodes, 3, 12_000, 4_096), ReferencePool()
    for number in range(nodes):
        reference.add(str(number), [0, 1, 2], 12, 4)
    held: list[tuple[Demand, list[Token], list[reference_pool.Token]]] = []
    for kind, count, release_first in steps:
        if release_first and held:
            demand, mine, theirs = held.pop(0)
            heap.release(demand, mine)
            for token in theirs:
                reference.release(token)
        demand = DEMANDS[kind]
        placed = heap.acquire(demand, count)
        wanted = reference.acquire(reference_pool.Demand(*demand), count)
        assert (placed is None) == (wanted is None)
        if placed is not None and wanted is not None:
            assert [(str(node), gpu_ids) for node, gpu_ids in placed] == [
                (token.node.name, token.gpu_ids) for token in wanted
            ]
            held.append((demand, placed, wanted))


@given(st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_what_the_benchmarks_expect_is_what_the_reference_does(nodes: int, batch: int) -> None:
    batch = min(batch, nodes * 24)
    pool = ReferencePool()
    for number in range(nodes):
        pool.add(str(number), list(range(8)), 96, 384)
    tokens = pool.acquire(reference_pool.Demand.of(0.33, 1, 4), batch)
    assert tokens is not None
    assert [(int(token.node.name), token.gpu_ids[0]) for token in tokens] == expected(nodes, batch)


def test_the_table_holds_the_figures_and_judges_the_goals(tmp_path: Path) -> None:
    folder = tmp_path / "criterion" / "empty pool, 10000 nodes" / "pool" / "64" / "new"
    folder.mkdir(parents=True)
    about = {"group_id": "empty pool, 10000 nodes", "function_id": "pool", "value_str": "64"}
    (folder / "benchmark.json").write_text(json.dumps(about))
    (folder / "estimates.json").write_text('{"median": {"point_estimate": 640.0}}')
    lines = tmp_path / "ray.jsonl"
    lines.write_text('chatter\n{"nodes": 16, "batch": 64, "ns_per_token": 2500000}\n')
    service = tmp_path / "service.json"
    service.write_text('[{"tokens": 64, "us_per_cycle": 640.0}]')
    figures = [
        *criterion_figures(tmp_path / "criterion"),
        *ray_figures(lines),
        *service_figures(service),
        Figure("scan", 10_000, 64, 4_000.0),
    ]
    comparison = Comparison(figures)
    text = markdown(comparison, 64)
    assert "| 4 | - | 10,000 | - | - |" in text
    assert "| 16 | - | - | - | 2,500,000 |" in text
    assert "| 10,000 | 10.0 | - | 4,000 | - |" in text
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- figures of make bench -->\nold\n<!-- end of figures -->\nafter\n")
    core = [Figure("core", 16, 64, 40.0), Figure("core", 10_000, 64, 50.0)]
    put_between_marks(readme, short_table(Comparison([*figures, *core]), 64))
    assert readme.read_text().startswith("before\n<!-- figures of make bench -->\n| ns a token")
    assert "| Ray placement groups | 2,500,000 | - |\n<!-- end of figures -->\nafter\n" in readme.read_text()
    assert "old" not in readme.read_text()
    (goal,) = comparison.goals()
    assert (goal[1], goal[2]) == (400.0, False)
    assert "| ≥ 500 | 400 | not reached |" in text


def test_what_is_close_is_judged_by_ratios_of_things_that_took_turns(tmp_path: Path) -> None:
    def line(case: str, nodes: int, batch: int, contenders: dict[str, tuple[float, float]]) -> str:
        listed = [
            {"name": name, "nanoseconds": nanoseconds, "first_over_it": over}
            for name, (nanoseconds, over) in contenders.items()
        ]
        return json.dumps({"case": case, "nodes": nodes, "batch": batch, "contenders": listed})

    called = "touch, locked and handed out"
    pool_two, pool_one = ("pool, two threads", (9.0, 1.0)), ("pool, one thread", (6.0, 1.5))
    lock_two, lock_one = ("lock, two threads", (4.0, 2.2)), ("lock, one thread", (2.0, 4.5))
    lines = [
        "cargo's chatter",
        line("over the limits", 1, 1, {"pool": (9, 1), "touch": (1, 9), "scan": (6, 1.4)}),
        line("over the limits", 16, 64, {"pool": (6, 1), "touch": (2, 3.2), called: (3, 2.0)}),
        line("over the limits", 256, 64, {"pool": (6, 1), "touch": (2, 2.9), called: (3, 2.1)}),
        line("half full", 10_000, 64, {"10 000 nodes": (25, 1), "16 nodes": (10, 2.4)}),
        line("two threads", 256, 64, dict([pool_two, pool_one, lock_two, lock_one])),
    ]
    ratios, python = tmp_path / "ratios.jsonl", tmp_path / "python.json"
    ratios.write_text("\n".join(lines))
    about = {"what": "heap over core", "nodes": 256, "batch": 1, "ratio": 19.0}
    python.write_text(json.dumps({"benchmarks": [{"extra_info": about, "stats": {"median": 1.0}}]}))
    assert list(python_figures(python)) == []
    found = Comparison([*thread_figures(ratios)], [*core_ratios(ratios), *python_ratios(python)]).goals()
    assert [(measured, reached) for _, measured, reached in found] == [
        (3.2, False),  # the worst of the sizes, and not the one node
        (2.1, True),
        (2.4, True),
        (1.4, True),
        (19.0, True),
        (1.5, False),
    ]


def test_what_callees_cost_is_counted_once() -> None:
    profile = """events: Ir Dr D1mr DLmr D1mw DLmw
fn=(1) core::Pool<T>::take
12 60 9 1 0 1 0
cfn=(2) core::NodeSet::insert
calls=4 30
+3 40 9 9 9 9 9
+1 20 0 0 0 0 0
fn=(2)
30 40 9 2 1 0 0
"""
    counted = read(profile, tokens=4)
    assert (counted.instructions, counted.first_level_misses, counted.last_level_misses) == (30, 1, 0.25)
    assert {short(name): cost for name, cost in counted.by_function.items()} == {
        "Pool::take": 20,
        "NodeSet::insert": 10,
    }
