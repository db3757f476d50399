"""What stands in examples/ and benches/ works as it is."""

from __future__ import annotations

import os
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

import msgspec
import pytest

from py_scheduler.adapters.fleet.settings import FleetSettings
from py_scheduler.adapters.http_server.settings import ServerSettings
from py_scheduler.adapters.llama_cpp.backend import LlamaCppSettings
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.with_examples import WithExamplesSettings
from py_scheduler.app import build_generation, build_pool, build_specs
from py_scheduler.app.backends import KINDS
from py_scheduler.cli import main
from py_scheduler.config import Config, convert_table, load_config, parse_config
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.integrations.reasoning_gym import ReasoningGymAgent
from py_scheduler.knobs import overrides_of
from py_scheduler.rollout.dagger import DAggerSchedule
from tests.support.models.scripted_episode import ScriptedEpisode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.errors import FieldViolation

ROOT = Path(__file__).parents[3]


CONFIGURATIONS = [f"examples/{name}.toml" for name in ("scheduler", "demo", "dagger_loop", "swe", "sglang/demo")] + [
    "benches/noop.toml"
]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_loads_and_its_batches_fit_its_cluster(name: str) -> None:
    path = ROOT / name
    config = load_config(path)
    pool = build_pool(config, path.parent)
    assert pool is not None
    faults: list[FieldViolation] = []
    specs = build_specs(config, faults)
    # A machine may be without what a sandbox needs; that is for the sandbox's own tests to say.
    assert [fault for fault in faults if not fault.field.endswith("handler_args.sandbox")] == []
    for spec in specs:
        assert pool.max_tokens_for(spec.sample_resource) >= spec.resource.concurrency


def test_the_server_in_the_readme_loads_and_its_batches_fit_its_cluster() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (text,) = [block for block in blocks if "[cluster.layout]" in block]
    config = parse_config(text)
    pool = build_pool(config, ROOT)
    assert pool is not None
    (evaluator,) = config.evaluator
    assert evaluator.run_resource is not None
    assert evaluator.eval_resource is not None
    sample = evaluator.run_resource.field_max(evaluator.eval_resource)
    assert pool.max_tokens_for(sample) >= evaluator.resource.concurrency


class Shown(NamedTuple):
    """A kind of generation backend in the example: under which role, and with which settings.

    beside: keys that are no settings. left_out: settings that it does not show. has_no_default: those whose value there
    is an example.
    """

    role: str
    settings: type[msgspec.Struct]
    beside: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    has_no_default: frozenset[str] = frozenset()


SHOWN = {
    "embedded": Shown("embedded", LlamaCppSettings, frozenset({"gguf_path"}), left_out=frozenset({"threads"})),
    "sglang": Shown(
        "teacher",
        SglangSettings,
        frozenset({"base_url", "control_urls"}),
        has_no_default=frozenset({"vocab_size", "context_length"}),
    ),
    "vllm": Shown(
        "vllm",
        ServerSettings,
        frozenset({"base_url", "control_urls"}),
        has_no_default=frozenset({"vocab_size", "context_length"}),
    ),
    "with_examples": Shown(
        "examples", WithExamplesSettings, has_no_default=frozenset({"base", "examples", "instruction"})
    ),
}


def whole_example() -> str:
    """examples/scheduler.toml with everything that is commented out in it."""
    text = (ROOT / "examples/scheduler.toml").read_text(encoding="utf-8")
    # What stands there as another way to have a student or a teacher gets a name of its own.
    text = text.replace('[generation.student]\n#kind = "embedded"', '[generation.embedded]\n#kind = "embedded"')
    text = text.replace(
        '[generation.teacher]\n#kind = "with_examples"', '[generation.examples]\n#kind = "with_examples"'
    )
    text = text.replace(
        '[generation.teacher]\n#kind = "sglang"\n#base_urls', '[generation.fleet]\n#kind = "sglang"\n#base_urls'
    )
    text = text.replace('[generation.teacher]\n#kind = "vllm"', '[generation.vllm]\n#kind = "vllm"')
    text = text.replace("[generation.teacher.fleet]", "[generation.fleet.fleet]")
    return re.sub(r"(?m)^#(?=[\[a-z])", "", text)


