"""Every kind of room that a sample can take is known wherever room is counted, sent or told.

A kind is a field of Resource: whoever adds one runs this file, and each failure is a place that forgot it.
"""

from __future__ import annotations

import json
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from py_scheduler.app.building import cluster_nodes
from py_scheduler.cli import main
from py_scheduler.commands.views.plan import PlanView, show_plan
from py_scheduler.config import Config, convert_config, convert_table
from py_scheduler.config.tables import ClusterSettings
from py_scheduler.domain.leases import PlacementDemand, Shortage, check_demand
from py_scheduler.domain.requests import NodeView
from py_scheduler.domain.resources import AMOUNTS, NODE_AMOUNTS, NodeResource, Resource
from py_scheduler.errors import ClusterLayoutError, UnplaceableError
from py_scheduler.knobs import KNOBS
from py_scheduler.placement import PlacementPool, check_deadlock, load_cluster_layout, tokens_in_budget
from py_scheduler.planning import BatchNeed, plan_spec, sample_packing
from py_scheduler.scheduler.leases.manager import node_view
from py_scheduler.scheduler.queue.entries import ReadyLease
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room
from py_scheduler.scheduler.queue.shares import Shares, supply_of
from py_scheduler.wire.placement import SHORTAGES
from py_scheduler.wire.requests import decode_node, decode_resource, encode_node, encode_resource

if TYPE_CHECKING:
    from pathlib import Path


def amounts_of(struct: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(struct) if field.type is float]


KINDS = amounts_of(Resource)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_kind_of_nodes = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpu"])


def of(kind: str, amount: float, others: float = 0.0, **fields: Any) -> Resource:
    amounts: dict[str, Any] = dict.fromkeys(KINDS, others) | {kind: amount}
    return Resource(**amounts, **fields)


def node(name: str, kind: str, amount: int, others: int = 64) -> NodeResource:
    supply: dict[str, Any] = dict.fromkeys(KINDS, others) | {kind: amount}
    return NodeResource(node_ip=name, gpus=list(range(supply.pop("gpu"))), **supply)


def pool_of(kind: str, amount: int, others: int = 64) -> PlacementPool:
    return PlacementPool([node("n", kind, amount, others)])


def entry_of(per_sample: Resource) -> ReadyLease:
    return ReadyLease(
        flow=("default", False),
        order=(0.0, 0, 0, 0),
        shape=(per_sample, 1),
        per_sample=per_sample,
        tokens=1,
        cost=1,
        queued_at=0.0,
        budget=per_sample,
        grant=lambda lease: None,
    )


def test_the_tables_have_every_amount() -> None:
    assert list(AMOUNTS) == KINDS
    assert list(NODE_AMOUNTS) == amounts_of(NodeResource) == [kind for kind in KINDS if kind != "gpu"]
    assert sorted(amounts_of(NodeView)) == sorted([*NODE_AMOUNTS, *(f"free_{kind}" for kind in NODE_AMOUNTS)])


@every_kind
def test_two_demands_are_covered_by_the_greater_of_each(kind: str) -> None:
    assert of(kind, 1).field_max(of(kind, 3)) == of(kind, 3)
    assert f"{kind} 3" in of(kind, 3).words
    assert of(kind, 3).taken == {kind: 3}


@every_kind
def test_a_lease_may_ask_for_it_alone_and_its_ceiling_holds_all(kind: str) -> None:
    demand = PlacementDemand(per_sample=of(kind, 3), max_tokens=5)
    assert list(check_demand(demand)) == []
    assert tokens_in_budget(demand.ceiling, demand.per_sample) == 5


@every_kind
def test_it_travels(kind: str) -> None:
    demand = of(kind, 3)
    assert decode_resource(encode_resource(demand), 1) == demand
    pool = pool_of(kind, 5)
    with pool.try_acquire_apart(demand, 1, []) or pytest.fail("it fits"):
        view = node_view(pool.nodes()[0])
    assert decode_node(encode_node(view)) == view
    supply, free = ([1.0] * 5, [0.0] * 3 + [1.0] * 2) if kind == "gpu" else (5, 2)
    assert (list(view.free_gpus) if kind == "gpu" else getattr(view, f"free_{kind}")) == free
    assert ([1.0] * len(view.gpu_ids) if kind == "gpu" else getattr(view, kind)) == supply
    assert kind == "gpu" or f"{kind} 2 of 5 free" in view.words


