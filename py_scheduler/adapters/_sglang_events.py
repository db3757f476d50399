"""Events of SGLang's stream, read as generations."""

from __future__ import annotations

from typing import Any

import msgspec

from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.errors import EngineUnavailableError

SERVER_ERRORS = 500
NOTHING = Generation(token_ids=[], log_probs=[], text="", finish_reason=FinishReason.ABORT)
UNSAID: dict[str, Any] = {
    "type": "abort",
    "message": "the stream ended without a finish reason",
    "status_code": SERVER_ERRORS,
}


def decode_event(payload: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(payload)
    except msgspec.DecodeError as error:
        raise EngineUnavailableError(f"SGLang sent an event that is no JSON: {payload[:200]!r}") from error
    if not isinstance(event, dict):
        raise EngineUnavailableError(f"SGLang sent an event that is no object: {payload[:200]!r}")
    return event


def _aligned(event: dict[str, Any]) -> dict[str, Any]:
    """The event up to where its ids and log-probs part. Its text is left out, for it goes on beyond that."""
    meta = event["meta_info"]
    scored, token_ids = meta.get("output_token_logprobs") or [], event.get("output_ids") or []
    count = 0
    while count < min(len(scored), len(token_ids)) and scored[count][1] == token_ids[count]:
        count += 1
    spans = [
        span | {"end": min(span["end"], count)} for span in meta.get("weight_versions") or [] if span["start"] < count
    ]
    cut = {"output_token_logprobs": scored[:count], "weight_versions": spans, "finish_reason": None}
    return {"output_ids": token_ids[:count], "meta_info": meta | cut}


def read_partial(event: dict[str, Any]) -> Generation:
    """What an event brought of a generation that did not end properly, as far as its ids and log-probs agree."""
    try:
        return msgspec.structs.replace(read_generation(event), finish_reason=FinishReason.ABORT)
    except EngineUnavailableError as error:
        if not isinstance(error.partial, Generation):
            raise
        return error.partial


def read_generation(event: dict[str, Any]) -> Generation:
    """One event as a generation; one without finish reason counts as aborted.

    Raises EngineUnavailableError when ids and log-probs do not belong together, with those that do as `partial`.
    """
    try:
        meta = event["meta_info"]
        token_ids: list[int] = event.get("output_ids") or []
        scored = meta.get("output_token_logprobs") or []
        reason = meta.get("finish_reason") or UNSAID
        if reason["type"] == FinishReason.ABORT:
            # An aborted one may end with a token of no meaning and without log-prob.
            token_ids = token_ids[: len(scored)]
        if [entry[1] for entry in scored] != token_ids:
            message = f"SGLang gave {len(token_ids)} token ids and {len(scored)} log-probs that do not match them"
            raise EngineUnavailableError(message, read_generation(_aligned(event)))
        spans = meta.get("weight_versions") or [
            {"version": meta.get("weight_version") or "default", "start": 0, "end": len(token_ids)}
        ]
        return Generation(
            token_ids=token_ids,
            log_probs=[float(entry[0]) for entry in scored],
            text=event.get("text") or "",
            finish_reason=FinishReason(reason["type"]),
            weight_spans=tuple(WeightSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans)
            if token_ids
            else (),
            log_prob_kind=LogProbKind.SAMPLED,
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineUnavailableError(f"SGLang sent an event that cannot be read: {error!r}") from error
