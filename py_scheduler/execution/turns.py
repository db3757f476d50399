"""One turn of an episode: how many tokens it may have, and what is kept of it when the episode is stopped meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import ContextOverflowError, GenerationError

if TYPE_CHECKING:
    from py_scheduler.domain.generation import Generation, GenerationRequest, SamplingParams, StoppingCriteria
    from py_scheduler.execution.generation.gateway import GenerationGateway
    from py_scheduler.execution.generation.queue import StoppableClock
    from py_scheduler.execution.record import EpisodeRecord

logger = logging.getLogger(__name__)

_PARTIAL_SECONDS = 3.0
"""How long a stopped episode waits for the tokens of the generation that it interrupts.

Longer than adapters wait for a backend that does not react to an abort: what has arrived is kept even then.
"""


async def generate_turn(
    gateway: GenerationGateway,
    role: str,
    request: GenerationRequest,
    record: EpisodeRecord,
    *,
    clock: StoppableClock,
    resumes: bool,
) -> Generation:
    """Generates. When it is cancelled, it asks the backend for the tokens made until then, and records those.

    The backend has a moment for that. Whatever it does not give in time is cancelled, which stops its work too. Nothing
    else is recorded here. Raises what `GenerationGateway.generate` raises.
    """
    flight = asyncio.ensure_future(gateway.generate(role, request, clock=clock, resumes=resumes))
    try:
        return await asyncio.shield(flight)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(_PARTIAL_SECONDS):
                await gateway.abort(request.rid)
                record.keep(await flight, role)
        except GenerationError as error:
            record.keep(error.partial, role)
        except TimeoutError:
            logger.warning("the backend gave no partial generation of %s in time", request.rid)
        raise
    finally:
        if not flight.done():
            flight.cancel()
            await asyncio.wait([flight])


async def turn_sampling(
    gateway: GenerationGateway,
    role: str,
    sampling: SamplingParams,
    stopping: StoppingCriteria,
    context_len: int,
    max_new_tokens: int | None,
) -> SamplingParams:
    """The sampling of a turn behind `context_len` tokens, cut to what `max_context_len` leaves.

    900 tokens so far, `max_context_len` 1,000: a turn that asks for 256 gets 100, and one behind 1,000 tokens raises
    ContextOverflowError. Where nobody names a budget, a turn gets what the model's context leaves as well, or the
    backend's default if that is less. So only a prompt that leaves nothing, or a budget that somebody asked for, can be
    too long.
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
    """room: what `max_context_len` leaves; None without one. None when the engine's default is not known."""
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
