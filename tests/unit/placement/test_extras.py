"""Named resources and labels: the values, one rule for names on both sides, the layout, the guard and the plan."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from py_scheduler.commands.views.plan import PlanView, show_plan
from py_scheduler.config import parse_config
from py_scheduler.domain.leases import NodeShortageView, Shortage
from py_scheduler.domain.resources import MAX_NAMED_AMOUNT, MAX_NAMES, NodeResource, Resource, check_extras
from py_scheduler.errors import ClusterLayoutError, ConfigError, InvalidArgumentError, UnplaceableError
from py_scheduler.placement import PlacementPool, check_deadlock, load_cluster_layout, tokens_in_budget
from py_scheduler.planning import BatchNeed, plan_spec, sample_packing


def node(name: str, licences: int = 0, **labels: str) -> NodeResource:
    named = {"licence": licences} if licences else {}
    return NodeResource(node_ip=name, gpus=[0, 1], cpu=16, memory_gb=64, named=named, labels=labels)


def pool() -> PlacementPool:
    return PlacementPool([node("a", 4, zone="a"), node("b", 2, zone="b"), node("c")])


AMPLE = Resource(gpu=100, cpu=1_000, memory_gb=1_000, concurrency=100, named={"licence": 100})


# Values


def test_a_resource_is_a_value() -> None:
    given_names = {"licence": 2, "sandbox": 0}
    resource = Resource(named=given_names, required_labels={"zone": "a"})
    given_names["licence"] = 9
    assert resource == Resource(named={"licence": 2}, required_labels={"zone": "a"})
    assert hash(resource) == hash(Resource(named={"licence": 2}, required_labels={"zone": "a"}))
    assert pickle.loads(pickle.dumps(resource)) == copy.deepcopy(resource) == resource
    changes: list[Any] = [
        lambda: resource.named.update(licence=1),
        lambda: resource.named.__setitem__("licence", 1),
        resource.named.clear,
        lambda: resource.required_labels.pop("zone"),
        lambda: resource.named.__ior__({"licence": 1}),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="frozen"):
            change()
    assert resource.words == "gpu 0, cpu 0, memory_gb 0, named.licence 2, label zone=a"


def test_the_peak_of_two_phases_has_the_most_of_each_name_and_all_labels() -> None:
    run = Resource(named={"licence": 2, "sandbox": 1}, required_labels={"zone": "a"})
    scoring = Resource(named={"licence": 3}, required_labels={"zone": "a", "gpu_type": "h100"})
    peak = Resource(named={"licence": 3, "sandbox": 1}, required_labels={"zone": "a", "gpu_type": "h100"})
    assert run.field_max(scoring) == scoring.field_max(run) == peak
    with pytest.raises(InvalidArgumentError, match=r"^required_labels\.zone: must be 'a' and 'b' at once"):
        run.field_max(Resource(required_labels={"zone": "b"}))


names = st.text("aZ9._-/ é\n", max_size=3) | st.sampled_from(["x" * 63, "x" * 64])
amounts = st.integers(0, 3) | st.sampled_from([MAX_NAMED_AMOUNT, MAX_NAMED_AMOUNT + 1])


@given(st.dictionaries(names, amounts, max_size=2), st.dictionaries(names, names, max_size=2))
def test_both_sides_have_one_rule(named: dict[str, int], labels: dict[str, str]) -> None:
    sample = Resource(named=named, required_labels=labels)
    faults = {f"per_sample.{violation.field}" for violation in check_extras(sample)}
    if not faults:
        PlacementPool([]).max_tokens_for(sample)
        return
    with pytest.raises(InvalidArgumentError) as caught:
        PlacementPool([]).max_tokens_for(sample)
    assert {violation.field for violation in caught.value.violations} <= faults


def test_too_many_names() -> None:
    many = {f"n{number}": 1 for number in range(MAX_NAMES + 1)}
    (fault,) = check_extras(Resource(named=many))
    assert (fault.field, fault.description) == ("named", "has 65 names, at most 64 can be")
    with pytest.raises(InvalidArgumentError, match=r"per_sample\.named: has 65 names"):
        pool().max_tokens_for(Resource(named=many))
    assert not list(check_extras(Resource(named=dict(list(many.items())[1:]))))


# The pool


def test_tokens_go_where_the_labels_and_the_licences_are() -> None:
    supply = pool()
    sample = Resource(cpu=1, named={"licence": 1}, required_labels={"zone": "a"})
    assert (supply.max_tokens_for(sample), supply.free_tokens_for(sample)) == (4, 4)
    with_lease = supply.try_acquire_batch(AMPLE, sample, 3)
    assert with_lease is not None
    assert {token.node_ip for token in with_lease.tokens} == {"a"}
    assert supply.nodes()[0].named_free == {"licence": 1}
    assert supply.try_acquire_batch(AMPLE, sample, 2) is None
    explanation = supply.explain(sample, 2)
    assert explanation.shortages == [("named.licence", 2), ("label zone=a", 2)]
    first, second, third = explanation.nodes
    assert (first.short, first.short_named, first.lacking_labels) == (["named"], ["licence"], {})
    assert (second.short, second.short_named, second.lacking_labels) == (["label"], [], {"zone": "a"})
    assert (third.short, third.short_named, third.lacking_labels) == (["named", "label"], ["licence"], {"zone": "a"})
    with_lease.tokens[0].release()
    assert supply.free_tokens_for(sample) == 2
    with_lease.release()
    assert supply.nodes()[0].named_free == supply.nodes()[0].named == {"licence": 4}


def test_a_budget_counts_named_resources() -> None:
    sample = Resource(cpu=1, named={"licence": 3})
    assert tokens_in_budget(Resource(cpu=9, concurrency=9, named={"licence": 7}), sample) == 2
    with pytest.raises(
        UnplaceableError, match=r"its named\.licence is 0, one sample takes 3: raise the budget's named"
    ):
        tokens_in_budget(Resource(cpu=9, concurrency=9), sample)


def test_a_restored_lease_takes_its_licences() -> None:
    supply = pool()
    sample = Resource(cpu=1, named={"licence": 2}, required_labels={"zone": "a"})
    lease = supply.try_acquire_batch(AMPLE, sample, 2)
    assert lease is not None
    tokens = lease.tokens
    lease.release()
    adopted = supply.adopt(sample, tokens)
    assert supply.free_tokens_for(sample) == 0
    adopted.release()
    assert supply.free_tokens_for(sample) == 2


# The cluster layout


def test_a_layout_with_extras() -> None:
    layout = (
        '{"a": {"gpus": [0], "cpu": 1, "memory_gb": 2, "named": {"licence": 4}, "labels": {"zone": "a"}}, "b": [1]}'
    )
    assert load_cluster_layout(layout, 1, 2) == [
        NodeResource(node_ip="a", gpus=[0], cpu=1, memory_gb=2, named={"licence": 4}, labels={"zone": "a"}),
        NodeResource(node_ip="b", gpus=[1], cpu=1, memory_gb=2),
    ]


def test_all_faults_of_a_layout_are_told() -> None:
    layout = """{
        "a": {"gpus": [], "named": {"l": -1, "m": 1.5, "n": true, "o": 4294967296, "p": 1, "p": 2, "q r": 1}},
        "b": {"gpus": [], "labels": {"zone": 1, "kind": "", "x": null}, "names": {}},
        "c": {"gpus": [], "named": [1], "labels": "zone=a"}
    }"""
    with pytest.raises(ClusterLayoutError) as caught:
        load_cluster_layout(layout, 1, 1)
    faults = sorted((violation.field, violation.description.split()[0]) for violation in caught.value.violations)
    assert faults == [
        ("a", "named"),
        ("a", "named.l"),
        ("a", "named.m"),
        ("a", "named.n"),
        ("a", "named.o"),
        ("a", "named.p"),
        ("b", "has"),
        ("b", "labels.kind"),
        ("b", "labels.x"),
        ("b", "labels.zone"),
        ("c", "labels"),
        ("c", "named"),
    ]


# The configuration

EVALUATOR = """
[[evaluator]]
evaluator_id = "m"
handler = "a:B"
resource = { cpu = 8, concurrency = 8, named = { licence = 5_000_000_000 } }
"""


def test_a_configuration_with_extras() -> None:
    (evaluator,) = parse_config(
        EVALUATOR + "run_resource = { cpu = 1, named = { licence = 1 }, required_labels = { zone = 'a' } }"
    ).evaluator
    assert evaluator.resource.named == {"licence": 5_000_000_000}
    assert evaluator.run_resource == Resource(cpu=1, named={"licence": 1}, required_labels={"zone": "a"})


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "run_resource = { named = { licence = -1, 'a b' = 1 } }",
            ["run_resource.named", "run_resource.named.licence"],
        ),
        ("run_resource = { named = { other = 1, licence = 'x' } }", ["run_resource.named.licence"]),
        ("run_resource = { required_labels = { zone = 1 } }", ["run_resource.required_labels.zone"]),
        ("eval_resource = { named = { licence = 4294967296 } }", ["eval_resource.named.licence"]),
        (
            "run_resource = { required_labels = { zone = 'a' } }\neval_resource = { required_labels = { zone = 'b' } }",
            ["eval_resource.required_labels.zone"],
        ),
    ],
)
def test_faults_of_a_configuration_name_the_key(text: str, fields: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(EVALUATOR + text)
    assert [violation.field for violation in caught.value.violations] == [f"evaluator[0].{field}" for field in fields]


# The guard and the plan


def need(count: int = 4, **per_sample: Any) -> BatchNeed:
    budget = Resource(gpu=100, cpu=1_000, memory_gb=1_000, concurrency=count, named={"licence": 100})
    return BatchNeed(evaluator_id="swe", budget=budget, per_sample=Resource(**per_sample))


def test_the_guard_names_what_to_lower_and_the_labels() -> None:
    sample = Resource(cpu=1, named={"licence": 1}, required_labels={"zone": "a"})
    with pytest.raises(
        UnplaceableError, match=r"add nodes with the label zone=a, lower cpu or named\.licence per sample"
    ):
        check_deadlock(pool(), evaluator_id="swe", budget=AMPLE, per_sample=sample, max_batch_samples=5)
    assert check_deadlock(pool(), evaluator_id="swe", budget=AMPLE, per_sample=sample, max_batch_samples=4) == 4


def test_the_plan_names_what_limits_and_what_one_more_node_brings() -> None:
    # The node without licences has the most GPUs, and another one like it would bring nothing.
    largest = NodeResource(node_ip="large", gpus=[0, 1, 2, 3], cpu=64, memory_gb=64)
    nodes = [node("a", 4, zone="a"), node("b", 2, zone="b"), largest]
    plan = plan_spec(nodes, need(2, gpu=0.1, named={"licence": 1}))
    assert (plan.tokens_possible, plan.batches_at_once, plan.problem) == (6, 3, "")
    assert plan.limits == (("named.licence", 3),)
    assert plan.one_more_node is not None
    assert (plan.one_more_node.like, plan.one_more_node.tokens, plan.one_more_node.batches) == ("a", 4, 2)

    plan = plan_spec(nodes, need(60, gpu=0.1, required_labels={"zone": "b"}))
    assert plan.limits == (("label zone=b", 2), ("gpu", 1))
    assert plan.problem.endswith("2 more nodes like b would do")
    plan = plan_spec(nodes, need(2, gpu=0.1, named={"licence": 5}, required_labels={"zone": "z"}))
    assert plan.problem.endswith("no node has 5 of named.licence or the label zone=z")


def test_the_plan_says_when_the_budget_of_a_name_bounds_the_batch() -> None:
    plan = plan_spec([node("a", 64)], need(90, named={"licence": 40}))
    assert (plan.tokens_needed, plan.bounds_batch) == (2, ("budget named.licence",))


def test_a_plan_is_shown_with_its_extras(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("a", 4, zone="a"), node("b", 4, zone="b")]
    drawn = need(2, cpu=1, named={"licence": 1}, required_labels={"zone": "b"})
    packing = sample_packing(nodes, drawn)
    show_plan(PlanView(nodes=nodes, plans=[plan_spec(nodes, drawn)], drawn=drawn, packing=packing), Console(width=200))
    shown = capsys.readouterr().out
    assert "cluster: 2 nodes, 4 GPUs, 32 cores, 128 GiB, 8 licence" in shown
    assert "a sample holds gpu 0, cpu 1, memory_gb 0, named.licence 1, label zone=b" in shown
    assert "label zone=b on 1 node, named.licence on 1 node" in shown or "named.licence on 1 node, label" in shown
    assert "licence 4/4" in shown
    assert "licence 0/4" in shown


def test_a_nodes_shortages_in_words() -> None:
    view = NodeShortageView(
        node_ip="a",
        free_tokens=0,
        max_tokens=1,
        short=(Shortage.CPU, Shortage.NAMED, Shortage.LABEL),
        short_named=("licence",),
        lacking_labels={"zone": "a"},
    )
    assert view.words == ("cpu", "named.licence", "label zone=a")
