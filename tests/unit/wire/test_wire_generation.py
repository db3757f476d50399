"""Pauses and weights on the wire: what goes in comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler.domain.generation import GenerationState, PauseMode, WeightUpdate
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import generation as wire
from tests.support import strategies

counts = st.integers(0, 2**63)
states = st.builds(
    GenerationState,
    role=strategies.names,
    pause_mode=st.none() | st.sampled_from(PauseMode),
    weight_version=strategies.names,
    weight_epoch=counts,
    running=counts,
    held=counts,
)


@given(states)
def test_states(state: GenerationState) -> None:
    message = wire.encode_state(state)
    assert wire.decode_state(message) == state
    assert message.paused == (state.pause_mode is not None)


@given(strategies.names, st.sampled_from(PauseMode))
def test_pauses(role: str, mode: PauseMode) -> None:
    assert wire.decode_pause_request(wire.encode_pause_request(role, mode)) == (role, mode)


@given(strategies.names, strategies.names, strategies.names)
def test_updates(role: str, folder: str, version: str) -> None:
    update = WeightUpdate(model_path=f"/{folder}", weight_version=version)
    assert wire.decode_update_request(wire.encode_update_request(role, update)) == (role, update)


@pytest.mark.parametrize("path", ["", "hub/model", "../up", "/a\nb", "/" + "x" * 4_096])
def test_only_an_absolute_path_that_can_be_read_names_weights(path: str) -> None:
    request = service.UpdateWeightsRequest(role="student", model_path=path, weight_version="1")
    with pytest.raises(InvalidArgumentError, match="model_path"):
        wire.decode_update_request(request)


def test_which_states_are_asked_for() -> None:
    assert wire.decode_state_request(service.GetGenerationStateRequest()) == ()
    assert wire.decode_state_request(service.GetGenerationStateRequest(role="student")) == ("student",)
