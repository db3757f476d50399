"""SubTasks of several samples on a runner of the engine: payloads, timeouts, restarts that are asked for, fencing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.events import AttemptEnded, AttemptRef
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.execution.attempt import AttemptReport, stopped_report
from py_scheduler.execution.run_sample import InlineRunner
from py_scheduler.scheduler.ledger.commands import EndAttempt
from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.trainers.collecting import collect, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.workers import Worker


class Whole(InlineRunner):
    """Runs a sub-task as one thing, as Trinity's runners do: `takes_seconds` says how long, None for ever."""

    def __init__(self, clock: FakeClock, takes_seconds: Callable[[RunningAttempt], float | None]) -> None:
        self._clock = clock
        self._takes_seconds = takes_seconds
        self.attempts: list[RunningAttempt] = []

    async def run(self, running: RunningAttempt, worker: Worker, *_: object) -> AttemptReport:
        self.attempts.append(running)
        over = asyncio.Event()
        seconds = self._takes_seconds(running)
        if seconds is not None:
            self._clock.call_at(self._clock.now + seconds, over.set)
        try:
            await over.wait()
        except asyncio.CancelledError:
            if worker.is_closing:
                raise
            await worker.absorb_cancellation()
            return stopped_report(running)
        return whole_report(running)


def whole_report(running: RunningAttempt) -> AttemptReport:
    planned = running.planned
    numbers = range(planned.first_sample_no, planned.first_sample_no + planned.sample_count)
    samples = tuple(
        SampleDone(
            task_id=planned.ref.task_id,
            sample_no=number,
            attempt_no=planned.ref.attempt_no,
            outcome=Outcome.SOLVED,
            metrics={"reward": float(number)},
        )
        for number in numbers
    )
    payload = f"{numbers.start}..{numbers.stop} of attempt {planned.ref.attempt_no}".encode()
    return AttemptReport(AttemptState.SUCCEEDED, samples, payload=payload)


async def test_payloads_come_in_the_order_in_which_subtasks_end_and_metrics_of_all_runs() -> None:
    clock = FakeClock()
    runner = Whole(clock, lambda running: 10.0 - running.planned.first_sample_no)
    async with running_engine(spec_of(SolvingAgent()), clock=clock, runners={"agent": runner}) as harness:
        reply = await schedule(harness.engine, [task_of(repeat_times=5, max_samples_per_subtask=2)])
        await settle()
        await clock.advance(10)
        collected = await collect(harness.engine)
        assert collected.payloads == [b"4..5 of attempt 1", b"2..4 of attempt 1", b"0..2 of attempt 1"]
        (result,) = collected.results
        assert [sample.sample_no for sample in result.samples] == [0, 1, 2, 3, 4]
        assert (result.metrics["reward"], result.metrics["time/task_execution"]) == (2.0, 8.0)
        ended = [
            record.event for record in await harness.records_until_done(reply) if isinstance(record.event, AttemptEnded)
        ]
        assert {event.subtask_no: event.payload for event in ended}[2] == b"4..5 of attempt 1"
        assert harness.engine.history.running_seconds == 24.0


async def test_an_attempt_that_takes_too_long_is_stopped_before_the_next_one_begins() -> None:
    clock = FakeClock()
    runner = Whole(clock, lambda running: None if running.ref.attempt_no == 1 else 1.0)
    async with running_engine(spec_of(SolvingAgent()), clock=clock, runners={"agent": runner}) as harness:
        task = task_of(
            repeat_times=2,
            max_samples_per_subtask=None,
            attempt_timeout_seconds=30.0,
            retry=RetryPolicy(max_retries=1),
        )
        await schedule(harness.engine, [task])
        await settle()
        await clock.advance(29)
        assert len(runner.attempts) == 1
        await clock.advance(1)
        assert [running.ref.attempt_no for running in runner.attempts] == [1, 2]
        assert runner.attempts[0].is_over
        await clock.advance(1)
        collected = await collect(harness.engine)
        assert collected.payloads == [b"0..2 of attempt 2"]


async def test_a_late_report_of_attempt_1_after_attempt_2_began_changes_nothing() -> None:
    clock = FakeClock()
    runner = Whole(clock, lambda running: None if running.ref.attempt_no == 1 else 2.0)
    async with running_engine(spec_of(SolvingAgent()), clock=clock, runners={"agent": runner}) as harness:
        task = task_of(
            repeat_times=2, max_samples_per_subtask=2, attempt_timeout_seconds=3, retry=RetryPolicy(max_retries=1)
        )
        reply = await schedule(harness.engine, [task])
        await settle()
        await clock.advance(3)
        late = whole_report(runner.attempts[0])
        recorder = harness.engine._recorder
        command = EndAttempt(
            AttemptRef(reply.task_ids[0], 0, 1), late.state, late.samples, "", 1.0, payload=late.payload
        )
        before = harness.engine.last_sequence
        assert recorder.record(command, "default") == []
        await settle()
        assert harness.engine.last_sequence == before
        await clock.advance(5)
        collected = await collect(harness.engine)
        assert collected.payloads == [b"0..2 of attempt 2"]
        assert [sample.attempt_no for sample in collected.results[0].samples] == [2, 2]
        assert collected.results[0].ok


async def test_the_dynamic_timeout_comes_from_training_only_and_after_the_warm_up() -> None:
    clock = FakeClock()
    seconds = iter([2.0, 2.0, 100.0, None, None])
    runner = Whole(clock, lambda _: next(seconds))
    settings = EngineSettings(dynamic_timeout=DynamicTimeoutSettings(ratio=3.0, warmup_min_steps=1))
    async with running_engine(
        spec_of(SolvingAgent()), clock=clock, settings=settings, runners={"agent": runner}
    ) as harness:

        async def takes(batch_id: int | str, *, is_eval: bool = False, count: int = 1) -> float:
            task = task_of(is_eval=is_eval, attempt_timeout_seconds=200.0, has_dynamic_timeout=True)
            await schedule(harness.engine, [task] * count, batch_id)
            began = clock.now
            waiting = asyncio.create_task(collect(harness.engine, batch_id))
            await settle()
            while not waiting.done():
                await clock.advance(0.5)
                await settle()
            return clock.now - began

        assert harness.engine.dynamic_timeout(200.0) == 200.0
        assert await takes(1, count=2) == 2.0
        assert harness.engine.dynamic_timeout(200.0) == 6.0
        assert harness.engine.dynamic_timeout(5.0) == 5.0
        # An eval is stopped by it as well, and feeds it with nothing.
        assert await takes("2/eval", is_eval=True) == 6.0
        assert harness.engine.dynamic_timeout(200.0) == 6.0
        assert await takes(2) == 6.0
        assert harness.engine.history.finished_subtasks == 3


async def test_whether_runners_are_restarted_is_told_to_what_runs() -> None:
    clock = FakeClock()
    runner = Whole(clock, lambda _: None)
    async with running_engine(spec_of(SolvingAgent()), clock=clock, runners={"agent": runner}) as harness:
        for batch_id, restarts in ((1, True), (2, False)):
            await schedule(harness.engine, [task_of()], batch_id)
            await settle()
            await harness.engine.abort(
                AbortRequest(selector=SubmissionSelector(batch_id=batch_id), wait=True, restart_runners=restarts)
            )
        await schedule(harness.engine, [task_of()], 4)
        waiting = asyncio.create_task(collect(harness.engine, 4, timeout_seconds=5))
        await settle()
        await clock.advance(5)
        await waiting
    assert [running.restarts_runner for running in runner.attempts] == [True, False, True]
