"""Data sets in files, and problems that are made."""

from __future__ import annotations

import datetime as dt
import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from py_scheduler.domain.episodes.cascade import dataset_config
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.integrations.reasoning_gym import reasoning_gym_tasks
from py_scheduler.rollout.sources.settings import SourceSettings
from py_scheduler.rollout.sources.sources import open_source, open_sources
from tests.support.steps.rows import numbered, of, prompts, write_lines, write_parquet

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "rows.jsonl", numbered(10))
    write_parquet(tmp_path / "rows.parquet", numbered(10))
    return tmp_path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_becomes_a_task(folder: Path, kind: str) -> None:
    sampling, stopping = SamplingParams(temperature=0.5), StoppingCriteria(max_turns=3)
    source = open_source(
        msgspec.structs.replace(of(kind), repeat_times=4, sampling=sampling, stopping=stopping), folder
    )
    (_, task) = source.take(2)
    assert (task.prompt, task.config.task_type, task.config.repeat_times) == ("p1", "solve", 4)
    assert (task.config.dataset, task.client_key, task.metadata["level"]) == ("math", "math/0/1", 1)
    assert task.metadata["_dataset_cfg"] == {
        "name": "math",
        "sampling": {"temperature": 0.5},
        "stopping": {"max_turns": 3},
    }
    assert dataset_config(task.metadata).sampling == sampling


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_step_that_asks_for_more_gets_a_new_epoch(folder: Path, kind: str) -> None:
    source = open_source(of(kind), folder)
    tasks = source.take(23)
    assert prompts(tasks) == [f"p{n % 10}" for n in range(23)]
    assert [tasks[n].client_key for n in (9, 10, 22)] == ["math/0/9", "math/1/0", "math/2/2"]
    assert len({task.client_key for task in tasks}) == 23


def test_a_source_that_stops_gives_what_there_is_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(of(on_end="stop"), folder)
    with caplog.at_level(logging.INFO):
        assert len(source.take(7)) == 7
        assert prompts(source.take(7)) == ["p7", "p8", "p9"]
        assert source.take(7) == []
    assert "'math' is at its end: 3 of 7" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_epoch_is_shuffled_in_its_own_way_and_always_the_same(folder: Path, kind: str) -> None:
    settings_ = of(kind, shuffle=True, seed=7)
    source = open_source(settings_, folder)
    first, second = prompts(source.take(10)), prompts(source.take(10))
    assert sorted(first) == sorted(second) == [f"p{n}" for n in range(10)]
    assert len({tuple(first), tuple(second), tuple(f"p{n}" for n in range(10))}) == 3
    assert prompts(open_source(settings_, folder).take(20)) == first + second
    assert prompts(open_source(of(kind, shuffle=True, seed=8), folder).take(10)) != first


def test_a_parquet_file_is_read_one_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "rows.parquet", numbered(100), row_group_size=10)
    read: list[int] = []
    read_row_group = pq.ParquetFile.read_row_group

    def counting(self: Any, number: int, **arguments: Any) -> Any:
        read.append(number)
        return read_row_group(self, number, **arguments)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    tasks = open_source(of("parquet", shuffle=True), tmp_path).take(100)
    assert sorted(prompts(tasks)) == sorted(f"p{n}" for n in range(100))
    # The first row is looked at when the source is opened; then each group once.
    assert sorted(read[1:]) == list(range(10))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    kind=st.sampled_from(["jsonl", "parquet", "reasoning_gym"]),
    shuffle=st.booleans(),
    on_end=st.sampled_from(["restart", "stop"]),
    limit=st.none() | st.integers(1, 12),
    before=st.lists(st.integers(0, 9), max_size=5),
    after=st.lists(st.integers(0, 9), max_size=5),
)
def test_a_restored_source_goes_on_exactly_as_the_saved_one(
    folder: Path, kind: str, shuffle: bool, on_end: str, limit: int | None, before: list[int], after: list[int]
) -> None:
    changes: dict[str, Any] = {"shuffle": shuffle, "on_end": on_end, "limit": limit, "seed": 3}
    if kind == "reasoning_gym":
        changes |= {"path": "", "options": {"dataset": "gcd", "size": 10}}
    source = open_source(of(kind, **changes), folder)
    for count in before:
        source.take(count)
    state = json.loads(json.dumps(source.state()))
    expected = [source.take(count) for count in after]
    restored = open_source(of(kind, **changes), folder)
    restored.restore(state)
    assert [restored.take(count) for count in after] == expected
    assert restored.state() == source.state()
    source.restore(state)
    assert [source.take(count) for count in after] == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "other"}, "state of 'math', not of the data source 'other'"),
        ({"shuffle": True}, "order were 'as they stand'"),
        ({"limit": 5}, "rows were"),
    ],
)
def test_the_state_of_another_source_is_refused(folder: Path, changes: dict[str, Any], told: str) -> None:
    state = open_source(of(), folder).state()
    with pytest.raises(FailedPreconditionError, match=told):
        open_source(of(**changes), folder).restore(state)


