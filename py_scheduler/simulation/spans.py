"""When and where each sample of a simulation ran, in columns: some 80 bytes a sample, whatever happened to it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from py_scheduler.domain.results import Outcome

if TYPE_CHECKING:
    from py_scheduler.domain.results import SampleDone

OUTCOMES = tuple(Outcome)
_NUMBERS = {outcome: number for number, outcome in enumerate(OUTCOMES)}


class Names:
    """Numbers in place of names, in the order in which the names were first seen."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number


class Spans:
    """One entry of each column to a sample that ran, in the order of their ends. Virtual seconds from the beginning.

    task_no counts tasks in the order of their submits. wait_seconds: what the last attempt waited for admission.
    """

    def __init__(self) -> None:
        self.task_no = array("q")
        self.sample_no = array("l")
        self.step = array("l")
        self.is_eval = array("b")
        self.evaluator = array("h")
        self.node = array("l")
        self.outcome = array("b")
        self.submitted = array("d")
        self.started = array("d")
        self.held = array("d")
        self.wait_seconds = array("d")
        self.evaluators = Names()
        self.nodes = Names()

    def __len__(self) -> int:
        return len(self.started)

    def add(
        self,
        sample: SampleDone,
        *,
        task_no: int,
        step: int,
        is_eval: bool,
        evaluator_id: str,
        submitted: float,
        started: float,
    ) -> None:
        self.task_no.append(task_no)
        self.sample_no.append(sample.sample_no)
        self.step.append(step)
        self.is_eval.append(is_eval)
        self.evaluator.append(self.evaluators.number(evaluator_id))
        self.node.append(self.nodes.number(sample.node_ip))
        self.outcome.append(_NUMBERS[sample.outcome])
        self.submitted.append(submitted)
        self.started.append(started)
        self.held.append(sample.timings.held_seconds)
        self.wait_seconds.append(sample.timings.wait_seconds)
