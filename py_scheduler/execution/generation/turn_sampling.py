"""How many tokens a turn may have: as many as were asked for, and as `max_context_len` and the model leave room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import ContextOverflowError

if TYPE_CHECKING:
    from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
    from py_scheduler.execution.generation.gateway import GenerationGateway


async def turn_sampling(
    gateway: GenerationGateway,
    role: str,
    sampling: SamplingParams,
    stopping: StoppingCriteria,
    context_len: int,
    max_new_tokens: int | None,
) -> SamplingParams:
    """The sampling of a turn behind `context_len` tokens, cut to what `max_context_len` leaves.

    Where nobody names a budget it is what the model's context leaves too, or the backend's default if that is less:
    only a prompt that leaves nothing, or a budget that somebody asked for, can be too long.
    Raises ContextOverflowError.
    """
    wanted = max_new_tokens if max_new_tokens is not None else sampling.max_new_tokens
    is_named = wanted is not None
    limit = stopping.max_context_len
    if limit is not None:
        room = _room(limit - context_len, f"the context has {context_len} tokens, max_context_len is {limit}")
        wanted = room if wanted is None else min(wanted, room)
    if not is_named:
        wanted = await _unnamed_budget(gateway, role, context_len, wanted)
    if wanted == sampling.max_new_tokens:
        return sampling
    if wanted is not None and sampling.min_new_tokens is not None and sampling.min_new_tokens > wanted:
        sampling = msgspec.structs.replace(sampling, min_new_tokens=wanted)
    return msgspec.structs.replace(sampling, max_new_tokens=wanted)


async def _unnamed_budget(gateway: GenerationGateway, role: str, context_len: int, room: int | None) -> int | None:
    """room: what `max_context_len` leaves; None without one. None when the backend's default is not known."""
    info = await gateway.backend(role).model_info()
    wanted = info.default_max_new_tokens if room is None else room
    if wanted is None:
        return None
    fault = f"the context has {context_len} tokens, that of {info.name} is {info.context_length}"
    return min(wanted, _room(info.context_length - context_len, fault))


def _room(tokens: int, fault: str) -> int:
    if tokens <= 0:
        raise ContextOverflowError(fault)
    return tokens
