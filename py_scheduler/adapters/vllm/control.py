"""Pauses and weights of a vLLM server, or of all the workers behind a router.

What 0.32.0 does, and what follows from it here:

- It takes these calls only when it was started with VLLM_SERVER_DEV_MODE=1.
- Mode "keep" of a pause is our in_place. Where the prefix is to be read again (retract), what stands still is told to
  give up its cache, which is also how a cache of old weights goes: a reset that does not touch what runs fails while
  anything does.
- Loading weights and naming them are two calls. In between the server is named `loading ...`: whatever breaks off
  there, it says itself that nobody knows its weights, and each of its tokens says so too.
- It would load weights between two steps of what it generates. So one that is not paused is paused first, once what it
  has was finished.
- A load that fails is answered 500, and may have put some of the weights in place: whether it has is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from py_scheduler.adapters.http_client import read_as
from py_scheduler.adapters.http_server.control import HttpControl
from py_scheduler.adapters.vllm.answers import Obeyed, ServedWeights
from py_scheduler.domain.generation import PauseMode
from py_scheduler.domain.limits import MAX_NAME_LENGTH
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.domain.generation import WeightUpdate

_MODES: Final = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep"}


class VllmControl(HttpControl):
    """The GenerationControl that is part of VllmBackend."""

    _maker = "vLLM"
    _version_before_load: str | None = None
    """While it loads other weights."""
    _is_left_paused = False
    """Whether the server may not have heard the end of the pause in which an update was loaded."""

    async def update_weights(self, update: WeightUpdate) -> None:
        self._version_before_load = await self.weight_version()
        try:
            if self._paused_in is None:
                await self._update_between(update)
            else:
                await self._load(update)
        finally:
            self._version_before_load = None
        self._served.has_weights(update.weight_version)

    async def _update_between(self, update: WeightUpdate) -> None:
        """Of a server that is not paused. After a failure it goes on, and says that nobody knows its weights."""
        self._flights.stand_still()
        try:
            await self._command("/pause?mode=wait", {}, self._limits.weight_update_timeout_seconds)
            await self._load(update)
        finally:
            self._is_left_paused = True
            try:
                await self.end_own_pause()
            finally:
                self._flights.go_on()

    async def end_own_pause(self) -> None:
        """Of an update, where the server has not heard that it may go on. Whoever generates there next says it else."""
        if self._is_left_paused and self._paused_in is None:
            try:
                await self._tell_resume(self._limits.pause_timeout_seconds)
            except BaseException:
                self._served.was_away()
                raise
        self._is_left_paused = False

    async def _load(self, update: WeightUpdate) -> None:
        await self._tell_name(f"loading {update.weight_version}"[:MAX_NAME_LENGTH])
        body = {"method": "reload_weights", "kwargs": {"weights_path": update.model_path}}
        await self._command("/collective_rpc", body, self._limits.weight_update_timeout_seconds)
        if self._paused_in is not PauseMode.IN_PLACE:
            await self._drop_cache()
        await self._tell_name(update.weight_version)

    async def weight_version(self) -> str:
        if self._version_before_load is not None:
            return self._version_before_load
        return await super().weight_version()

    async def _tell_pause(self, mode: PauseMode) -> None:
        await self._command(f"/pause?mode={_MODES[mode]}", {}, self._limits.pause_timeout_seconds)
        if mode is PauseMode.RETRACT:
            await self._drop_cache()

    async def _drop_cache(self) -> None:
        """Of what stands still, too: its prefix is read again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        await self._command(path, {}, self._limits.control_timeout_seconds)

    async def _tell_resume(self, timeout_seconds: float) -> None:
        await self._command("/resume", {}, timeout_seconds)

    async def _tell_name(self, version: str) -> None:
        body = {"new_version": version}
        await self._command("/update_weight_version", body, self._limits.control_timeout_seconds)

    async def _version_at(self, client: HttpClient) -> str:
        answer = await client.get_json("/weight_info", timeout_seconds=self._limits.control_timeout_seconds)
        return read_as(ServedWeights, answer, "/weight_info").weight_version

    def _has_obeyed(self, answer: Any, source: str) -> bool:
        obeyed = read_as(Obeyed, answer, source)
        if obeyed.says_nothing:
            raise EngineUnavailableError(f"{source} answered what vLLM would not: {answer!r:.200}")
        return obeyed.success is not False