@every_kind
def test_a_node_without_it_says_so_in_a_word_that_travels(kind: str) -> None:
    pool = pool_of(kind, 1)
    assert pool.max_tokens_for(of(kind, 2, others=1)) == 0
    explained = pool.explain(of(kind, 2, others=1), 1)
    assert [word for word, _ in explained.shortages] == [short for seen in explained.nodes for short in seen.short]
    (short,) = explained.nodes[0].short
    assert SHORTAGES.member(SHORTAGES.number_of[Shortage(short)], "short") == short


@every_kind
def test_a_share_is_the_part_of_it_that_is_taken(kind: str) -> None:
    pool = pool_of(kind, 4)
    supply = supply_of(pool, 64)
    shares = Shares(supply)
    assert supply[kind] == 4
    shares.take("a", "evaluator", of(kind, 2, others=1), 1, now=0.0)
    shares.take("b", "other", of(kind, 1, others=1), 1, now=0.0)
    assert shares.level("a", 1.0) == 2 * shares.level("b", 1.0)


@every_kind
def test_who_takes_it_takes_what_a_head_waits_for(kind: str) -> None:
    pool = pool_of(kind, 4)
    rivalry = Rivalry(Room(pool))
    with pool.try_acquire_apart(of(kind, 1), 1, []) or pytest.fail("it fits"):
        assert rivalry.has_to_take_from(entry_of(of(kind, 1)), [entry_of(of(kind, 4))])


@every_kind
def test_what_the_pool_cannot_give_may_be_lowered(kind: str) -> None:
    pool = pool_of(kind, 1)
    budget, sample = of(kind, 8, concurrency=4), of(kind, 2)
    with pytest.raises(UnplaceableError, match=f"lower {kind} per sample"):
        check_deadlock(pool, evaluator_id="a", budget=budget, per_sample=sample, max_batch_samples=4)


@every_kind
def test_a_plan_tells_it(kind: str) -> None:
    nodes = [node("small", kind, 2), node("large", kind, 4)]
    budget = of(kind, 2, others=1_000, concurrency=1_000)
    need = BatchNeed(evaluator_id="a", budget=budget, per_sample=of(kind, 2))
    plan = plan_spec(nodes, need)
    assert (plan.bounds_batch, plan.tokens_possible) == ((f"budget {kind}",), 3)
    assert plan.one_more_node is not None
    assert (plan.one_more_node.like, plan.one_more_node.tokens) == ("large", 2)
    console = Console(file=StringIO(), width=200)
    show_plan(PlanView(nodes=nodes, plans=[plan], drawn=need, packing=sample_packing(nodes, need)), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"6 {NODE_AMOUNTS.get(kind, 'GPUs')}" in shown
    assert kind == "gpu" or "4/4" in shown


@every_kind
def test_an_evaluator_may_ask_for_it(kind: str) -> None:
    evaluator = {"evaluator_id": "a", "handler": "a:B", "resource": {kind: 4}, "run_resource": {kind: 2}}
    config: Config = convert_config({"evaluator": [evaluator]})
    assert getattr(config.evaluator[0].resource, kind) == 4
    assert config.evaluator[0].run_resource == of(kind, 2)


@every_kind_of_nodes
def test_a_layout_gives_it(kind: str) -> None:
    (one,) = load_cluster_layout(json.dumps({"n": {"gpus": [], **dict.fromkeys(NODE_AMOUNTS, 1), kind: 3}})) or []
    assert getattr(one, kind) == 3
    assert PlacementPool([one]).max_tokens_for(of(kind, 1)) == 3


@every_kind_of_nodes
def test_a_layout_without_it_has_the_flag_of_the_server_and_of_a_plan(kind: str, tmp_path: Path) -> None:
    layout = {"n": {"gpus": [], **dict.fromkeys(NODE_AMOUNTS, 1)}}
    del layout["n"][kind]
    with pytest.raises(ClusterLayoutError, match=f"{kind} is absent") as told:
        load_cluster_layout(json.dumps(layout))
    flag = str(told.value).split()[-1]
    (knob,) = [knob for knob in KNOBS if knob.flag == flag]
    table, key = knob.keys[0].split(".")
    (one,) = cluster_nodes(convert_table({"layout": layout, key: 3}, ClusterSettings, table), tmp_path) or []
    assert getattr(one, kind) == 3
    specs = tmp_path / "specs.json"
    specs.write_text(
        json.dumps({"evaluator": [{"evaluator_id": "a", "resource": {kind: 3}, "run_resource": {kind: 3}}]})
    )
    assert main(["plan", json.dumps(layout), str(specs), flag, "3"]) == 0
    assert main(["plan", json.dumps(layout), str(specs), flag, "2"]) == 1
