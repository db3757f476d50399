"""Runs a built server and takes it down again, whatever its handlers do."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.app.backends import base_role
from py_scheduler.app.building import build
from py_scheduler.app.journal import state_dir_of
from py_scheduler.app.loop_watchdog import LoopWatchdog
from py_scheduler.domain.ports import MovableBackend, ProbedBackend
from py_scheduler.errors import ConfigError, EngineUnavailableError, first_of
from py_scheduler.execution.containment import contained_task
from py_scheduler.knobs import hand_set_warnings
from py_scheduler.version import version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from py_scheduler.api.server import ApiServer
    from py_scheduler.app.building import Parts
    from py_scheduler.config import Config
    from py_scheduler.interfaces.task_scheduler import TaskScheduler

_log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""How long the loop's thread may keep the journal's from going on: a commit waits for that several times."""
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_EXIT_SECONDS = 8.0
"""What the end takes beside drain and grace, at most: streams that are cut off, the journal, processes of backends."""


async def serve(
    config: Config,
    base_dir: Path,
    announce: Callable[[str], None],
    stop: asyncio.Event,
    state_dir: Path | None = None,
) -> int:
    """Serves until `stop` is set, then stops gracefully; returns how many handlers would not end.

    `announce` gets the address once calls are answered. state_dir: where the journal lies; None: in memory.
    Raises ConfigError, EngineUnavailableError, JournalError.
    """
    parts = build(config, base_dir, state_dir)
    async with AsyncExitStack() as stack:
        # First, so that a store that cannot be used shows before a backend loads its model.
        await parts.scheduler.open_journal(stack)
        stack.push_async_callback(parts.api.stop)
        address = parts.api.bind()
        if parts.front is not None:
            stack.push_async_callback(parts.front.close)
            _log.info("generation gateway: listening on %s", ", ".join(parts.front.bind()))
        parts.scheduler.read_journal()
        if not await start_backends(parts, stack, stop):
            return 0
        await open_front(parts, stack)
        await stack.enter_async_context(running(parts))
        watchdog = LoopWatchdog(config.server.loop_blocked_seconds, parts.api.loop_is_blocked)
        await stack.enter_async_context(watchdog)
        stack.enter_context(_hangup_calls(parts.api))
        # Before the scheduler's own end: streams must not outlive it.
        stack.push_async_callback(parts.api.stop)
        await parts.api.start()
        announce(address)
        await stop.wait()
        _log.info("stopping: no new tasks; running samples have %g seconds", config.server.drain_seconds)
        parts.api.stop_serving()
        parts.step_service.stop()
        await parts.scheduler.drain(config.server.drain_seconds)
    return parts.scheduler.stranded_workers


@asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[None]:
    """Starts and ends the scheduler and what drives it; the backends run by then."""
    async with parts.scheduler, parts.steps, parts.step_service:
        yield


@asynccontextmanager
async def in_process(config: Config, base_dir: Path) -> AsyncIterator[TaskScheduler]:
    """The TaskScheduler of a configuration, with its backends and without a network.

    Where the file names no reuse mode, it is "auto", as in every TaskScheduler, and not a server's "never".
    Raises ConfigError, EngineUnavailableError.
    """
    rollout = msgspec.structs.replace(config.rollout, reuse=config.rollout.reuse.defaulting_to("auto"))
    parts = build(msgspec.structs.replace(config, rollout=rollout), base_dir)
    async with AsyncExitStack() as stack:
        await start_backends(parts, stack, asyncio.Event())
        await open_front(parts, stack)
        await stack.enter_async_context(parts.scheduler)
        yield await stack.enter_async_context(parts.steps)


async def open_front(parts: Parts, stack: AsyncExitStack) -> None:
    """Before the scheduler runs anything, so that it closes after the last episode."""
    if parts.front is not None:
        await stack.enter_async_context(parts.front)


async def start_backends(parts: Parts, stack: AsyncExitStack, stop: asyncio.Event) -> bool:
    """Starts all at once; False when the server is told to stop meanwhile. Whatever happens, they get closed, and none
    of them while it still starts.
    """
    for backend in parts.backends.values():
        stack.push_async_callback(backend.close)
    try:
        async with asyncio.TaskGroup() as tasks:
            ready = {role: asyncio.Event() for role in parts.backends}
            starting = [tasks.create_task(_start_backend(parts, role, ready)) for role in parts.backends]
            stopping = tasks.create_task(_cancel_upon(stop, starting))
            if starting:
                await asyncio.wait(starting)
            stopping.cancel()
    except BaseExceptionGroup as group:
        raise first_of(group) from None
    return not any(task.cancelled() for task in starting)


