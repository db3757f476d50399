"""Saved training samples on the wire: the same ones, in frames of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.training import training_group
from py_scheduler.wire.rollouts import decode_read_request
from py_scheduler.wire.training_samples import decode_samples, encode_group
from tests.support.steps.samples import SOLVED, group_with
from tests.support.strategies import training_samples

if TYPE_CHECKING:
    from py_scheduler.domain.training.samples import TrainingSample

COMPLETED = service.SAMPLE_STATUS_COMPLETED


def decoded(frames: list[bytes]) -> list[tuple[int, TrainingSample]]:
    return [one for frame in frames for one in decode_samples(service.ReadSamplesResponse.FromString(frame))]


@given(st.lists(training_samples, min_size=1, max_size=5), st.integers(0, 2**31), st.integers(1, 1_000))
def test_samples_come_back_bit_by_bit(group: list[TrainingSample], group_no: int, max_bytes: int) -> None:
    assert decoded(list(encode_group(group_no, group, max_bytes))) == [(group_no, sample) for sample in group]


def test_a_frame_is_closed_before_it_grows_too_large() -> None:
    group = training_group(group_with(*[SOLVED] * 10))
    (whole,) = encode_group(0, group)
    limit = len(whole) // 3
    frames = list(encode_group(0, group, limit))
    assert len(frames) > 3
    assert max(map(len, frames)) <= limit
    assert decoded(frames) == decoded([whole])


@pytest.mark.parametrize("rollout_id", [-1, 2**53])
def test_an_iteration_that_cannot_be(rollout_id: int) -> None:
    with pytest.raises(InvalidArgumentError, match="rollout_id: is "):
        decode_read_request(service.ReadSamplesRequest(rollout_id=rollout_id))


@pytest.mark.parametrize(
    ("sample", "field"),
    [
        (service.TrainingSample(status=COMPLETED, reward_json=b"7", metadata_json=b"{}"), "samples.reward_json"),
        (service.TrainingSample(status=COMPLETED, reward_json=b"{}", metadata_json=b"{"), "samples.metadata_json"),
        (service.TrainingSample(reward_json=b"{}", metadata_json=b"{}"), "samples.status"),
    ],
)
def test_what_no_server_of_this_version_sends(sample: service.TrainingSample, field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        list(decode_samples(service.ReadSamplesResponse(samples=[sample])))
