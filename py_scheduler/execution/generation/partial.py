"""A generation that was cut and goes on: what is left to ask for, and the parts as one."""

from __future__ import annotations

import msgspec

from py_scheduler.domain.generation import FinishReason, Generation, GenerationRequest, WeightSpan

NOTHING = Generation(token_ids=[], log_probs=[], text="", finish_reason=FinishReason.ABORT)


def rest_of(request: GenerationRequest, made: Generation, budget: int) -> GenerationRequest:
    """The request that continues `made`, with what is left of `budget` new tokens in all.

    A stop string that would begin in `made` is not seen, and penalties count `made` as part of the prompt: the backend
    knows it no other way.
    """
    count = len(made.token_ids)
    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=budget - count)
    if sampling.min_new_tokens:
        sampling = msgspec.structs.replace(sampling, min_new_tokens=max(0, sampling.min_new_tokens - count))
    return msgspec.structs.replace(request, token_ids=[*request.token_ids, *made.token_ids], sampling=sampling)


def joined(made: Generation | None, more: Generation) -> Generation:
    """Both parts as one generation; it ends as the second one did."""
    if made is None or not made.token_ids:
        return more
    start = len(made.token_ids)
    spans = list(made.weight_spans)
    for span in more.weight_spans:
        end = start + span.end
        if spans and spans[-1].version == span.version and spans[-1].end == start + span.start:
            spans[-1] = WeightSpan(span.version, spans[-1].start, end)
        else:
            spans.append(WeightSpan(span.version, start + span.start, end))
    return msgspec.structs.replace(
        more,
        token_ids=[*made.token_ids, *more.token_ids],
        log_probs=[*made.log_probs, *more.log_probs],
        text=made.text + more.text,
        weight_spans=tuple(spans),
        # Of the prompt that was asked: the second part's prompt holds the first part.
        prompt_tokens=made.prompt_tokens,
        cached_tokens=made.cached_tokens,
    )
