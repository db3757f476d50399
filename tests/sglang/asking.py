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
import pytest

from examples.sglang.serve_cpu import environment
from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from py_scheduler.domain.results import SampleDone

FIRST_VERSION = "default"
"""What a server calls the weights that it was started with."""
TRAINED_VERSION = "step-1"
"""What these tests call those beside them, which are other ones."""
PROMPT = (42, 100, 7, 300, 11, 270)
FIRST_PLAIN_TOKEN = 5
"""Ids below are special tokens of the tiny model."""
CONTEXT_LENGTH = 4096
USABLE_CONTEXT = CONTEXT_LENGTH - 2
MAX_RUNNING, MAX_QUEUED = 16, 256
"""At each server."""
VOCAB_SIZE = 320
TOLERANCE = 1e-4
"""Between the log-probs of SGLang and of transformers."""
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 0.02

SETTINGS = SglangSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.01, max_seconds=0.05),
    stream_interval=1,
    cumulative_events=CONTEXT_LENGTH,
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

    def __init__(self, base_url: str, model: Path, *, streams_increments: bool = True) -> None:
        self.base_url = base_url
        self.streams_increments = streams_increments
        self._model = str(model)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def engine(self, base_url: str = "", **settings: Any) -> AsyncIterator[SglangBackend]:
        """The adapter on this server, or on what stands in front of it at `base_url`."""
        engine = SglangBackend(base_url or self.base_url, settings=msgspec.structs.replace(SETTINGS, **settings))
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        status, content = await self.ask(path, body)
        assert status == 200, content
        return msgspec.json.decode(content) if content.startswith((b"{", b"[")) else content

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        async with self._session.post(self.base_url + path, json=body) as response:
            return response.status, await response.read()

    async def status(self, path: str) -> int:
        async with self._session.get(self.base_url + path) as response:
            return response.status

    async def slow_down(self, seconds: float | None) -> None:
        """Every step of the model takes that much longer."""
        await self.post("/slow_down", {"forward_sleep_time": seconds})

    async def pause(self, mode: str = "in_place") -> None:
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def update_weights(self, version: str, *, keep_pause: bool = True) -> None:
        """The weights that it was started with, under that name."""
        update = {"model_path": self._model, "weight_version": version, "flush_cache": False, "keep_pause": keep_pause}
        await self.post("/update_weights_from_disk", update)

    async def weight_version(self) -> str:
        async with self._session.get(f"{self.base_url}/model_info") as response:
            return str((await response.json())["weight_version"])

    async def restore(self) -> None:
        """As it was started: not paused, not slow, with its first weights. Nothing may decode on by then."""
        await self.resume()
        await self.slow_down(None)
        await self.until_idle()
        if await self.weight_version() != FIRST_VERSION:
            await self.update_weights(FIRST_VERSION, keep_pause=False)
        await self.post("/flush_cache", {})

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
    """A process with transformers and the same models; see reference.py for the questions."""

    def __init__(self, python: str, folders: dict[str, Path]) -> None:
        """`folders` by the version of their weights."""
        named = [f"{version}={folder}" for version, folder in folders.items()]
        self._command = [python, str(Path(__file__).with_name("reference.py")), *named]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def continuation(self, prompt: tuple[int, ...], new_tokens: int, version: str = FIRST_VERSION) -> list[int]:
        return list(self._ask(prompt=prompt, new_tokens=new_tokens, version=version)["token_ids"])

    def log_probs(self, token_ids: list[int], *, temperature: float = 1.0, version: str = FIRST_VERSION) -> list[float]:
        """Of every id but the first."""
        return list(self._ask(token_ids=token_ids, temperature=temperature, version=version)["log_probs"])

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


def assert_exact(sample: SampleDone, reference: Reference, *temperatures: float) -> None:
    """Flat arrays of one length, in turns without a gap; the mask is 1 where the model wrote, and only there are
    log-probs. Each is that of its token after all that stands before it, of the weights that its span names.

    `temperatures`: of all that was generated, or one for each of its turns.
    """
    trajectory = sample.trajectory
    ids, mask = trajectory.token_ids.tolist(), trajectory.loss_mask == 1
    assert len(ids) == len(trajectory.log_probs) == len(mask)
    position, said_at = 0, list[float]()
    generated = sum(turn.source != "environment" for turn in trajectory.turns)
    left = iter(temperatures * generated if len(temperatures) == 1 else temperatures)
    for turn in trajectory.turns:
        is_generated = turn.source != "environment"
        assert turn.start == position
        position = turn.end
        assert (mask[turn.start : turn.end] == is_generated).all()
        said_at += [next(left) if is_generated else 0.0] * (turn.end - turn.start)
    assert position == len(ids)
    assert not trajectory.log_probs[~mask].any()
    covered = 0
    for span in trajectory.weight_spans:
        places = [place for place in range(span.start, span.end) if mask[place]]
        for temperature in {said_at[place] for place in places}:
            scores = [0.0, *reference.log_probs(ids, temperature=temperature, version=span.version)]
            here = [place for place in places if said_at[place] == temperature]
            expected = [scores[place] for place in here]
            assert trajectory.log_probs[here].tolist() == pytest.approx(expected, abs=TOLERANCE)
        covered += len(places)
    assert covered == trajectory.generated_tokens == mask.sum()
