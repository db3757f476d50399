"""Calls and answers of placement_service.proto, total both ways."""

from __future__ import annotations

from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import resource_pb2
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
    check_acquire,
    check_demand,
)
from py_scheduler.domain.limits import name_fault
from py_scheduler.domain.resources import Resource, check_extras
from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.wire.common.fields import EnumTable, Faults
from py_scheduler.wire.requests import decode_node, decode_resource, encode_node, encode_resource
from py_scheduler.wire.tasks import decode_batch_id, encode_batch_id

LEASE_STATES = EnumTable(LeaseState, service.LeaseState, "LEASE_STATE")
SHORTAGES = EnumTable(Shortage, service.Shortage, "SHORTAGE")

# Acquire


def decode_acquire_request(message: service.AcquireLeaseRequest, timeout_seconds: float | None) -> AcquireRequest:
    """`timeout_seconds` is what the call's deadline leaves for a wait. Raises InvalidArgumentError with every fault."""
    faults = Faults()
    terms = LeaseTerms(
        batch_id=decode_batch_id(message.batch_id, "batch_id", faults),
        demand=_decode_demand(message),
        ttl_seconds=message.ttl_seconds,
    )
    request = AcquireRequest(
        request_id=message.request_id,
        terms=terms,
        namespace=message.namespace or DEFAULT_NAMESPACE,
        wait=message.wait,
        timeout_seconds=timeout_seconds,
    )
    faults.add_all("", check_acquire(request))
    faults.check()
    return request


def encode_acquire_request(request: AcquireRequest) -> service.AcquireLeaseRequest:
    """Without the timeout, which travels as the call's deadline.

    Raises InvalidArgumentError for named resources and labels that the server would refuse anyway.
    """
    terms = request.terms
    budget = terms.demand.budget
    return service.AcquireLeaseRequest(
        request_id=request.request_id,
        batch_id=encode_batch_id(terms.batch_id),
        namespace=request.namespace,
        budget=None if budget is None else _encode_checked(budget, "budget"),
        per_sample=_encode_checked(terms.demand.per_sample, "per_sample"),
        max_tokens=terms.demand.max_tokens,
        ttl_seconds=terms.ttl_seconds,
        wait=request.wait,
    )


def _decode_demand(message: service.AcquireLeaseRequest | service.ExplainPlacementRequest) -> PlacementDemand:
    budget = None
    if message.HasField("budget"):
        budget = decode_resource(message.budget, message.budget.concurrency or message.max_tokens)
    return PlacementDemand(per_sample=_decode_sample(message.per_sample), max_tokens=message.max_tokens, budget=budget)


def _decode_sample(message: resource_pb2.Resource) -> Resource:
    return decode_resource(message, concurrency=1)


def _encode_checked(resource: Resource, path: str) -> resource_pb2.Resource:
    """What a map of the message could not hold is an error that names its field."""
    faults = Faults()
    faults.add_all(path, check_extras(resource, is_budget=path == "budget"))
    faults.check()
    return encode_resource(resource)


def encode_lease(view: LeaseView) -> service.AcquireLeaseResponse:
    return service.AcquireLeaseResponse(
        lease=service.Lease(
            lease_id=view.lease_id,
            state=LEASE_STATES.number_of[view.state],
            fencing_token=view.fencing_token,
            tokens=[
                service.LeaseToken(token_no=token.token_no, node_ip=token.node_ip, gpu_ids=token.gpu_ids)
                for token in view.tokens
            ],
            expires_in_seconds=view.expires_in_seconds,
            reason=safe_text(view.reason),
            waiting_seconds=view.waiting_seconds,
            bypassed=view.bypassed,
        )
    )


def decode_lease(message: service.AcquireLeaseResponse) -> LeaseView:
    lease = message.lease
    return LeaseView(
        lease_id=lease.lease_id,
        state=LEASE_STATES.member(lease.state, "lease.state"),
        fencing_token=lease.fencing_token,
        tokens=tuple(
            LeaseToken(token_no=token.token_no, node_ip=token.node_ip, gpu_ids=tuple(token.gpu_ids))
            for token in lease.tokens
        ),
        expires_in_seconds=lease.expires_in_seconds,
        reason=lease.reason,
        waiting_seconds=lease.waiting_seconds,
        bypassed=lease.bypassed,
    )


# Renew, release


def decode_renew_request(message: service.RenewLeaseRequest) -> RenewRequest:
    faults = Faults()
    _check_names(faults, message.namespace, lease_id=message.lease_id)
    faults.check()
    return RenewRequest(
        lease_id=message.lease_id,
        fencing_token=message.fencing_token,
        namespace=message.namespace or DEFAULT_NAMESPACE,
    )


