"""A model that generates nothing, and workflows that behave as their tasks say: what Trinity runs here on a CPU."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from trinity.common.config import Config, GenerationConfig, InferenceModelConfig
from trinity.common.experience import EID, Experience
from trinity.common.models.model import InferenceModel
from trinity.common.workflows import Task, Workflow

NAMESPACE = "py-scheduler-tests"


class DummyModel(InferenceModel):  # type: ignore[misc]
    """What a runner asks of a model when it generates nothing: its version."""

    async def sync_model_weights(self, model_version: int, method: Any, timeout: float = 1200) -> int:
        return model_version

    def get_model_version(self) -> int:
        return 7


def new_config(engines: int = 2, **explorer: Any) -> Config:
    """Trinity's own, with 2 runners to an engine unless `explorer` says otherwise."""
    config = Config(ray_namespace=NAMESPACE, mode="explore")
    config.buffer.batch_size = 4
    config.explorer = replace(
        config.explorer,
        **{
            "runner_per_model": 2,
            "max_timeout": 30,
            "max_retry_times": 1,
            "rollout_model": InferenceModelConfig(model_path="dummy", engine_num=engines, ray_namespace=NAMESPACE),
            **explorer,
        },
    )
    return config


def start_models(count: int = 2) -> list[Any]:
    """The actors that runners look for by name."""
    model = InferenceModelConfig(model_path="dummy", ray_namespace=NAMESPACE)
    actors = [
        ray.remote(DummyModel)
        .options(name=f"explorer_rollout_model_{number}_0", namespace=NAMESPACE, num_cpus=0)
        .remote(config=model)
        for number in range(count)
    ]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    return actors


def experience(run: int, **metrics: float) -> Experience:
    return Experience(eid=EID(run=run), tokens=torch.zeros(5, dtype=torch.int32), prompt_length=2, metrics=metrics)


class _AsTold(Workflow):  # type: ignore[misc]
    """Does what `task.workflow_args` say. Traces each start in the file `trace`, so that tests see who began what."""

    can_reset = True

    def reset(self, task: Task) -> None:
        self.task = task

    @property
    def told(self) -> dict[str, Any]:
        return dict(self.task.workflow_args)

    def begin(self) -> None:
        told = self.told
        if "trace" in told:
            with Path(told["trace"]).open("a") as trace:
                trace.write(f"{told.get('name', '')} {os.getpid()} {threading.get_ident()} {time.time()}\n")
        if "until" in told and not Path(told["until"]).exists():
            # Of the first try only: the file says that there was one.
            Path(told["until"]).touch()
            self.break_down(told["first"])
        elif "second" in told:
            Path(told["second"]).touch()
        self.break_down(told.get("always", ""))

    def break_down(self, how: str) -> None:
        if how == "raise":
            raise ValueError(f"{self.told.get('name', 'it')} raised as told")
        if how == "exit":
            raise SystemExit(1)
        if how == "die":
            os._exit(1)
        if how == "block":
            time.sleep(600)
        if how == "come late":
            while not Path(self.told["second"]).exists():
                time.sleep(0.01)
            self.told["score"] = 0.0

    def experiences(self, count: int = 1) -> list[Experience]:
        return [experience(number, score=self.told.get("score", 1.0)) for number in range(count)]


class SyncWorkflow(_AsTold):
    def run(self) -> list[Experience]:
        self.begin()
        time.sleep(self.told.get("seconds", 0.0))
        return self.experiences()


class AsyncWorkflow(_AsTold):
    is_async = True

    async def run_async(self) -> list[Experience]:
        self.begin()
        await asyncio.sleep(self.told.get("seconds", 0.0))
        return self.experiences()


class RepeatableWorkflow(_AsTold):
    can_repeat = True
    is_async = True

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    async def run_async(self) -> list[Experience]:
        self.begin()
        assert self.task.rollout_args.n == self.repeat_times
        await asyncio.sleep(self.told.get("seconds", 0.0))
        score = self.told.get("score", 1.0)
        return [experience(self.run_id_base + number, score=score) for number in range(self.repeat_times)]


def new_task(
    workflow: type[Workflow] = AsyncWorkflow, repeat_times: int | None = 1, *, is_eval: bool = False, **told: Any
) -> Task:
    return Task(
        workflow=workflow,
        repeat_times=repeat_times,
        is_eval=is_eval,
        raw_task={},
        workflow_args=told,
        rollout_args=GenerationConfig(),
    )
