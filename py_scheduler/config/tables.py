"""What the file can say, table by table. Settings of a layer live in that layer; these are the rest, and the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from py_scheduler.domain.generation import OnWeightUpdate, SamplingParams, StoppingCriteria
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES, MAX_TASKS_PER_CALL
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.runners import RaySettings, RunnerKind, RunnerSettings
from py_scheduler.rollout.settings import RolloutSettings
from py_scheduler.rollout.sources import SourceSettings
from py_scheduler.scheduler.settings import EngineSettings

DEFAULT_LISTEN = "127.0.0.1:50051"
UNIX_PREFIX = "unix:"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[server]` table.

    listen: "host:port" (port 0: any free one) or "unix:/path". insecure_remote: take a host off loopback although there
    is neither TLS nor a token, so that whoever reaches the port can use the service.
    max_message_bytes: of one message, either way. max_tasks_per_call: of one SubmitTasks.
    drain_seconds: how long running samples may go on after SIGTERM; what does not end then has stop_grace_seconds
    more, and the process ends at most 8 seconds after that.
    event_loop: "auto" takes uvloop when it is installed.
    """

    listen: str = DEFAULT_LISTEN
    insecure_remote: bool = False
    reflection: bool = True
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=(1 << 31) - 1)] = MAX_MESSAGE_BYTES
    max_tasks_per_call: Annotated[int, msgspec.Meta(ge=1)] = MAX_TASKS_PER_CALL
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[gateway]` table: where episodes can be reached over OpenAI's API; nowhere, when it is left out.

    socket: path of a unix socket, in a folder of mode 0700. listen: "host:port" (port 0: any free one), whose host is
    also what clients are told. insecure_remote: take a host off loopback although keys and conversations travel there
    unencrypted.
    max_body_bytes: of one request.
    """

    socket: str = ""
    listen: str = ""
    insecure_remote: bool = False
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 30)] = 8 << 20


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[cluster]` table. Without a layout batches are not gated by placement.

    layout: a path to a JSON file, JSON text, or a table of nodes. num_cpus, memory_gb: of nodes that name none.
    """

    layout: str | dict[str, Any] | None = None
    num_cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    memory_gb: Annotated[float, msgspec.Meta(ge=0)] | None = None


class SchedulerSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[scheduler]` table: the engine's settings, and who makes the batches.

    batching_strategy: "module:function", called with the tasks and the evaluators by id; empty: `fifo_batching`.
    """

    batching_strategy: str = ""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[evaluator]]` table: an EvaluatorSpec whose handler is named `module:Class` and made with `handler_args`.

    eval_resource: that of run, when absent. batch_size: tasks to a batch; 0 for no limit.
    runner: where its samples are played: in the loop, in processes of this machine, in actors of a Ray cluster.
    runner_settings: of the latter two.
    """

    evaluator_id: str
    handler: str
    handler_args: dict[str, Any] = {}
    resource: Resource
    run_resource: Resource = Resource()
    eval_resource: Resource | None = None
    batch_size: Annotated[int, msgspec.Meta(ge=0)] = 1
    default_sampling: SamplingParams = SamplingParams()
    default_stopping: StoppingCriteria = StoppingCriteria()
    run_timeout_seconds: Positive | None = None
    eval_timeout_seconds: Positive | None = None
    solve_threshold: float = 1.0
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESTART
    mask_off_policy_prefix: bool = False
    runner: RunnerKind = "inline"
    runner_settings: RunnerSettings = RunnerSettings()


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `generation` maps a role (student, teacher) to its table, which the engine's adapter reads."""

    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingCriteria = StoppingCriteria()
    generation: dict[str, dict[str, Any]] = {}
    evaluator: tuple[EvaluatorSettings, ...] = ()
    ray: RaySettings = RaySettings()
    rollout: RolloutSettings = RolloutSettings()
    dataset: tuple[SourceSettings, ...] = ()
    eval_dataset: tuple[SourceSettings, ...] = ()

    def located(self, base_dir: Path) -> Config:
        """With the folders that it names counted from `base_dir`; files are found by whoever opens them."""
        replace = msgspec.structs.replace
        reuse, workdir_root = self.rollout.reuse, self.scheduler.workdir_root
        if reuse.reuse_dir:
            reuse = replace(reuse, reuse_dir=str(base_dir / reuse.reuse_dir))
        rollout = replace(self.rollout, artifact_dir=str(base_dir / self.rollout.artifact_dir), reuse=reuse)
        scheduler = replace(self.scheduler, workdir_root=workdir_root and str(base_dir / workdir_root))
        gateway = replace(self.gateway, socket=self.gateway.socket and str(base_dir / self.gateway.socket))
        return replace(self, rollout=rollout, scheduler=scheduler, gateway=gateway)
