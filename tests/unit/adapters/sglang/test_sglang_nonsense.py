"""A server that answers what SGLang never would: that is its own fault each time, and nothing of it gets further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.domain.generation import FinishReason, PauseMode, WeightSpan, WeightUpdate
from py_scheduler.errors import EngineUnavailableError, GenerationError
from tests.support.models.scripted_sglang import Script
from tests.support.models.served_backends import engine_on, request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from py_scheduler.adapters.sglang.backend import SglangBackend

pytestmark = pytest.mark.usefixtures("either_way")

DEEP = b"[" * 100_000


def event(token_ids: list[Any] | None = None, log_probs: list[Any] | None = None, **meta: Any) -> bytes:
    """Two tokens that ended, but for what is said."""
    ids = [100, 101] if token_ids is None else token_ids
    scores = [-0.5] * len(ids) if log_probs is None else log_probs
    scored = [[score, token_id, None] for score, token_id in zip(scores, ids, strict=False)]
    said = {"finish_reason": {"type": "length", "length": 2}, "output_token_logprobs": scored} | meta
    return msgspec.json.encode({"text": "ab", "output_ids": ids, "meta_info": said})


def spans(*told: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": f"v{number}", "start": start, "end": end} for number, (start, end) in enumerate(told)]


EVENTS = {
    "no json": b"<html>",
    "deep": DEEP,
    "no utf-8": b'{"text": "\xff"}',
    "a number": b"5",
    "nothing": b"{}",
    "meta is null": b'{"output_ids": [1], "meta_info": null}',
    "meta is a list": b'{"output_ids": [1], "meta_info": [1]}',
    "error is text": b'{"error": "out of order"}',
    "error code is text": b'{"error": {"message": "m", "code": "none"}}',
    "nan": event().replace(b"-0.5", b"NaN"),
    "infinite": event(log_probs=[-1e300, -0.5]),
    "log-prob is null": event(log_probs=[None, -0.5]),
    "log-prob is text": event(log_probs=["-0.5", -0.5]),
    "negative id": event([-5, 3]),
    "huge id": event([2**31, 3]),
    "id is a float": event([1.0, 3]),
    "id is text": event(["a", "b"]),
    "text is a number": event().replace(b'"ab"', b"5"),
    "reason is text": event(finish_reason="length"),
    "reason without type": event(finish_reason={"length": 2}),
    "unknown reason": event(finish_reason={"type": "tired"}),
    "status is text": event(finish_reason={"type": "abort", "status_code": "busy"}),
    "fewer log-probs": event(log_probs=[-0.5]),
    "spans with a hole": event(weight_versions=spans((0, 1), (1, 1), (2, 3))),
    "spans that begin late": event(weight_versions=spans((1, 2))),
    "spans that end early": event(weight_versions=spans((0, 1))),
    "spans that go back": event(weight_versions=spans((0, 2), (2, 1))),
    "span before the first": event(weight_versions=spans((-7, 2))),
    "endless version": event(weight_version="v" * 1_000_000),
}


@pytest.mark.parametrize("name", EVENTS)
async def test_an_event_that_cannot_be_read_is_the_servers_fault(name: str) -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(event=EVENTS[name]))
        with pytest.raises(EngineUnavailableError, match=r"SGLang (gave|sent)"):
            await engine.generate(request())
        assert len((await engine.generate(request())).token_ids) == 8, "the engine is as well as before"


async def test_spans_end_with_the_tokens_where_an_abort_left_one_out() -> None:
    """The last token of an aborted one may be of no meaning, and the server counts it in its spans."""
    async with engine_on() as (engine, server):
        aborted = {"type": "abort", "message": "Aborted"}
        for told, expected in (
            (spans((0, 3)), (WeightSpan("v0", 0, 2),)),
            (spans((0, 1), (1, 3)), (WeightSpan("v0", 0, 1), WeightSpan("v1", 1, 2))),
            (spans((0, 2), (2, 3)), (WeightSpan("v0", 0, 2),)),
        ):
            said = event([100, 101, 102], [-0.5, -0.5], finish_reason=aborted, weight_versions=told)
            server.scripts.append(Script(event=said))
            generation = await engine.generate(request())
            assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, [100, 101])
            assert generation.weight_spans == expected


CALLS: dict[str, tuple[str, Callable[[SglangBackend], Awaitable[object]]]] = {
    "encode": ("/v1/tokenize", lambda engine: engine.encode("x")),
    "loads": ("/v1/loads", lambda engine: engine.ask_requests()),
    "version": ("/model_info", lambda engine: engine.weight_version()),
    "model": ("/server_info", lambda engine: engine.refresh_model_info()),
    "generate": ("/generate", lambda engine: engine.generate(request())),
    "pause": ("/pause_generation", lambda engine: engine.pause(PauseMode.RETRACT)),
    "continue": ("/continue_generation", lambda engine: engine.resume()),
    "update": (
        "/update_weights_from_disk",
        lambda engine: engine.update_weights(WeightUpdate(model_path="/w", weight_version="v")),
    ),
}
BODIES = [
    b"",
    b"<html>Bad Gateway</html>",
    DEEP,
    b'{"message": "\xff"}',
    b"null",
    b"[1]",
    b'{"tokens": [1.5], "loads": [5], "weight_version": {}, "max_req_input_len": "many"}',
    b'{"tokens": [-1], "loads": {"a": 1}, "weight_version": [], "max_req_input_len": []}',
    b'{"success": false, "message": "no weights there", "tokens": 1, "loads": 1, "weight_version": 1}',
    b'{"tokens": "abc", "loads": null, "weight_version": 5, "max_req_input_len": null}',
]


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("name", CALLS)
async def test_an_answer_that_cannot_be_read_is_the_servers_fault(name: str, status: int) -> None:
    path, ask = CALLS[name]
    async with engine_on() as (engine, server):
        for body in BODIES:
            server.nonsense[path] = status, body
            with pytest.raises(GenerationError):
                await ask(engine)
        known = engine.known_model
        assert known is not None
        assert known.weight_version == "default"


async def test_an_answer_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("py_scheduler.adapters.http_client.MAX_ANSWER_BYTES", 100_000)
    endless = b"x" * 200_000
    async with engine_on() as (engine, server):
        server.scripts.extend(Script(event=endless) for _ in range(3))
        with pytest.raises(EngineUnavailableError, match="more than 100000 bytes"):
            await engine.generate(request())
        assert set(server.aborts) == set(server.rids)
        for name in ("encode", "generate", "pause"):
            path, ask = CALLS[name]
            server.nonsense[path] = 500, endless
            with pytest.raises(EngineUnavailableError, match="more than 100000 bytes"):
                await ask(engine)


async def test_a_server_that_is_none_of_sglangs_is_told_apart() -> None:
    async with engine_on() as (engine, server):
        server.nonsense["/model_info"] = 404, b'{"detail":"Not Found"}'
        with pytest.raises(EngineUnavailableError, match=r"answered 404: .*SGLang server, without a path such as /v1"):
            await engine.refresh_model_info()