async def _start_backend(parts: Parts, role: str, ready: dict[str, asyncio.Event]) -> None:
    """Starts one, after the one that it asks. When that one does not start, all of them are cancelled."""
    backend, table = parts.backends[role], parts.config.generation.get(role, {})
    if base := base_role(table):
        await ready[base].wait()
    kind = table.get("kind", type(backend).__name__)
    place = table.get("base_url") or ", ".join(table.get("base_urls", ()))
    if isinstance(backend, MovableBackend):
        place = ", ".join(backend.endpoints.urls)
    if isinstance(backend, MovableBackend) and not place:
        _log.info("engine %s: no server of it is named yet: `py-scheduler endpoints %s URL` names some", role, role)
    else:
        _log.info("engine %s: %s is loading%s", role, kind, place and f" at {place}")
    begun = time.monotonic()
    try:
        await backend.start()
    except EngineUnavailableError as error:
        key = next((name for name in ("base_url", "base_urls") if name in table), "kind")
        raise EngineUnavailableError(f"generation.{role}.{key}: the engine does not start: {error}") from error
    ready[role].set()
    if isinstance(backend, ProbedBackend) and not backend.is_up:
        _log.info("engine %s: none of its servers is up yet; generations wait for one", role)
    else:
        _log.info("engine %s: %s is ready after %.1f s", role, kind, time.monotonic() - begun)


async def _cancel_upon(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    await stop.wait()
    for task in tasks:
        task.cancel()


@contextmanager
def _hangup_calls(api: ApiServer) -> Iterator[None]:
    """SIGHUP has the tokens read again now, and not only with the next call."""
    tokens = api.tokens
    if tokens is None:
        yield
        return
    loop = asyncio.get_running_loop()
    # Not by the loop, which would take over what wakes `stop_signals`.
    before = signal.signal(signal.SIGHUP, lambda _number, _frame: loop.call_soon_threadsafe(tokens.reload))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def stop_limit_seconds(config: Config) -> float:
    """From the signal to the end of the process, at most: beyond it something is stuck, such as the loop itself."""
    return config.server.drain_seconds + config.scheduler.stop_grace_seconds + _EXIT_SECONDS


@contextmanager
def stop_signals(stop: asyncio.Event, exit_seconds: float) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second one, or `exit_seconds` without an end, ends the process at once.

    A thread hears of them. Python calls handlers of signals in the main thread alone, and that may be blocked by a
    call of somebody's: a signal that comes just before such a call begins does not even interrupt it.
    """
    loop = asyncio.get_running_loop()
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    loop_fd = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, _nothing) for number in _STOP_SIGNALS}

    def listen() -> None:
        watchdog: threading.Timer | None = None
        while numbers := hears.recv(64):
            for number in _STOP_SIGNALS.intersection(numbers):
                if watchdog is not None:
                    os._exit(128 + number)
                watchdog = threading.Timer(exit_seconds, _end_hard, (exit_seconds,))
                watchdog.daemon = True
                watchdog.start()
                loop.call_soon_threadsafe(stop.set)
            if loop_fd >= 0:
                with suppress(OSError):
                    os.write(loop_fd, numbers)
        if watchdog is not None:
            watchdog.cancel()

    listener = threading.Thread(target=listen, name="stop signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(loop_fd)
        tells.close()
        listener.join()
        hears.close()


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A signal without a handler would end the process."""


def _end_hard(seconds: float) -> None:
    sys.stderr.write(f"py-scheduler: still not stopped after {seconds:g} seconds; ending\n")
    sys.stderr.flush()
    os._exit(1)


def run(config: Config, config_file: Path) -> None:
    """`py-scheduler serve`: serves until a signal comes. Raises what `serve` raises."""
    base_dir = config_file.resolve().parent
    # Handlers may lie beside the configuration that names them; last, so that nothing there hides an installed module.
    sys.path.append(str(base_dir))
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    _log.info("py-scheduler %s, configuration %s", version(), config_file)
    for warning in hand_set_warnings(os.environ):
        _log.warning(warning)

    def announce(address: str) -> None:
        sys.stdout.write(f"listening on {address}\n")
        sys.stdout.flush()

    state_dir = state_dir_of(config, config_file)
    if state_dir is None:
        _log.warning("no journal: what is acknowledged does not survive this process")
    else:
        _log.info("journal: %s", state_dir)
        sys.setswitchinterval(_SWITCH_SECONDS)
    _tune_collector()

    async def main() -> int:
        asyncio.get_running_loop().set_task_factory(contained_task)
        stop = asyncio.Event()
        with stop_signals(stop, stop_limit_seconds(config)):
            return await serve(config, base_dir, announce, stop, state_dir)

    with asyncio.Runner(loop_factory=_loop_factory(config)) as runner:
        stranded = runner.run(main())
        if stranded:
            # The runner would wait for them; nothing but the end of the process stops them.
            _log.warning("%d handlers did not end: ending without them", stranded)
            logging.shutdown()
            os._exit(0)


def _tune_collector() -> None:
    """Hundreds of thousands of waiting tasks are no garbage, and hold no cycles: look for those less often.

    At the default thresholds the collector took a third of the processor time of a full queue.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if config.server.event_loop == "asyncio":
        return None
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError as error:
        if config.server.event_loop == "uvloop":
            reason = "uvloop is not installed: install the extra 'uvloop' of py-scheduler, or say 'auto'"
            raise ConfigError(reason, "server.event_loop") from error
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
