"""An HTTP server that takes SGLang's control calls as 0.5.23 was seen to, its traps included, and generates when told.

Every token's id is its position in the context. Tokens are sent one event each, as they are made.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE = 512
MAX_INPUT = 400
STREAMS_INCREMENTS = False
"""Whether a server does."""


class _Flight:
    def __init__(self) -> None:
        self.versions: list[str] = []
        self.is_aborted = False


class ControlledSglang:
    """Use as an async context manager; `base_url` is its address. `calls` holds control calls in order."""

    def __init__(self) -> None:
        self.weight_version = "default"
        self.base_url = ""
        self.running: dict[str, _Flight] = {}
        self.waiting = 0
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.breaks_connections = 0
        """So many control calls get no answer, after they had their effect."""
        self.may_answer = asyncio.Event()
        """Until it is set, control calls have their effect and get no answer."""
        self.may_answer.set()
        self.is_paused = False
        self.stands_still = False
        """As in modes retract and in_place: aborts take no effect either."""
        self.keeps_cache = False
        """As in mode in_place."""
        self._changed = asyncio.Condition()
        self._pausing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for name in (
            "pause_generation",
            "continue_generation",
            "update_weights_from_disk",
            "update_weight_version",
        ):
            app.router.add_post(f"/{name}", self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    # What a test makes happen

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(condition)

    async def step(self, tokens: int = 1) -> None:
        """What runs gets that many tokens each."""
        assert not self.stands_still
        for flight in self.running.values():
            flight.versions += [self.weight_version] * tokens
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # Endpoints

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/tiny", "weight_version": self.weight_version})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "/models/tiny",
                "max_req_input_len": MAX_INPUT,
                "incremental_streaming_output": STREAMS_INCREMENTS,
            }
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json()).get("prompt", "")
        return web.json_response({"tokens": list(range(len(text)))})

    async def _abort(self, request: web.Request) -> web.Response:
        flight = self.running.get((await request.json())["rid"])
        if flight is not None:
            flight.is_aborted = True
            await self._tell()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids_logprob" in body:
            return web.json_response({"error": {"message": f"valid range is [0, {VOCAB_SIZE})"}}, status=400)
        self.bodies.append(body)
        self.waiting += 1
        await self._tell()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.is_paused)
        finally:
            self.waiting -= 1
        response = web.StreamResponse()
        await response.prepare(request)
        flight = self.running[body["rid"]] = _Flight()
        await self._tell()
        try:
            await self._stream(response, body, flight)
        finally:
            del self.running[body["rid"]]
            await self._tell()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], flight: _Flight) -> None:
        sent, budget = 0, body["sampling_params"]["max_new_tokens"]
        reason: dict[str, Any] | None = None
        while reason is None:
            async with self._changed:
                while len(flight.versions) == sent and (self.stands_still or not flight.is_aborted):
                    await self._changed.wait()
            if flight.is_aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            elif len(flight.versions) >= budget:
                reason = {"type": "length", "length": budget}
            before, sent = sent, min(len(flight.versions), budget)
            event = _event(body, flight.versions[:budget], reason, before if STREAMS_INCREMENTS else 0)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def _control(self, request: web.Request) -> web.Response:
        name, body = request.path.removeprefix("/"), await request.json()
        self.calls.append((name, body))
        await self._tell()
        answer = await {
            "pause_generation": self._pause,
            "continue_generation": self._continue,
            "update_weights_from_disk": self._update,
            "update_weight_version": self._name_weights,
        }[name](body)
        await self._tell()
        await self.may_answer.wait()
        if self.breaks_connections and request.transport is not None:
            self.breaks_connections -= 1
            request.transport.abort()
        return answer

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        async with self._pausing:
            self.is_paused = True
            if body["mode"] != "abort":
                self.stands_still, self.keeps_cache = True, body["mode"] == "in_place"
                return _obeyed()
            for flight in self.running.values():
                flight.is_aborted = True
            await self._tell()
            # For ever, and with every later call behind it, when what runs stands still.
            async with self._changed:
                await self._changed.wait_for(lambda: not self.running)
        return _obeyed()

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        async with self._pausing:
            self.is_paused = self.stands_still = self.keeps_cache = False
        return _obeyed()

    async def _update(self, body: dict[str, Any]) -> web.Response:
        if not body["model_path"].startswith("/weights/"):
            return web.json_response({"success": False, "message": "Failed to find any weights"}, status=400)
        if not self.is_paused:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.running)
        self.weight_version = body["weight_version"]
        if self.running and self.keeps_cache and body["flush_cache"]:
            message = "Weights were updated, but the cache was not flushed"
            return web.json_response({"success": False, "message": message}, status=400)
        return web.json_response({"success": True, "message": "Succeeded"})

    async def _name_weights(self, body: dict[str, Any]) -> web.Response:
        assert body["abort_all_requests"] is False
        self.weight_version = body["new_version"]
        return web.json_response({"success": True, "message": "Weight version updated", "new_version": "1"})


def _obeyed() -> web.Response:
    return web.json_response({"message": "Succeeded", "status": "ok"})


def _event(body: dict[str, Any], versions: list[str], reason: dict[str, Any] | None, before: int) -> dict[str, Any]:
    """`before`: tokens that it leaves out, because they were sent."""
    start, spans = len(body["input_ids"]), list[dict[str, Any]]()
    for number, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = number + 1
        else:
            spans.append({"version": version, "start": number, "end": number + 1})
    ids = list(range(start + before, start + len(versions)))
    meta = {
        "id": body["rid"],
        "finish_reason": reason,
        "prompt_tokens": start,
        "weight_version": versions[-1] if versions else "default",
        "weight_versions": spans if reason is not None else None,
        "output_token_logprobs_length": len(versions),
        "output_token_logprobs": [[-token_id / 128, token_id, None] for token_id in ids],
    }
    return {"text": "".join(f"<{token_id}>" for token_id in ids), "output_ids": ids, "meta_info": meta}
