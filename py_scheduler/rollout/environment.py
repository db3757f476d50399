"""The iteration as STACX_* variables, for handlers that read the environment. Source: seed 1, section 5.

Invariants

- A process has one environment, so at most one iteration or eval is published in it at a time.
- Afterwards each variable has the value again that it had before.
- A tail length that the schedule says nothing about is never overwritten.

Children of `process` and `ray` runners get variables of their own instead (`variables`) and need no such guard.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.knobs import BETA, EVAL_BETA, ROLLOUT_ID, T_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping


def variables(context: IterationContext) -> dict[str, str]:
    """What a child process of this iteration, or of an eval with this context, gets in its environment."""
    said = {ROLLOUT_ID: str(context.rollout_id), BETA: repr(context.beta)}
    if context.t_max > 0:
        said[T_MAX] = str(context.t_max)
    return said


def eval_context(rollout_id: int, environment: Mapping[str, str], eval_beta: float = 0.0) -> IterationContext:
    """The context of an eval: β is `eval_beta` unless STACX_DAGGER_EVAL_BETA says otherwise.

    Raises InvalidArgumentError when that is no probability.
    """
    text = environment.get(EVAL_BETA, "").strip()
    if not text:
        return IterationContext(rollout_id=rollout_id, beta=eval_beta)
    try:
        beta = float(text)
    except ValueError:
        beta = -1.0
    if not 0 <= beta <= 1:
        raise InvalidArgumentError(f"is {text!r}, must be a probability from 0 to 1", EVAL_BETA)
    return IterationContext(rollout_id=rollout_id, beta=beta)


class EnvironmentExporter:
    """Publishes one iteration at a time in an environment. Any thread or asyncio task may call it."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._published: str | None = None

    @contextmanager
    def training(self, context: IterationContext) -> Iterator[IterationContext]:
        """Publishes the iteration for as long as the block runs.

        Raises FailedPreconditionError while another iteration or an eval is published.
        """
        before = self._publish(f"iteration {context.rollout_id}", dict(variables(context)))
        try:
            yield context
        finally:
            self._restore(before)

    @contextmanager
    def evaluation(self, rollout_id: int, eval_beta: float = 0.0) -> Iterator[IterationContext]:
        """Takes STACX_DAGGER_BETA away, or sets it to what evals are to have, for as long as the block runs.

        Raises FailedPreconditionError while an iteration or another eval is published.
        """
        context = eval_context(rollout_id, self._environ, eval_beta)
        is_said = eval_beta > 0 or self._environ.get(EVAL_BETA, "").strip()
        beta = repr(context.beta) if is_said else None
        before = self._publish(f"the eval of iteration {rollout_id}", {ROLLOUT_ID: str(rollout_id), BETA: beta})
        try:
            yield context
        finally:
            self._restore(before)

    def _publish(self, what: str, values: Mapping[str, str | None]) -> dict[str, str | None]:
        """Writes the values (None: absent) and gives what stood in their places."""
        with self._lock:
            if self._published is not None:
                raise FailedPreconditionError(
                    f"{what} cannot be published in the environment while {self._published} is: a process has only "
                    "one. Let the handlers read episode.iteration, run them in `process` or `ray` runners, whose "
                    "children have environments of their own, or wait for the other to end"
                )
            self._published = what
            before = {name: self._environ.get(name) for name in values}
            self._write(values)
            return before

    def _restore(self, before: Mapping[str, str | None]) -> None:
        with self._lock:
            self._write(before)
            self._published = None

    def _write(self, values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value


process_environment = EnvironmentExporter()
"""The one of this process."""
