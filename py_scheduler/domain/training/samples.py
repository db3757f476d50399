"""What a trainer's loss takes (design word: Sample, as a step hands it out)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from py_scheduler.domain.generation import TEACHER
from py_scheduler.domain.trajectory import Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SampleStatus(StrEnum):
    """COMPLETED: to be trained on. TRUNCATED: likewise, but the last generation was cut. ABORTED: a dummy."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sample for the loss.

    reward: a dict with at least "score". remove_sample: it is there for the batch's shape alone. metadata: the task's
    own, with `_termination_reason` (the outcome), `_termination_reason_agent` (the agent's own words, if any),
    `_weight_epoch` and `_staleness` (see SampleDone; where the student generated) and, where it was aborted, `_abort`:
    phase, start_unix_seconds, end_unix_seconds, seconds, node_ip, gpu_ids, turns and error.
    """

    task_id: str
    sample_no: int
    dataset: str = ""
    prompt: str = ""
    reward: dict[str, Any]
    status: SampleStatus
    remove_sample: bool = False
    metadata: dict[str, Any] = {}
    trajectory: Trajectory

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Shape (tokens,), read-only."""
        return self.trajectory.token_ids

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Shape (tokens,), read-only, natural logarithm; 0 where nothing was generated."""
        return self.trajectory.log_probs

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """Shape (tokens,), read-only: 1 where the model generated, whoever that was."""
        return self.trajectory.loss_mask

    @property
    def teacher_mask(self) -> NDArray[np.uint8]:
        """Shape (tokens,): 1 where the teacher generated, for losses that tell whose tokens they learn from."""
        return self.source_mask(TEACHER)

    def source_mask(self, source: str) -> NDArray[np.uint8]:
        """Shape (tokens,): 1 on the tokens of one source (a backend role, or "environment")."""
        mask = np.zeros(len(self.trajectory), dtype=np.uint8)
        for turn in self.trajectory.turns:
            if turn.source == source:
                mask[turn.start : turn.end] = 1
        return mask

    @property
    def score(self) -> float:
        return float(self.reward["score"])
