"""What is known of a runner from outside (design words: Runner), and what runners that are no part of this loop need.

A runner runs one sub-task at a time. `inline` runners are the loop itself; `process` and `ray` runners are children
that live outside it; whoever brings runners of another kind implements `execution.runner.Runners`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec

from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import FieldViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from py_scheduler.domain.resources import PlacementToken

RunnerKind = Literal["inline", "process", "ray"]

RunnerKey = tuple[str, tuple[int, ...] | None]
"""Where a child may work: the node's address (empty: anywhere) and the GPUs that it sees (None: no pool says)."""

ANYWHERE: RunnerKey = ("", None)

DEFAULT_ENVIRONMENT = ("HOME", "HF_HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `runner_settings` of an evaluator whose runner is `process` or `ray`."""

    max_runners: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Children at once."""
    min_runners: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Started with the server, which does not start when they cannot be."""
    prepare_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 8
    """How many of them start at once."""
    prepare_max_retries: Annotated[int, msgspec.Meta(ge=0)] = 2
    """Further tries of a start that failed. After these it is tried again later, and where no other child lives, who
    waits loses an attempt over it."""
    start_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """What one try may take, importing and making the handler included."""
    max_resident_mib: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A child that is larger than this after an attempt is replaced; None: never."""
    hard_resident_mib: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A child that is larger than this is killed in the middle of its attempt (process runners); None: never."""
    environment: tuple[str, ...] = DEFAULT_ENVIRONMENT
    """Names of the server's own variables that children get; nothing of a client's ever gets there."""


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[ray]` table."""

    address: str = "auto"
    """Of the cluster, as `ray.init` takes it; "auto": the one that runs here."""
    listen: str = "127.0.0.1:0"
    """Where actors connect: "host:port" (port 0: any free one). A host off loopback needs insecure_remote."""
    advertised_host: str = ""
    """What actors are told instead of the host in `listen`."""
    insecure_remote: bool = False
    """Admits that what actors and server say is authenticated but not encrypted."""
    node_label: str = "py-scheduler/node"
    """The label of a Ray node that says what the cluster layout calls it; without one, its address does."""


_FORBIDDEN = re.compile(r"^(LD_|PYTHON|DYLD_)|^(BASH_ENV|ENV|IFS|CUDA_VISIBLE_DEVICES)$")


def is_forbidden(variable: str) -> bool:
    """Whether it changes how programs are found and loaded, or is the token's to say: so no setting hands it on."""
    return _FORBIDDEN.search(variable) is not None


def check_runner_settings(settings: RunnerSettings) -> Iterator[FieldViolation]:
    """What types cannot say."""
    for name in filter(is_forbidden, settings.environment):
        yield FieldViolation("environment", f"{name} is never handed to a runner: take it out")
    soft, hard = settings.max_resident_mib, settings.hard_resident_mib
    if soft is not None and hard is not None and hard < soft:
        yield FieldViolation("hard_resident_mib", f"is {hard:g}, must be at least max_resident_mib ({soft:g})")
    if settings.min_runners > settings.max_runners:
        yield FieldViolation("min_runners", f"is {settings.min_runners}, max_runners is {settings.max_runners}")


class RunnerState(StrEnum):
    """STARTING: not known to be alive yet. FAILED: its last start failed; it is tried again later."""

    IDLE = "idle"
    BUSY = "busy"
    STARTING = "starting"
    FAILED = "failed"


NOTHING_SHOWN: Mapping[str, str] = {}
_MAX_SHOWN_KEYS = 16
_MAX_SHOWN_CHARACTERS = 256


def shown_with(shown: Mapping[str, str], key: str, value: object) -> Mapping[str, str]:
    """What a runner shows, and this. Long values are cut. Raises ValueError."""
    name: object = key
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_SHOWN_CHARACTERS):
        raise ValueError(f"a key to show has 1 to {_MAX_SHOWN_CHARACTERS} printable characters, {key!r:.80} is none")
    if key not in shown and len(shown) >= _MAX_SHOWN_KEYS:
        raise ValueError(f"{key} would be one key more to show than {_MAX_SHOWN_KEYS}")
    return {**shown, key: safe_text(str(value))[:_MAX_SHOWN_CHARACTERS]}


class RunnerView(msgspec.Struct, frozen=True, kw_only=True):
    """One runner as it stands.

    submission_id, task_id, sample_no, attempt_no: what it is at; empty and -1 unless it is busy.
    begun_unix_seconds, running_seconds: of that. restarts: how often another child has taken its place.
    message: why it is FAILED, or how the child before it ended. keys: what its handler shows of what it is at.
    """

    runner_id: str
    kind: str
    state: RunnerState
    evaluator_id: str = ""
    node_ip: str = ""
    gpu_ids: tuple[int, ...] = ()
    pid: int = 0
    submission_id: str = ""
    task_id: str = ""
    sample_no: int = -1
    attempt_no: int = -1
    begun_unix_seconds: float = 0.0
    running_seconds: float = 0.0
    restarts: int = 0
    message: str = ""
    keys: dict[str, str] = {}


class HandlerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that a child makes: `module:Class` and its arguments, from the server's own configuration.

    key: of the evaluator in that configuration, for errors.
    """

    name: str
    arguments: dict[str, Any] = {}
    key: str = "evaluator"


class Child(Protocol):
    """A live process elsewhere that has said hello, and the frames that go to and fro."""

    pid: int

    @property
    def is_alive(self) -> bool: ...

    def send(self, frame: bytes) -> None:
        """Never blocks, never raises: what is sent to a child that has ended is dropped."""
        ...

    def listen(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        """Called once, at first. on_end gets how the child ended (`exit status 1`), once, after its last frame."""
        ...

    def kill(self, why: str = "") -> None:
        """Ends it at once, whatever it does. `why` becomes part of how it ended."""
        ...

    def resident_mib(self) -> float | None:
        """What it holds of its machine's memory; None when that is not known from here."""
        ...


class ChildHost(Protocol):
    """Starts children. Kinds: processes of this machine, actors of a Ray cluster."""

    kind: str

    async def open(self) -> None:
        """For each who uses it, before anything is launched. Raises RunnerStartError."""
        ...

    def key_of(self, token: PlacementToken) -> RunnerKey:
        """Which children may run samples with this token."""
        ...

    async def launch(self, key: RunnerKey, settings: RunnerSettings) -> Child:
        """A child that has connected. Raises RunnerStartError; then nothing of it is left running."""
        ...

    async def close(self) -> None:
        """Once for each `open`; with the last one every child ends."""
        ...
