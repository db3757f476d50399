"""An HTTP server that speaks vLLM's API as version 0.32.0 was seen to, with faults on demand.

It generates as the scripted SGLang does, and says it in vLLM's words: `bodies` has requests as that one would get them,
`asked` as they came.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tests.support.models.scripted_sglang import FIRST_TOKEN, Reply, Script, ScriptedSglang, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
CONTROL = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
KNOWN_AS = "generate-tokens-"
"""In front of each request id."""


@dataclass
class ScriptedVllm(ScriptedSglang):
    """Use as an async context manager; `base_url` is its address."""

    log_prob_of_the_allowed: float = 0.0
    """Of a token when it is the only one allowed: 0 in mode processed_logprobs, less in raw_logprobs."""
    takes_token_ids: bool = True
    """As --enable-scale-out has it."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """Control calls, with what stands in their query or body."""
    loads_weights: bool = True
    control_gate: asyncio.Event | None = None
    """No control call is obeyed before it is set."""

    def _add_calls(self, app: web.Application) -> None:
        app.router.add_post(GENERATE, self._generate)
        if self.is_router:
            return
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post(ABORT, self._abort)
        app.router.add_get("/load", self._load)
        for path in CONTROL:
            app.router.add_post(path, self._control)

    async def _models(self, _request: web.Request) -> web.Response:
        self.model_questions += 1
        served = {"id": self.model_name, "root": "/models/tiny", "parent": None, "max_model_len": self.context_length}
        return web.json_response({"object": "list", "data": [served]})

    async def _weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _load(self, _request: web.Request) -> web.Response:
        self.load_questions += 1
        self._changed.set()
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_status != 200:
            return refusal(self.load_status, "scripted", "error")
        return web.json_response({"server_load": len(self.running) + self.foreign_requests})

    async def _abort(self, request: web.Request) -> web.Response:
        (known_as,) = (await request.json())["request_ids"]
        assert known_as.startswith(KNOWN_AS), "it knows no request by that name"
        self._abort_rid(known_as.removeprefix(KNOWN_AS))
        return web.Response()

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = request.query_string or body.get("new_version") or (body.get("kwargs") or {}).get("weights_path") or ""
        self.calls.append(f"{request.path} {said}".rstrip())
        self._changed.set()
        if self.control_gate is not None:
            await self.control_gate.wait()
        if request.path == "/collective_rpc":
            if not self.loads_weights:
                return refusal(500, "Call to collective_rpc method failed: no weights there", "error")
            return web.json_response({"results": [None]})
        if request.path == "/update_weight_version":
            self.weight_version = body["new_version"]
            return web.json_response({"success": True, "new_version": self.weight_version})
        if request.path == "/reset_prefix_cache":
            return web.json_response({"success": True})
        return await self._pause(request)

    async def _pause(self, request: web.Request) -> web.Response:
        self.is_paused = request.path == "/pause"
        if request.query.get("mode") == "abort":
            for aborted in self.running.values():
                aborted.set()
        if request.query.get("mode") in ("abort", "wait"):
            await self.until(lambda: not self.running)
        self._changed.set()
        return web.json_response({"status": "paused" if self.is_paused else "resumed"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        if not self.takes_token_ids:
            said = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return refusal(403, said, "error")
        if sampling.get("logit_bias"):
            self.vocabulary_questions += 1
            said = f"token_id(s) [1] in logit_bias contain out-of-vocab token ids. Vocabulary size: {self.vocab_size}"
            return refusal(400, said if self.tells_vocabulary else "no such thing", "error")
        if sampling.get("allowed_token_ids"):
            return await self._tell_log_prob()
        self.asked.append(body)
        theirs = sampling | {"max_new_tokens": sampling["max_tokens"]}
        rid, token_ids = body["request_id"], body["token_ids"]
        assert body["output_mode"] == "text", "else it sends no text"
        assert body["stream_options"] == {"include_usage": True}, "else nobody knows how many tokens there were"
        return await self._begin(
            request, {"rid": rid, "input_ids": token_ids, "sampling_params": theirs, "stream": body["stream"]}
        )

    async def _tell_log_prob(self) -> web.Response:
        await self.until(lambda: not self.is_paused)
        scored = {"token_id": 0, "logprob": self.log_prob_of_the_allowed, "rank": 1, "top_logprobs": []}
        choice = {"index": 0, "finish_reason": "length", "token_ids": [0], "logprobs": {"content": [scored]}}
        return web.json_response({"request_id": KNOWN_AS, "output_mode": "tokens", "choices": [choice]})

    def _reply_to(self, request: web.Request, body: dict[str, Any], script: Script) -> Reply:
        return _VllmReply(request, body, script, lambda: self.weight_version)


class _VllmReply(Reply):
    """As vLLM says it: always what is new, and how many tokens there were in an event of its own behind the last."""

    def __init__(
        self, request: web.Request, body: dict[str, Any], script: Script, weight_version: Callable[[], str]
    ) -> None:
        super().__init__(request, body, script, increments=True)
        self._weight_version = weight_version
        self._has_ended = False

    async def tell(self, count: int, finish: dict[str, Any] | None) -> None:
        await super().tell(count, finish)
        self._has_ended = finish is not None

    def event(self, count: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        spans = None
        if finish is not None:
            spans = self.script.weight_versions or [{"version": self._weight_version(), "start": 0, "end": count}]
        return said(self.sent, count, finish["type"] if finish else None, spans, self.body["rid"])

    async def end(self) -> web.StreamResponse:
        if self._has_ended:
            await self.send(msgspec.json.encode(usage(self.sent)))
        return await super().end()


def said(
    start: int, end: int, reason: str | None = None, spans: list[dict[str, Any]] | None = None, rid: str = "r"
) -> dict[str, Any]:
    """An event that has the tokens [start, end)."""
    content = [
        {"token": f"t{i}", "logprob": -i / 128, "bytes": [116, 48 + i % 10], "top_logprobs": []}
        for i in range(start, end)
    ]
    choice = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": [FIRST_TOKEN + i for i in range(start, end)],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": spans,
        "text": "".join(f"t{i}" for i in range(start, end)),
        "logprobs": {"content": content},
    }
    return {"request_id": KNOWN_AS + rid, "usage": None, "output_mode": "text", "choices": [choice]}


def usage(count: int, prompt: int = 3) -> dict[str, Any]:
    """The event behind the last that has tokens."""
    told = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + count,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    return {"request_id": KNOWN_AS, "usage": told, "output_mode": "text", "choices": []}
