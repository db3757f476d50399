"""A running SGLang as the tests look at it beside the adapter, and transformers as the other opinion."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

from examples.sglang.serve_cpu import environment
from py_scheduler.adapters._http import RetrySettings
from py_scheduler.adapters.sglang import SglangEngine, SglangSettings
from py_scheduler.domain.generation import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PROMPT = (42, 100, 7, 300, 11, 270)
FIRST_PLAIN_TOKEN = 5
"""Ids below are special tokens of the tiny model."""
CONTEXT_LENGTH = 4096
USABLE_CONTEXT = CONTEXT_LENGTH - 2
MAX_RUNNING = MAX_QUEUED = 64
VOCAB_SIZE = 320
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 0.02

SETTINGS = SglangSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.01, max_seconds=0.05),
    stream_interval=1,
    control_timeout_seconds=30.0,
)


def request(
    rid: str = "r", *, prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = 16, **said: Any
) -> GenerationRequest:
    """To its full length unless told otherwise."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, **({"ignore_eos": True} | said))
    return GenerationRequest(rid=rid, token_ids=prompt, sampling=sampling)


class RealSglang:
    """Looks at a server and sets it up, over connections of its own."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._undo: list[tuple[str, dict[str, Any]]] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def engine(self, base_url: str = "", **settings: Any) -> AsyncIterator[SglangEngine]:
        """The adapter on this server, or on what stands in front of it at `base_url`."""
        engine = SglangEngine(base_url or self.base_url, settings=msgspec.structs.replace(SETTINGS, **settings))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(self.base_url + path, json=body) as response:
            content = await response.read()
            assert response.status == 200, content
            return msgspec.json.decode(content) if content.startswith((b"{", b"[")) else content

    async def slow_down(self, seconds: float) -> None:
        """Every step of the model takes that much longer, until the test is over."""
        self._undo.append(("/slow_down", {"forward_sleep_time": None}))
        await self.post("/slow_down", {"forward_sleep_time": seconds})

    async def pause(self, mode: str = "in_place") -> None:
        """Until `resume`, at the latest until the test is over."""
        self._undo.append(("/continue_generation", {}))
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def update_weights(self, version: str) -> None:
        """The same weights under another version's name, until the test is over. The server stays paused."""
        async with self._session.get(f"{self.base_url}/model_info") as response:
            update = {"model_path": (await response.json())["model_path"], "flush_cache": False}
        self._undo.insert(0, ("/update_weights_from_disk", update | {"weight_version": "default"}))
        await self.post("/update_weights_from_disk", update | {"weight_version": version, "keep_pause": True})

    async def undo(self) -> None:
        while self._undo:
            await self.post(*self._undo.pop())

    def forget(self) -> None:
        """The server is gone, and what was set up with it."""
        self._undo.clear()

    async def load(self) -> dict[str, Any]:
        async with self._session.get(f"{self.base_url}/v1/loads", params={"include": "core"}) as response:
            (load,) = msgspec.json.decode(await response.read())["loads"]
            assert isinstance(load, dict)
            return load

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """It tells its state when asked, and no other way."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while not condition(await self.load()):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(LOOK_SECONDS)

    async def until_running(self, count: int, tokens: int = 0) -> None:
        await self.until(lambda load: load["num_running_reqs"] == count and load["num_used_tokens"] >= tokens)

    async def until_idle(self, seconds: float = 10.0) -> None:
        """The running count returns to zero, far sooner than the long generations of these tests would end."""
        try:
            async with asyncio.timeout(seconds):
                await self.until(lambda load: load["num_running_reqs"] == load["num_waiting_reqs"] == 0)
        except TimeoutError:
            raise AssertionError(f"something still decodes for nobody: {await self.load()}") from None


class Reference:
    """A process with transformers and the same model; see reference.py for the questions."""

    def __init__(self, python: str, model: Path) -> None:
        self._command = [python, str(Path(__file__).with_name("reference.py")), str(model)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def continuation(self, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
        return list(self._ask(prompt=prompt, new_tokens=new_tokens)["token_ids"])

    def log_probs(self, token_ids: list[int], *, temperature: float = 1.0) -> list[float]:
        """Of every id but the first."""
        return list(self._ask(token_ids=token_ids, temperature=temperature)["log_probs"])

    def encode(self, text: str) -> list[int]:
        return list(self._ask(text=text)["token_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return list(self._ask(messages=messages)["token_ids"])

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._read())
        return answer

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
