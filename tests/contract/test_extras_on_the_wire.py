"""Named resources and labels over real channels: leases, capacity, explanations, and why a task waits."""

from __future__ import annotations

import asyncio

import pytest
from rich.console import Console

from py_scheduler.client import BlockingPlacementClient, PlacementClient, SchedulerClient
from py_scheduler.commands.why import show_explanation
from py_scheduler.domain.leases import Shortage
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError, UnplaceableError
from tests.contract.conftest import whole_server

CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
n1 = { gpus = [0], cpu = 64, memory_gb = 64, named = { licence = 3 }, labels = { zone = "a" } }
n2 = { gpus = [0], cpu = 64, memory_gb = 64, labels = { zone = "b" } }
[[evaluator]]
evaluator_id = "licensed"
handler = "tests.support.agents.app_handlers:Echo"
handler_args = { seconds = 3600 }
resource = { cpu = 8, concurrency = 2, named = { licence = 4 } }
run_resource = { cpu = 1, named = { licence = 2 } }
eval_resource = { cpu = 1, required_labels = { zone = "a" } }
"""
SAMPLE = Resource(cpu=1, named={"licence": 1}, required_labels={"zone": "a"})


async def test_leases_take_named_resources_on_nodes_with_the_label() -> None:
    async with whole_server(CONFIG) as address, PlacementClient.connect(address, reconnect_seconds=0.0) as client:
        view = await client.capacity(SAMPLE)
        assert (view.max_tokens, view.free_tokens) == (3, 3)
        n1, n2 = view.nodes
        assert (n1.named, n1.free_named, n1.labels) == ({"licence": 3}, {"licence": 3}, {"zone": "a"})
        assert (n2.named, n2.free_named, n2.labels) == ({}, {}, {"zone": "b"})
        async with client.lease(SAMPLE, 2) as lease:
            assert {token.node_ip for token in lease.tokens} == {"n1"}
            assert (await client.capacity(SAMPLE)).nodes[0].free_named == {"licence": 1}
            explained = await client.explain(SAMPLE, 2)
            first, second = explained.nodes
            assert (first.short, first.short_named, first.lacking_labels) == ((Shortage.NAMED,), ("licence",), {})
            assert second.short == (Shortage.NAMED, Shortage.LABEL)
            assert second.lacking_labels == {"zone": "a"}
        assert (await client.capacity(SAMPLE)).free_tokens == 3


async def test_a_budget_holds_named_resources_or_says_what_it_lacks() -> None:
    async with whole_server(CONFIG) as address, PlacementClient.connect(address, reconnect_seconds=0.0) as client:
        budget = Resource(cpu=9, concurrency=9, named={"licence": 2})
        assert (await client.explain(SAMPLE, 9, budget=budget)).wanted_tokens == 2
        with pytest.raises(UnplaceableError, match=r"its named\.licence is 0"):
            await client.explain(SAMPLE, 9, budget=Resource(cpu=9))
        for sample, field in (
            (Resource(cpu=1, named={"licence": -1}), "per_sample.named.licence"),
            (Resource(cpu=1, required_labels={"zone": "ä"}), "per_sample.required_labels.zone"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                await client.capacity(sample)
            assert [violation.field for violation in caught.value.violations] == [field]


async def test_the_blocking_client_takes_them_too() -> None:
    def lease(address: str) -> tuple[str, ...]:
        with (
            BlockingPlacementClient(address, reconnect_seconds=0.0) as client,
            client.lease(SAMPLE, 3) as held,
        ):
            return tuple(token.node_ip for token in held.tokens)

    async with whole_server(CONFIG) as address:
        assert await asyncio.to_thread(lease, address) == ("n1", "n1", "n1")


async def test_a_waiting_task_is_told_which_resource_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    async with whole_server(CONFIG) as address, SchedulerClient.connect(address, reconnect_seconds=0.0) as client:
        tasks = [Task(config=TaskConfig(task_type="licensed"), prompt=str(number)) for number in range(2)]
        submission = await client.submit(tasks, batch_id=1)
        async with asyncio.timeout(10):
            while not (waits := (await client.explain_task(submission.task_ids[1])).waits):
                pass
        assert "named.licence on 2 nodes, label zone=a on 1 node" in waits[0].reason
        show_explanation(await client.explain_task(submission.task_ids[1]), Console(width=200))
        assert "named.licence, label zone=a" in capsys.readouterr().out
        info = await client.server_info()
        (evaluator,) = info.evaluators
        assert evaluator.resource.named == {"licence": 4}
        assert evaluator.sample_resource == Resource(cpu=1, named={"licence": 2}, required_labels={"zone": "a"})
