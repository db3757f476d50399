"""How long an event is under way from the server to a watcher, beside a bare grpc.aio stream in the same run.

    python benches/delivery_latency.py [--events 5000] [--rate 200] [--journal on|off] [--json out.json]

Two servers at once: the service, and bare grpc.aio that streams messages of the same size, each stamped when it is
sent. In turn a task is submitted whose handler stamps its end with the clock that all processes of a machine share,
and the bare server is asked for a message, so that both meet the same machine. What is measured is from the stamp to
the client's hands: for the service that is the report, the ledger, the journal's commit if there is one, the stream
and the decoding; for the bare stream the message alone. The goal is p50 within 1.25 times and p99 within 1.5 times of
the bare stream.

To see where the time goes: py-spy on the server, whose pid is printed (`py-spy record -p PID`); with `--journal off`
the commit is out of the way, which is most of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec

from benches._server_process import server_process
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = Path(__file__).parent
GOAL_P50, GOAL_P99 = 1.25, 1.5
WARM_UP = 100
_SAY, _HEAR = "/bench.Latency/Say", "/bench.Latency/Hear"
CONFIG = """
[server]
listen = "127.0.0.1:0"
log_level = "warning"
[journal]
state_dir = "{state_dir}"
[[evaluator]]
evaluator_id = "stamp"
handler = "benches.noop_agent:StampingAgent"
resource = {{ concurrency = 64 }}
"""


class Latencies(msgspec.Struct, frozen=True):
    """Milliseconds, of one way."""

    p50: float
    p99: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    journal: bool
    events: int
    rate: float
    service: Latencies
    bare: Latencies

    @property
    def ratios(self) -> tuple[float, float]:
        return self.service.p50 / self.bare.p50, self.service.p99 / self.bare.p99


def _latencies(seconds: list[float]) -> Latencies:
    ordered = sorted(seconds)
    return Latencies(1e3 * ordered[len(ordered) // 2], 1e3 * ordered[int(len(ordered) * 0.99)])


# The two servers


class _Bare(grpc.GenericRpcHandler):
    """`Say` has `Hear`, a stream, give a message of so many bytes that begins with the time."""

    def __init__(self) -> None:
        self._wanted: asyncio.Queue[int] = asyncio.Queue()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if handler_call_details.method == _SAY:
            return grpc.unary_unary_rpc_method_handler(self._say)
        return grpc.unary_stream_rpc_method_handler(self._hear)

    async def _say(self, request: bytes, context: object) -> bytes:  # noqa: ARG002
        self._wanted.put_nowait(int(request))
        return b""

    async def _hear(self, request: bytes, context: object) -> AsyncIterator[bytes]:  # noqa: ARG002
        while True:
            size = await self._wanted.get()
            yield repr(time.monotonic()).encode().ljust(size)


async def serve_bare() -> None:
    """Until SIGTERM."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Bare(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await stopped.wait()
    await server.stop(grace=0.0)


def _run_bare() -> None:
    """On the loop that the service chooses, too: uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 (optional)
    except ImportError:
        asyncio.run(serve_bare())
    else:
        uvloop.run(serve_bare())


# The measurement


async def _hear_service(
    client: SchedulerClient, submission_ready: asyncio.Event, heard: list[float], count: int
) -> None:
    frames = client.watch(kinds=[EventKind.ATTEMPT_ENDED])
    async with aclosing(frames):
        await anext(frames)
        submission_ready.set()
        async for frame in frames:
            now = time.monotonic()
            for record in frame.records:
                assert isinstance(record.event, AttemptEnded)
                (sample,) = record.event.samples
                assert sample.reward is not None
                heard.append(now - sample.reward.score)
            if len(heard) >= count:
                return


async def _hear_bare(call: Any, heard: list[float], count: int) -> None:
    while len(heard) < count:
        message = await call.read()
        heard.append(time.monotonic() - float(message[:24].split()[0]))


async def measure(events: int, rate: float, *, journal: bool, event_bytes: int = 160) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "scheduler.toml"
        config.write_text(CONFIG.format(state_dir=f"{folder}/state"))
        serve = ["-m", "py_scheduler.cli", "serve", "--config", str(config), *([] if journal else ["--no-journal"])]
        async with (
            server_process(serve) as server,
            server_process([str(HERE / "delivery_latency.py"), "--serve-bare"]) as bare,
            SchedulerClient(server.address) as client,
            grpc.aio.insecure_channel(bare.address) as channel,
        ):
            print(f"server: pid {server.pid}, {server.address}")
            count = events + WARM_UP
            served: list[float] = []
            bared: list[float] = []
            ready = asyncio.Event()
            say: Any = channel.unary_unary(_SAY)
            hear: Any = channel.unary_stream(_HEAR)
            async with asyncio.timeout(120 + 4 * count / rate), asyncio.TaskGroup() as tasks:
                tasks.create_task(_hear_service(client, ready, served, count))
                tasks.create_task(_hear_bare(hear(b""), bared, count))
                await ready.wait()
                begun = time.monotonic()
                for number in range(count):
                    await client.submit([Task(config=TaskConfig(task_type="stamp"))], number)
                    await say(str(event_bytes).encode())
                    await asyncio.sleep(max(0.0, begun + (number + 1) / rate - time.monotonic()))
    assert len(served) == len(bared) == count, "every event came once"
    return Report(
        journal=journal,
        events=events,
        rate=rate,
        service=_latencies(served[WARM_UP:]),
        bare=_latencies(bared[WARM_UP:]),
    )


def show(report: Report) -> None:
    p50, p99 = report.ratios
    print(
        f"{report.events} events, at most {report.rate:g} a second, the journal {'on' if report.journal else 'off'}\n"
        f"  service:   p50 {report.service.p50:.3f} ms, p99 {report.service.p99:.3f} ms\n"
        f"  bare gRPC: p50 {report.bare.p50:.3f} ms, p99 {report.bare.p99:.3f} ms\n"
        f"  ratio:     p50 {p50:.2f} (goal {GOAL_P50}: {'reached' if p50 <= GOAL_P50 else 'not reached'}), "
        f"p99 {p99:.2f} (goal {GOAL_P99}: {'reached' if p99 <= GOAL_P99 else 'not reached'})"
    )
    if p50 > GOAL_P50 or p99 > GOAL_P99:
        print("  what stands between: `py-spy record --pid PID --threads -o out.svg` while it runs again; the way is")
        print(
            "  scheduler/event_log, wire/events (encode_record) and client (decode_frame), the commit _journal_writer"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="From an event to its watcher, beside a bare stream.")
    parser.add_argument("--events", type=int, default=5_000)
    parser.add_argument("--rate", type=float, default=200.0, help="events a second at most; default: %(default)s")
    parser.add_argument("--journal", choices=("on", "off", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the reports there as well")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        _run_bare()
        return
    reports = []
    for journal in {"on": (True,), "off": (False,), "both": (False, True)}[options.journal]:
        reports.append(asyncio.run(measure(options.events, options.rate, journal=journal)))
        show(reports[-1])
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")


if __name__ == "__main__":
    main()
