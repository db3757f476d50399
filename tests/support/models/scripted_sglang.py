"""An HTTP server that speaks SGLang's API as version 0.5.23 was seen to, with faults on demand.

Invariants: `running` holds exactly the rids whose streams are open; every change wakes `until`. Faults come from
`scripts`: each /generate takes the next one, and a plain generation when there is none left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VOCAB_SIZE = 512
INPUT_MARGIN = 4
FIRST_TOKEN = 100
ABORTED = {"type": "abort", "message": "Aborted"}
STREAMS_INCREMENTS = False
"""Whether a server does of which nothing is said."""


@dataclass
class Script:
    """What one /generate does. Counts are of tokens; the default generates `max_new_tokens` and ends."""

    status: int = 200
    message: str = "scripted"
    form: str = "error"
    """Of a refusal: `error` or `object` as the two JSON bodies, `stream` as an event under status 200."""
    disconnect_before: bool = False
    """Drops the connection without a byte."""
    disconnect_after: int | None = None
    close_after: int | None = None
    """Ends the stream properly, but too early."""
    stall_after: int | None = None
    """Goes silent, connection open."""
    aborted: bytes | None = None
    """The last event after an abort, in place of the server's own."""
    deaf: bool = False
    """Ignores aborts, as a paused server does."""
    gate: asyncio.Event | None = None
    """Nothing is generated before it is set."""
    finish: dict[str, Any] | None = None
    weight_versions: list[dict[str, Any]] | None = None
    event: bytes | None = None
    """Sent in place of anything that is generated."""
    is_taken_back: bool = False
    """When it is aborted, it waits to go on after its memory was taken from it: then the last event has everything."""
    pieces: Sequence[bytes] | None = None
    """Written one by one in place of anything that is generated; then the connection is dropped."""
    misaligned_after: int | None = None
    """The log-probs of tokens from this one on are those of other tokens."""


