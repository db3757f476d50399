"""Numbers of `[generation.ROLE]` with which nothing is generated, or a call is called done that was never sent."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.app import build_generation
from py_scheduler.config import Config
from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from py_scheduler.errors import FieldViolation

ONE = {"base_url": "http://127.0.0.1:1"}
SEVERAL = {"base_urls": ["http://127.0.0.1:1"]}
SERVED = [
    "retry.attempts = 0",
    "retry.attempts = -1",
    "retry.base_seconds = -1.0",
    "retry.max_seconds = nan",
    "default_max_new_tokens = 0",
    "stream_interval = 0",
    "least_tokens_per_second = nan",
    "first_token_timeout_seconds = -1.0",
    "idle_read_timeout_seconds = nan",
    "connect_timeout_seconds = 0.0",
    "control_timeout_seconds = -3.0",
    "pause_timeout_seconds = 0",
    "weight_update_timeout_seconds = nan",
    "abort_grace_seconds = -1.0",
    "encoded_seconds = nan",
    "keepalive_seconds = nan",
    "vocab_size = -5",
    "context_length = -1",
]
EMBEDDED = [
    "threads = 0",
    "slots = 0",
    "context_length = -1",
    "prompt_cache_mib = -1",
    "default_max_new_tokens = 0",
    "start_timeout_seconds = nan",
    "first_token_timeout_seconds = 0",
    "idle_read_timeout_seconds = -1.0",
    "control_timeout_seconds = nan",
]


def faults_of(table: dict[str, Any], tmp_path: Path) -> list[str]:
    faults: list[FieldViolation] = []
    assert not build_generation(Config(generation={"student": table}), tmp_path, faults)
    return [fault.field for fault in faults]


@pytest.mark.parametrize("said", SERVED)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_number_that_no_server_can_be_spoken_to_with_is_named(kind: str, said: str, tmp_path: Path) -> None:
    key = f"generation.student.{said.split(' ', maxsplit=1)[0]}"
    for addresses in (ONE, SEVERAL):
        assert faults_of({"kind": kind} | addresses | tomllib.loads(said), tmp_path) == [key]


@pytest.mark.parametrize("said", ["max_concurrency = 0", "no_endpoint_seconds = nan", "max_attempts = -1"])
def test_a_number_of_a_fleet_is_named_too(said: str, tmp_path: Path) -> None:
    table = {"kind": "sglang", "fleet": tomllib.loads(said)} | SEVERAL
    assert faults_of(table, tmp_path) == [f"generation.student.fleet.{said.split(' ', maxsplit=1)[0]}"]


@pytest.mark.parametrize("said", EMBEDDED)
def test_a_number_that_no_model_can_be_run_with_is_named(said: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    table = {"kind": "embedded", "gguf_path": "model.gguf"} | tomllib.loads(said)
    assert faults_of(table, tmp_path) == [f"generation.student.{said.split(' ', maxsplit=1)[0]}"]


def test_a_program_is_held_to_it_as_a_file_is() -> None:
    """Without an attempt a pause or an update would be sent to nobody, and called done."""
    with pytest.raises(InvalidArgumentError, match="attempts: is 0, must be above 0"):
        RetrySettings(attempts=0)
