"""What changes between two turns that share one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.queue import admission as admission_module
from py_scheduler.scheduler.queue.admission import Admission
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.handlers import SolvingAgent, spec_of

if TYPE_CHECKING:
    import pytest

    from py_scheduler.placement import Lease

GPU = Resource(gpu=1)


def test_a_head_that_can_never_fit_any_more_lets_go_even_what_this_line_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(admission_module, "_LOOKS", 1)
    pool = PlacementPool([NodeResource(node_ip="n", gpus=list(range(8)), cpu=64, memory_gb=64)])
    held = pool.try_acquire_apart(GPU, 1, [])
    assert held is not None
    admission = Admission(
        pool,
        cast("Any", SimpleNamespace(ledger=None, record=lambda *_: ())),
        cast("Any", SimpleNamespace(monotonic=lambda: 0.0)),
        EngineSettings(max_bypass=0),
        lambda *_: None,
        Quotas({}),
        {},
    )
    granted: list[Lease] = []
    for per_sample in (Resource(gpu=8), *(Resource(gpu=1, cpu=1 + number) for number in range(3))):
        demand = PlacementDemand(per_sample=per_sample, max_tokens=1)
        admission.enqueue_lease("default", (0.0, 0), demand, 1, granted.append)
    while admission._admit_for_one_turn():
        pass
    admission.room_returned()
    for _ in range(3):
        assert admission._admit_for_one_turn(), "refused, passed; the first of the small ones is held back"
    assert not granted
    (token,) = held.tokens
    stuck = SimpleNamespace(
        planned=SimpleNamespace(namespace="default"), node_ip=token.node_ip, gpu_ids=tuple(token.gpu_ids)
    )
    spec = spec_of(SolvingAgent(), "gpu", resource=GPU, run_resource=GPU, eval_resource=GPU)
    admission.room_is_stranded([(spec, cast("Any", stuck))])
    while admission._admit_for_one_turn():
        pass
    assert len(granted) == 3
