"""Pauses and weights of an SGLang server, or of all the workers behind a router.

What 0.5.23 was seen to do, and what follows from it here:

- A pause in mode abort waits for all requests to end and answers nothing else until then. Those of a server that stands
  still in another mode never end, so whatever pause somebody left behind is ended first.
- In mode in_place the cache cannot be flushed, and asking for it is answered 400 although the weights were changed: it
  is asked for in every other mode.
- `abort_all_requests` of an update is answered 400 likewise, so it is never used: a pause does the same.
- An abort of a request that a pause holds is lost: only the end of its connection frees it, which `abort` brings about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.http_client import read_as
from py_scheduler.adapters.http_server.control import HttpControl
from py_scheduler.adapters.sglang.answers import Obeyed, ServedWeights
from py_scheduler.domain.generation import PauseMode

if TYPE_CHECKING:
    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.domain.generation import WeightUpdate


class SglangControl(HttpControl):
    """The GenerationControl that is part of SglangBackend."""

    _maker = "SGLang"

    async def update_weights(self, update: WeightUpdate) -> None:
        body = {
            "model_path": update.model_path,
            "weight_version": update.weight_version,
            "flush_cache": self._paused_in is not PauseMode.IN_PLACE,
            "keep_pause": self._paused_in is not None,
        }
        await self._command("/update_weights_from_disk", body, self._limits.weight_update_timeout_seconds)
        self._served.has_weights(update.weight_version)

    async def _prepare_pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT and self._paused_in is None:
            await self._tell_resume(self._limits.pause_timeout_seconds)

    async def _tell_pause(self, mode: PauseMode) -> None:
        await self._command("/pause_generation", {"mode": str(mode)}, self._limits.pause_timeout_seconds)

    async def _tell_resume(self, timeout_seconds: float) -> None:
        await self._command("/continue_generation", {}, timeout_seconds)

    async def _tell_name(self, version: str) -> None:
        # By default the server aborts all that it runs, which a pause in another mode than abort keeps.
        body = {"new_version": version, "abort_all_requests": False}
        await self._command("/update_weight_version", body, self._limits.control_timeout_seconds)

    async def _version_at(self, client: HttpClient) -> str:
        answer = await client.get_json("/model_info", timeout_seconds=self._limits.control_timeout_seconds)
        return read_as(ServedWeights, answer, "/model_info").weight_version or "default"

    def _has_obeyed(self, answer: Any, source: str) -> bool:
        return read_as(Obeyed, answer, source).success
