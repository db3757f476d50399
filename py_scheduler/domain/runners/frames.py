"""What the server and a child that runs samples for it say to one another, over whatever carries frames: msgpack, one
message to a frame.

    server                                   child
      <- Hello                                 connects
      MakeHandler ->                           imports and makes it
      <- Ready | Unfit
      Ping -> <- Pong                          before every attempt: it is alive, and its loop turns
      RunSample -> ... <- Returned | Raised    the handler's run
      EvalSample -> ... <- Returned | Raised   its eval of what run returned, which stays in the child
      EvalGroup -> ... <- Returned | Raised    its eval_group
      during any of them: <- Ask, Answer | Refused ->, <- Withdraw, Cancel ->
      Leave ->                                 ends

An order of the server's has a number, which its word bears: a word that comes late answers no other order.
Everything that touches an engine, the record or the clock is asked of the server, so a child holds none of them. The
server decodes frames of a child as strictly as any other input: it runs somebody's handler.
"""

from __future__ import annotations

from typing import Any

import msgspec

from py_scheduler.domain.generation import ChatMessage, Generation, SamplingParams
from py_scheduler.domain.results import Outcome, SampleDone
from py_scheduler.domain.task import Sample, Task
from py_scheduler.domain.training.iteration import IterationContext

PROTOCOL = 4
MAX_FRAME_BYTES = 1 << 30


# What a child asks


class Look(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """For what the episode knows: `sampling`, `stopping`, `remaining_seconds`, `workdir`, `api` or `role`."""

    name: str


class LookAtContext(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The token ids from `start` on, as the bytes of a `Generation`."""

    start: int


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """token_id_bytes: as those of a `Generation`."""

    token_id_bytes: bytes
    text: str


class Show(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    key: str
    value: str


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    text: str


class EncodeChat(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    messages: list[ChatMessage]


class ObserveChat(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    messages: list[ChatMessage]


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    role: str
    max_new_tokens: int | None
    sampling: SamplingParams | None


Question = Look | LookAtContext | Observe | Show | Encode | EncodeChat | ObserveChat | Generate


# From the child


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """secret: what the server gave it to be known by, where others could connect too."""

    pid: int
    protocol: int = PROTOCOL
    secret: str = ""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    order_no: int


class Unfit(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The handler cannot be made, and why."""

    order_no: int
    message: str


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """resident_mib: what the child holds of its machine's memory."""

    order_no: int
    resident_mib: float


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    call_no: int
    question: Question


class Withdraw(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Who asked waits no longer; an answer comes all the same."""

    call_no: int


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """value: an `AgentSaid` of run, a `RewardSaid` of eval, a list of these of eval_group."""

    order_no: int
    value: msgspec.Raw
    resident_mib: float = 0.0


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """error: one line. shown: the traceback, for the log. is_cancelled: the cancellation itself came out."""

    order_no: int
    outcome: Outcome
    error: str
    shown: str = ""
    is_cancelled: bool = False
    termination_reason: str = ""
    resident_mib: float = 0.0


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The child ends now, by its handler's doing: `exit status 1`."""

    how: str


class AgentSaid(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What the server keeps of an AgentResult."""

    termination_reason: str
    answer: str
    metrics: dict[str, float] = {}
    payload: bytes = b""


class RewardSaid(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """details: a JSON object."""

    score: float
    details: bytes


Word = Ready | Unfit | Pong | Returned | Raised
ChildFrame = Hello | Word | Ask | Withdraw | Leaving


# From the server


class MakeHandler(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """name: `module:Class`. key: the evaluator's in the configuration. import_path: folders that the server has too."""

    order_no: int
    name: str
    arguments: dict[str, Any]
    key: str
    import_path: list[str]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    order_no: int


class TokenSaid(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What a child sees of its placement token."""

    node_ip: str
    gpu_ids: list[int]


class RunSample(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """variables: for the child's environment while it runs this sample."""

    order_no: int
    sample: Sample
    attempt_no: int
    token: TokenSaid | None
    iteration: IterationContext | None
    variables: dict[str, str]


class EvalSample(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    order_no: int


class EvalGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    order_no: int
    task: Task
    samples: list[SampleDone]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """The phase that is under way is to end."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    call_no: int
    value: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """kind: the exception's class. partial: of a generation that did not get to its end."""

    call_no: int
    kind: str
    message: str
    partial: Generation | None = None


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    pass


Order = MakeHandler | Ping | RunSample | EvalSample | EvalGroup
ServerFrame = Order | Cancel | Answer | Refused | Leave

_encoder = msgspec.msgpack.Encoder()
_of_child = msgspec.msgpack.Decoder(ChildFrame)
_of_server = msgspec.msgpack.Decoder(ServerFrame)


def encode(frame: ChildFrame | ServerFrame) -> bytes:
    """Raises TypeError, ValueError for values that no frame can carry."""
    return _encoder.encode(frame)


def raw(value: object) -> msgspec.Raw:
    """A value for `Answer` or `Returned`."""
    return msgspec.Raw(_encoder.encode(value))


def read_child_frame(data: bytes) -> ChildFrame:
    """Raises msgspec.ValidationError, msgspec.DecodeError."""
    return _of_child.decode(data)


def read_server_frame(data: bytes) -> ServerFrame:
    """As `read_child_frame`."""
    return _of_server.decode(data)
