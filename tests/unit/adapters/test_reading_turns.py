"""However much lies there of however many streams, the loop is given back in between."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING
from unittest import mock

import aiohttp
import msgspec
import pytest

from py_scheduler.adapters.http_client import body_of, sse_payloads
from py_scheduler.adapters.reading_turns import TURN_SECONDS, ReadingTurns
from py_scheduler.adapters.sglang.output import SglangOutput
from py_scheduler.adapters.vllm.output import VllmOutput
from py_scheduler.domain.generation import LogProbKind
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag
from tests.support.models.sglang_events import event

if TYPE_CHECKING:
    from py_scheduler.adapters.http_client import Response
    from py_scheduler.adapters.http_server.attempt import Output

STREAMS = 300
TOKENS = 4_096
END = {"type": "length"}
BUSY_SECONDS = 0.4 * TURN_SECONDS


def sglang(*, increments: bool) -> list[bytes]:
    """256 tokens an event, or 8 events that repeat the output."""
    step = 256 if increments else 512
    return [
        event(end - step if increments else 0, end, finish_reason=END if end == TOKENS else None)
        for end in range(step, TOKENS + 1, step)
    ]


def vllm() -> list[bytes]:
    step = 256
    scored = {"content": [{"logprob": -0.5, "token": "token_id:100"}] * step}
    choice = {"text": "x" * step, "token_ids": [100] * step, "logprobs": scored}
    events = [{"choices": [choice]} for _ in range(step, TOKENS, step)]
    events += [{"choices": [choice | {"finish_reason": "length"}]}]
    usage = {"prompt_tokens": 3, "completion_tokens": TOKENS}
    return [msgspec.json.encode(each) for each in [*events, {"choices": [], "usage": usage}]]


KINDS = {
    "sglang increments": sglang(increments=True),
    "sglang cumulative": sglang(increments=False),
    "vllm": vllm(),
}


def all_there(body: bytes) -> aiohttp.StreamReader:
    content = aiohttp.StreamReader(mock.Mock(), 1 << 16, loop=asyncio.get_running_loop())
    content.feed_data(body)
    content.feed_eof()
    return content


async def generated(kind: str, content: aiohttp.StreamReader) -> int:
    """Tokens, read as the backends read them."""
    output: Output = VllmOutput(LogProbKind.SAMPLED) if kind == "vllm" else SglangOutput()
    async for payload in sse_payloads(content):
        output.add(payload)
    output.settle()
    return output.whole().token_count


@pytest.mark.parametrize("kind", KINDS)
async def test_hundreds_of_streams_whose_data_all_lie_there_are_read_while_the_loop_goes_on(kind: str) -> None:
    body = b"".join(b"data: " + payload + b"\n\n" for payload in KINDS[kind])
    contents = [all_there(body) for _ in range(STREAMS)]
    with LoopLag() as lag:
        counts = await asyncio.gather(*(generated(kind, content) for content in contents))
    assert counts == [TOKENS] * STREAMS
    assert lag.worst_seconds < LIMIT_SECONDS


async def test_hundreds_of_plain_answers_are_read_while_the_loop_goes_on() -> None:
    async def answered(response: Response) -> int:
        output = SglangOutput()
        output.add(await body_of(response))
        return output.whole().token_count

    responses = [mock.Mock(content=all_there(event(0, TOKENS, finish_reason=END))) for _ in range(STREAMS)]
    with LoopLag() as lag:
        counts = await asyncio.gather(*(answered(response) for response in responses))
    assert counts == [TOKENS] * STREAMS
    assert lag.worst_seconds < LIMIT_SECONDS


def busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def test_who_waits_longest_reads_first() -> None:
    turns, order = ReadingTurns(), []

    async def reads(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            await turns.until_mine()
            order.append(number)
            busy(BUSY_SECONDS)

    await asyncio.gather(*(reads(number) for number in range(10)))
    assert order == [*range(10)] * 3


async def test_who_gives_up_is_passed_over_and_the_others_read() -> None:
    turns, read = ReadingTurns(), []

    async def reads(number: int) -> None:
        await turns.until_mine()
        read.append(number)
        busy(BUSY_SECONDS)

    tasks = [asyncio.create_task(reads(number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[50:80]:
        task.cancel()
    await asyncio.wait(tasks)
    assert read == [*range(50), *range(80, 100)]


async def test_a_loop_that_is_busy_otherwise_keeps_nobody_from_reading_for_good() -> None:
    turns, read = ReadingTurns(), 0

    async def reads() -> None:
        nonlocal read
        await turns.until_mine()
        read += 1
        busy(BUSY_SECONDS)

    async def is_busy() -> None:
        while read < 8:
            busy(2 * TURN_SECONDS)
            await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(is_busy(), *(reads() for _ in range(8))), 10.0)
    assert read == 8
