"""What becomes of a sample whose handler meets a real fault: one table, every outcome, on the real engine.

The faults are brought about, not made up: connections that are refused, reset, cut short or never answered, processes
that fail or hang, a full disk, no file descriptors left.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import subprocess
import urllib.request
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import aiohttp
import grpc
import grpc.aio
import pytest

from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone
from py_scheduler.domain.generation import StoppingCriteria
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.errors import EngineUnavailableError, SandboxError
from tests.support.handlers import ScriptedAgent, spec_of
from tests.support.harness import running_engine, samples_in, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from py_scheduler.domain.evaluator import Episode

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SOON = 0.05


# Peers that fail


def nobody() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def peer(serve: Serve) -> AsyncIterator[int]:
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.close()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def cuts_short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
    writer.close()


async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1024):
        pass
    writer.close()


async def is_overloaded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    writer.close()


# Handlers that meet them


def over_http(serve: Serve | None, **timeout: float) -> Callable[[Episode], Awaitable[AgentResult]]:
    async def run(_: Episode) -> AgentResult:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(**timeout), raise_for_status=True) as session:
            if serve is None:
                await session.get(f"http://127.0.0.1:{nobody()}/")
                raise AssertionError("unreachable")
            async with peer(serve) as port, session.get(f"http://127.0.0.1:{port}/") as answer:
                await answer.read()
        raise AssertionError("unreachable")

    return run


async def over_grpc_to_nobody(_: Episode) -> AgentResult:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{nobody()}") as channel:
        await channel.unary_unary("/a/b")(b"", timeout=5)  # type: ignore[arg-type]
    raise AssertionError("unreachable")


async def over_grpc_to_silence(_: Episode) -> AgentResult:
    async with peer(is_silent) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.unary_unary("/a/b")(b"", timeout=SOON, wait_for_ready=True)  # type: ignore[arg-type]
    raise AssertionError("unreachable")


async def over_blocking_grpc(_: Episode) -> AgentResult:
    def call() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{nobody()}") as channel:
            channel.unary_unary("/a/b")(b"", timeout=5)  # type: ignore[arg-type]

    await asyncio.to_thread(call)
    raise AssertionError("unreachable")


def over_a_socket(serve: Serve) -> Callable[[Episode], Awaitable[AgentResult]]:
    async def run(_: Episode) -> AgentResult:
        async with peer(serve) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"x")
                await reader.readexactly(4)
            finally:
                writer.close()
        raise AssertionError("unreachable")

    return run


async def blocking_socket_to_silence(_: Episode) -> AgentResult:
    async with peer(is_silent) as port:
        # Not in a thread: what comes out of one is another TimeoutError, of which nobody can say where it is from.
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=SOON)  # noqa: ASYNC210
    raise AssertionError("unreachable")


async def urlopen_to_nobody(_: Episode) -> AgentResult:
    await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{nobody()}/")
    raise AssertionError("unreachable")


async def no_such_host(_: Episode) -> AgentResult:
    await asyncio.get_running_loop().getaddrinfo("nowhere.invalid", 80)
    raise AssertionError("unreachable")


async def the_peer_does_not_answer(_: Episode) -> AgentResult:
    raise OSError(110, "Connection timed out")  # what a connect raises after minutes; a TimeoutError by class


async def broken_pipe(_: Episode) -> AgentResult:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"x")
    finally:
        os.close(writing)
    raise AssertionError("unreachable")


async def own_timeout(_: Episode) -> AgentResult:
    async with asyncio.timeout(SOON):
        await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def wait_for_own_timeout(_: Episode) -> AgentResult:
    await asyncio.wait_for(asyncio.Event().wait(), SOON)
    raise AssertionError("unreachable")


async def failing_process(_: Episode) -> AgentResult:
    await asyncio.to_thread(subprocess.run, ["false"], check=True)
    raise AssertionError("unreachable")


async def hanging_process(_: Episode) -> AgentResult:
    await asyncio.to_thread(subprocess.run, ["sleep", "30"], check=True, timeout=SOON)
    raise AssertionError("unreachable")


async def no_such_program(_: Episode) -> AgentResult:
    await asyncio.create_subprocess_exec("/nonexistent/program")
    raise AssertionError("unreachable")


async def out_of_memory(_: Episode) -> AgentResult:
    bytearray(1 << 62)
    raise AssertionError("unreachable")


async def full_disk(_: Episode) -> AgentResult:
    device = os.open("/dev/full", os.O_WRONLY)
    try:
        os.write(device, b"x")
    finally:
        os.close(device)
    raise AssertionError("unreachable")


async def no_descriptors(_: Episode) -> AgentResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        os.open(os.devnull, os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise AssertionError("unreachable")


async def several_at_once(_: Episode) -> AgentResult:
    async def fails(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in (KeyError("x"), ValueError("y"), ConnectionResetError("z")):
            group.create_task(fails(error))
    raise AssertionError("unreachable")


async def caused(_: Episode) -> AgentResult:
    try:
        await over_http(None)(_)
    except aiohttp.ClientError as error:
        raise ValueError("the tool gave no answer") from error
    raise AssertionError("unreachable")


async def cancels_itself(_: Episode) -> AgentResult:
    raise asyncio.CancelledError


async def no_room(episode: Episode) -> AgentResult:
    episode.observe(range(8))
    await episode.generate()
    raise AssertionError("unreachable")


def raising(error: BaseException) -> Callable[[Episode], Awaitable[AgentResult]]:
    async def run(_: Episode) -> AgentResult:
        raise error

    return run


def returning(reason: str, score: float) -> Callable[[Episode], Awaitable[AgentResult]]:
    async def run(_: Episode) -> AgentResult:
        return AgentResult(termination_reason=reason, answer=str(score))

    return run


class TableAgent(ScriptedAgent):
    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=float(result.answer))


# name: what the handler does, the outcome, the exception that the record names
TABLE: dict[str, tuple[Callable[[Episode], Awaitable[AgentResult]], Outcome, str]] = {
    "solves": (returning("", 1.0), Outcome.SOLVED, ""),
    "is wrong": (returning("", 0.0), Outcome.WRONG_ANSWER, ""),
    "runs out of turns": (returning("max_turns", 0.0), Outcome.MAX_TURNS, ""),
    "runs out of context": (returning("context_overflow", 0.0), Outcome.CONTEXT_OVERFLOW, ""),
    "max_context_len": (no_room, Outcome.CONTEXT_OVERFLOW, "ContextOverflowError"),
    "asyncio.timeout": (own_timeout, Outcome.AGENT_TIMEOUT, "TimeoutError"),
    "asyncio.wait_for": (wait_for_own_timeout, Outcome.AGENT_TIMEOUT, "TimeoutError"),
    "aiohttp, nobody there": (over_http(None), Outcome.INFRA_CONN, "ClientConnectorError"),
    "aiohttp, hung up": (over_http(hangs_up), Outcome.INFRA_CONN, "ServerDisconnectedError"),
    "aiohttp, reset": (over_http(resets), Outcome.INFRA_CONN, "Client"),
    "aiohttp, cut short": (over_http(cuts_short), Outcome.INFRA_CONN, "ClientPayloadError"),
    "aiohttp, silence": (over_http(is_silent, sock_read=SOON), Outcome.INFRA_CONN, "SocketTimeoutError"),
    "aiohttp, total": (over_http(is_silent, total=SOON), Outcome.INFRA_CONN, "TimeoutError"),
    "aiohttp, 503": (over_http(is_overloaded), Outcome.INFRA_CONN, "ClientResponseError"),
    "grpc, nobody there": (over_grpc_to_nobody, Outcome.INFRA_CONN, "AioRpcError"),
    "grpc, deadline": (over_grpc_to_silence, Outcome.INFRA_CONN, "DEADLINE_EXCEEDED"),
    "grpc, blocking": (over_blocking_grpc, Outcome.INFRA_CONN, "InactiveRpcError"),
    "socket, hung up": (over_a_socket(hangs_up), Outcome.INFRA_CONN, "IncompleteReadError"),
    "socket, reset": (over_a_socket(resets), Outcome.INFRA_CONN, "ConnectionResetError"),
    "socket, its timeout": (blocking_socket_to_silence, Outcome.INFRA_CONN, "TimeoutError"),
    "urllib, nobody there": (urlopen_to_nobody, Outcome.INFRA_CONN, "URLError"),
    "name resolution": (no_such_host, Outcome.INFRA_CONN, "gaierror"),
    "ETIMEDOUT": (the_peer_does_not_answer, Outcome.INFRA_CONN, "TimeoutError"),
    "broken pipe": (broken_pipe, Outcome.INFRA_CONN, "BrokenPipeError"),
    "engine": (raising(EngineUnavailableError("all attempts failed")), Outcome.INFRA_CONN, "EngineUnavailableError"),
    "sandbox": (raising(SandboxError("no namespace")), Outcome.INFRA_SANDBOX, "SandboxError"),
    "process failed": (failing_process, Outcome.INFRA_SANDBOX, "CalledProcessError"),
    "process hangs": (hanging_process, Outcome.INFRA_SANDBOX, "TimeoutExpired"),
    "no such program": (no_such_program, Outcome.INFRA_OTHER, "FileNotFoundError"),
    "memory": (out_of_memory, Outcome.INFRA_OTHER, "MemoryError"),
    "ENOSPC": (full_disk, Outcome.INFRA_OTHER, "No space left"),
    "EMFILE": (no_descriptors, Outcome.INFRA_OTHER, "Too many open files"),
    "unknown": (raising(KeyError("x")), Outcome.INFRA_OTHER, "KeyError"),
    "SystemExit": (raising(SystemExit(3)), Outcome.INFRA_OTHER, "SystemExit"),
    "its own cancel": (cancels_itself, Outcome.INFRA_OTHER, "CancelledError"),
    "a group of faults": (several_at_once, Outcome.INFRA_CONN, "ExceptionGroup"),
    "a fault with a cause": (caused, Outcome.INFRA_CONN, "ValueError"),
}


async def test_every_outcome_by_what_really_happened() -> None:
    agent = TableAgent(**{name: does for name, (does, _, _) in TABLE.items()})
    stopping = StoppingCriteria(max_context_len=8)
    async with running_engine(spec_of(agent, default_stopping=stopping)) as harness:
        reply = await harness.submit([task_of(name) for name in TABLE])
        records = await harness.records_until_done(reply)
    samples = {sample.task_id: sample for sample in samples_in(records)}
    got = {name: samples[task_id].outcome for name, task_id in zip(TABLE, reply.task_ids, strict=True)}
    assert got == {name: outcome for name, (_, outcome, _) in TABLE.items()}
    assert set(got.values()) == set(Outcome) - {Outcome.ABORTED}, "all eight"
    for (name, (_, _, said)), task_id in zip(TABLE.items(), reply.task_ids, strict=True):
        sample = samples[task_id]
        assert said in sample.error, name
        assert (sample.phase == "run") == bool(said), name
        assert not said or sample.reward.score == 0.0
    for kind in (AttemptStarted, AttemptEnded, TaskDone):
        ids = [record.event.task_id for record in records if isinstance(record.event, kind)]
        assert sorted(ids) == sorted(reply.task_ids), "each exactly once"


@pytest.mark.parametrize("name", ["asyncio.timeout", "aiohttp, nobody there", "sandbox", "unknown"])
async def test_a_fault_in_eval_is_the_same_fault(name: str) -> None:
    does, outcome, said = TABLE[name]

    class FailingScorer(ScriptedAgent):
        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            await does(episode)
            raise AssertionError("unreachable")

    async with running_engine(spec_of(FailingScorer())) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    assert (sample.outcome, sample.phase) == (outcome, "eval")
    assert said in sample.error
