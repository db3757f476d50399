"""The backends of a configuration: which of them training can wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.app.backends import KINDS, build_generation, check_staleness
from py_scheduler.config import parse_config
from py_scheduler.domain.ports import CONTROLLED_KINDS, GenerationControl, base_of
from tests.support.servers.command import EVALUATOR

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.errors import FieldViolation

STALENESS = "[scheduler.staleness.default]\nmax_staleness = 1\nstep_size = 1\n"
TABLES = {
    "embedded": 'kind = "embedded"\ngguf_path = "model.gguf"\n',
    "sglang": 'kind = "sglang"\nbase_url = "http://127.0.0.1:1"\n',
    "vllm": 'kind = "vllm"\nbase_url = "http://127.0.0.1:1"\n',
}
TAUGHT = 'kind = "with_examples"\nbase = "base"\ninstruction = "Be right."\n[generation.base]\n'
STUDENTS = [(text, kind in CONTROLLED_KINDS) for kind, table in TABLES.items() for text in (table, TAUGHT + table)]


def test_every_kind_is_a_student_below() -> None:
    assert {*TABLES, "with_examples"} == set(KINDS)


@pytest.mark.parametrize(("table", "is_controlled"), STUDENTS)
def test_training_does_not_wait_for_weights_that_never_change(table: str, is_controlled: bool, tmp_path: Path) -> None:
    """And what a message says of a kind is so."""
    (tmp_path / "model.gguf").touch()
    for role, staleness in (("student", ""), ("student", STALENESS), ("teacher", STALENESS)):
        faults: list[FieldViolation] = []
        config = parse_config(EVALUATOR + f"[generation.{role}]\n" + table + staleness)
        backends = build_generation(config, tmp_path, faults)
        check_staleness(config, backends, faults)
        assert isinstance(base_of(backends[role]), GenerationControl) is is_controlled
        is_refused = role == "student" and bool(staleness) and not is_controlled
        assert [fault.field for fault in faults] == ["scheduler.staleness"] * is_refused
        assert all(f'"{kind}"' in fault.description for fault in faults for kind in CONTROLLED_KINDS)
