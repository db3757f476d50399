"""A client of OpenAI's API that hides nothing: what was answered, and under which status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import aiohttp

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode


class ChatClient:
    """Speaks to one base_url with one key, over the unix socket when one is named."""

    def __init__(self, base_url: str, api_key: str, socket_path: str = "") -> None:
        self.base_url = base_url
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self._socket_path = socket_path

    @classmethod
    def of(cls, episode: Episode) -> ChatClient:
        return cls(episode.api_base_url, episode.api_key, episode.api_socket)

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(self._socket_path) if self._socket_path else aiohttp.TCPConnector()
        self._session = aiohttp.ClientSession(connector=connector, headers=self.headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, messages: list[dict[str, Any]], **said: Any) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        return await self.post("/chat/completions", json={"model": "student", "messages": messages, **said})

    async def post(self, path: str, **content: Any) -> tuple[int, dict[str, Any]]:
        async with self._session.post(self.base_url + path, **content) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self._session.get(self.base_url + path) as response:
            return response.status, await response.json()


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def converse(client: ChatClient, system: str, questions: list[str], **said: Any) -> list[str]:
    """Asks one after the other, each with the whole conversation before it, as agents do; the answers."""
    messages = [says("system", system)]
    answers = []
    for question in questions:
        messages.append(says("user", question))
        status, body = await client.ask(messages, **said)
        assert status == 200, body
        message = body["choices"][0]["message"]
        messages.append(message)
        answers.append(message["content"])
    return answers
