"""Servers of all kinds: SGLang in both of its ways, and vLLM."""

from __future__ import annotations

import pytest

from tests.support.models import scripted_sglang, served_backends


@pytest.fixture(params=["sglang cumulative", "sglang increments", "vllm"])
def any_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all servers of a test that says nothing of it."""
    kind, _, way = request.param.partition(" ")
    monkeypatch.setattr(served_backends, "KIND", kind)
    monkeypatch.setattr(scripted_sglang, "STREAMS_INCREMENTS", way == "increments")