@dataclass
class ScriptedSglang:
    """Use as an async context manager; `base_url` is its address."""

    context_length: int = 1000
    """Of what can be generated altogether; of the model itself two more."""
    scripts: deque[Script] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    lost_aborts: list[str] = field(default_factory=list)
    disconnects: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    most_running: int = 0
    streamed: int = 0
    """Tokens sent in all."""
    connections: set[int] = field(default_factory=set)
    died_of: str = ""
    base_url: str = ""
    streams_increments: bool = field(default_factory=lambda: STREAMS_INCREMENTS)
    """As --incremental-streaming-output has it; else each event repeats the output."""
    tells_increments: bool = True
    """Whether /server_info is right about that."""
    tells_vocabulary: bool = True
    heeds_seeds: bool = False
    model_name: str = "tiny"
    weights_path: str = ""
    """Of the last update; the server takes it for its name from then on."""
    vocab_size: int = VOCAB_SIZE
    weight_version: str = "default"
    port: int = 0
    """0: any free one, and from then on that one, so that the server can come back to its place."""
    foreign_requests: int = 0
    """That others have sent: they count as load."""
    is_router: bool = False
    """sglang-router: it forwards generations, as if to a worker, and answers 404 to everything else."""
    load_questions: int = 0
    load_status: int = 200
    load_gate: asyncio.Event | None = None
    tokenize_status: int = 200
    tokenize_questions: int = 0
    tokenize_failures: int = 0
    """How many of its next answers are a 503."""
    model_questions: int = 0
    opening: str = ""
    """What the chat template puts behind a conversation, for the answer to go on from."""
    is_paused: bool = False
    """It holds only the question for its vocabulary: what else it is to hold, scripts say."""
    nonsense: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By path: status and body of every answer, whatever is asked."""
    health_questions: int = 0
    vocabulary_questions: int = 0

    async def __aenter__(self) -> Self:
        self._changed = asyncio.Event()
        app = web.Application(middlewares=[self._unless_nonsense])
        self._add_calls(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024, reuse_address=True)
        await site.start()
        host, self.port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{self.port}"
        return self

    def _add_calls(self, app: web.Application) -> None:
        app.router.add_post("/generate", self._generate)
        if self.is_router:
            return
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        for path in ("/health", "/ready"):
            app.router.add_get(path, self._health)

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state of this server, without polling."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def go_on(self) -> None:
        self.is_paused = False
        self._changed.set()

    @property
    def rids(self) -> list[str]:
        return [body["rid"] for body in self.bodies]

    # -- endpoints

    @web.middleware
    async def _unless_nonsense(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in self.nonsense:
            status, body = self.nonsense[request.path]
            return web.Response(status=status, body=body, content_type="text/html")
        return await handler(request)

    async def _model_info(self, _request: web.Request) -> web.Response:
        self.model_questions += 1
        return web.json_response(
            {
                "model_path": self.weights_path or "/models/tiny",
                "served_model_name": self.weights_path or self.model_name,
                "weight_version": self.weight_version,
            }
        )

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "/models/tiny",
                "served_model_name": self.model_name,
                "context_length": None,
                "max_req_input_len": self.context_length - INPUT_MARGIN,
                "incremental_streaming_output": self.streams_increments is self.tells_increments,
                "enable_deterministic_inference": self.heeds_seeds,
            }
        )

    async def _loads(self, request: web.Request) -> web.Response:
        assert request.query["include"] == "core"
        self.load_questions += 1
        self._changed.set()
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_status != 200:
            return refusal(self.load_status, "scripted", "error")
        waiting = self.foreign_requests
        return web.json_response({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": waiting}]})

    async def _health(self, _request: web.Request) -> web.Response:
        self.health_questions += 1
        return web.Response(status=503 if self.is_paused else 200)

    async def _tokenize(self, request: web.Request) -> web.Response:
        """One token per character; a conversation is its roles and contents in order."""
        self.tokenize_questions += 1
        if self.tokenize_failures:
            self.tokenize_failures -= 1
            return refusal(503, "scripted", "error")
        if self.tokenize_status != 200:
            return refusal(self.tokenize_status, "scripted", "error")
        body = await request.json()
        said = "".join(f"<{m['role']}>{m['content']}" for m in body.get("messages", ()))
        text = body.get("prompt") or said + self.opening
        return web.json_response({"tokens": [ord(c) for c in text], "count": len(text)})

    async def _abort(self, request: web.Request) -> web.Response:
        self._abort_rid((await request.json())["rid"])
        return web.Response()

    def _abort_rid(self, rid: str) -> None:
        self.aborts.append(rid)
        if rid in self.running:
            self.running[rid].set()
        else:
            self.lost_aborts.append(rid)
        self._changed.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("token_ids_logprob") == [-1]:
            self.vocabulary_questions += 1
            self._changed.set()
            await self.until(lambda: not self.is_paused)
            said = f"token_ids_logprob contains out-of-vocabulary token id -1; valid range is [0, {self.vocab_size})."
            return refusal(400, said if self.tells_vocabulary else "no such thing", "error")
        return await self._begin(request, body)

    async def _begin(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.bodies.append(body)
        self.connections.add(id(request.transport))
        script = self.scripts.popleft() if self.scripts else Script()
        self._changed.set()
        if script.disconnect_before:
            _drop(request)
            return web.Response()
        if script.status != 200 and script.form != "stream":
            return refusal(script.status, script.message, script.form)
        return await self._stream(request, body, script)

    def _reply_to(self, request: web.Request, body: dict[str, Any], script: Script) -> Reply:
        return Reply(request, body, script, increments=self.streams_increments)

    async def _stream(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        reply = self._reply_to(request, body, script)
        await reply.begin()
        rid, ids, wanted = body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if any(not 0 <= token_id < self.vocab_size for token_id in ids):
            self.died_of = rid
            _drop(request)
            return reply.response
        refused = script.message if script.status != 200 else None
        if len(ids) + wanted > self.context_length:
            refused = "Requested token count exceeds the model's maximum context length of 1000 tokens."
        if rid in self.running:
            refused = f"Duplicate request ID detected: {rid}"
        if refused is not None:
            await reply.refuse(refused)
        else:
            aborted = self.running[rid] = asyncio.Event()
            self.most_running = max(self.most_running, len(self.running))
            self._changed.set()
            try:
                if not await self._generation(request, reply, body, script, aborted):
                    return reply.response
            except (asyncio.CancelledError, ConnectionError):
                self.disconnects.append(rid)
                raise
            finally:
                del self.running[rid]
                self._changed.set()
        return await reply.end()

    async def _generation(
        self, request: web.Request, reply: Reply, body: dict[str, Any], script: Script, aborted: asyncio.Event
    ) -> bool:
        """False when the stream was dropped or ended early."""
        if script.event is not None:
            await reply.send(script.event)
            return True
        if script.pieces is not None:
            for piece in script.pieces:
                await reply.response.write(piece)
                await asyncio.sleep(0)
            if request.transport is not None:
                request.transport.close()
            return False
        wanted = body["sampling_params"]["max_new_tokens"]
        silence = asyncio.Event() if script.deaf else aborted
        if script.gate is not None and not await _first(script.gate, silence):
            await reply.tell(0, ABORTED)
            return True
        for count in range(1, wanted + 1):
            await reply.tell(
                count, (script.finish or {"type": "length", "length": wanted}) if count == wanted else None
            )
            self.streamed += 1
            self._changed.set()
            if script.disconnect_after == count:
                _drop(request)
                return False
            if script.close_after == count:
                await reply.close()
                return False
            if script.stall_after == count:
                await silence.wait()
                await (reply.tell(count, ABORTED) if script.aborted is None else reply.send(script.aborted))
                return True
        return True


class Reply:
    """To one /generate: token i is FIRST_TOKEN + i, its log-prob -i / 128, its text `ti`.

    As SGLang streams: the first token at once, then whenever as many as the request's stream_interval are unsent.
    """

    def __init__(self, request: web.Request, body: dict[str, Any], script: Script, *, increments: bool) -> None:
        self._request = request
        self.body = body
        self.script = script
        self._increments = increments
        self._interval = body["sampling_params"].get("stream_interval", 1)
        self.sent = 0
        self._newest = b""
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream" if body["stream"] else "application/json"}
        )

    async def begin(self) -> None:
        if self.body["stream"]:
            await self.response.prepare(self._request)

    async def tell(self, count: int, finish: dict[str, Any] | None) -> None:
        """That so many tokens are there."""
        unsent = count - self.sent
        if finish is not None or (self.body["stream"] and (unsent >= self._interval or not self.sent)):
            await self.send(msgspec.json.encode(self.event(count, finish)))
            self.sent = count

    async def send(self, event: bytes) -> None:
        self._newest = event
        if self.body["stream"]:
            await self.response.write(b"data: " + event + b"\n\n")

    async def refuse(self, message: str) -> None:
        if not self.body["stream"]:
            self.response.set_status(400)
        await self.send(msgspec.json.encode({"error": {"message": message, "code": 400, "retryable": False}}))

    async def end(self) -> web.StreamResponse:
        if not self.body["stream"]:
            finish = (msgspec.json.decode(self._newest).get("meta_info") or {}).get("finish_reason") or {}
            if finish.get("status_code"):
                return refusal(finish["status_code"], finish["message"], "error")
            self.response.content_length = len(self._newest)
            await self.response.prepare(self._request)
        await self.response.write(b"data: [DONE]\n\n" if self.body["stream"] else self._newest)
        await self.response.write_eof()
        return self.response

    async def close(self) -> None:
        """Properly, but too early."""
        await self.begin()
        await self.response.write_eof()

    def event(self, count: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        body, script = self.body, self.script
        new = self.sent if self._increments and body["stream"] else 0
        token_ids = ids(count)
        scored: list[list[Any]] = [[-i / 128, token_id, None] for i, token_id in enumerate(token_ids)]
        if script.misaligned_after is not None:
            for entry in scored[script.misaligned_after :]:
                entry[1] += 1
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": count,
            "cached_tokens": 1,
            "weight_version": "default",
            "output_token_logprobs": scored[new:],
            "output_token_logprobs_length": count,
        }
        if script.weight_versions is not None and finish is not None:
            meta["weight_versions"] = script.weight_versions
        text, told_ids = "".join(f"t{i}" for i in range(new, count)), token_ids[new:]
        if finish is ABORTED and script.is_taken_back:
            text, told_ids = "".join(f"t{i}" for i in range(count)), token_ids[-1 if new else 0 :]
            meta["output_token_logprobs"] = scored
        return {"text": text, "output_ids": told_ids, "meta_info": meta}


def ids(count: int) -> list[int]:
    """Of the first so many tokens that it generates."""
    return [FIRST_TOKEN + i for i in range(count)]


async def _first(gate: asyncio.Event, aborted: asyncio.Event) -> bool:
    """True when the gate opened, False when the abort came first."""
    waits = [asyncio.ensure_future(event.wait()) for event in (gate, aborted)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return gate.is_set()


def refusal(status: int, message: str, form: str) -> web.Response:
    body = (
        {"object": "error", "message": message, "code": status} if form == "object" else {"error": {"message": message}}
    )
    return web.json_response(body, status=status)


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
