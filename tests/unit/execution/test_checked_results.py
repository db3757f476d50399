"""What a handler measured, as it is taken from what `run` returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult
from py_scheduler.domain.values.metrics import plain_metrics
from py_scheduler.execution.run_sample import checked_result


class TensorOfOne:
    """As torch's."""

    def item(self) -> float:
        return 0.5


NUMBERS = [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5]), np.array([[0.5]]), TensorOfOne()]
ODD = [np.array([0.5, 1.0]), np.array([]), np.array(["x"]), "0.5", None, [0.5], object()]


def named(value: object) -> str:
    return f"{type(value).__name__}{getattr(value, 'shape', '')}"


@pytest.mark.parametrize("number", NUMBERS, ids=named)
def test_numbers_of_numpy_and_torch_are_numbers(number: Any) -> None:
    measured: Any = {"score": number, "turns": np.int64(3)}
    result = checked_result(AgentResult(metrics=measured), BaseAgent())
    assert result.metrics == {"score": 0.5, "turns": 3.0}
    assert {type(value) for value in result.metrics.values()} == {float}
    assert plain_metrics(measured) == {"score": 0.5, "turns": 3.0}


@pytest.mark.parametrize("odd", ODD, ids=named)
def test_what_is_no_number_is_refused_by_name(odd: Any) -> None:
    with pytest.raises(TypeError, match=r"BaseAgent\.run returned a AgentResult .*\$\.metrics"):
        checked_result(AgentResult(metrics={"good": 1.0, "odd": odd}), BaseAgent())
    # A runner's status is not a handler's: what it measured besides is worth keeping.
    assert plain_metrics({"good": 1.0, "odd": odd}) == {"good": 1.0}
