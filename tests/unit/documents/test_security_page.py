"""SECURITY.md names tests that there are, and what it says of requests holds for all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import (
    generation_service_pb2,
    placement_service_pb2,
    rollout_service_pb2,
    scheduler_service_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
SERVICES = (scheduler_service_pb2, placement_service_pb2, rollout_service_pb2, generation_service_pb2)
CODE_OR_VARIABLE = re.compile(r"env|command|argv|handler|module|class|script|pickle|import|code")


def test_the_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 10
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    functions = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    assert named <= functions | set(files), named - functions - set(files)


def fields_of(message: Any, seen: set[str]) -> Iterator[str]:
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field.name
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def test_no_request_can_name_code_or_a_variable() -> None:
    seen: set[str] = set()
    names: set[str] = set()
    for module in SERVICES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                names.update(fields_of(method.input_type, seen))
    assert {"prompt", "metadata_json", "request_id"} <= names
    assert {name for name in names if CODE_OR_VARIABLE.search(name)} == set()
