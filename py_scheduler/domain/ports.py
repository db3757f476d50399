"""What the scheduler needs of the world; `adapters/` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.generation import (
        ChatMessage,
        Endpoints,
        EndpointView,
        Generation,
        GenerationRequest,
        ModelInfo,
        PauseMode,
        WeightUpdate,
    )


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The only source of time. Durations and deadlines are monotonic; unix time is for people to read."""

    @property
    def boot_id(self) -> bytes:
        """Names what `monotonic` counts from: readings of two processes with the same one can be compared. Empty: they
        cannot.
        """
        ...

    def monotonic(self) -> float: ...

    def unix_time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Calls back once `monotonic()` has reached `when`."""
        ...


class GenerationBackend(Protocol):
    """A language model that continues token ids.

    Cancelling `generate` stops the work at the backend too: nothing decodes on for nobody.
    """

    async def start(self) -> None:
        """Gets ready; raises EngineUnavailableError when it cannot."""
        ...

    async def close(self) -> None: ...

    async def model_info(self) -> ModelInfo:
        """One that has met none of its servers yet waits for one, as `generate` does."""
        ...

    async def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens added."""
        ...

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation under the model's chat template, with the opening of the answer."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continues `request.token_ids`.

        Raises ContextOverflowError, EngineRejectedError, EngineUnavailableError. A generation that was aborted by rid
        is returned with finish reason ABORT and the tokens made until then.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Stops the generation of that rid; one that is unknown or over is not an error."""
        ...


@runtime_checkable
class GenerationControl(Protocol):
    """What a backend has besides when its weights can be changed while it runs. Every call may be repeated.

    Raises EngineUnavailableError when the backend did not answer, so that its state is unknown; EngineRejectedError
    when it refused.
    """

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is generated any more; what is asked for meanwhile waits. Another mode needs a resume
        first.
        """
        ...

    async def resume(self) -> None:
        """Goes on; a backend that is not paused stays as it is."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Loads weights. A paused backend does so at once and stays paused; another finishes what it is generating."""
        ...

    async def name_weights(self, version: str) -> None:
        """Somebody else has put weights of this name there. Loads nothing: it calls what it has so from now on."""
        ...

    async def weight_version(self) -> str:
        """As the backend says now; empty when its servers have different ones."""
        ...


CONTROLLED_KINDS: Final = ("sglang", "vllm")
"""Each `kind` of a `[generation.ROLE]` table whose backend has GenerationControl. Messages tell users of them."""
CONTROLLED_KINDS_SAID: Final = "kind = " + " or ".join([f'"{kind}"' for kind in CONTROLLED_KINDS])


@runtime_checkable
class DerivedBackend(Protocol):
    """A GenerationBackend that asks another one: what pauses that one pauses both."""

    @property
    def base(self) -> GenerationBackend: ...


def base_of(backend: GenerationBackend) -> GenerationBackend:
    """The backend that has the weights: itself, or the one that it asks in the end."""
    while isinstance(backend, DerivedBackend):
        backend = backend.base
    return backend


@runtime_checkable
class ProbedBackend(Protocol):
    """A GenerationBackend that notices by itself whether its servers answer. Others count as up while they are open."""

    @property
    def is_up(self) -> bool: ...


@runtime_checkable
class MovableBackend(Protocol):
    """A GenerationBackend whose servers can be others while it runs."""

    @property
    def endpoints(self) -> Endpoints:
        """Those that are named now."""
        ...

    def set_endpoints(self, endpoints: Endpoints | None) -> None:
        """These, and no others; None: those of its configuration. May be called before `start`, which waits for none of
        them then. What a removed one runs is finished there.

        Raises InvalidArgumentError, and changes nothing then.
        """
        ...

    def endpoint_views(self) -> list[EndpointView]:
        """Those that are named, and the removed ones that still run something."""
        ...


SERVICE = ""
"""The name of the snapshot of what is of no submission."""


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """A piece of the state, so that a restart need not read how it came about.

    State after the event `sequence`; later events are applied on top. What `content` says is the scheduler's alone.

    name: a submission's id; a task's, for the result that is kept of it; or SERVICE. is_final: whether it will never be
    written again, only dropped.
    """

    name: str
    sequence: int
    content: bytes
    is_final: bool = False


class Journal(Protocol):
    """Where events become durable. One writer; sequences rise by one.

    `append` returns at once; `on_commit(through_sequence)` is called in the event loop when everything up to that
    sequence will survive a crash. Nothing is acknowledged to anybody before.

    open -> snapshots, replay -> start -> append, read, and now and then a checkpoint -> close

    What a restart needs is kept apart from what watchers may still read: a checkpoint puts the state, piece by piece,
    into snapshots, and from then on events are kept for watchers alone, as long as the retention says.
    """

    def open(self) -> None:
        """Takes the store, for this process alone, and proves that it is whole; blocks. May be called again.

        Raises JournalError.
        """
        ...

    @property
    def store_epoch(self) -> bytes:
        """16 bytes that name this store: a cursor of another one is refused."""
        ...

    @property
    def is_durable(self) -> bool:
        """Whether what is open when the process ends is found again by the next one."""
        ...

    @property
    def oldest_sequence(self) -> int:
        """The first sequence that `read` can still give; one past the last when nothing is retained."""
        ...

    @property
    def last_sequence(self) -> int:
        """Of the last event that is stored, before `start`; 0 when there never was one."""
        ...

    @property
    def first_fencing_token(self) -> int:
        """2^32 above that of the last process that opened the store, at least, whatever the wall clock says."""
        ...

    def snapshots(self) -> Iterable[Snapshot]:
        """What the last checkpoints left, in no order. Before `start`."""
        ...

    def replay(self) -> Iterable[Sequence[EventRecord]]:
        """Events from the last checkpoint on, in order, for the ledger alone; blocks. Before `start`.

        Samples are without their trajectories: `read` has those.
        """
        ...

    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        """Called once, after what is stored has been read.

        `on_failure` says that nothing can be written for now (a full disk); what was appended is kept and tried again,
        and the next `on_commit` ends the failure. With a JournalError it says that nothing ever will be.
        """
        ...

    def append(self, records: Sequence[EventRecord]) -> None: ...

    async def read(self, after_sequence: int, limit: int) -> list[EventRecord]:
        """At most `limit` committed records, in order, from `after_sequence` + 1 on; fewer when they are large.

        Raises CursorExpiredError when the first of them is no longer retained.
        """
        ...

    def discard_through(self, sequence: int) -> None:
        """Nobody will read these events again: their room may be used for others."""
        ...

    @property
    def wants_checkpoint(self) -> bool:
        """Whether enough was written since the last one that another is worth its price."""
        ...

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        """They take the place of those of the same names. The events that they count in were appended before."""
        ...

    def checkpoint(self, through_sequence: int, forgotten: Sequence[str]) -> None:
        """Whatever events up to there changed is forgotten, or has a snapshot as of there or later.

        The snapshots of the forgotten ones go in the same step: before it events would be applied to them, after it
        they would come back to life.
        """
        ...

    async def close(self) -> None: ...
