"""The configuration file: everything it can say, every fault named by its key, and what beats what."""

from __future__ import annotations

from pathlib import Path

import pytest

from py_scheduler.config import (
    Config,
    EvaluatorSettings,
    parse_config,
)
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.quotas import NamespaceSettings
from py_scheduler.domain.resources import Resource
from py_scheduler.rollout.dagger import DAggerSchedule, Decay
from py_scheduler.rollout.filters import FilterSettings, Rejection
from py_scheduler.rollout.reuse import ReuseSettings
from py_scheduler.rollout.settings import RolloutSettings
from py_scheduler.rollout.sources.settings import SourceSettings
from tests.support.servers.configs import DATASET, EVALUATOR, OPEN

FULL = """
[server]
listen = "127.0.0.1:0"
drain_seconds = 5
event_loop = "asyncio"
log_level = "warning"

[cluster]
num_cpus = 16
memory_gb = 64
[cluster.layout]
"10.0.0.1" = [0, 1]
"10.0.0.2" = { gpus = [0], cpu = 8, memory_gb = 32 }

[scheduler]
max_bypass = 3

[sampling]
temperature = 0.7
stop = ["\\n"]

[stopping]
max_turns = 4

[generation.student]
kind = "sglang"
base_url = "http://127.0.0.1:30000"

[[evaluator]]
evaluator_id = "math"
handler = "agents.math:MathAgent"
handler_args = { examples = 4 }
resource = { gpu = 2, cpu = 8, memory_gb = 16, concurrency = 8 }
run_resource = { gpu = 0.25, cpu = 1 }
eval_resource = { cpu = 2 }
batch_size = 0
default_sampling = { max_new_tokens = 64 }
default_stopping = { max_context_len = 512 }
run_timeout_seconds = 30
eval_timeout_seconds = 5
solve_threshold = 0.9
"""


def test_everything_it_can_say() -> None:
    config = parse_config(FULL)
    assert config.server.drain_seconds == 5
    assert config.cluster.layout == {
        "10.0.0.1": [0, 1],
        "10.0.0.2": {"gpus": [0], "cpu": 8, "memory_gb": 32},
    }
    assert config.scheduler.max_bypass == 3
    assert config.sampling == SamplingParams(temperature=0.7, stop=("\n",))
    assert config.stopping == StoppingCriteria(max_turns=4)
    assert config.generation == {"student": {"kind": "sglang", "base_url": "http://127.0.0.1:30000"}}
    assert config.evaluator == (
        EvaluatorSettings(
            evaluator_id="math",
            handler="agents.math:MathAgent",
            handler_args={"examples": 4},
            resource=Resource(gpu=2, cpu=8, memory_gb=16, concurrency=8),
            run_resource=Resource(gpu=0.25, cpu=1),
            eval_resource=Resource(cpu=2),
            batch_size=0,
            default_sampling=SamplingParams(max_new_tokens=64),
            default_stopping=StoppingCriteria(max_context_len=512),
            run_timeout_seconds=30,
            eval_timeout_seconds=5,
            solve_threshold=0.9,
        ),
    )


def test_only_an_evaluator_is_needed() -> None:
    config = parse_config(EVALUATOR)
    assert config.server == Config().server
    assert config.server.listen == "127.0.0.1:50051"


def test_the_training_loop_and_its_data_sets() -> None:
    text = """
[rollout]
groups_per_step = 4
samples_per_group = 2
n_samples_per_eval_prompt = 8
artifact_dir = "out"
save_eval_details = true
[rollout.filters]
rejection = "spread"
finish_only = true
[rollout.dagger]
decay = "cosine"
decay_iterations = 3
[rollout.reuse]
reuse_dir = "old"
"""
    config = parse_config(EVALUATOR + text + DATASET + DATASET.replace("dataset", "eval_dataset"))
    assert config.rollout == RolloutSettings(
        groups_per_step=4,
        samples_per_group=2,
        n_samples_per_eval_prompt=8,
        artifact_dir="out",
        save_eval_details=True,
        filters=FilterSettings(rejection=Rejection.SPREAD, finish_only=True),
        dagger=DAggerSchedule(decay=Decay.COSINE, decay_iterations=3),
        reuse=ReuseSettings(reuse_dir="old"),
    )
    assert config.dataset == config.eval_dataset
    assert config.dataset == (SourceSettings(name="gsm8k", task_type="math", path="gsm8k.jsonl"),)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:50051", "[::1]:1", "127.8.9.1:5", "unix:/tmp/s"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert parse_config(EVALUATOR + f"[server]\nlisten = '{listen}'").server.listen == listen


def test_with_tls_and_tokens_another_host_is_served_and_their_files_count_from_the_configuration() -> None:
    text = EVALUATOR + OPEN + "tokens_file = 't'\n[server.tls]\ncertificate = 'c'\nkey = '/k'"
    server = parse_config(text).located(Path("/etc/scheduler")).server
    assert (server.tokens_file, server.tls.certificate) == ("/etc/scheduler/t", "/etc/scheduler/c")
    assert (server.tls.key, server.tls.client_ca) == ("/k", "")


def test_namespaces_have_weights_and_quotas() -> None:
    namespaces = parse_config(EVALUATOR + "[namespace.a]\nweight = 3\nmax_queued_tasks = 7").namespace
    assert namespaces == {"a": NamespaceSettings(weight=3.0, max_queued_tasks=7)}


def test_another_host_needs_one() -> None:
    text = EVALUATOR + "[server]\nlisten = '0.0.0.0:1'\ninsecure_remote = true"
    assert parse_config(text).server.listen == "0.0.0.0:1"


def test_a_budget_without_a_concurrency_gets_the_default_of_its_variable() -> None:
    text = EVALUATOR.replace("concurrency = 8", "gpu = 2")
    assert parse_config(text).evaluator[0].resource == Resource(gpu=2, concurrency=4)
    assert parse_config(EVALUATOR).evaluator[0].resource == Resource(concurrency=8)
    assert parse_config(EVALUATOR).evaluator[0].run_resource == Resource()


def test_relative_folders_count_from_the_configuration(tmp_path: Path) -> None:
    text = (
        "[rollout]\nartifact_dir = 'out'\n[rollout.reuse]\nreuse_dir = '../old'\n[scheduler]\nworkdir_root = 'work'\n"
    )
    config = parse_config(EVALUATOR + text).located(tmp_path)
    assert config.rollout.artifact_dir == str(tmp_path / "out")
    assert config.rollout.reuse.reuse_dir == str(tmp_path / "../old")
    assert config.scheduler.workdir_root == str(tmp_path / "work")
    again = parse_config(EVALUATOR + "[rollout]\nartifact_dir = '/out'").located(tmp_path)
    assert again.rollout.artifact_dir == "/out"
    assert (again.rollout.reuse.reuse_dir, again.scheduler.workdir_root) == ("", None)
