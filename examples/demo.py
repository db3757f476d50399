"""A whole rollout on one machine: a server process with a real language model, and this process as its client.

    python examples/demo.py [--groups 24] [--samples 4]

Tasks of three reasoning-gym data sets go out over gRPC; their samples come back while others still run. At the end come
a table, and the trajectories in demo_output/. The server is stopped whatever happens. Exits with 1 unless every task
finished and at least one sample says something about the model.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from py_scheduler import (
    Origin,
    Outcome,
    RolloutSummary,
    SampleDone,
    SchedulerClient,
    SchedulerError,
    TaskDone,
    TaskState,
    summarise,
    summary_table,
    write_trajectories,
)
from py_scheduler.integrations.reasoning_gym import reasoning_gym_mixture

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import BinaryIO

    from py_scheduler import ServerInfo, Task

HERE = Path(__file__).parent
DATASETS = {
    "letter_counting": {"min_words": 2, "max_words": 4},
    "lcm": {"min_value": 1, "max_value": 6},
    "count_bits": {"max_n": 8},
}
START_SECONDS = 180.0
STOP_SECONDS = 30.0
LISTENING = re.compile(rb"^listening on (\S+)")
LOG_TAIL_LINES = 30
LINE_SECONDS = 10.0
BATCH_ID = 0


class ServerFailedError(Exception):
    """The server did not come up."""


@asynccontextmanager
async def server(config: Path, log: Path) -> AsyncIterator[str]:
    """Runs `py-scheduler serve` until the block is left, however it is left; gives its address.

    Raises ServerFailedError.
    """
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "py_scheduler.cli",
            "serve",
            "--config",
            str(config),
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            # Ctrl-C reaches the demo alone, which then stops the server in order.
            start_new_session=True,
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(read_output(process, sink, address))
        try:
            await asyncio.wait((address, reading), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                how = f"ended with code {await process.wait()}" if reading.done() else f"took over {START_SECONDS:g} s"
                raise ServerFailedError(f"the server {how} before it listened")
            yield address.result()
        finally:
            await stop(process)
            await reading


async def read_output(process: asyncio.subprocess.Process, sink: BinaryIO, address: asyncio.Future[str]) -> None:
    """To its end, since a full pipe would hold the server up."""
    assert process.stdout is not None
    async for line in process.stdout:
        sink.write(line)
        if (found := LISTENING.match(line)) and not address.done():
            address.set_result(found[1].decode())


async def stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def log_tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-LOG_TAIL_LINES:])


class Rollout(msgspec.Struct):
    """What came back so far."""

    samples: list[SampleDone] = []
    tasks_done: list[TaskDone] = []
    tasks: dict[str, Task] = {}
    server: ServerInfo | None = None
    elapsed_seconds: float = 0.0


async def roll_out(address: str, tasks: list[Task], rollout: Rollout, console: Console) -> None:
    """Fills `rollout` while it goes, so that what was finished is there when it is broken off."""
    total = sum(task.config.repeat_times for task in tasks)
    request_id = uuid.uuid4().hex
    async with SchedulerClient(address) as client:
        rollout.server = await client.server_info()
        started = time.perf_counter()
        # Sent twice and accepted once, by its request_id: the first time for the ids, the second for the events.
        submission = await client.submit(tasks, BATCH_ID, request_id=request_id)
        rollout.tasks.update(zip(submission.task_ids, tasks, strict=True))
        events = client.rollout(tasks, batch_id=BATCH_ID, request_id=request_id, abort_on_exit=True)
        with SampleProgress(console, total) as progress:
            async for event in events:
                if isinstance(event, SampleDone):
                    rollout.samples.append(event)
                    progress.advance(event)
                else:
                    rollout.tasks_done.append(event)
        rollout.elapsed_seconds = time.perf_counter() - started


class SampleProgress:
    """A live bar on a terminal; elsewhere a line at the first sample, the last, and now and then."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._finished = self._solved = 0
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("rolling out"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples, {task.fields[solved]} solved"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task("", total=total, solved=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, sample: SampleDone) -> None:
        self._finished += 1
        self._solved += sample.outcome is Outcome.SOLVED
        self._bar.update(self._row, completed=self._finished, solved=self._solved)
        now = time.monotonic()
        if not self._console.is_terminal and (now >= self._next_line or self._finished == self._total):
            self._next_line = now + LINE_SECONDS
            self._console.print(f"{self._finished}/{self._total} samples, {self._solved} solved")


def show(rollout: Rollout, summary: RolloutSummary, console: Console) -> None:
    console.print(summary_table(summary, title="Outcomes"))
    assert rollout.server is not None
    total, elapsed = summary.total, rollout.elapsed_seconds
    share = rollout.server.evaluators[0].sample_resource.gpu
    gpus = sum(len(node.gpu_ids) for node in rollout.server.nodes)
    use = total.held_seconds * share / (gpus * elapsed)
    console.print(
        f"{len(rollout.tasks_done)} groups, {total.samples} samples in {elapsed:.1f} s: "
        f"{total.prompt_tokens} prompt and {total.generated_tokens} generated tokens, "
        f"{total.generated_tokens / elapsed:.1f} generated tokens/s\n"
        f"placement held {100 * use:.0f} % of the GPU·seconds of {gpus} GPUs on {len(rollout.server.nodes)} nodes, "
        f"{share:g} GPU a sample\n"
        f"a sample waited {total.mean_wait_seconds:.1f} s and ran {total.mean_run_seconds:.1f} s on average, "
        f"{total.generate_seconds / max(1, total.samples):.1f} s of it generating"
    )


def show_sample(rollout: Rollout, console: Console) -> None:
    """A solved one if there is one."""
    sample = max(rollout.samples, key=lambda sample: (sample.outcome is Outcome.SOLVED, sample.reward.score))
    trajectory, details = sample.trajectory, sample.reward.details
    generated = trajectory.loss_mask == 1
    log_probs = [round(float(value), 3) for value in trajectory.log_probs[generated]]
    kinds = ", ".join(sorted({turn.log_prob_kind for turn in trajectory.turns if turn.log_prob_kind}))
    facts = {
        "question": details.get("question", ""),
        "answer": f"{details.get('answer', '')!r}, expected {details.get('expected', '')!r}",
        "outcome": f"{sample.outcome}, reward {sample.reward.score:.2f}",
        "placed on": f"{sample.node_ip}, gpu {list(sample.gpu_ids)}",
        "tokens": f"{len(trajectory)}, of them generated {trajectory.token_ids[generated].tolist()}",
        "log-probs": f"{log_probs} ({kinds})",
        "weights": ", ".join(f"{span.version} [{span.start}, {span.end})" for span in trajectory.weight_spans),
    }
    text = "\n".join(f"{name:10} {fact}" for name, fact in facts.items())
    title = f"one sample of {rollout.tasks[sample.task_id].config.dataset}"
    console.print(Panel(escape(text), title=title, title_align="left"))


def keep(rollout: Rollout, folder: Path) -> str:
    """Writes what was finished, and says so."""
    path = folder / "trajectories.parquet"
    model = rollout.server.engines[0].model_name if rollout.server else ""
    written = write_trajectories(path, rollout.samples, rollout.tasks, Origin(batch_id=BATCH_ID, model=model))
    return f"{written} trajectories: {path}"


def is_success(rollout: Rollout, planned: int) -> bool:
    finished = sum(event.state is TaskState.SUCCEEDED for event in rollout.tasks_done)
    return finished == planned and any(sample.outcome.is_model_result for sample in rollout.samples)


async def demo(options: argparse.Namespace, console: Console) -> int:
    tasks = reasoning_gym_mixture(DATASETS, count=options.groups, seed=options.seed, repeat_times=options.samples)
    log = options.output / "server.log"
    rollout = Rollout()
    console.print(f"starting the server with {options.config} (its log: {log})")
    try:
        async with server(options.config, log) as address:
            console.print(f"the server listens on {address}; {len(tasks)} groups of {options.samples} samples go out")
            await roll_out(address, tasks, rollout, console)
    except BaseException as error:
        if rollout.samples:
            console.print(f"broken off; {keep(rollout, options.output)}", soft_wrap=True)
        if not isinstance(error, asyncio.CancelledError) and (tail := log_tail(log)):
            console.print(f"the end of {log}:\n{tail}", markup=False, highlight=False, style="dim")
        if isinstance(error, ServerFailedError | SchedulerError):
            console.print(f"the demo failed: {error}", markup=False, style="red")
            return 1
        raise
    summary = summarise(rollout.samples, rollout.tasks)
    show(rollout, summary, console)
    kept = keep(rollout, options.output)
    show_sample(rollout, console)
    console.print(kept, soft_wrap=True)
    if is_success(rollout, len(tasks)):
        return 0
    console.print(f"not every task finished, or nothing but infrastructure failed: see {log}", style="red")
    return 1


async def until_told_to_stop(options: argparse.Namespace, console: Console) -> int:
    """SIGTERM ends the demo as Ctrl-C does: in order, the server included."""
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await demo(options, console)


def main() -> int:
    parser = argparse.ArgumentParser(description="A rollout from gRPC to a real language model and back.")
    parser.add_argument("--groups", type=int, default=24, help="tasks (default %(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="samples of each task (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo_output")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    # A pipe or a file has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return asyncio.run(until_told_to_stop(options, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