def test_a_state_that_is_none_or_points_nowhere(folder: Path) -> None:
    source = open_source(of(), folder)
    for state in ({}, {"source": "math"}, {**source.state(), "cursor": "3"}, {**source.state(), "more": 1}):
        with pytest.raises(FailedPreconditionError, match="no state of the data source 'math'"):
            source.restore(state)
    with pytest.raises(FailedPreconditionError, match="damaged"):
        source.restore({**source.state(), "cursor": 11})


def test_rows_that_have_changed_are_noticed(folder: Path) -> None:
    source = open_source(of(), folder)
    state = source.state()
    write_lines(folder / "rows.jsonl", numbered(11))
    with pytest.raises(FailedPreconditionError, match=r"rows\.jsonl has changed since it was opened"):
        source.take(1)
    with pytest.raises(FailedPreconditionError, match="has changed since its state was saved"):
        open_source(of(), folder).restore(state)


def test_a_bad_line_is_named_and_costs_no_task(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": \n')
    source = open_source(of(), tmp_path)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"data set 'math', rows\.jsonl, line 4: is no JSON"):
            source.take(3)
    assert prompts(source.take(2)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "a", "level": 1}', r"rows\.jsonl, line 2, key 'prompt': is missing, the row has 'question'"),
        ('{"prompt": 5}', "line 2, key 'prompt': is a int, must be text"),
        ('{"prompt": null}', "line 2, key 'prompt': is a NoneType, must be text"),
        ('["a"]', "line 2: is a list, must be a JSON object"),
        ("{'prompt': 'a'}", "line 2: is no JSON"),
    ],
)
def test_a_wrong_row(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=told):
        open_source(of(), tmp_path).take(2)


def test_a_wrong_key_is_told_when_the_source_is_opened(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="line 1, key 'question': is missing, the row has 'prompt', 'level'"):
        open_source(of(prompt_key="question"), folder)
    with pytest.raises(InvalidArgumentError, match="key 'question': is missing"):
        open_source(of("parquet", prompt_key="question"), folder)
    with pytest.raises(InvalidArgumentError, match="has no column 'hint', it has 'prompt', 'level'"):
        open_source(of("parquet", metadata_keys=["hint"]), folder)


def test_only_the_named_keys_become_metadata(folder: Path) -> None:
    write_lines(folder / "rows.jsonl", [{"prompt": "a", "x": 1, "y": 2, "_dataset_cfg": {"sampling": {"top_k": 1}}}])
    (task,) = open_source(of(metadata_keys=["x"]), folder).take(1)
    assert task.metadata == {"x": 1, "_dataset_cfg": {"name": "math"}}
    (task,) = open_source(of(prompt_key="", metadata_keys=["prompt"]), folder).take(1)
    assert (task.prompt, task.metadata["prompt"]) == ("", "a")
    # What a row says of the cascade is not taken: it is for the settings to say.
    (task,) = open_source(of(), folder).take(1)
    assert task.metadata["_dataset_cfg"] == {"name": "math"}


def test_parquet_values_become_what_json_can_say(tmp_path: Path) -> None:
    day = dt.date(2026, 1, 2)
    write_parquet(tmp_path / "rows.parquet", [{"prompt": "a", "day": day, "raw": b"\x00\x01", "list": [1, 2]}])
    (task,) = open_source(of("parquet"), tmp_path).take(1)
    assert json.loads(json.dumps(task.metadata))["day"] == "2026-01-02"
    assert (task.metadata["raw"], task.metadata["list"]) == ("AAE=", [1, 2])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_rows_of_the_same_size_are_noticed(folder: Path, kind: str) -> None:
    source, path = open_source(of(kind), folder), folder / f"rows.{kind}"
    state, size = source.state(), path.stat().st_size
    path.write_bytes(path.read_bytes())
    assert prompts(source.take(1)) == ["p0"], "written anew, and the same"
    rows = [{"prompt": row["prompt"].replace("p", "q"), "level": row["level"]} for row in numbered(10)]
    (write_lines if kind == "jsonl" else write_parquet)(path, rows)
    assert path.stat().st_size == size
    with pytest.raises(FailedPreconditionError, match=rf"rows\.{kind} has changed since it was opened"):
        source.take(9)
    with pytest.raises(FailedPreconditionError, match="has changed since its state was saved"):
        open_source(of(kind), folder).restore(state)


