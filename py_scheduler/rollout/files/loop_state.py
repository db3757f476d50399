"""Where a training loop stands, so that a restarted one finishes the iteration that was under way with the same tasks.

The source's state is the one at the iteration's start: a restart takes the same tasks again and submits them under the
same request id, which the service runs once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from py_scheduler.errors import FailedPreconditionError
from py_scheduler.rollout.files.paths import atomic_file, open_regular

if TYPE_CHECKING:
    from pathlib import Path


_MAX_EXACT = 2**53 - 1
"""Exact for every reader of JSON."""


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest iteration that was begun.

    loop_id: names the loop, the same after a restart. execution_no: rises with each execution of an iteration, and
    stays when a killed process is followed by another; request ids are made of both. source_state: of the data source
    before the iteration took from it; once `is_finished`, after it. request_id: under which a client asked for it.
    """

    rollout_id: Annotated[int, msgspec.Meta(ge=0, le=_MAX_EXACT)]
    source_state: dict[str, Any]
    is_finished: bool = False
    loop_id: str = ""
    execution_no: Annotated[int, msgspec.Meta(ge=0, le=_MAX_EXACT)] = 0
    request_id: str = ""

    @property
    def unfinished(self) -> int | None:
        """The iteration to be finished first; None when the newest one was."""
        return None if self.is_finished else self.rollout_id


def read_loop_state(path: Path) -> LoopState | None:
    """None when there is no file. Raises FailedPreconditionError when it is damaged, or no file at all."""
    try:
        with open_regular(path) as source:
            return msgspec.json.decode(source.read(), type=LoopState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise FailedPreconditionError(
            f"{path} is no state of a training loop ({error}): bring an intact one back, or take it away to begin anew"
        ) from error


def write_loop_state(path: Path, state: LoopState) -> None:
    """Durable when it returns, and never half written. Folders are made as needed."""
    with atomic_file(path) as sink:
        sink.write(msgspec.json.format(msgspec.json.encode(state)))
