"""Calls and answers of generation_service.proto, total both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler.domain.generation import (
    Endpoints,
    EndpointState,
    EndpointView,
    GenerationState,
    PauseMode,
    WeightUpdate,
)
from py_scheduler.domain.limits import check_endpoints, check_weight_update, name_fault
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.fields import EnumTable, Faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAUSE_MODES = EnumTable(PauseMode, service.PauseMode, "PAUSE_MODE")
ENDPOINT_STATES = EnumTable(EndpointState, service.EndpointState, "ENDPOINT_STATE")

_NamesRole = (
    service.PauseGenerationRequest
    | service.ContinueGenerationRequest
    | service.UpdateWeightsRequest
    | service.ReportWeightsRequest
    | service.SetEndpointsRequest
    | service.GetGenerationStateRequest
)


def _add_role_fault(message: _NamesRole, faults: Faults, *, required: bool) -> None:
    if fault := name_fault(message.role, required=required):
        faults.add("role", fault)


def decode_pause_request(message: service.PauseGenerationRequest) -> tuple[str, PauseMode]:
    """The role and the mode. Raises InvalidArgumentError with every fault, as all of these do."""
    faults = Faults()
    _add_role_fault(message, faults, required=True)
    mode = PauseMode.ABORT
    try:
        mode = PAUSE_MODES.member(message.mode, "mode")
    except InvalidArgumentError as error:
        faults.add_all("", error.violations)
    faults.check()
    return message.role, mode


def encode_pause_request(role: str, mode: PauseMode) -> service.PauseGenerationRequest:
    return service.PauseGenerationRequest(role=role, mode=PAUSE_MODES.number_of[mode])


def decode_continue_request(message: service.ContinueGenerationRequest) -> str:
    faults = Faults()
    _add_role_fault(message, faults, required=True)
    faults.check()
    return message.role


def decode_update_request(message: service.UpdateWeightsRequest) -> tuple[str, WeightUpdate]:
    faults = Faults()
    _add_role_fault(message, faults, required=True)
    update = WeightUpdate(model_path=message.model_path, weight_version=message.weight_version)
    faults.add_all("", check_weight_update(update))
    faults.check()
    return message.role, update


def encode_update_request(role: str, update: WeightUpdate) -> service.UpdateWeightsRequest:
    return service.UpdateWeightsRequest(role=role, model_path=update.model_path, weight_version=update.weight_version)


def decode_report_request(message: service.ReportWeightsRequest) -> tuple[str, str]:
    """The role and the weight version."""
    faults = Faults()
    _add_role_fault(message, faults, required=True)
    if fault := name_fault(message.weight_version):
        faults.add("weight_version", fault)
    faults.check()
    return message.role, message.weight_version


def decode_endpoints_request(message: service.SetEndpointsRequest) -> tuple[str, Endpoints | None]:
    """The role and its endpoints; None: the configuration's."""
    faults = Faults()
    _add_role_fault(message, faults, required=True)
    endpoints = Endpoints(urls=tuple(message.urls), control_urls=tuple(message.control_urls))
    if message.configured and (endpoints.urls or endpoints.control_urls):
        faults.add("configured", "means the configuration's own addresses: send it without others")
    faults.add_all("", check_endpoints(endpoints))
    faults.check()
    return message.role, None if message.configured else endpoints


def encode_endpoints_request(role: str, endpoints: Endpoints | None) -> service.SetEndpointsRequest:
    if endpoints is None:
        return service.SetEndpointsRequest(role=role, configured=True)
    return service.SetEndpointsRequest(role=role, urls=endpoints.urls, control_urls=endpoints.control_urls)


def encode_endpoint(view: EndpointView) -> service.Endpoint:
    return service.Endpoint(
        url=view.url,
        state=ENDPOINT_STATES.number_of[view.state],
        in_flight=view.in_flight,
        reason=safe_text(view.reason),
        control_urls=view.control_urls,
    )


def decode_endpoint(message: service.Endpoint) -> EndpointView:
    return EndpointView(
        url=message.url,
        state=ENDPOINT_STATES.member(message.state, "state"),
        in_flight=message.in_flight,
        reason=message.reason,
        control_urls=tuple(message.control_urls),
    )


def encode_role_endpoints(role: str, views: Sequence[EndpointView]) -> service.RoleEndpoints:
    return service.RoleEndpoints(role=role, endpoints=map(encode_endpoint, views))


def decode_endpoints(messages: Iterable[service.Endpoint]) -> tuple[EndpointView, ...]:
    return tuple(map(decode_endpoint, messages))


def decode_state_request(message: service.GetGenerationStateRequest) -> tuple[str, ...]:
    """The roles that are asked for; none for all."""
    faults = Faults()
    _add_role_fault(message, faults, required=False)
    faults.check()
    return (message.role,) if message.role else ()


def encode_state(state: GenerationState) -> service.GenerationState:
    mode = state.pause_mode
    return service.GenerationState(
        role=state.role,
        paused=mode is not None,
        mode=service.PAUSE_MODE_UNSPECIFIED if mode is None else PAUSE_MODES.number_of[mode],
        weight_version=safe_text(state.weight_version),
        weight_epoch=state.weight_epoch,
        running=state.running,
        held=state.held,
    )


def decode_state(message: service.GenerationState) -> GenerationState:
    return GenerationState(
        role=message.role,
        pause_mode=PAUSE_MODES.member_or_none(message.mode, "mode"),
        weight_version=message.weight_version,
        weight_epoch=message.weight_epoch,
        running=message.running,
        held=message.held,
    )