def test_after_a_line_was_mended_the_error_says_how_to_go_on(folder: Path) -> None:
    source = open_source(of(), folder)
    source.take(3)
    state = source.state()
    write_lines(folder / "rows.jsonl", [*numbered(9), {"prompt": "mended"}])
    source = open_source(of(), folder)
    with pytest.raises(FailedPreconditionError, match="write what is now over what was in the saved state") as caught:
        source.restore(state)
    assert repr(source.state()["rows"]) in str(caught.value)
    source.restore(state | {"rows": source.state()["rows"]})
    assert prompts(source.take(7)) == [*(f"p{number}" for number in range(3, 9)), "mended"]


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", b""), ("rows.jsonl", b"\n \n")])
def test_a_file_without_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="data set 'math': has no rows"):
        open_source(of(), tmp_path)


def test_a_file_that_is_none(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nowhere\.jsonl cannot be read: No such file"):
        open_source(of(path="nowhere.jsonl"), folder)
    with pytest.raises(InvalidArgumentError, match=r"rows\.jsonl is no Parquet file"):
        open_source(of("parquet", path="rows.jsonl"), folder)


def test_a_path_may_lead_anywhere_since_only_the_servers_own_file_names_one(folder: Path) -> None:
    inside = folder / "in"
    inside.mkdir()
    (inside / "link.jsonl").symlink_to(folder / "rows.jsonl")
    for path in ("../rows.jsonl", str(folder / "rows.jsonl"), "link.jsonl"):
        assert len(open_source(of(path=path), inside).take(2)) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "csv"}, "data set 'math', kind: is 'csv', must be one of jsonl, parquet, reasoning_gym"),
        ({"path": ""}, "data set 'math', path"),
        ({"path": "a\0b"}, "data set 'math', path"),
        ({"weight": 0}, "data set 'math', weight"),
        ({"weight": float("nan")}, "data set 'math', weight"),
        ({"weight": 1e308}, "data set 'math', weight"),
        ({"limit": 0}, "data set 'math', limit"),
        ({"repeat_times": 0}, "data set 'math', repeat_times"),
        ({"task_type": ""}, "data set 'math', task_type"),
        ({"name": ""}, "data set '', name"),
        ({"sampling": {"temperature": -1}}, "data set 'math', sampling.temperature"),
        ({"stopping": {"max_turns": 0}}, "data set 'math', stopping.max_turns"),
        ({"options": {"dataset": "gcd"}}, "data set 'math', options"),
    ],
)
def test_settings_that_cannot_be(folder: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        open_source(of(**changes), folder)
    assert told in str(caught.value)


# reasoning-gym


def gym(**changes: Any) -> SourceSettings:
    return of("reasoning_gym", path="", task_type="reasoning_gym", **changes)


def test_made_problems_are_those_of_the_tasks_that_a_trainer_makes(tmp_path: Path) -> None:
    options = {"dataset": "gcd", "config": {"min_numbers": 2}, "size": 2_500}
    source = open_source(gym(options=options, seed=5), tmp_path)
    made = source.take(2_500)
    expected = reasoning_gym_tasks("gcd", count=2_500, seed=5, config={"min_numbers": 2})
    assert [task.metadata["reasoning_gym"] for task in made] == [task.metadata["reasoning_gym"] for task in expected]
    (again,) = source.take(1)
    assert again.metadata["reasoning_gym"] == made[0].metadata["reasoning_gym"]
    assert (again.prompt, again.client_key) == ("", "math/1/0")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"options": {}}, "data set 'math', options: Object missing required field `dataset`"),
        ({"options": {"dataset": "gcd", "sise": 5}}, "unknown field `sise`"),
        ({"options": {"dataset": "gcd", "size": 0}}, "options.size: is 0"),
        ({"options": {"dataset": "gcd"}, "seed": -1}, "data set 'math', seed"),
        ({"options": {"dataset": "gcd"}, "seed": 2**32}, "data set 'math', seed"),
        ({"options": {"dataset": "gcd"}, "path": "x"}, "none, it is made"),
    ],
)
def test_problems_that_cannot_be_made(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    values = {"path": "", **changes}
    with pytest.raises(InvalidArgumentError) as caught:
        open_source(of("reasoning_gym", **values), tmp_path)
    assert told in str(caught.value)


def test_several_data_sets_at_once(folder: Path) -> None:
    mixture = open_sources(
        [of(name="a", weight=2), of("parquet", name="b", sampling={"top_k": 5})], folder, name="training"
    )
    tasks = mixture.take(9)
    assert [task.config.dataset for task in tasks].count("a") == 6
    assert mixture.name == "training"
    told = {task.config.dataset: task.metadata["_dataset_cfg"] for task in tasks}
    assert told == {"a": {"name": "a"}, "b": {"name": "b", "sampling": {"top_k": 5}}}
