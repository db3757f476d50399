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
    """A `[server.tls]` or `[gateway.tls]` table: PEM files, read again for new connections when they change."""

    certificate: str = ""
    """The chain that the server shows; empty: no TLS."""
    key: str = ""
    """The certificate's private key."""
    client_ca: str = ""
    """Only clients with a certificate that it signed are let in; empty: no client needs one."""

    def located(self, base_dir: Path) -> TlsSettings:
        files = {name: getattr(self, name) for name in self.__struct_fields__}
        return TlsSettings(**{name: file and str(base_dir / file) for name, file in files.items()})

    @property
    def is_on(self) -> bool:
        return bool(self.certificate)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[server]` table."""

    listen: str = DEFAULT_LISTEN
    """Where it listens: "host:port" (port 0: any free one) or "unix:/path". A host off loopback needs TLS and tokens,
    or insecure_remote."""
    insecure_remote: bool = False
    """Lets a host off loopback do without; whoever reaches the port can use the service then."""
    tls: TlsSettings = TlsSettings()
    tokens_file: str = ""
    """The bearer tokens, see `api.security.bearer_tokens`; empty: anybody may call."""
    reflection: bool | None = None
    """Whether tools may ask which calls there are; left out: on loopback without tokens."""
    max_streams: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Open at once; more are refused."""
    stalled_stream_seconds: Positive = 60.0
    """How long a stream waits for a client that does not read."""
    disconnect_grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """How long the client of a submission with cancel_on_disconnect has to come back."""
    keepalive_seconds: Annotated[float, msgspec.Meta(ge=0.1)] = 60.0
    """How long a silent connection is left before it is asked whether it is still there."""
    loop_blocked_seconds: Positive = 5.0
    """How long a handler may block the loop before health says NOT_SERVING."""
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=(1 << 31) - 1)] = MAX_MESSAGE_BYTES
    """Of one message, either way."""
    max_tasks_per_call: Annotated[int, msgspec.Meta(ge=1)] = MAX_TASKS_PER_CALL
    """Of one SubmitTasks."""
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 15.0
    """How long running samples may go on after SIGTERM. What does not end then has scheduler.stop_grace_seconds more,
    and the process ends at most 8 seconds after that: with 15 and 5, after 28 seconds."""
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    """With "auto", uvloop is taken when it is installed."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[gateway]` table: where episodes can be reached over OpenAI's API; nowhere, when it is left out."""

    socket: str = ""
    """Path of a unix socket, in a folder of mode 0700; empty: none."""
    listen: str = ""
    """Where it listens: "host:port" (port 0: any free one), whose host is also what clients are told; empty: no port. A
    host off loopback needs TLS, or insecure_remote."""
    insecure_remote: bool = False
    """Lets keys and conversations travel unencrypted."""
    tls: TlsSettings = TlsSettings()
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 30)] = 8 << 20
    """Of one request."""


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[journal]` table: what `serve` writes down to go on from after its end, however it ends."""

    enabled: bool = True
    """Without it nothing survives the process."""
    state_dir: str = ""
    """Where it lies, for one server at a time; empty: a folder of this configuration's own under
    $XDG_STATE_HOME/py-scheduler."""
    retained_seconds: Positive | None = None
    """Events older than that go, whoever has read them; left out: only scheduler.retained_events and
    scheduler.retained_bytes count. What is still to be run is never dropped."""
    checkpoint_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20
    """Of events, after which their outcome is written down instead, so that a restart is short."""
    ballast_bytes: Annotated[int, msgspec.Meta(ge=0)] = 16 << 20
    """Put aside, and given up on a full disk to make room by dropping what may go; 0: none."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[cluster]` table. Without a layout batches are not gated by placement."""

    layout: str | dict[str, Any] | None = None
    """A path to a JSON file, JSON text, or a table of nodes."""
    num_cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Cores of nodes that name none."""
    memory_gb: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """GiB of nodes that name none."""


class SchedulerSettings(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[scheduler]` table: the engine's settings, and who makes the batches."""

    batching_strategy: str = ""
    """As "module:function", called with the tasks and the evaluators by id; empty: `fifo_batching`."""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[evaluator]]` table, of which an EvaluatorSpec is made."""

    evaluator_id: str
    handler: str
    """`module:Class`."""
    handler_args: dict[str, Any] = {}
    """What the class is made with."""
    resource: Resource
    """The budget of one batch."""
    run_resource: Resource = Resource()
    """What one sample holds while it runs."""
    eval_resource: Resource | None = None
    """What it holds while it is scored; left out: the same as run_resource."""
    batch_size: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Tasks to a batch; 0: no limit."""
    default_sampling: SamplingParams = SamplingParams()
    default_stopping: StoppingCriteria = StoppingCriteria()
    run_timeout_seconds: Positive | None = None
    """Of one sample's run; left out: no limit."""
    eval_timeout_seconds: Positive | None = None
    """Of one sample's scoring; left out: no limit."""
    solve_threshold: float = 1.0
    """A finished sample with at least this score is `solved`."""
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESTART
    """What becomes of a turn that is being generated when a pause aborts it."""
    mask_off_policy_prefix: bool = False
    """Takes tokens of older weights than a sample's newest out of its loss mask."""
    runner: RunnerKind = "inline"
    """Where its samples run: in the loop, in processes of this machine, or in actors of a Ray cluster."""
    runner_settings: RunnerSettings = RunnerSettings()
    """Of the latter two."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    journal: JournalSettings = JournalSettings()
    namespace: dict[str, NamespaceSettings] = {}
    """By namespace, what it weighs and may hold."""
    sampling: SamplingParams = SamplingParams()
    """What holds where neither data set, nor task, nor evaluator says anything."""
    stopping: StoppingCriteria = StoppingCriteria()
    """Likewise."""
    generation: dict[str, dict[str, Any]] = {}
    """By role (student, teacher), the table that its backend reads."""
    evaluator: tuple[EvaluatorSettings, ...] = ()
    ray: RaySettings = RaySettings()
    rollout: RolloutSettings = RolloutSettings()
    dataset: tuple[SourceSettings, ...] = ()
    """Of training steps."""
    eval_dataset: tuple[SourceSettings, ...] = ()
    """Of evals."""

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