def keys_missing(table: dict[str, Any], target: type[msgspec.Struct], key: str = "") -> Iterator[str]:
    """The keys of a Struct that a table lacks, with those of its inner tables; tables of a list have them together."""
    for field in msgspec.structs.fields(target):
        where = f"{key}.{field.name}".removeprefix(".")
        annotations = (field.type, *get_args(field.type))
        struct = next(
            (part for part in annotations if isinstance(part, type) and issubclass(part, msgspec.Struct)), None
        )
        if field.name not in table:
            yield where
        elif struct in {Resource, SamplingParams, StoppingCriteria} and key:
            continue  # shown in full once, and of a Resource as far as it makes sense
        elif get_origin(field.type) is dict:
            for name, entry in table[field.name].items():
                if struct is not None:
                    yield from keys_missing(entry, struct, f"{where}.{name}")
        elif struct is not None:
            value = table[field.name]
            if get_origin(field.type) is dict:
                value = list(value.values())
            merged = (
                {name: part for entry in value for name, part in entry.items()} if isinstance(value, list) else value
            )
            yield from keys_missing(merged, struct, where)


def test_the_example_shows_every_key_of_every_table() -> None:
    tables = tomllib.loads(whole_example())
    assert {key for key in keys_missing(tables, Config) if not key.startswith("eval_dataset.")} == set()
    for kind, shown in SHOWN.items():
        fields = set(shown.settings.__struct_fields__) - shown.left_out
        assert set(tables["generation"][shown.role]) == {"kind", *shown.beside, *fields}, kind
    assert set(tables["generation"]["fleet"]["fleet"]) == set(FleetSettings.__struct_fields__)


def test_what_is_commented_out_shows_the_defaults() -> None:
    """But for what may be left out altogether, which has no default to show."""
    live = load_config(ROOT / "examples/scheduler.toml")
    whole = parse_config(whole_example())
    assert whole.server == msgspec.structs.replace(
        live.server, tls=whole.server.tls, tokens_file=whole.server.tokens_file, reflection=True
    )
    left_out = {
        name: getattr(whole.scheduler, name)
        for name in (
            "batching_strategy",
            "workdir_root",
            "max_wait_seconds",
            "max_running_generations",
            "dynamic_timeout",
            "staleness",
        )
    }
    assert whole.scheduler == msgspec.structs.replace(live.scheduler, **left_out)
    assert whole.rollout == msgspec.structs.replace(live.rollout, dagger=DAggerSchedule())
    assert whole.dataset[0] == live.dataset[0]
    assert whole.eval_dataset == live.eval_dataset
    for kind, shown in SHOWN.items():
        table = {
            key: value for key, value in whole.generation[shown.role].items() if key not in {"kind", *shown.beside}
        }
        settings = convert_table(table, shown.settings, f"generation.{shown.role}")
        for field in msgspec.structs.fields(shown.settings):
            if field.name not in shown.left_out | shown.has_no_default:
                default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
                assert getattr(settings, field.name) == default, (kind, field.name)
    fleet = dict(whole.generation["fleet"]["fleet"])
    del fleet["max_concurrency"]
    assert convert_table(fleet, FleetSettings, "generation.fleet.fleet") == FleetSettings()


def test_the_commented_tables_load_and_show_the_defaults() -> None:
    path = ROOT / "examples/scheduler.toml"
    config = parse_config(whole_example())
    assert {table["kind"] for table in config.generation.values()} == set(KINDS) == set(SHOWN)
    assert {kind: config.generation[shown.role]["kind"] for kind, shown in SHOWN.items()} == {
        kind: kind for kind in KINDS
    }
    faults: list[FieldViolation] = []
    build_generation(config, path.parent, faults)
    assert {fault.field for fault in faults} <= {"generation.embedded.gguf_path"}, "the model may not be fetched yet"


# The SWE recipe's shape


