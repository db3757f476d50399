"""What a user of the Scheduler of seed 2 may say wrongly: refused by name, before anything has changed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.interfaces.trinity import (
    DynamicTimeoutConfig,
    Experience,
    ModelConfig,
    OverRolloutConfig,
    ProcessConfig,
    Scheduler,
    Task,
    Workflow,
)
from tests.support.runners.mortal_runners import MortalScheduler
from tests.support.runners.trinity_workflows import (
    Gate,
    Told,
    ToldRepeatable,
    ToldSync,
    new_config,
    read,
    started,
    told,
)


@pytest.mark.parametrize("batch_id", [1.5, None, -1, "", "line\nbreak", (1,), True, np.int64(1)])
async def test_what_would_be_refused_is_refused_before_the_start_too(batch_id: Any) -> None:
    scheduler = MortalScheduler(new_config())
    with pytest.raises(InvalidArgumentError, match="batch_id"):
        scheduler.schedule([told()], batch_id)
    scheduler.schedule([told()], 0)
    await scheduler.start()
    with pytest.raises(InvalidArgumentError, match="batch_id"):
        scheduler.schedule([told()], batch_id)
    assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True]
    await scheduler.close()


async def test_a_call_from_another_thread_is_refused_before_anything_changes() -> None:
    async with started() as scheduler:
        refused = await asyncio.gather(
            *[asyncio.to_thread(scheduler.schedule, [told()], number) for number in range(8)], return_exceptions=True
        )
        assert {type(error) for error in refused} == {FailedPreconditionError}
        assert not any(scheduler.has_step(number) for number in range(8))
        scheduler.schedule([told()], 0)
        assert len(await scheduler.get_statuses(0, timeout=30)) == 1


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("runner_per_model", {"runner_per_model": 0}),
        ("runner_per_model", {"runner_per_model": 1.5}),
        ("max_timeout", {"max_timeout": 0}),
        ("max_timeout", {"max_timeout": float("nan")}),
        ("max_timeout", {"max_timeout": "10"}),
        ("max_timeout: times max_retry_times", {"max_timeout": 300 * 86_400.0, "max_retry_times": 2}),
        ("max_retry_times", {"max_retry_times": -1}),
        ("max_retry_times", {"max_retry_times": None}),
        ("max_repeat_times_per_runner", {"max_repeat_times_per_runner": 0}),
        ("concurrent_mode", {"concurrent_mode": "parallel"}),
        ("runner_prepare_concurrency", {"runner_prepare_concurrency": 0}),
        ("runner_state_report_interval", {"runner_state_report_interval": -1}),
        ("rollout_model.engine_num", {"rollout_model": ModelConfig(engine_num=0)}),
        ("auxiliary_models[0].engine_num", {"auxiliary_models": [ModelConfig(engine_num=0)]}),
        ("over_rollout.wait_after_min", {"over_rollout": OverRolloutConfig(wait_after_min=-1)}),
        ("over_rollout.wait_after_min", {"over_rollout": None}),
        ("dynamic_timeout.ratio", {"dynamic_timeout": DynamicTimeoutConfig(ratio=0)}),
        ("runner: is 'ray', must be one of inline, process", {"runner": "ray"}),
        ("process.start_seconds", {"runner": "process", "process": ProcessConfig(start_seconds=0)}),
        ("process.max_resident_mib", {"runner": "process", "process": ProcessConfig(max_resident_mib=-1)}),
        ("process.environment", {"runner": "process", "process": ProcessConfig(environment=("LD_PRELOAD",))}),
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused_by_the_name_of_its_field(
    field: str, odd: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Scheduler(new_config(**odd))
    assert str(refused.value).startswith(f"explorer.{field}")


def test_all_faults_of_a_configuration_are_told_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Scheduler(new_config(max_timeout=-1, max_retry_times=-1, concurrent_mode=""))
    assert {violation.field for violation in refused.value.violations} == {
        "explorer.max_timeout",
        "explorer.max_retry_times",
        "explorer.concurrent_mode",
    }


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        *(("tasks[1].repeat_times", told(repeats=odd)) for odd in (0, -1, None, True, 70_000)),
        ("tasks[1].repeat_times", told(repeats=1.5)),  # type: ignore[arg-type]
        ("tasks[1].workflow", Task(None)),  # type: ignore[arg-type]
        ("tasks[1].workflow", Task(Told(task=told(), model=None))),  # type: ignore[arg-type]
        ("tasks[1].rollout_args", replace(told(), rollout_args=None)),  # type: ignore[arg-type]
        ("tasks[1]: is dict without workflow", {}),
    ],
)
async def test_a_task_that_cannot_be_right_is_refused_with_all_of_its_call(field: str, odd: Any) -> None:
    async with started() as scheduler:
        with pytest.raises(InvalidArgumentError) as refused:
            scheduler.schedule([told(), odd], 0)
        assert str(refused.value).startswith(field)
        assert not scheduler.has_step(0)
        scheduler.schedule((told() for _ in range(2)), 0)  # Any iterable will do.
        assert [status.ok for status in await scheduler.get_statuses(0, timeout=30)] == [True, True]


async def test_more_samples_than_one_call_may_plan_are_refused() -> None:
    async with started() as scheduler:
        with pytest.raises(InvalidArgumentError, match="tasks: plan 540000 samples, at most 500000 in one call"):
            scheduler.schedule([told(repeats=60_000) for _ in range(9)], 0)
        assert not scheduler.has_step(0)


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("min_num", {"min_num": -1}),
        ("min_num", {"min_num": 1.5}),
        ("timeout", {"timeout": float("nan")}),
        ("timeout", {"timeout": "3"}),
    ],
)
async def test_a_wait_that_cannot_be_right_is_refused_and_takes_nothing(field: str, odd: dict[str, Any]) -> None:
    async with started() as scheduler:
        scheduler.schedule([told(), told()], 0)
        for collect in (scheduler.get_statuses, scheduler.get_payload_results):
            with pytest.raises(InvalidArgumentError, match=f"^{field}: is "):
                await collect(0, **odd)
        assert len(await scheduler.get_statuses(0, timeout=30)) == 2


@pytest.mark.parametrize("wait", [{"timeout": -5.0}, {"timeout": 0}])
async def test_a_timeout_of_nothing_or_less_takes_what_is_there_and_stops_the_rest(wait: dict[str, Any]) -> None:
    gate = Gate()
    async with started() as scheduler:
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        assert await scheduler.get_statuses(0, **wait) == []
        assert not scheduler.has_step(0)
        assert len(scheduler.stopped_without_result(0)) == 1


async def test_a_closed_scheduler_says_that_it_is_closed() -> None:
    scheduler = Scheduler(new_config())
    await scheduler.close()
    with pytest.raises(FailedPreconditionError, match="this scheduler was closed"):
        await scheduler.start()
    with pytest.raises(FailedPreconditionError, match="this scheduler was closed"):
        scheduler.schedule([told()], 0)
    assert await scheduler.get_statuses(0) == []
    await scheduler.close()


class OddError(BaseException):
    """No Exception."""


@pytest.mark.parametrize("workflow", [Told, ToldSync, ToldRepeatable])
@pytest.mark.parametrize(
    "error",
    [OddError, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration, TimeoutError],
)
async def test_whatever_a_workflow_raises_fails_its_own_task_alone(
    workflow: type[Workflow], error: type[BaseException]
) -> None:
    def fail(_workflow: object) -> None:
        raise error("on purpose")

    async def fail_async(_workflow: object) -> None:
        raise error("on purpose")

    async with started(runner_per_model=1, max_retry_times=0) as scheduler:
        scheduler.schedule([told(fail if workflow is ToldSync else fail_async, workflow=workflow), told()], 0)
        failed, following = await scheduler.get_statuses(0, timeout=30)
        assert (failed.completed_runs, following.ok) == (0, True)
        assert ("cancelled its own runner" if error is asyncio.CancelledError else "on purpose") in failed.message


class Returning(Workflow):
    is_async = True

    async def run_async(self) -> Any:
        return self.task.workflow_args["made"]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (None, "Returning returned NoneType, not a list of experiences"),
        (Experience(), "Returning returned Experience, not a list of experiences"),
        ([], "Returning returned no experience"),
        ([3], "Returning returned int among its experiences"),
        ([Experience(info={"lock": object()})], "Returning made experiences that cannot be serialized"),
        ([Experience(info={"large": 2**70})], "Returning made experiences that cannot be serialized"),
        ([Experience(reward="x")], "Expected `float | null`, got `str` - at `$[0].reward`"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_experience_or_cannot_be_sent_fails_its_task_with_the_reason(made: Any, why: str) -> None:
    async with started(runner_per_model=1, max_retry_times=0) as scheduler:
        scheduler.schedule([told(workflow=Returning, made=made), told()], 0)
        failed, following = await scheduler.get_statuses(0, timeout=30)
        assert (failed.completed_runs, following.ok) == (0, True)
        assert why in failed.message


async def test_numbers_and_arrays_of_numpy_are_what_they_look_like() -> None:
    made = [
        Experience(
            tokens=np.arange(3),  # type: ignore[arg-type]
            logprobs=np.array([-0.5], dtype=np.float32),  # type: ignore[arg-type]
            reward=np.float32(0.5),  # type: ignore[arg-type]
            metrics={"score": np.float32(0.5), "turns": np.array([3])},  # type: ignore[dict-item]
        )
    ]
    async with started() as scheduler:
        scheduler.schedule([told(workflow=Returning, made=made)], 0)
        (status,), payloads = await scheduler.get_payload_results(0, timeout=30)
    assert (status.metrics[0]["score"], status.metrics[0]["turns"]) == (0.5, 3.0)
    (experience,) = read(payloads)
    assert (experience.tokens, experience.logprobs, experience.reward) == ([0, 1, 2], [-0.5], 0.5)


async def test_what_is_scheduled_while_it_stops_waits_for_the_next_start() -> None:
    gate = Gate()
    async with started(runner_per_model=1) as scheduler:
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        stopping = asyncio.ensure_future(scheduler.stop())
        await asyncio.sleep(0)
        scheduler.schedule([told()], 0)
        collecting = asyncio.ensure_future(scheduler.get_statuses(0, timeout=30))
        gate.open()
        await stopping
        assert not collecting.done()
        await scheduler.start()
        assert [status.ok for status in await collecting] == [True, True]
