"""Flags and variables: one definition, which the command line, the README and the code agree with; what beats what."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from py_scheduler import app
from py_scheduler.cli import main, parsers
from py_scheduler.commands.knobs import BEGIN, END
from py_scheduler.config import convert_config, load_config
from py_scheduler.errors import ConfigError
from py_scheduler.knobs import (
    CONFIG,
    KNOBS,
    Kind,
    Knob,
    Override,
    add_flags,
    hand_set_warnings,
    knob_table,
    overrides_of,
)

ROOT = Path(__file__).parents[3]
TEXTS = {
    Kind.TEXT: ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    Kind.NUMBER: ("0.25", "0.5", "0.75"),
    Kind.COUNT: ("2", "3", "5"),
    Kind.LAYOUT: ('{"a": [0]}', '{"b": [0]}', '{"c": [0]}'),
    Kind.PATH: ("/a", "/b", "/c"),
}
PLAIN = [knob for knob in KNOBS if knob.keys and knob.kind is not Kind.SWITCH]
SWITCHES = [knob for knob in KNOBS if knob.keys and knob.kind is Kind.SWITCH]


def knob_id(knob: Knob) -> str:
    return knob.name


def tables() -> dict[str, Any]:
    evaluators: list[dict[str, Any]] = [
        {"evaluator_id": name, "handler": "a:B", "resource": {}} for name in ("math", "code")
    ]
    return {"evaluator": evaluators}


def put(found: dict[str, Any], key: str, value: Any) -> None:
    """Writes a value where a file would have it."""
    first, _, rest = key.partition(".")
    if not rest:
        found[first] = value
    elif first.endswith("[]"):
        for table in found[first[:-2]]:
            put(table, rest, value)
    else:
        put(found.setdefault(first, {}), rest, value)


def values_at(config: Any, key: str) -> list[Any]:
    """What a configuration holds under a dotted key, for each table of a list."""
    found = [config]
    for name in key.split("."):
        found = [getattr(value, name.removesuffix("[]")) for value in found]
        if name.endswith("[]"):
            found = [value for values in found for value in values]
    return found


def typed(knob: Knob, text: str) -> Any:
    return {Kind.NUMBER: float, Kind.COUNT: int}.get(knob.kind, str)(text)


# One definition


def test_the_readme_has_the_table_of_the_definition() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition(BEGIN)[2].partition(END)[0]
    assert table == knob_table(), "run `py-scheduler knobs --write README.md`"
    assert readme.count("| flag | variable |") == 1


def test_the_help_names_every_knob(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for knob in (CONFIG, *KNOBS):
        assert re.search(rf"{knob.variable}\b", shown), knob.variable
        if knob.flag:
            assert f"{knob.flag}" in shown
            assert knob.help in shown


def test_serve_has_no_flag_beside_the_definition() -> None:
    _, commands = parsers()
    commands["serve"].load()
    flags = {flag for action in commands["serve"]._actions for flag in action.option_strings}
    switches = {f"--no-{knob.flag[2:]}" for knob in KNOBS if knob.kind is Kind.SWITCH and knob.flag}
    assert flags == {knob.flag for knob in (CONFIG, *KNOBS) if knob.flag} | switches | {"-h", "--help"}


def test_every_variable_in_the_code_is_defined() -> None:
    defined = {knob.variable for knob in (CONFIG, *KNOBS)}
    assert len(defined) == len(KNOBS) + 1
    used: set[str] = set()
    for folder in ("py_scheduler", "examples", "proto", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".toml", ".proto", ".md"}:
                used |= set(re.findall(r"\bSTACX_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    assert used <= defined
    assert {
        "--env-cluster-layout",
        "--env-num-cpus",
        "--env-memory-gb",
        "--evaluator-batch-size",
        "--evaluator-concurrency",
        "--save-eval-details",
        "--n-samples-per-eval-prompt",
        "STACX_DAGGER_BETA",
        "STACX_DAGGER_EVAL_BETA",
        "STACX_DAGGER_T_MAX",
        "STACX_ROLLOUT_ID",
        "STACX_DAGGER_ENV_CONCURRENCY",
        "STACX_FORCE_FRESH_ROLLOUT",
        "STACX_REUSE_ROLLOUT",
        "STACX_REUSE_PER_ITER_DIR",
        "STACX_SAVE_PER_ITER_PT",
    } <= defined | {knob.flag for knob in KNOBS}


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob.keys], ids=knob_id)
def test_the_default_is_the_one_that_holds(knob: Knob) -> None:
    for key in knob.keys:
        for value in values_at(convert_config(tables()), key):
            if knob.kind is Kind.SWITCH:
                assert knob.default == str(int(value))
            else:
                assert knob.default == ("" if value is None else str(value))


def test_the_command_shows_them_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["knobs"]) == 0
    shown = capsys.readouterr().out
    assert all(knob.variable in shown for knob in KNOBS)
    assert main(["knobs", "--markdown"]) == 0
    assert capsys.readouterr().out == knob_table()
    document = tmp_path / "document.md"
    document.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert main(["knobs", "--write", str(document)]) == 0
    assert document.read_text() == f"before\n{BEGIN}{knob_table()}{END}after\n"
    document.write_text("no marks")
    assert main(["knobs", "--write", str(document)]) == 2
    assert "has no lines <!-- knobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [("missing/README.md", "No such file"), (".", "Is a directory"), ("latin.md", "it is not UTF-8")],
)
def test_a_document_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "latin.md").write_bytes(b"\xff")
    assert main(["knobs", "--write", str(tmp_path / name)]) == 2
    assert f"cannot read {tmp_path / name}: {told}" in capsys.readouterr().err


# What beats what


@pytest.mark.parametrize("knob", PLAIN, ids=knob_id)
def test_a_flag_beats_the_environment_which_beats_the_file(knob: Knob) -> None:
    in_file, in_environment, on_line = knob.choices[:3] or TEXTS[knob.kind]
    (key,) = knob.keys
    found = tables()
    put(found, key, typed(knob, in_file))
    environment = {knob.variable: in_environment, "HOME": "/"}
    flags = {knob.flag: on_line} if knob.flag else {}

    def held(*overrides: Override) -> set[Any]:
        return set(values_at(convert_config(msgspec.json.decode(msgspec.json.encode(found)), overrides), key))

    assert held() == {typed(knob, in_file)}
    assert held(*overrides_of({}, environment)) == {typed(knob, in_environment)}
    if knob.flag:
        assert held(*overrides_of(flags, environment)) == {typed(knob, on_line)}
        assert held(*overrides_of(flags, {})) == {typed(knob, on_line)}


@pytest.mark.parametrize("knob", SWITCHES, ids=knob_id)
def test_a_switch_works_both_ways_and_its_flag_has_the_last_word(knob: Knob) -> None:
    (key, *_) = knob.keys
    for text, on in (("1", True), ("0", False), ("true", True), ("Off", False)):
        found = tables()
        put(found, key, not on)
        assert values_at(convert_config(found), key) == [not on]
        config = convert_config(found, overrides_of({}, {knob.variable: text}))
        assert values_at(config, key) == [on]
        if knob.flag:
            config = convert_config(tables(), overrides_of({knob.flag: not on}, {knob.variable: text}))
            assert values_at(config, key) == [not on]


def test_the_flag_of_a_key_beats_every_variable_of_that_key() -> None:
    environment = {"STACX_DAGGER_ENV_CONCURRENCY": "2", "PY_SCHEDULER_EVALUATOR_CONCURRENCY": "3"}
    key = "evaluator[].resource.concurrency"
    flag = {"--evaluator-concurrency": "5"}
    assert values_at(convert_config(tables(), overrides_of({}, environment)), key) == [3, 3]
    assert values_at(convert_config(tables(), overrides_of(flag, environment)), key) == [5, 5]
    del environment["PY_SCHEDULER_EVALUATOR_CONCURRENCY"]
    assert values_at(convert_config(tables(), overrides_of({}, environment)), key) == [2, 2]


def test_fresh_samples_said_outside_beat_saved_ones_in_the_file_and_the_other_way_round() -> None:
    found = tables()
    put(found, "rollout.reuse.reuse_rollout", True)
    reuse = convert_config(found, overrides_of({}, {"STACX_FORCE_FRESH_ROLLOUT": "1"})).rollout.reuse
    assert (reuse.force_fresh, reuse.reuse_rollout) == (True, False)
    put(found, "rollout.reuse.reuse_rollout", True)
    put(found, "rollout.reuse.force_fresh", False)
    assert convert_config(found, overrides_of({}, {"STACX_FORCE_FRESH_ROLLOUT": "0"})).rollout.reuse.reuse_rollout
    for variable, value in (("STACX_REUSE_ROLLOUT", "1"), ("STACX_REUSE_PER_ITER_DIR", "/saved")):
        found = tables()
        put(found, "rollout.reuse.force_fresh", True)
        assert not convert_config(found, overrides_of({}, {variable: value})).rollout.reuse.force_fresh


def test_fresh_and_saved_samples_both_said_outside_is_a_fault() -> None:
    for variable, value in (("STACX_REUSE_ROLLOUT", "1"), ("STACX_REUSE_PER_ITER_DIR", "/saved")):
        with pytest.raises(ConfigError, match=rf"STACX_FORCE_FRESH_ROLLOUT\) asks for fresh samples, .*{variable}"):
            convert_config(tables(), overrides_of({}, {"STACX_FORCE_FRESH_ROLLOUT": "1", variable: value}))


async def test_the_rollout_of_a_server_hears_of_them(tmp_path: Path) -> None:
    found = tables()
    for evaluator in found["evaluator"]:
        evaluator["handler"] = "tests.support.agents.app_handlers:Echo"
    flags = {"--save-eval-details": True, "--n-samples-per-eval-prompt": "3"}
    environment = {"STACX_SAVE_PER_ITER_PT": "0", "STACX_REUSE_PER_ITER_DIR": "/saved"}
    settings = app.build(convert_config(found, overrides_of(flags, environment)), tmp_path).steps.settings
    assert settings.save_eval_details
    assert settings.n_samples_per_eval_prompt == 3
    assert (settings.reuse.reuse_dir, settings.reuse.save_per_iteration) == ("/saved", False)
    assert settings.reuse.mode == "never", "a server reuses nothing by itself"


def test_the_flags_of_a_command_are_read_back() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = parser.parse_args(["--env-num-cpus=4", "--no-save-eval-details", "--listen=unix:/s"])
    overrides = overrides_of(vars(options), {"PY_SCHEDULER_SAVE_EVAL_DETAILS": "1", "PY_SCHEDULER_LISTEN": ""})
    assert {override.origin: override.text for override in overrides} == {
        "--listen": "unix:/s",
        "--env-num-cpus": "4",
        "--save-eval-details": "0",
    }


def test_an_empty_variable_says_nothing() -> None:
    assert overrides_of({}, {knob.variable: "" for knob in KNOBS}) == []


def test_a_typed_path_counts_from_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layout.json").write_text('{"n1": [0, 1]}')
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "scheduler.toml"
    file.write_text(
        '[[evaluator]]\nevaluator_id = "a"\nhandler = "a:B"\nresource = {}\n[cluster]\nnum_cpus = 1\nmemory_gb = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config(file, overrides_of({"--env-cluster-layout": "layout.json"}, {}))
    nodes = app.cluster_nodes(config.cluster, file.parent)
    assert nodes is not None
    (node,) = nodes
    assert (node.node_ip, node.gpus) == ("n1", [0, 1])


# Faults


@pytest.mark.parametrize(
    ("flags", "environment", "fault"),
    [
        ({}, {"PY_SCHEDULER_ENV_NUM_CPUS": "many"}, "PY_SCHEDULER_ENV_NUM_CPUS: is 'many', must be a number"),
        ({"--evaluator-batch-size": "1.5"}, {}, "--evaluator-batch-size: is '1.5', must be a whole number below 2^31"),
        (
            {},
            {"STACX_DAGGER_ENV_CONCURRENCY": "99999999999999999999"},
            "STACX_DAGGER_ENV_CONCURRENCY: is '99999999999999999999', must be a whole number below 2^31",
        ),
        ({"--log-level": "loud"}, {}, "--log-level: is 'loud', must be one of debug, info, warning, error"),
        (
            {},
            {"PY_SCHEDULER_SAVE_EVAL_DETAILS": "maybe"},
            "PY_SCHEDULER_SAVE_EVAL_DETAILS: is 'maybe', must be 1 or 0",
        ),
        ({"--n-samples-per-eval-prompt": "0"}, {}, "rollout.n_samples_per_eval_prompt: must be `int` >= 1"),
        ({}, {"STACX_DAGGER_EVAL_BETA": "1.5"}, "rollout.eval_beta: must be `float` <= 1.0"),
    ],
)
def test_a_fault_names_the_knob_as_it_was_turned(
    flags: dict[str, str], environment: dict[str, str], fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert_config(tables(), overrides_of(flags, environment))
    assert str(caught.value) == fault


def test_what_the_rollout_sets_is_not_for_hands() -> None:
    code_set = [knob.variable for knob in KNOBS if knob.is_code_set]
    assert code_set == ["STACX_ROLLOUT_ID", "STACX_DAGGER_BETA", "STACX_DAGGER_T_MAX"]
    environment = dict.fromkeys(code_set, "1") | {"STACX_DAGGER_ENV_CONCURRENCY": "2"}
    warnings = hand_set_warnings(environment)
    assert [warning.split()[0] for warning in warnings] == code_set
    assert all("set by hand" in warning for warning in warnings)
    assert hand_set_warnings({"HOME": "/"}) == []
    assert [override.origin for override in overrides_of({}, environment)] == ["STACX_DAGGER_ENV_CONCURRENCY"]
    assert convert_config(tables(), overrides_of({}, {"STACX_DAGGER_BETA": "1"})) == convert_config(tables())
