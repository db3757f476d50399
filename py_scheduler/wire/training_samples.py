"""Saved training samples on the wire (rollout_service.proto, ReadSamples).

A sample is encoded as a response that holds nothing else; concatenating serialised messages merges them, so a response
of many is their bytes in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
from py_scheduler.domain.training.samples import TrainingSample
from py_scheduler.domain.values.plain import details_json, safe_text
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.fields import SAMPLE_STATUSES
from py_scheduler.wire.events import MAX_FRAME_BYTES
from py_scheduler.wire.results import decode_trajectory, encode_trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def encode_group(group_no: int, samples: Iterable[TrainingSample], max_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Serialised ReadSamplesResponses with a group's samples: one, or several when there is much to carry."""
    parts: list[bytes] = []
    size = 0
    for sample in samples:
        encoded = _encode(group_no, sample)
        if parts and size + len(encoded) > max_bytes:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(encoded)
        size += len(encoded)
    yield b"".join(parts)


def _encode(group_no: int, sample: TrainingSample) -> bytes:
    response = service.ReadSamplesResponse()
    message = response.samples.add(
        group_no=group_no,
        task_id=safe_text(sample.task_id),
        sample_no=sample.sample_no,
        dataset=safe_text(sample.dataset),
        prompt=safe_text(sample.prompt),
        reward_json=details_json(sample.reward),
        status=SAMPLE_STATUSES.number_of[sample.status],
        remove_sample=sample.remove_sample,
        metadata_json=details_json(sample.metadata),
    )
    encode_trajectory(sample.trajectory, message.trajectory)
    return response.SerializeToString()


def decode_samples(message: service.ReadSamplesResponse) -> Iterator[tuple[int, TrainingSample]]:
    """Each sample with the number of its group. Raises InvalidArgumentError for what a newer server could send."""
    for sample in message.samples:
        yield (
            sample.group_no,
            TrainingSample(
                task_id=sample.task_id,
                sample_no=sample.sample_no,
                dataset=sample.dataset,
                prompt=sample.prompt,
                reward=_object(sample.reward_json, "reward_json"),
                status=SAMPLE_STATUSES.member(sample.status, "samples.status"),
                remove_sample=sample.remove_sample,
                metadata=_object(sample.metadata_json, "metadata_json"),
                trajectory=decode_trajectory(sample.trajectory),
            ),
        )


def _object(encoded: bytes, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(encoded, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError(f"is not a JSON object: {error}", f"samples.{field}") from error