def encode_renew_request(request: RenewRequest) -> service.RenewLeaseRequest:
    return service.RenewLeaseRequest(
        lease_id=request.lease_id, fencing_token=request.fencing_token, namespace=request.namespace
    )


def decode_release_request(message: service.ReleaseLeaseRequest) -> ReleaseRequest:
    faults = Faults()
    _check_names(faults, message.namespace, request_id=message.request_id, lease_id=message.lease_id)
    faults.check()
    return ReleaseRequest(
        request_id=message.request_id,
        lease_id=message.lease_id,
        fencing_token=message.fencing_token,
        token_nos=tuple(message.token_nos),
        namespace=message.namespace or DEFAULT_NAMESPACE,
    )


def _check_names(faults: Faults, namespace: str, **ids: str) -> None:
    for field, name in ids.items():
        if fault := name_fault(name):
            faults.add(field, fault)
    if fault := name_fault(namespace, required=False):
        faults.add("namespace", fault)


def encode_release_request(request: ReleaseRequest) -> service.ReleaseLeaseRequest:
    return service.ReleaseLeaseRequest(
        request_id=request.request_id,
        lease_id=request.lease_id,
        fencing_token=request.fencing_token,
        token_nos=request.token_nos,
        namespace=request.namespace,
    )


def encode_release_reply(reply: ReleaseReply) -> service.ReleaseLeaseResponse:
    return service.ReleaseLeaseResponse(released_tokens=reply.released_tokens, held_tokens=reply.held_tokens)


def decode_release_reply(message: service.ReleaseLeaseResponse) -> ReleaseReply:
    return ReleaseReply(released_tokens=message.released_tokens, held_tokens=message.held_tokens)


# Capacity, explain


def decode_capacity_request(message: service.GetCapacityRequest) -> Resource:
    return _decode_sample(message.per_sample)


def encode_capacity_request(per_sample: Resource) -> service.GetCapacityRequest:
    """Raises InvalidArgumentError as `encode_acquire_request` does."""
    return service.GetCapacityRequest(per_sample=_encode_checked(per_sample, "per_sample"))


def encode_capacity(view: CapacityView) -> service.GetCapacityResponse:
    return service.GetCapacityResponse(
        max_tokens=view.max_tokens, free_tokens=view.free_tokens, nodes=map(encode_node, view.nodes)
    )


def decode_capacity(message: service.GetCapacityResponse) -> CapacityView:
    return CapacityView(
        max_tokens=message.max_tokens, free_tokens=message.free_tokens, nodes=tuple(map(decode_node, message.nodes))
    )


def decode_explain_request(message: service.ExplainPlacementRequest) -> PlacementDemand:
    demand = _decode_demand(message)
    faults = Faults()
    faults.add_all("", check_demand(demand))
    faults.check()
    return demand


def encode_explain_request(demand: PlacementDemand) -> service.ExplainPlacementRequest:
    """Raises InvalidArgumentError as `encode_acquire_request` does."""
    return service.ExplainPlacementRequest(
        budget=None if demand.budget is None else _encode_checked(demand.budget, "budget"),
        per_sample=_encode_checked(demand.per_sample, "per_sample"),
        max_tokens=demand.max_tokens,
    )


def encode_shortage(node: NodeShortageView) -> service.NodeShortage:
    return service.NodeShortage(
        node_ip=node.node_ip,
        free_tokens=node.free_tokens,
        max_tokens=node.max_tokens,
        short=[SHORTAGES.number_of[short] for short in node.short],
        short_named=node.short_named,
        lacking_labels=node.lacking_labels,
    )


def decode_shortage(message: service.NodeShortage) -> NodeShortageView:
    return NodeShortageView(
        node_ip=message.node_ip,
        free_tokens=message.free_tokens,
        max_tokens=message.max_tokens,
        short=tuple(SHORTAGES.member(number, "nodes.short") for number in message.short),
        short_named=tuple(message.short_named),
        lacking_labels=dict(message.lacking_labels),
    )


def encode_placement(view: PlacementView) -> service.ExplainPlacementResponse:
    return service.ExplainPlacementResponse(
        wanted_tokens=view.wanted_tokens,
        free_tokens=view.free_tokens,
        max_tokens=view.max_tokens,
        nodes=map(encode_shortage, view.nodes),
    )


def decode_placement(message: service.ExplainPlacementResponse) -> PlacementView:
    return PlacementView(
        wanted_tokens=message.wanted_tokens,
        free_tokens=message.free_tokens,
        max_tokens=message.max_tokens,
        nodes=tuple(map(decode_shortage, message.nodes)),
    )
