"""Where a training loop stands, between steps and across restarts.

Invariants
  1. Before an iteration takes a task, the state says which iteration it is and where the source stood. So the process
     that follows a killed one takes the same tasks, under the same request ids.
  2. An iteration that fails or is cancelled gives its tasks back to the source and uses up its request ids.
  3. The state in memory is the one in the file: a write that fails leaves both as they were, and a write that is
     cancelled ends first.
  4. The newest request that a client's iteration was finished for is not executed again, also after a restart.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import FailedPreconditionError
from py_scheduler.rollout.files.loop_state import LoopState, read_loop_state, write_loop_state

if TYPE_CHECKING:
    from py_scheduler.domain.training.data import DataSource
    from py_scheduler.interfaces.artifact_folder import ArtifactFolder
    from py_scheduler.interfaces.step_results import RolloutResult

_log = logging.getLogger(__name__)

STATE_FILE = "loop_state.json"


class TrainingLoop:
    """The loop's source and state. Without a folder the state lives as long as the process."""

    def __init__(self, source: DataSource | None, folder: ArtifactFolder) -> None:
        self.source = source
        self._folder = folder
        self._path = None if folder.root is None else folder.root / STATE_FILE
        self._state: LoopState | None = None
        self._unclaimed: RolloutResult | None = None
        self._found: LoopState | None = None
        """As the process before this one left it."""

    def restore(self) -> None:
        """Reads the state and puts the source where it stood. Raises FailedPreconditionError when it is another's."""
        if self._path is None:
            return
        self._state = self._found = read_loop_state(self._path)
        if self._state is not None and self.source is not None and self._state.source_state:
            self.source.restore(self._state.source_state)

    @property
    def unfinished(self) -> int | None:
        """The iteration that was begun and is not finished."""
        return None if self._state is None else self._state.unfinished

    @property
    def next_rollout_id(self) -> int:
        """The iteration to be executed next: the unfinished one, or the one after the last."""
        if self._state is None:
            return 0
        return self._state.rollout_id + self._state.is_finished

    def refuse_if_done(self, request_id: str) -> None:
        """Raises FailedPreconditionError when the newest iteration was finished for this request of a client."""
        state = self._state
        if state is not None and state.is_finished and request_id and state.request_id == request_id:
            raise FailedPreconditionError(
                f"request {request_id!r} was iteration {state.rollout_id}, which this server finished before it was "
                "started anew; its report is gone, its samples and its summary are in the artifact folder. Go on with "
                f"iteration {self.next_rollout_id}, or send a fresh request_id to execute another one"
            )

    def was_begun_before(self, request_id: str) -> bool:
        """Whether the process before this one had begun, and not finished, the iteration that a client asks for."""
        state = self._state
        return state is not None and state is self._found and not state.is_finished and state.request_id == request_id

    async def begin(self, rollout_id: int, request_id: str = "") -> str:
        """Writes down that the iteration is under way; the prefix of its request ids."""
        assert self.source is not None, "whoever begins has checked that"
        before = self._state
        if before is not None and not before.is_finished and before.rollout_id != rollout_id:
            raise FailedPreconditionError(
                f"iteration {before.rollout_id} is unfinished: execute it first, it gets the same tasks again"
                + (f"; or remove {STATE_FILE} to begin a new loop" if self._path else "")
            )
        state = self._next_state(rollout_id) if before is None or before.is_finished else before
        state = msgspec.structs.replace(state, request_id=request_id)
        self._unclaimed = None
        await self._commit(state)
        return f"{state.loop_id}/{state.rollout_id}/{state.execution_no}"

    async def skip(self, rollout_id: int, request_id: str = "") -> None:
        """The iteration was made of saved samples."""
        await self._commit(
            msgspec.structs.replace(self._next_state(rollout_id), is_finished=True, request_id=request_id)
        )

    def _next_state(self, rollout_id: int) -> LoopState:
        before = self._state
        return LoopState(
            rollout_id=rollout_id,
            source_state={} if self.source is None else self.source.state(),
            loop_id=before.loop_id if before else self._fresh_id(),
            execution_no=before.execution_no + 1 if before else 1,
        )

    def give_back(self, *, ids_are_used: bool) -> None:
        """The iteration under way ended without a result.

        ids_are_used: its tasks were stopped, so the next execution needs other request ids to run them again.
        """
        if self._state is None or self._state.is_finished:
            return
        self._unclaimed = None
        assert self.source is not None, "an iteration was begun"
        try:
            self.source.restore(self._state.source_state)
        except FailedPreconditionError as error:
            _log.warning("iteration %d gives its tasks back in vain: %s", self._state.rollout_id, error)
        if ids_are_used:
            state = msgspec.structs.replace(self._state, execution_no=self._state.execution_no + 1)
            try:
                self._commit_now(state)
            except OSError as error:
                # The engine of this process knows the ids; the one of a later process will not.
                self._state = state
                _log.warning("iteration %d: its state cannot be written: %s", state.rollout_id, error)

    async def finish(self, result: RolloutResult) -> None:
        """The iteration under way has its result, once this is written down.

        A cancellation that comes meanwhile is raised when it is; then the result can still be claimed.
        """
        assert self._state is not None, "finish follows begin"
        assert self.source is not None, "an iteration was begun"
        self._unclaimed = result
        await self._commit(msgspec.structs.replace(self._state, source_state=self.source.state(), is_finished=True))
        self._unclaimed = None

    def claim(self, rollout_id: int) -> RolloutResult | None:
        """The result of this iteration, if whoever asked for it was cancelled just when it was finished; once."""
        result = self._unclaimed
        if result is None or result.rollout_id != rollout_id:
            return None
        self._unclaimed = None
        return result

    def _fresh_id(self) -> str:
        # Without a file there is nothing to remember it by, so a restarted process has to find the same one.
        return "loop" if self._path is None else os.urandom(4).hex()

    async def _commit(self, state: LoopState) -> None:
        await self._folder.run(lambda: self._commit_now(state))

    def _commit_now(self, state: LoopState) -> None:
        if self._path is not None:
            write_loop_state(self._path, state)
        self._state = state
