"""How the configuration says where SGLang is: one server, several, or a router with its workers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.adapters.fleet.settings import FleetSettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.app import build_generation
from py_scheduler.config import Config
from py_scheduler.domain.generation import Endpoints
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from py_scheduler.domain.ports import GenerationBackend


def built(keys: str) -> tuple[GenerationBackend | None, list[str]]:
    config = Config(generation={"student": {"kind": "sglang"} | tomllib.loads(keys)})
    faults: list[FieldViolation] = []
    engines = build_generation(config, Path(), faults)
    return engines.get("student"), [str(fault) for fault in faults]


def test_several_servers_with_all_that_can_be_set() -> None:
    engine, faults = built("""
base_urls = ["http://10.0.0.1:30000", "https://b:1/"]
default_max_new_tokens = 77
fleet = { max_concurrency = 5, warm_up_seconds = 9.0 }
""")
    assert faults == []
    assert isinstance(engine, SglangFleet)
    assert [endpoint.base_url for endpoint in engine._endpoints] == ["http://10.0.0.1:30000", "https://b:1"]
    assert engine._fleet == FleetSettings(max_concurrency=5, warm_up_seconds=9.0)
    assert engine._settings.default_max_new_tokens == 77


def test_none_yet_and_a_router_that_may_change() -> None:
    engine, faults = built("base_urls = []")
    assert faults == []
    assert isinstance(engine, SglangFleet)
    assert engine.endpoints == Endpoints(urls=())
    engine, faults = built('base_urls = ["http://r:1"]\ncontrol_urls = ["http://b:1", "http://c:1"]')
    assert faults == []
    assert isinstance(engine, SglangFleet)
    assert engine._endpoints[0].backend.control_urls == ("http://b:1", "http://c:1")


def test_one_server_and_a_router_with_its_workers() -> None:
    engine, faults = built('base_url = "http://a:1"')
    assert (type(engine), faults) == (SglangBackend, [])
    engine, faults = built('base_url = "http://a:1"\ncontrol_urls = ["http://b:1", "http://c:1"]')
    assert faults == []
    assert isinstance(engine, SglangBackend)
    assert [client.base_url for client in engine._controls] == ["http://b:1", "http://c:1"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "base_url: is missing"),
        ("base_url = 3", "base_url: 3 is no address"),
        ("base_url = 'http://a:1/x?key=1'", "base_url: 'http://a:1/x?key=1' is no address"),
        ("base_urls = ['http://a:1/#part']", "base_urls: 'http://a:1/#part' is no address"),
        ("base_url = 'localhost:30000'", "base_url: 'localhost:30000' is no address"),
        ("base_urls = 'http://a:1'", "base_urls: must be a list"),
        ("base_urls = ['http://a:1', 'http://b:port']", "base_urls: 'http://b:port' is no address"),
        ("base_urls = ['http://a:1', 'http://a:1/']", "base_urls: names an address twice"),
        ("base_url = 'http://a:1'\nbase_urls = ['http://b:1']", "base_url: base_urls are asked directly"),
        ("base_urls = ['http://b:1', 'http://d:1']\ncontrol_urls = ['http://c:1']", "control_urls: are the workers"),
        ("base_urls = []\ncontrol_urls = ['http://c:1']", "control_urls: are the workers"),
        ("base_url = 'http://a:1'\ncontrol_urls = []", "control_urls: must be a list of one or more"),
        ("base_url = 'http://a:1'\nfleet = {}", "fleet: unknown key"),
        ("base_urls = ['http://b:1']\nfleet = { max_concurency = 1 }", "fleet.max_concurency: unknown key"),
        ("base_urls = ['http://b:1']\nfleet = { max_concurrency = 0 }", "max_concurrency"),
        ("base_urls = ['http://b:1']\nslots = 3", "slots: unknown key"),
    ],
)
def test_what_is_wrong_is_said(keys: str, message: str) -> None:
    engine, faults = built(keys)
    assert engine is None
    assert len(faults) == 1
    assert faults[0].startswith("generation.student.")
    assert message in faults[0]


def test_every_fault_is_told_at_once() -> None:
    _, faults = built("base_urls = ['http://b:1']\nslots = 3\nfleet = { a = 1 }")
    assert [fault.split(":")[0] for fault in faults] == ["generation.student.slots", "generation.student.fleet.a"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency: is 0"),
        ({"load_interval_seconds": 0.0}, "load_interval_seconds: is 0.0"),
        ({"set_aside_max_seconds": 0.1}, "less than set_aside_base_seconds"),
    ],
)
def test_settings_are_checked(said: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(said, FleetSettings)


def test_addresses_are_checked_without_a_configuration_too() -> None:
    with pytest.raises(InvalidArgumentError, match="named already"):
        SglangFleet(["http://a:1", "http://a:1/"])
