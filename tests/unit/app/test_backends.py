"""The backends of a configuration: which of them training can wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.app.backends import build_generation, check_staleness
from py_scheduler.config import parse_config
from tests.support.servers.command import EVALUATOR

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.errors import FieldViolation

STALENESS = "[scheduler.staleness.default]\nmax_staleness = 1\nstep_size = 1\n"
SGLANG = 'kind = "sglang"\nbase_url = "http://127.0.0.1:1"\n'
EMBEDDED = 'kind = "embedded"\ngguf_path = "model.gguf"\n'
TAUGHT = '[generation.student]\nkind = "with_examples"\nbase = "base"\ninstruction = "Be right."\n[generation.base]\n'


@pytest.mark.parametrize(
    ("student", "is_refused"),
    [
        ("[generation.student]\n" + EMBEDDED, True),
        (TAUGHT + EMBEDDED, True),
        ("[generation.student]\n" + SGLANG, False),
        (TAUGHT + SGLANG, False),
        ("[generation.teacher]\n" + EMBEDDED, False),
    ],
)
def test_training_does_not_wait_for_weights_that_never_change(student: str, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    faults: list[FieldViolation] = []
    for staleness in ("", STALENESS):
        config = parse_config(EVALUATOR + student + staleness)
        check_staleness(config, build_generation(config, tmp_path, faults), faults)
        assert [fault.field for fault in faults] == ["scheduler.staleness"] * (is_refused and bool(staleness))
