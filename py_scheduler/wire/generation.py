"""Calls and answers of generation_service.proto, total both ways."""

from __future__ import annotations

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler.domain.generation import GenerationState, PauseMode, WeightUpdate
from py_scheduler.domain.limits import check_weight_update, name_fault
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.fields import EnumTable, Faults

PAUSE_MODES = EnumTable(PauseMode, service.PauseMode, "PAUSE_MODE")

_NamesRole = service.PauseGenerationRequest | service.ContinueGenerationRequest | service.UpdateWeightsRequest


def _add_role_fault(message: _NamesRole | service.GetGenerationStateRequest, faults: Faults, *, required: bool) -> None:
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
