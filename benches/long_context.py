"""What a turn costs the client as its context grows: 50 turns that end with 64k tokens, as an agent makes them.

    python -m benches.long_context [--turns 50] [--tokens 65536]

A scripted server in a process of its own answers each turn with as many tokens as it was shown new ones. What counts is
the processor time of this process, from the episode's record to the answer in it, a turn, for a whole conversation and
for its last tenth. `body` is what HTTP has to carry for it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import mean

from benches._scripted_sglang import VOCAB_SIZE, Output, scripted_server
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import GenerationRequest, SamplingParams
from py_scheduler.domain.trajectory import TrajectoryBuilder


async def conversation(backend: SglangBackend, turns: int, tokens: int) -> tuple[list[float], int]:
    """Seconds of processor time by turn, and the bytes of all prompts in JSON."""
    step = tokens // turns // 2
    ids = Output(step).ids
    sampling = SamplingParams(max_new_tokens=step, ignore_eos=True)
    record, seconds, carried = TrajectoryBuilder(), list[float](), 0
    for turn in range(turns):
        begun = time.process_time()
        record.append_environment(ids)
        request = GenerationRequest(rid=f"r{turn}", token_ids=record.prompt(), sampling=sampling)
        record.append_generation(await backend.generate(request), "student")
        seconds.append(time.process_time() - begun)
        carried += len(record.prompt().json())
    assert record.token_ids == ids * (2 * turns)
    return seconds, carried


async def measure(base_url: str, options: argparse.Namespace) -> None:
    settings = SglangSettings(streaming="increments", vocab_size=VOCAB_SIZE, context_length=2 * options.tokens)
    backend = SglangBackend(base_url, settings=settings)
    await backend.start()
    await conversation(backend, options.turns, options.tokens)
    runs = [await conversation(backend, options.turns, options.tokens) for _ in range(options.rounds)]
    await backend.close()
    seconds, carried = min(runs)
    tenth = max(1, options.turns // 10)
    print(
        f"{options.turns} turns, {options.tokens} tokens at the end: {1e3 * sum(seconds):.1f} ms, the last {tenth} "
        f"{1e3 * mean(seconds[-tenth:]):.2f} ms each, the first {tenth} {1e3 * mean(seconds[:tenth]):.2f} ms; "
        f"body {carried / 1e6:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a turn costs the client as its context grows.")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with scripted_server() as base_url:
        asyncio.run(measure(base_url, options))


if __name__ == "__main__":
    main()
