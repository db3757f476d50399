"""Cluster layouts: every form, every fault, and all faults of a layout at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.errors import ClusterLayoutError
from py_scheduler.placement import NodeResource, Resource, load_cluster_layout, load_pool


def faults(text: str, num_cpus: float | None = 8, memory_gb: float | None = 32) -> list[tuple[str, str]]:
    with pytest.raises(ClusterLayoutError) as caught:
        load_cluster_layout(text, num_cpus, memory_gb)
    return [(violation.field, violation.description) for violation in caught.value.violations]


def test_full_and_short_form() -> None:
    layout = '{"a": {"gpus": [0, 1], "cpu": 96, "memory_gb": 384.5}, "b": [3], "c": {"gpus": [], "cpu": 4}}'
    assert load_cluster_layout(layout, 16, 64) == [
        NodeResource(node_ip="a", gpus=[0, 1], cpu=96, memory_gb=384.5),
        NodeResource(node_ip="b", gpus=[3], cpu=16, memory_gb=64),
        NodeResource(node_ip="c", gpus=[], cpu=4, memory_gb=64),
    ]


def test_a_path_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text('{"nöde": [0]}', encoding=encoding)
        for given_as in (file, str(file)):
            nodes = load_cluster_layout(given_as, 1, 1)
            assert nodes is not None
            assert nodes[0].node_ip == "nöde"


@pytest.mark.parametrize("absent", [None, ""])
def test_no_layout_is_no_pool(absent: str | None) -> None:
    assert load_cluster_layout(absent) is None
    assert load_pool(absent) is None


def test_a_pool_of_a_layout() -> None:
    pool = load_pool('{"a": [0, 1]}', 96, 384)
    assert pool is not None
    assert pool.max_tokens_for(Resource(gpu=0.33)) == 6


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("/no/such/file.json", "neither inline JSON"),
        ("\0", "neither inline JSON"),
        ("x" * 5_000, "neither inline JSON"),
        ('{"a": [0]', "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ("[0, 1]", "must be an object"),
        ("{}", "has no nodes"),
    ],
)
def test_what_is_no_layout_at_all(text: str, part: str) -> None:
    [(field, description)] = faults(text)
    assert field == ""
    assert part in description


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("3", "must be a list of GPU ids or an object"),
        ("null", "must be a list of GPU ids or an object"),
        ('"0,1"', "must be a list of GPU ids or an object"),
        ("[0, 0]", "gpus has the id 0 more than once"),
        ("[-1]", "gpus has the id -1"),
        ("[0.5]", "gpus must hold whole numbers"),
        ("[true]", "gpus must hold whole numbers"),
        (f"[{10**30}]", "which no GPU has"),
        (f"[{2**40}]", "must be from 0"),
        (json.dumps(list(range(65))), "at most 64"),
        ('{"gpus": {}}', "gpus must be a list"),
        ('{"cpu": 1}', "gpus is absent"),
        ('{"gpus": [], "gpu": 1}', "unknown key 'gpu': known are gpus, cpu, memory_gb"),
        ('{"gpus": [], "cpu": 1, "cpu": 2}', "cpu is given twice"),
        ('{"gpus": [], "cpu": -1}', "cpu -1 must be 0 or more"),
        ('{"gpus": [], "cpu": NaN}', "cpu NaN must be a finite number"),
        ('{"gpus": [], "memory_gb": Infinity}', "memory_gb inf must be a finite number"),
        ('{"gpus": [], "memory_gb": 1e300}', "larger than what can be counted"),
        (f'{{"gpus": [], "cpu": 1{"0" * 400}}}', "cpu inf must be a finite number"),
        ('{"gpus": [], "cpu": 1e-9}', "below the smallest unit"),
        ('{"gpus": [], "cpu": "8"}', "cpu must be a number"),
        ('{"gpus": [], "cpu": true}', "cpu must be a number"),
        ('{"gpus": [], "cpu": null}', "cpu must be a number"),
    ],
)
def test_faulty_nodes(entry: str, part: str) -> None:
    [(field, description)] = faults(f'{{"good": [0], "bad": {entry}}}')
    assert field == "bad"
    assert part in description


def test_absent_supplies_name_the_flag() -> None:
    descriptions = faults('{"a": [0]}', None, None)
    assert descriptions == [
        ("a", "cpu is absent: give it here or with --env-num-cpus"),
        ("a", "memory_gb is absent: give it here or with --env-memory-gb"),
    ]


def test_a_bad_fallback_is_found() -> None:
    assert faults('{"a": [0]}', float("nan"), 1) == [("a", "cpu NaN must be a finite number")]


def test_all_faults_at_once() -> None:
    layout = '{"a": [0, 0], "a": {"gpus": [-1], "cpu": -2, "ram": 1}, "": 7}'
    assert len(faults(layout)) == 7
    fields = {field for field, _ in faults(layout)}
    assert fields == {"a", ""}


numbers = st.integers(-2, 10) | st.floats() | st.integers()
entries = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["gpus", "cpu", "memory_gb", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), entries, max_size=4), st.none() | numbers)
def test_any_layout_gives_nodes_or_a_layout_error(layout: dict[str, object], num_cpus: float | None) -> None:
    try:
        pool = load_pool(json.dumps(layout), num_cpus, 4)
    except ClusterLayoutError:
        return
    assert pool is not None
    assert [node.node_ip for node in pool.nodes()] == list(layout)


@given(st.data())
def test_a_mutated_layout_gives_nodes_or_a_layout_error(data: st.DataObject) -> None:
    text = '{"10.0.0.1": {"gpus": [0, 1, 2, 3], "cpu": 96, "memory_gb": 384}, "10.0.0.2": [0, 1]}'
    at = data.draw(st.integers(1, len(text) - 1))
    until = data.draw(st.integers(at, min(len(text), at + 3)))
    mutated = text[:at] + data.draw(st.text(st.sampled_from('{}[]":,-0189eE. aN'), max_size=3)) + text[until:]
    try:
        nodes = load_cluster_layout(mutated, 1, 1)
    except ClusterLayoutError:
        return
    assert nodes
