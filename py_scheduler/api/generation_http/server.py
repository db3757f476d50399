"""The HTTP server in front of the episodes: who asks, and what becomes of it.

Invariant: nothing is answered without the key of an episode that is not over, and nothing of another episode ever.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

from py_scheduler.api.generation_http.chat import chat_completion, read_chat
from py_scheduler.api.generation_http.episode_api import EpisodeApi
from py_scheduler.api.generation_http.refusals import (
    BAD_REQUEST,
    NOT_FOUND,
    TOO_LARGE,
    UNAUTHORIZED,
    RefusedError,
    refusal_of,
)
from py_scheduler.api.generation_http.sockets import remove_socket, tcp_socket, unix_socket
from py_scheduler.api.security.tls import http_context
from py_scheduler.domain.ports import ProbedBackend, base_of
from py_scheduler.domain.values.keys import Keys
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from py_scheduler.config import GatewaySettings
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.ports import Clock, GenerationBackend

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SOCKET_URL = "http://gateway.invalid/v1"
"""Of a front on a unix socket alone: who overlooks the socket finds no such host, and tells nobody the key."""
_STOP_SECONDS = 1.0
UNREADABLE_BODY = "invalid_body"


class GenerationHttp:
    """Use as `async with`; `bind` may be called before, so that an address in use is known early."""

    def __init__(self, settings: GatewaySettings, engines: Mapping[str, GenerationBackend], clock: Clock) -> None:
        self._settings = settings
        self._engines = engines
        self._clock = clock
        self._keys: Keys[EpisodeApi] = Keys(prefix="sk-episode-")
        self._sockets: list[socket.socket] = []
        self._tls = http_context(settings.tls) if settings.tls.is_on else None
        self._base_url = _SOCKET_URL
        self._runner: web.AppRunner | None = None

    # Where

    def bind(self) -> list[str]:
        """Takes the addresses and returns them. Raises ConfigError when one cannot be had."""
        settings, addresses = self._settings, []
        if settings.socket:
            self._sockets.append(unix_socket(settings.socket))
            addresses.append(f"unix:{settings.socket}")
        if settings.listen:
            bound = tcp_socket(settings.listen)
            self._sockets.append(bound)
            host = settings.listen.rpartition(":")[0]
            scheme = "https" if self._tls is not None else "http"
            self._base_url = f"{scheme}://{host}:{bound.getsockname()[1]}/v1"
            addresses.append(self._base_url)
        return addresses

    async def __aenter__(self) -> Self:
        try:
            if not self._sockets:
                self.bind()
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._boundary])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        # A client that leaves is noticed at once, for its generation is to end with it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_STOP_SECONDS)
        await self._runner.setup()
        for bound in self._sockets:
            tls = None if bound.family == socket.AF_UNIX else self._tls
            await web.SockSite(self._runner, bound, ssl_context=tls).start()

    async def close(self) -> None:
        """By then the episodes are over, and with them their requests."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        sockets, self._sockets = self._sockets, []
        for bound in sockets:
            bound.close()
        if sockets and self._settings.socket:
            remove_socket(self._settings.socket)

    # Who

    def admit(self, episode: Episode) -> EpisodeApi:
        """Implements `domain.episodes.api_access.ApiFront`. Raises FailedPreconditionError."""
        if self._runner is None:
            raise FailedPreconditionError("the gateway's HTTP front does not run (any more)")
        return EpisodeApi(episode, self._keys, self._base_url, self._settings.socket)

    def _episode_of(self, request: web.Request) -> EpisodeApi:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            message = (
                "no running episode has this API key: send `Authorization: Bearer` with episode.api_key, which is dead "
                "as soon as its episode is over"
            )
            raise RefusedError(UNAUTHORIZED, message, "invalid_api_key")
        return found

    # What

    async def _complete(self, request: web.Request) -> web.Response:
        episode = self._episode_of(request)
        asked = read_chat(await request.read())
        role = await self._role_of(asked.model)
        model = (await self._engines[role].model_info()).name
        answer = await episode.complete(asked, role)
        return _json(
            chat_completion(
                answer.generation,
                completion_id=answer.completion_id,
                created=int(self._clock.unix_time()),
                model=model,
                prompt_tokens=answer.prompt_tokens,
                wants_log_probs=asked.wants_log_probs,
            )
        )

    async def _models(self, request: web.Request) -> web.Response:
        """Roles, and the names of the models that are there: one whose server is yet to come has none."""
        self._episode_of(request)
        names = {role: role for role in self._engines}
        for role, engine in self._engines.items():
            base = base_of(engine)
            if not isinstance(base, ProbedBackend) or base.is_up:
                names.setdefault((await engine.model_info()).name, role)
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": f"role {names[name]}"} for name in names]
        return _json({"object": "list", "data": entries})

    async def _role_of(self, model: str) -> str:
        """By its name, or by the model's: then the first role that has it. No role behind that one is asked, since
        another may have no server yet.
        """
        if model in self._engines:
            return model
        names = []
        for role, engine in self._engines.items():
            names.append((await engine.model_info()).name)
            if names[-1] == model:
                return role
        known = ", ".join(dict.fromkeys([*self._engines, *names])) or "none"
        message = f"model: there is no model {model!r} (there are: {known})"
        raise RefusedError(NOT_FOUND, message, "model_not_found", param="model")

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The one place where exceptions become answers."""
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = self._settings.max_body_bytes
            refused = RefusedError(TOO_LARGE, f"the body has over {limit} bytes (gateway.max_body_bytes)", "too_large")
        except web.RequestPayloadError as error:
            message = f"the body cannot be read: {error}"
            refused = RefusedError(BAD_REQUEST, message, UNREADABLE_BODY)
        except web.HTTPException as error:
            message = (
                f"{request.method} {request.path}: {error.reason}; there are POST /v1/chat/completions, GET /v1/models"
            )
            refused = RefusedError(error.status, message, "unknown_url" if error.status == NOT_FOUND else "bad_request")
        except Exception as error:  # noqa: BLE001 -- a client gets an answer, whatever happened
            refused = refusal_of(error)
        headers = refused.headers
        if refused.status == UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        response = _json(refused.body, refused.status, headers)
        if refused.code == UNREADABLE_BODY:
            # Where such a body ends nobody knows, nor where the next request would begin.
            response.force_close()
        return response


def _json(body: Mapping[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
