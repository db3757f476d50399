"""What leasing room from another process costs: acquire and release over gRPC, one call after another.

    python benches/placement_service.py [--cycles 1500] [--json out.json]

Prints cycles (one acquire and one release) per second for leases of 1 and of 64 tokens, and how many times longer one
took than two bare grpc.aio unary echoes of the same sizes in the same run. Every lease is checked for its tokens and
for a rising fencing token before anything is reported, and the pool for being whole at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import msgspec

from benches._grpc_echo import Traffic, echo_seconds
from benches._server_process import server_process
from py_scheduler.client import PlacementClient
from py_scheduler.domain.leases import AcquireRequest, LeaseState, LeaseTerms, LeaseView, PlacementDemand, ReleaseReply
from py_scheduler.domain.resources import Resource
from py_scheduler.wire import placement as wire

HERE = Path(__file__).parent
BATCHES = (1, 64)
ROUNDS = 5
SAMPLE = Resource(gpu=0.125, cpu=0.125, memory_gb=0.5)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One size of lease. The seconds and the ratio are those of the median round."""

    tokens: int
    cycles_per_second: float
    tokens_per_second: float
    us_per_cycle: float
    server_cpu_us_per_cycle: float
    echo_us_per_cycle: float
    echo_ratio: float


async def lease_and_release(client: PlacementClient, tokens: int, cycles: int) -> list[LeaseView]:
    leases = []
    for _ in range(cycles):
        lease = await client.acquire(SAMPLE, tokens)
        await client.release(lease)
        leases.append(lease)
    return leases


def check(leases: list[LeaseView], tokens: int) -> None:
    """Raises AssertionError unless each was granted whole, in turn."""
    assert all(lease.state is LeaseState.GRANTED and len(lease.tokens) == tokens for lease in leases)
    fencing_tokens = [lease.fencing_token for lease in leases]
    assert fencing_tokens == sorted(set(fencing_tokens))


def traffic_of(lease: LeaseView, cycles: int) -> Traffic:
    """The frames of so many cycles: (sent, received) of an acquire, then of a release."""
    demand = PlacementDemand(per_sample=SAMPLE, max_tokens=len(lease.tokens))
    terms = LeaseTerms(batch_id=0, demand=demand, ttl_seconds=30.0)
    asked = wire.encode_acquire_request(AcquireRequest(request_id="0" * 32, terms=terms, wait=True))
    released = wire.encode_release_reply(ReleaseReply(released_tokens=len(lease.tokens), held_tokens=0))
    # A release sends its id, the lease's and the fencing token.
    calls = [(asked.ByteSize(), wire.encode_lease(lease).ByteSize()), (72, released.ByteSize())]
    return Traffic(calls * cycles, [])


async def measure(cycles: int) -> list[Row]:
    serve = ["-m", "py_scheduler.cli", "serve", "--config", str(HERE / "noop.toml")]
    echo_server = [str(HERE / "_grpc_echo.py")]
    async with (
        server_process(serve) as server,
        server_process(echo_server) as echo,
        PlacementClient(server.address) as client,
    ):
        rows = []
        for tokens in BATCHES:
            warm = await lease_and_release(client, tokens, cycles // 5)
            traffic = traffic_of(warm[-1], cycles)
            rounds = []
            # In turns, so that a busy machine slows both.
            for _ in range(ROUNDS):
                cpu, started = server.cpu_seconds(), time.perf_counter()
                leases = await lease_and_release(client, tokens, cycles)
                seconds = time.perf_counter() - started
                cpu = server.cpu_seconds() - cpu
                check(leases, tokens)
                rounds.append((seconds, cpu, await echo_seconds(echo.address, traffic)))
            rows.append(row_of(tokens, cycles, rounds))
        capacity = await client.capacity(SAMPLE)
        assert capacity.free_tokens == capacity.max_tokens, "a lease was not given back"
        return rows


def row_of(tokens: int, cycles: int, rounds: list[tuple[float, float, float]]) -> Row:
    seconds = statistics.median(seconds for seconds, _, _ in rounds)
    return Row(
        tokens=tokens,
        cycles_per_second=cycles / seconds,
        tokens_per_second=cycles * tokens / seconds,
        us_per_cycle=seconds / cycles * 1e6,
        server_cpu_us_per_cycle=statistics.median(cpu for _, cpu, _ in rounds) / cycles * 1e6,
        echo_us_per_cycle=statistics.median(echo for _, _, echo in rounds) / cycles * 1e6,
        echo_ratio=statistics.median(seconds / echo for seconds, _, echo in rounds),
    )


def show(rows: list[Row]) -> None:
    for row in rows:
        print(
            f"lease of {row.tokens} tokens: {row.cycles_per_second:,.0f} acquire + release/s "
            f"({row.tokens_per_second:,.0f} tokens/s), {row.us_per_cycle:.0f} µs each, "
            f"server CPU {row.server_cpu_us_per_cycle:.0f} µs\n"
            f"  two bare grpc.aio echoes of the same sizes: {row.echo_us_per_cycle:.0f} µs, ratio {row.echo_ratio:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Leases between a client and a server process.")
    parser.add_argument("--cycles", type=int, default=1_500, help="of each of five rounds")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.cycles))
    show(rows)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


if __name__ == "__main__":
    main()
