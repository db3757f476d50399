"""The configuration file: everything it can say, every fault named by its key, and what beats what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from py_scheduler.config import (
    KNOBS,
    Config,
    EvaluatorSettings,
    Knob,
    Override,
    load_config,
    overrides_of,
    parse_config,
)
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import ConfigError

EVALUATOR = """
[[evaluator]]
evaluator_id = "math"
handler = "agents.math:MathAgent"
resource = { concurrency = 8 }
"""

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


def faults_of(text: str, *overrides: Override) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)
    return {violation.field: violation.description for violation in caught.value.violations}


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


@pytest.mark.parametrize(
    ("text", "key", "description"),
    [
        ("= 1", "", "not TOML.*line 1"),
        ("", "evaluator", "there is none"),
        (EVALUATOR + "[servr]", "servr", "unknown key: did you mean server"),
        (EVALUATOR + "[server]\nlissen = 'x'", "server.lissen", "unknown key: did you mean listen"),
        (EVALUATOR + "[server]\nzzz = 1", "server.zzz", "unknown key: known here: listen, insecure_remote"),
        (EVALUATOR + "[server]\nlisten = 5", "server.listen", "must be `str`, got `int`"),
        (EVALUATOR + "[server]\nlisten = 'nothing'", "server.listen", "host:port"),
        (EVALUATOR + "[server]\nlisten = '127.0.0.1:99999'", "server.listen", "host:port"),
        (EVALUATOR + "[server]\nlisten = 'unix:'", "server.listen", "names no path"),
        (EVALUATOR + "[server]\nlisten = '0.0.0.0:1'", "server.listen", "not loopback.*insecure_remote = true"),
        (EVALUATOR + "[server]\nlisten = '127.0.0.1.evil.org:1'", "server.listen", "not loopback"),
        (EVALUATOR + "[server]\nmax_message_bytes = 1", "server.max_message_bytes", "must be `int` >= 65536"),
        (EVALUATOR + "[server]\ndrain_seconds = -1", "server.drain_seconds", ">= 0"),
        (EVALUATOR + "[server]\ndrain_seconds = nan", "server.drain_seconds", ""),
        (EVALUATOR + "[server]\nevent_loop = 'trio'", "server.event_loop", "trio"),
        (EVALUATOR + "[server]\nlog_level = 'loud'", "server.log_level", "loud"),
        (EVALUATOR + "[scheduler]\nmax_bypas = 1", "scheduler.max_bypas", "did you mean max_bypass"),
        (EVALUATOR + "[scheduler]\nmax_bypass = -1", "scheduler.max_bypass", "not negative"),
        (EVALUATOR + "[scheduler]\nmax_running_samples = 0", "scheduler.max_running_samples", "at least 1"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = -1", "scheduler.stop_grace_seconds", "not negative"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = 601", "scheduler.stop_grace_seconds", "at most 600"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = inf", "scheduler.stop_grace_seconds", "finite"),
        (EVALUATOR + "[cluster]\nnum_cpus = -4", "cluster.num_cpus", ">= 0"),
        (EVALUATOR + "[sampling]\ntemperature = -1", "sampling.temperature", "at least 0"),
        (EVALUATOR + "[sampling]\ntemprature = 1", "sampling.temprature", "did you mean temperature"),
        (EVALUATOR + "[stopping]\nmax_turns = 0", "stopping.max_turns", "at least 1"),
        (EVALUATOR + "[generation]\nstudent = 3", "generation.student", "must be a table"),
        ("evaluator = 3", "evaluator", r"\[\[evaluator\]\]"),
        ("[[evaluator]]\nhandler = 'a:B'", "evaluator[0].evaluator_id", "is missing"),
        (EVALUATOR + "handlr = 1", "evaluator[0].handlr", "did you mean handler"),
        (EVALUATOR + "run_resource = { gpus = 1 }", "evaluator[0].run_resource.gpus", "did you mean gpu"),
        (EVALUATOR + "run_resource = { gpu = -1 }", "evaluator[0].run_resource.gpu", "not negative"),
        (EVALUATOR + "run_resource = { gpu = nan }", "evaluator[0].run_resource.gpu", "finite"),
        (EVALUATOR + "eval_resource = { concurrency = 0 }", "evaluator[0].eval_resource.concurrency", "at least 1"),
        (EVALUATOR + "batch_size = -1", "evaluator[0].batch_size", ">= 0"),
        (EVALUATOR + "run_timeout_seconds = 0", "evaluator[0].run_timeout_seconds", "> 0"),
        (EVALUATOR + "run_timeout_seconds = inf", "evaluator[0].run_timeout_seconds", "finite"),
        (EVALUATOR + "solve_threshold = nan", "evaluator[0].solve_threshold", "finite"),
        (EVALUATOR + "default_sampling = { top_p = 2 }", "evaluator[0].default_sampling.top_p", "at most 1"),
        (
            EVALUATOR + "default_stopping = { turns = 2 }",
            "evaluator[0].default_stopping.turns",
            "did you mean max_turns",
        ),
        (EVALUATOR.replace("agents.math:MathAgent", "agents/math.py"), "evaluator[0].handler", "module:Class"),
        (EVALUATOR.replace("agents.math:MathAgent", "os:system()"), "evaluator[0].handler", "module:Class"),
        (EVALUATOR * 2, "evaluator[1].evaluator_id", "taken by another"),
    ],
)
def test_a_fault_names_its_key_and_the_way_out(text: str, key: str, description: str) -> None:
    faults = faults_of(text)
    assert list(faults) == [key]
    assert re.search(description, faults[key]), faults[key]


def test_all_faults_are_told_at_once() -> None:
    text = EVALUATOR + "bad = 1\n[[evaluator]]\n[server]\nlissen = 1\n[sampling]\ntop_p = 'x'\n[other]\n"
    assert set(faults_of(text)) == {
        "evaluator[0].bad",
        "evaluator[1].evaluator_id",
        "server.lissen",
        "sampling.top_p",
        "other",
    }


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:50051", "[::1]:1", "127.8.9.1:5", "unix:/tmp/s"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert parse_config(EVALUATOR + f"[server]\nlisten = '{listen}'").server.listen == listen


def test_another_host_needs_one() -> None:
    text = EVALUATOR + "[server]\nlisten = '0.0.0.0:1'\ninsecure_remote = true"
    assert parse_config(text).server.listen == "0.0.0.0:1"


def test_a_flag_beats_the_environment_which_beats_the_file() -> None:
    environment = {"PY_SCHEDULER_LISTEN": "127.0.0.1:2", "PY_SCHEDULER_EVALUATOR_CONCURRENCY": "5", "HOME": "/"}
    overrides = overrides_of({"--listen": "127.0.0.1:3", "--evaluator-batch-size": "9"}, environment)
    assert {override.origin for override in overrides} == {
        "--listen",
        "--evaluator-batch-size",
        "PY_SCHEDULER_EVALUATOR_CONCURRENCY",
    }
    config = parse_config(EVALUATOR + EVALUATOR.replace("math", "code") + "[server]\nlisten = '127.0.0.1:1'", overrides)
    assert config.server.listen == "127.0.0.1:3"
    assert [evaluator.batch_size for evaluator in config.evaluator] == [9, 9]
    assert [evaluator.resource.concurrency for evaluator in config.evaluator] == [5, 5]


def test_a_knob_that_is_no_number_is_named_as_it_was_turned() -> None:
    (override,) = overrides_of({}, {"PY_SCHEDULER_ENV_NUM_CPUS": "many"})
    assert faults_of(EVALUATOR, override) == {"PY_SCHEDULER_ENV_NUM_CPUS": "is 'many', must be a number"}
    (override,) = overrides_of({"--log-level": "loud"}, {})
    assert faults_of(EVALUATOR, override) == {"--log-level": "is 'loud', must be one of debug, info, warning, error"}


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.flag)
def test_every_knob_reaches_a_known_key(knob: Knob) -> None:
    text = knob.choices[0] if knob.choices else "127.0.0.1:7" if knob.parse is str else "7"
    (override,) = overrides_of({knob.flag: text}, {})
    text = EVALUATOR + "[server]\n[cluster]\n"
    before, after = parse_config(text), parse_config(text, [override])
    assert before != after


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml: No such file"):
        load_config(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.toml")
