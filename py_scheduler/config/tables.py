"""What the file can say, table by table. Settings of a layer live in that layer; these are the rest, and the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from py_scheduler.domain.generation import OnWeightUpdate, SamplingParams, StoppingCriteria
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES, MAX_TASKS_PER_CALL
from py_scheduler.domain.quotas import NamespaceSettings
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.runners.runner import RaySettings, RunnerKind, RunnerSettings
from py_scheduler.rollout.settings import RolloutSettings
from py_scheduler.rollout.sources.settings import SourceSettings
from py_scheduler.scheduler.settings import EngineSettings

DEFAULT_LISTEN = "127.0.0.1:50051"
UNIX_PREFIX = "unix:"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[server.tls]` or `[gateway.tls]` table: PEM files, read again for new connections when they change.

    client_ca: only clients with a certificate that it signed are let in.
    """

    certificate: str = ""
    key: str = ""
    client_ca: str = ""

    def located(self, base_dir: Path) -> TlsSettings:
        files = {name: getattr(self, name) for name in self.__struct_fields__}
        return TlsSettings(**{name: file and str(base_dir / file) for name, file in files.items()})

    @property
    def is_on(self) -> bool:
        return bool(self.certificate)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[server]` table.

    listen: "host:port" (port 0: any free one) or "unix:/path". A host off loopback needs TLS and tokens, or
    insecure_remote, with which whoever reaches the port can use the service. tokens_file: the bearer tokens, see
    `api.security.bearer_tokens`; empty: anybody may call. reflection: whether tools may ask which calls there are; left
    out: on loopback without tokens. max_streams: open at once; more are refused. stalled_stream_seconds: how long a
    stream waits for a client that does not read. disconnect_grace_seconds: how long the client of a submission with
    cancel_on_disconnect has to come back. keepalive_seconds: how long a silent connection is left before it is asked
    whether it is still there. max_message_bytes: of one message, either way. max_tasks_per_call: of one SubmitTasks.
    drain_seconds: how long running samples may go on after SIGTERM; what does not end then has stop_grace_seconds more,
    and the process ends at most 8 seconds after that. event_loop: "auto" takes uvloop when it is installed.
    loop_blocked_seconds: how long a handler may block the loop before health says NOT_SERVING.
    """

    listen: str = DEFAULT_LISTEN
    insecure_remote: bool = False
    tls: TlsSettings = TlsSettings()
    tokens_file: str = ""
    reflection: bool | None = None
    max_streams: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    stalled_stream_seconds: Positive = 60.0
    disconnect_grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    keepalive_seconds: Annotated[float, msgspec.Meta(ge=0.1)] = 60.0
    loop_blocked_seconds: Positive = 5.0
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=(1 << 31) - 1)] = MAX_MESSAGE_BYTES
    max_tasks_per_call: Annotated[int, msgspec.Meta(ge=1)] = MAX_TASKS_PER_CALL
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 15.0
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[gateway]` table: where episodes can be reached over OpenAI's API; nowhere, when it is left out.

    socket: path of a unix socket, in a folder of mode 0700. listen: "host:port" (port 0: any free one), whose host is
    also what clients are told. A host off loopback needs TLS, or insecure_remote, with which keys and conversations
    travel unencrypted.
    max_body_bytes: of one request.
    """

    socket: str = ""
    listen: str = ""
    insecure_remote: bool = False
    tls: TlsSettings = TlsSettings()
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 30)] = 8 << 20


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[journal]` table: what `serve` writes down to go on from after its end, however it ends.

    enabled: without it nothing survives the process. state_dir: where; empty: a folder of this configuration's own
    under $XDG_STATE_HOME/py-scheduler. One server at a time uses it.
    retained_seconds: events older than that go, whoever has read them; left out: only scheduler.retained_events and
    scheduler.retained_bytes count. What is still to be run is never dropped.
    checkpoint_bytes: of events, after which their outcome is written down instead, so that a restart is short.
    ballast_bytes: put aside, and given up on a full disk to make room by dropping what may go; 0: none.
    """

    enabled: bool = True
    state_dir: str = ""
    retained_seconds: Positive | None = None
    checkpoint_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20
    ballast_bytes: Annotated[int, msgspec.Meta(ge=0)] = 16 << 20


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
    """The whole file. `generation` maps a role (student, teacher) to its table, which the engine's adapter reads;
    `namespace` a namespace to what it weighs and may hold.
    """

    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    journal: JournalSettings = JournalSettings()
    namespace: dict[str, NamespaceSettings] = {}
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
        journal = replace(self.journal, state_dir=self.journal.state_dir and str(base_dir / self.journal.state_dir))
        gateway = replace(
            self.gateway,
            socket=self.gateway.socket and str(base_dir / self.gateway.socket),
            tls=self.gateway.tls.located(base_dir),
        )
        server = replace(
            self.server,
            tokens_file=self.server.tokens_file and str(base_dir / self.server.tokens_file),
            tls=self.server.tls.located(base_dir),
        )
        return replace(self, rollout=rollout, scheduler=scheduler, journal=journal, gateway=gateway, server=server)