def test_the_swe_recipe_has_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(ROOT / "examples/swe.toml")
    (evaluator,) = config.evaluator
    assert evaluator.evaluator_id == "swe"
    assert evaluator.resource == Resource(gpu=0, cpu=96, memory_gb=320, concurrency=4)
    assert evaluator.run_resource == evaluator.eval_resource == Resource(gpu=0, cpu=4, memory_gb=16)
    assert evaluator.default_stopping == StoppingCriteria(max_turns=100, max_context_len=65_536)
    assert set(config.generation) == {"student", "teacher"}
    assert config.rollout.dagger is not None
    assert (config.rollout.dagger.beta(0), config.rollout.dagger.beta(10)) == (1.0, 0.0)
    assert main(["plan", str(ROOT / "examples/swe.toml")]) == 0
    assert re.search(r"\| swe +\| +4 \| +24 \| +6 \|", capsys.readouterr().out)


def test_its_concurrency_is_for_the_variable_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STACX_DAGGER_ENV_CONCURRENCY", "24")
    (evaluator,) = load_config(ROOT / "examples/swe.toml", overrides_of({}, os.environ)).evaluator
    assert evaluator.resource.concurrency == 24
    # 320 GiB hold 20 samples of 16, whatever the concurrency.
    assert main(["plan", str(ROOT / "examples/swe.toml")]) == 0
    assert re.search(r"\| swe +\| +20 \|", capsys.readouterr().out)


async def test_the_own_handler_is_found_beside_its_configuration_and_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples/own_handler"
    monkeypatch.syspath_prepend(folder)
    faults: list[FieldViolation] = []
    (spec,) = build_specs(load_config(folder / "scheduler.toml"), faults)
    assert not faults
    client = runpy.run_path(str(folder / "client.py"))
    tasks = client["make_tasks"]()
    assert {task.config.task_type for task in tasks} == {spec.evaluator_id}
    for answer, score in ((f" {tasks[0].metadata['answer']}.", 1.0), ("none", 0.0), ("-1", 0.0)):
        episode = ScriptedEpisode(tasks[0], answer)
        result = await spec.handler.run(episode)
        assert (await spec.handler.eval(episode, result)).score == score
        assert episode.messages[-1].content == episode.observed_text == tasks[0].prompt


def test_the_demo_shares_gpus() -> None:
    (spec,) = build_specs(load_config(ROOT / "examples/demo.toml"), [])
    assert isinstance(spec.handler, ReasoningGymAgent)
    assert 0 < spec.sample_resource.gpu < 1
    assert spec.sample_resource == Resource(gpu=0.5, cpu=1.0, memory_gb=2.0)


def minimal_client() -> str:
    """Without the words above it."""
    return (ROOT / "examples/minimal_client.py").read_text(encoding="utf-8").rpartition('"""')[2].strip()


def test_the_client_in_the_readme_is_the_minimal_client() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert minimal_client() in [block.strip() for block in blocks]


def test_the_minimal_client_is_minimal() -> None:
    code = minimal_client()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


async def test_the_agent_for_openais_client_asks_twice_and_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is the test's; the real one plays it in tests/sglang."""
    folder = ROOT / "examples/openai_agent"
    monkeypatch.syspath_prepend(folder)
    config = load_config(folder / "scheduler.toml")
    assert config.gateway.listen == "127.0.0.1:0"
    faults: list[FieldViolation] = []
    (spec,) = build_specs(config, faults)
    assert not faults
    asked: list[list[str]] = []

    async def create(*, messages: list[dict[str, str]], **_: object) -> SimpleNamespace:
        asked.append([message["role"] for message in messages])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=f"{len(asked)}."))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    answer = await runpy.run_path(str(folder / "question_agent.py"))["solve"](client, "student", "1 + 1?")
    assert asked == [["system", "user"], ["system", "user", "assistant", "user"]]
    episode = ScriptedEpisode(Task(config=TaskConfig(task_type="sums"), metadata={"answer": 2}))
    assert (await spec.handler.eval(episode, AgentResult(answer=answer))).score == 1.0
