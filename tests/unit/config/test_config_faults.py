"""The configuration file: each fault names its key and the way out, all of them at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from py_scheduler.config import (
    load_config,
    parse_config,
)
from py_scheduler.errors import ConfigError
from py_scheduler.knobs import Override
from tests.support.servers.configs import DATASET, EVALUATOR, OPEN, PYTHON


def faults_of(text: str, *overrides: Override) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)
    return {violation.field: violation.description for violation in caught.value.violations}


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
        (EVALUATOR + OPEN, "server.listen", "there is no TLS and there are no tokens.*server.tokens_file"),
        (EVALUATOR + OPEN + "tokens_file = 't'", "server.listen", "there is no TLS:"),
        (EVALUATOR + OPEN + "tls = { certificate = 'c', key = 'k' }", "server.listen", "there are no tokens:"),
        (EVALUATOR + "[server.tls]\ncertificate = 'c'", "server.tls.key", "is missing"),
        (EVALUATOR + "[server.tls]\nclient_ca = 'c'", "server.tls.certificate", "is missing"),
        (EVALUATOR + "[gateway]\nlisten = '0.0.0.0:1'", "gateway.listen", "no TLS.*gateway.tls.certificate"),
        (EVALUATOR + "[namespace.a]\nweight = 0", "namespace.a.weight", ">= 1e-06"),
        (EVALUATOR + "[namespace.a]\nweight = nan", "namespace.a.weight", ">= 1e-06"),
        (EVALUATOR + "[namespace.a]\nweight = 5e-324", "namespace.a.weight", ">= 1e-06"),
        (EVALUATOR + "[namespace.a]\nweight = 1e308", "namespace.a.weight", "<= 1000000"),
        (EVALUATOR + "[namespace.'*']\nweight = 2", "namespace.*", "a table for each"),
        (EVALUATOR + "[namespace.a]\nwieght = 2", "namespace.a.wieght", "did you mean weight"),
        (EVALUATOR + "[namespace.a]\nmax_queued_tasks = 0", "namespace.a.max_queued_tasks", ">= 1"),
        (EVALUATOR + "[server]\nmax_message_bytes = 1", "server.max_message_bytes", "must be `int` >= 65536"),
        (EVALUATOR + "[server]\ndrain_seconds = -1", "server.drain_seconds", ">= 0"),
        (EVALUATOR + "[server]\ndrain_seconds = nan", "server.drain_seconds", ""),
        (EVALUATOR + "[server]\nevent_loop = 'trio'", "server.event_loop", "trio"),
        (EVALUATOR + "[server]\nlog_level = 'loud'", "server.log_level", "loud"),
        (EVALUATOR + "[scheduler]\nmax_bypas = 1", "scheduler.max_bypas", "did you mean max_bypass"),
        (EVALUATOR + "[scheduler]\nmax_bypass = -1", "scheduler.max_bypass", "not negative"),
        (EVALUATOR + "[scheduler]\nmax_running_samples = 0", "scheduler.max_running_samples", "at least 1"),
        (EVALUATOR + "[scheduler]\nbatching_strategy = 'fifo'", "scheduler.batching_strategy", "module:function"),
        (EVALUATOR + "[scheduler]\neval_weight = -1", "scheduler.eval_weight", "not negative"),
        (EVALUATOR + "[scheduler]\neval_weight = 'strict'", "scheduler.eval_weight", "one of a number, by_batch_id"),
        (
            EVALUATOR + "[generation.student]\n[scheduler]\nmax_running_generations = { student = 0 }",
            "scheduler.max_running_generations.student",
            "at least 1",
        ),
        (
            EVALUATOR + "[scheduler]\nmax_running_generations = { judge = 1 }",
            "scheduler.max_running_generations.judge",
            "no such role",
        ),
        (
            EVALUATOR + "[scheduler.staleness.default]\nmax_staleness = -1\nstep_size = 1",
            "scheduler.staleness.default.max_staleness",
            ">= 0",
        ),
        (
            EVALUATOR + "[scheduler.staleness.default]\nmax_staleness = 1\nstep_size = 0",
            "scheduler.staleness.default.step_size",
            ">= 1",
        ),
        (
            EVALUATOR + "[scheduler.staleness.default]\nmax_staleness = 1",
            "scheduler.staleness.default.step_size",
            "is missing",
        ),
        (
            EVALUATOR + "[scheduler.staleness]\nmax_staleness = 1",
            "scheduler.staleness.max_staleness",
            r"write \[scheduler.staleness.NAME\]",
        ),
        (
            EVALUATOR + '[scheduler.staleness."a\\nb"]\nmax_staleness = 1\nstep_size = 1',
            "scheduler.staleness.a\nb",
            "cannot be printed",
        ),
        (EVALUATOR + 'on_weight_update = "forget"', "evaluator[0].on_weight_update", "forget"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = -1", "scheduler.stop_grace_seconds", "not negative"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = 601", "scheduler.stop_grace_seconds", "at most 600"),
        (EVALUATOR + "[scheduler]\nstop_grace_seconds = inf", "scheduler.stop_grace_seconds", "finite"),
        (EVALUATOR + "[cluster]\nnum_cpus = -4", "cluster.num_cpus", ">= 0"),
        (EVALUATOR + "[sampling]\ntemperature = -1", "sampling.temperature", "at least 0"),
        (EVALUATOR + "[sampling]\ntemprature = 1", "sampling.temprature", "did you mean temperature"),
        (EVALUATOR + "[stopping]\nmax_turns = 0", "stopping.max_turns", "at least 1"),
        (EVALUATOR + "[generation]\nstudent = 3", "generation.student", "must be a table"),
        ("evaluator = 3", "evaluator", r"\[\[evaluator\]\]"),
        ("[[evaluator]]\nhandler = 'a:B'\nresource = { concurrency = 1 }", "evaluator[0].evaluator_id", "is missing"),
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
        (EVALUATOR + "[rollout]\ngroup_per_step = 1", "rollout.group_per_step", "did you mean groups_per_step"),
        (EVALUATOR + "[rollout]\ngroups_per_step = 0", "rollout.groups_per_step", ">= 1"),
        (EVALUATOR + "[rollout]\nfile_format = 'csv'", "rollout.file_format", "is 'csv', must be one of parquet, pt"),
        (EVALUATOR + "[rollout]\nartifact_dir = ''", "rollout.artifact_dir", "name a folder"),
        (EVALUATOR + "[rollout]\nfilters = 1", "rollout.filters", "must be `object`"),
        (EVALUATOR + "[rollout.filters]\nmin_scor = 1", "rollout.filters.min_scor", "did you mean min_score"),
        (EVALUATOR + "[rollout.filters]\nrejection = 'all'", "rollout.filters.rejection", "off, threshold, spread"),
        (EVALUATOR + "[rollout.filters]\nmin_spread = nan", "rollout.filters.min_spread", "at least 0"),
        (EVALUATOR + "[rollout.dagger]\nbeta_start = 2", "rollout.dagger.beta_start", "from 0 to 1"),
        (EVALUATOR + "[rollout.dagger]\nbeta = 1", "rollout.dagger.beta", "did you mean beta_end|known here"),
        (EVALUATOR + "[rollout.reuse]\nmode = 'always'", "rollout.reuse.mode", "one of auto, never"),
        (
            EVALUATOR + "[rollout.reuse]\nforce_fresh = true\nreuse_dir = 'old'",
            "rollout.reuse.force_fresh",
            r"reuse_dir \(STACX_REUSE_PER_ITER_DIR\) for saved ones",
        ),
        (EVALUATOR + "dataset = 3", "evaluator[0].dataset", "unknown key"),
        (EVALUATOR + "[dataset]\nname = 'a'", "dataset", r"write \[\[dataset\]\]"),
        (EVALUATOR + DATASET + "pathh = 'x'", "dataset[0].pathh", "did you mean path"),
        (EVALUATOR + DATASET + "kind = 'csv'", "dataset[0].kind", "must be one of jsonl"),
        (EVALUATOR + DATASET + "weight = 0", "dataset[0].weight", "above 0"),
        (EVALUATOR + DATASET + "repeat_times = 0", "dataset[0].repeat_times", "at least 1"),
        (EVALUATOR + DATASET + "on_end = 'wrap'", "dataset[0].on_end", "one of restart, stop"),
        (EVALUATOR + DATASET + "sampling = { top_p = 2 }", "dataset[0].sampling.top_p", "at most 1"),
        (EVALUATOR + DATASET + "stopping = { turns = 2 }", "dataset[0].stopping.turns", "did you mean max_turns"),
        (EVALUATOR + PYTHON, "dataset[0].factory", 'a python data set has one, "module:function"'),
        (EVALUATOR + PYTHON + "factory = 'rows'", "dataset[0].factory", "is 'rows', must be \"module:function\""),
        (EVALUATOR + PYTHON + "factory = 'a:b'\nseed = 1", "dataset[0].seed", "the factory's matter"),
        (EVALUATOR + PYTHON + "factory = 'a:b'\npath = 'x'", "dataset[0].path", "has none, it is made"),
        (EVALUATOR + DATASET + "factory = 'a:b'", "dataset[0].factory", 'none, only kind "python" has'),
        (EVALUATOR + DATASET * 2, "dataset[1].name", "taken by another dataset"),
        (EVALUATOR + DATASET.replace("dataset", "eval_dataset") * 2, "eval_dataset[1].name", "taken by another"),
    ],
)
def test_a_fault_names_its_key_and_the_way_out(text: str, key: str, description: str) -> None:
    faults = faults_of(text)
    assert list(faults) == [key]
    assert re.search(description, faults[key]), faults[key]


def test_the_faults_of_all_tables_of_the_loop_are_told_at_once() -> None:
    text = (
        "[rollout]\ngroups_per_step = 0\n[rollout.dagger]\nbeta_start = 2\nrate = 3\n[rollout.filters]\nx = 1\n"
        "[[dataset]]\nname = 'a'\n[[eval_dataset]]\nname = 'a'\ntask_type = 'b'\nzzz = 1\n"
    )
    assert set(faults_of(EVALUATOR + text)) == {
        "rollout.groups_per_step",
        "rollout.dagger.beta_start",
        "rollout.dagger.rate",
        "rollout.filters.x",
        "dataset[0].task_type",
        "eval_dataset[0].zzz",
    }


def test_all_faults_are_told_at_once() -> None:
    text = EVALUATOR + "bad = 1\n[[evaluator]]\nhandler = 3\n[server]\nlissen = 1\nmax_streams = 0\nlisten = 5\n"
    text += "[sampling]\ntop_p = 'x'\n[other]\n"
    assert set(faults_of(text)) == {
        "evaluator[0].bad",
        "evaluator[1].evaluator_id",
        "evaluator[1].resource",
        "evaluator[1].handler",
        "server.lissen",
        "server.max_streams",
        "server.listen",
        "sampling.top_p",
        "other",
    }


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.toml: No such file"):
        load_config(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.toml")


@pytest.mark.parametrize("table", ["dataset", "eval_dataset"])
def test_a_data_set_for_an_evaluator_that_is_not_there_is_refused(table: str) -> None:
    text = DATASET.replace("[[dataset]]", f"[[{table}]]")
    for wrong, hint in (("maht", "did you mean 'math'?"), ("chess", "there are math")):
        with pytest.raises(ConfigError) as caught:
            parse_config(EVALUATOR + text.replace('task_type = "math"', f'task_type = "{wrong}"'))
        (fault,) = caught.value.violations
        assert (fault.field, fault.description) == (
            f"{table}[0].task_type",
            f"no evaluator is called {wrong!r}: {hint}",
        )


@pytest.mark.parametrize("name", ["run_resource", "eval_resource"])
def test_gpus_between_the_whole_numbers_are_refused_where_they_stand(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(EVALUATOR + f"{name} = {{ gpu = 1.5 }}\n")
    (fault,) = caught.value.violations
    assert fault.field == f"evaluator[0].{name}.gpu"
    assert "is 1.5, must be below 1 (a share of one GPU) or a whole number" in fault.description
    # A budget may be any number.
    parse_config(EVALUATOR.replace("concurrency = 8", "concurrency = 8, gpu = 1.5"))
