"""A generation gateway over one controlled model, with what tests ask of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import (
    Generation,
    GenerationRequest,
    PauseMode,
    SamplingParams,
    WeightUpdate,
)
from py_scheduler.execution.generation.gateway import GenerationGateway
from tests.support.fake_clock import settle
from tests.support.models.controlled_model import ControlledModel

if TYPE_CHECKING:
    from py_scheduler.domain.generation import GenerationState

STUDENT, TEACHER = "student", "teacher"
PROMPT = (0, 1, 2)
ALL_MODES = list(PauseMode)


class StoppedTime:
    """A phase's clock that counts its stops."""

    def __init__(self) -> None:
        self.stands_still = False
        self.stops = 0

    def stop_clock(self) -> None:
        self.stops += not self.stands_still
        self.stands_still = True

    def start_clock(self) -> None:
        self.stands_still = False


class Based:
    """An engine that asks another one."""

    def __init__(self, base: ControlledModel) -> None:
        self.base = base

    def __getattr__(self, name: str) -> object:
        if name in {"pause", "resume", "update_weights", "weight_version"}:
            raise AttributeError(name)
        return getattr(self.base, name)


def request(rid: str = "r", max_new_tokens: int | None = 10, min_new_tokens: int | None = None) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    return GenerationRequest(rid=rid, token_ids=PROMPT, sampling=params)


def update(version: str) -> WeightUpdate:
    return WeightUpdate(model_path=f"/weights/{version}", weight_version=version)


def spans(generation: Generation) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.weight_spans]


class Asking:
    """A gateway over one controlled model, and generations that a test has asked for."""

    def __init__(self, model: ControlledModel | None = None, limit: int | None = None) -> None:
        self.model = model or ControlledModel()
        self.gateway = GenerationGateway({STUDENT: self.model}, {STUDENT: limit} if limit else None)

    async def ask(
        self, rid: str = "r", *, resumes: bool = False, clock: StoppedTime | None = None, **sampling: int | None
    ) -> asyncio.Task[Generation]:
        asked = request(rid, **sampling)
        task = asyncio.create_task(self.gateway.generate(STUDENT, asked, resumes=resumes, clock=clock))
        await settle()
        return task

    async def state(self) -> GenerationState:
        (state,) = await self.gateway.states(STUDENT)
        return state

    async def counts(self) -> tuple[int, int]:
        state = await self.state()
        return state.running, state.held

    async def change_weights(self, version: str, mode: PauseMode = PauseMode.ABORT) -> None:
        await self.gateway.pause(STUDENT, mode)
        await settle()
        await self.gateway.update_weights(STUDENT, update(version))
        await self.gateway.resume(STUDENT)
        await settle()
