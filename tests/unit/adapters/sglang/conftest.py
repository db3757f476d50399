"""Servers of both kinds: whose events have what is new, and whose events repeat the output so far."""

from __future__ import annotations

import pytest

from tests.support.models import controlled_sglang, scripted_sglang


@pytest.fixture(params=["cumulative", "increments"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all servers of a test that says nothing of it."""
    for servers in (controlled_sglang, scripted_sglang):
        monkeypatch.setattr(servers, "STREAMS_INCREMENTS", request.param == "increments")
