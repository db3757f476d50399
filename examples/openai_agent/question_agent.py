"""An agent that knows OpenAI's client and nothing of py-scheduler: it answers a question, and then its own doubt.

On its own it runs against any server:  OPENAI_BASE_URL=... OPENAI_API_KEY=... python question_agent.py MODEL QUESTION
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam


async def solve(client: AsyncOpenAI, model: str, question: str) -> str:
    """The second answer."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Give the result as a number and nothing else."},
        {"role": "user", "content": question},
    ]
    first = await client.chat.completions.create(model=model, messages=messages, max_tokens=64)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Are you sure? Say it again."},
    ]
    second = await client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0.5)
    return second.choices[0].message.content or ""


async def main() -> None:
    from openai import AsyncOpenAI  # noqa: PLC0415 - the handler beside it has a client already

    async with AsyncOpenAI() as client:
        print(await solve(client, *sys.argv[1:]))


if __name__ == "__main__":
    asyncio.run(main())
