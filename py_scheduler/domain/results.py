"""How samples, attempts and tasks end (design words: Outcome, State).

What is journalled for each sample is stored as an array: a new field goes to the end and has a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, Trajectory
from py_scheduler.domain.values.frozen_dict import FrozenDict

NO_METRICS: FrozenDict[str, float] = FrozenDict()
"""One object for all samples that measured nothing."""


class Outcome(StrEnum):
    """A sample's terminal class: the eight of seed 1, and `ABORTED` for one that was stopped on request."""

    SOLVED = "solved"
    WRONG_ANSWER = "wrong_answer"
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"
    AGENT_TIMEOUT = "agent_timeout"
    INFRA_CONN = "infra_conn"
    INFRA_SANDBOX = "infra_sandbox"
    INFRA_OTHER = "infra_other"
    ABORTED = "aborted"

    @property
    def is_model_result(self) -> bool:
        """Whether it says something about the model. Infrastructure failures and aborts never count in a rate."""
        return self in _MODEL_RESULTS

    @property
    def is_infra(self) -> bool:
        """Whether the infrastructure failed, and not the agent."""
        return self in _INFRA


_MODEL_RESULTS = frozenset(
    {Outcome.SOLVED, Outcome.WRONG_ANSWER, Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW, Outcome.AGENT_TIMEOUT}
)
_INFRA = frozenset({Outcome.INFRA_CONN, Outcome.INFRA_SANDBOX, Outcome.INFRA_OTHER})


def classify_termination(score: float, termination_reason: str, solve_threshold: float) -> Outcome:
    """The outcome of a sample that ran and was scored to the end."""
    if score >= solve_threshold:
        return Outcome.SOLVED
    if termination_reason == Outcome.MAX_TURNS:
        return Outcome.MAX_TURNS
    if termination_reason == Outcome.CONTEXT_OVERFLOW:
        return Outcome.CONTEXT_OVERFLOW
    return Outcome.WRONG_ANSWER


class AttemptState(StrEnum):
    """Lifecycle of one try at a SubTask."""

    QUEUED = "queued"
    LEASED = "leased"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"
    LOST = "lost"


class TaskState(StrEnum):
    """How a task ended: with all planned samples, with some, with none, or stopped on request.

    FAILED too when its samples are there and the handler could not score them as a group.
    """

    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    FAILED = "failed"
    ABORTED = "aborted"


class EpisodePhase(StrEnum):
    """Which part of an episode."""

    RUN = "run"
    EVAL = "eval"


class Reward(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The score of one sample, and whatever the scorer wants to say about it (JSON values)."""

    score: float
    details: dict[str, Any] = {}


NO_REWARD = Reward(score=0.0)


class AgentResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What `BaseAgent.run` returns; the tokens are recorded by the episode itself."""

    termination_reason: str = ""
    """Why the agent stopped, in its own words; `"max_turns"` and `"context_overflow"` are understood."""
    answer: str = ""
    """What `eval` needs, with `reward_inputs`."""
    reward_inputs: dict[str, Any] = {}
    metrics: dict[str, float] = NO_METRICS
    """What the run measured; see `domain.values.metrics` for their names."""
    payload: bytes = b""
    """Opaque bytes for whoever collects the task's result; those of samples that are one SubTask stand one behind
    another there.
    """


class Timings(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Where a sample's time went, in seconds."""

    wait_seconds: float = 0.0
    """For admission."""
    run_seconds: float = 0.0
    generate_seconds: float = 0.0
    """Of `run_seconds`."""
    eval_seconds: float = 0.0

    @property
    def held_seconds(self) -> float:
        """As long as the sample held its room: from run through eval."""
        return self.run_seconds + self.eval_seconds


class SampleDone(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sample's terminal record; every planned sample of a task gets exactly one."""

    task_id: str
    sample_no: int
    attempt_no: int
    outcome: Outcome
    reward: Reward = NO_REWARD
    trajectory: Trajectory = EMPTY_TRAJECTORY
    termination_reason: str = ""
    """The agent's own."""
    error: str = ""
    """What was raised, if anything."""
    phase: str = ""
    """The EpisodePhase that raised it."""
    node_ip: str = ""
    """Where it ran; empty when it never did, like `gpu_ids`."""
    gpu_ids: tuple[int, ...] = ()
    timings: Timings = Timings()
    started_unix_seconds: float = 0.0
    """When run began; 0 when it never did."""
    weight_epoch: int | None = None
    """Of the oldest weights that the student generated tokens of it with; None when it generated none."""
    staleness: int = 0
    """How often the weights had changed since then when the sample ended."""
    metrics: dict[str, float] = NO_METRICS
    """What its run measured, by name; a name may end in how it is to be put together (see `domain.values.metrics`)."""

    @property
    def is_scored(self) -> bool:
        """Whether it ran and was scored to its end."""
        return self.outcome.is_model_result and not self.error

    @property
    def is_trainable(self) -> bool:
        """Whether it ran and was scored to the end and has tokens."""
        return bool(self.trajectory.loss_mask_bytes) and self.is_scored

    def staleness_at(self, weight_epoch: int) -> int | None:
        """How many changes of weights lie between its oldest tokens and the student's `weight_epoch` of a moment, such
        as that of the update that trains on it; None for one that has no token of the student.
        """
        return None if self.weight_epoch is None else weight_epoch - self.weight_epoch
