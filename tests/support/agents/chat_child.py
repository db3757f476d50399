"""An agent in a process of its own: it is told where to ask by the environment, and what by its arguments."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tests.support.agents.chat_client import ChatClient, converse


async def main() -> None:
    place = (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ.get("OPENAI_SOCKET", ""))
    async with ChatClient(*place) as client:
        print(json.dumps(await converse(client, sys.argv[1], sys.argv[2:])))


if __name__ == "__main__":
    asyncio.run(main())
