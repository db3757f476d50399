"""Leases on the wire: what goes in comes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2 as service
from py_scheduler.domain.leases import (
    AcquireRequest,
    CapacityView,
    LeaseState,
    LeaseTerms,
    LeaseToken,
    LeaseView,
    NodeShortageView,
    PlacementDemand,
    PlacementView,
    ReleaseReply,
    ReleaseRequest,
    RenewRequest,
    Shortage,
)
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import placement as wire
from tests.support import strategies

amounts = strategies.amounts
counts = st.integers(0, 2**31)
samples, budgets, nodes = strategies.sample_resources, strategies.budget_resources, strategies.node_views
demands = st.builds(PlacementDemand, per_sample=samples, max_tokens=st.integers(1, 16_384), budget=st.none() | budgets)
terms = st.builds(
    LeaseTerms,
    batch_id=st.integers(0, 2**63 - 1) | strategies.names,
    demand=demands,
    ttl_seconds=st.floats(0.1, 86_400),
)
acquires = st.builds(
    AcquireRequest, request_id=strategies.names, terms=terms, namespace=strategies.names, wait=st.booleans()
)
tokens = st.builds(
    LeaseToken, token_no=counts, node_ip=strategies.names, gpu_ids=st.lists(counts, max_size=4).map(tuple)
)
views = st.builds(
    LeaseView,
    lease_id=strategies.names,
    state=st.sampled_from(LeaseState),
    fencing_token=st.integers(0, 2**64 - 1),
    tokens=st.lists(tokens, max_size=4).map(tuple),
    expires_in_seconds=amounts,
    reason=strategies.names,
    waiting_seconds=amounts,
    bypassed=counts,
)
shortages = st.builds(
    NodeShortageView,
    node_ip=strategies.names,
    free_tokens=counts,
    max_tokens=counts,
    short=st.lists(st.sampled_from(Shortage), max_size=5).map(tuple),
    short_named=st.lists(strategies.resource_names, max_size=3).map(tuple),
    lacking_labels=strategies.labels,
)


@given(acquires)
def test_acquire(request: AcquireRequest) -> None:
    raw = wire.encode_acquire_request(request).SerializeToString()
    assert wire.decode_acquire_request(service.AcquireLeaseRequest.FromString(raw), None) == request


@given(demands)
def test_explain(demand: PlacementDemand) -> None:
    assert wire.decode_explain_request(wire.encode_explain_request(demand)) == demand


@given(views)
def test_lease(view: LeaseView) -> None:
    raw = wire.encode_lease(view).SerializeToString()
    assert wire.decode_lease(service.AcquireLeaseResponse.FromString(raw)) == view


@given(st.builds(RenewRequest, lease_id=strategies.names, fencing_token=counts, namespace=strategies.names))
def test_renew(request: RenewRequest) -> None:
    assert wire.decode_renew_request(wire.encode_renew_request(request)) == request


@given(
    st.builds(
        ReleaseRequest,
        request_id=strategies.names,
        lease_id=strategies.names,
        fencing_token=counts,
        token_nos=st.lists(counts, max_size=4).map(tuple),
        namespace=strategies.names,
    ),
    st.builds(ReleaseReply, released_tokens=counts, held_tokens=counts),
)
def test_release(request: ReleaseRequest, reply: ReleaseReply) -> None:
    assert wire.decode_release_request(wire.encode_release_request(request)) == request
    assert wire.decode_release_reply(wire.encode_release_reply(reply)) == reply


@given(
    st.builds(CapacityView, max_tokens=counts, free_tokens=counts, nodes=st.lists(nodes, max_size=3).map(tuple)),
    st.builds(
        PlacementView,
        wanted_tokens=counts,
        free_tokens=counts,
        max_tokens=counts,
        nodes=st.lists(shortages, max_size=3).map(tuple),
    ),
)
def test_answers_to_questions(capacity: CapacityView, placement: PlacementView) -> None:
    assert wire.decode_capacity(wire.encode_capacity(capacity)) == capacity
    assert wire.decode_placement(wire.encode_placement(placement)) == placement


@pytest.mark.parametrize(
    ("field", "name", "value", "path"),
    [
        ("named", "licence", 2**32, "per_sample.named.licence"),
        ("named", "a b", 1, "per_sample.named"),
        ("required_labels", "zone", "", "per_sample.required_labels.zone"),
        ("required_labels", "-", "a", "per_sample.required_labels"),
    ],
)
def test_bad_names_and_amounts_are_refused_by_their_field(field: str, name: str, value: Any, path: str) -> None:
    message = service.ExplainPlacementRequest(max_tokens=1)
    message.per_sample.gpu = 1
    getattr(message.per_sample, field)[name] = value
    with pytest.raises(InvalidArgumentError) as caught:
        wire.decode_explain_request(message)
    assert [violation.field for violation in caught.value.violations] == [path]
    extras: dict[str, Any] = {field: {name: value}}
    sample = Resource(gpu=1, **extras)
    with pytest.raises(InvalidArgumentError) as caught:
        wire.encode_explain_request(PlacementDemand(per_sample=sample, max_tokens=1))
    assert [violation.field for violation in caught.value.violations] == [path]


def test_no_more_names_are_read_than_it_takes_to_refuse_them() -> None:
    message = service.ExplainPlacementRequest(max_tokens=1)
    for number in range(100):
        message.per_sample.named[f"n{number}"] = 1
    with pytest.raises(InvalidArgumentError, match=r"per_sample\.named: has 65 names, at most 64 can be"):
        wire.decode_explain_request(message)


def test_a_budget_without_concurrency_is_limited_by_max_tokens() -> None:
    message = service.ExplainPlacementRequest(max_tokens=5)
    message.per_sample.gpu = 1
    message.budget.gpu = 3
    assert wire.decode_explain_request(message).budget == Resource(gpu=3, concurrency=5)
