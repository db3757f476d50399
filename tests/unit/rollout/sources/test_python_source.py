"""Data sets that a function of the user's makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.app import build
from py_scheduler.config import parse_config
from py_scheduler.domain.episodes.cascade import DATASET_CONFIG_KEY
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ConfigError, InvalidArgumentError
from py_scheduler.rollout.sources.settings import SourceSettings
from py_scheduler.rollout.sources.sources import open_source
from tests.support.agents.app_handlers import made_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from py_scheduler.rollout.sources.python import Factory


def of(**changes: Any) -> SourceSettings:
    settings: dict[str, Any] = {"options": {"count": 3}, "factory": "rows:made_rows", **changes}
    return SourceSettings(name="made", kind="python", task_type="echo", repeat_times=2, **settings)


def prompts(tasks: Iterable[Task]) -> list[str]:
    return [task.prompt for task in tasks]


def test_rows_become_tasks_epoch_after_epoch(tmp_path: Path) -> None:
    source = open_source(of(sampling=SamplingParams(temperature=0.5)), tmp_path, made_rows)
    tasks = source.take(5)
    assert prompts(tasks) == ["0.0", "0.1", "0.2", "1.0", "1.1"]
    assert tasks[1].config == TaskConfig(task_type="echo", repeat_times=2, dataset="made")
    assert tasks[1].metadata["level"] == 1
    assert tasks[1].metadata[DATASET_CONFIG_KEY]["sampling"] == {"temperature": 0.5}
    assert [task.client_key for task in tasks] == ["made/0", "made/1", "made/2", "made/0@1", "made/1@1"]


def test_it_goes_on_where_it_stood(tmp_path: Path) -> None:
    source = open_source(of(), tmp_path, made_rows)
    source.take(4)
    resumed = open_source(of(), tmp_path, made_rows)
    resumed.restore(source.state())
    assert resumed.take(3) == source.take(3)


def test_it_ends_where_that_is_wanted_and_counts_as_far_as_its_limit(tmp_path: Path) -> None:
    assert prompts(open_source(of(on_end="stop", limit=2), tmp_path, made_rows).take(9)) == ["0.0", "0.1"]


def test_a_task_stands_as_it_is(tmp_path: Path) -> None:
    task = Task(config=TaskConfig(task_type="other"), prompt="own")
    assert open_source(of(), tmp_path, lambda _epoch, **_options: [task]).take(1) == [task]


def raising(_epoch: int, **_options: Any) -> Iterable[Any]:
    raise OSError("no such table")


def raising_later(_epoch: int, **_options: Any) -> Iterable[Any]:
    yield {"prompt": "first"}
    raise OSError("the table is gone")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (raising, "'made', factory: rows:made_rows failed in epoch 0: OSError: no such table"),
        (lambda _epoch, **_options: 7, "rows:made_rows returned int, which gives no items"),
        (lambda _epoch, **_options: [7], r"item 0 of rows:made_rows is a int, must be a row \(a mapping\) or a Task"),
        (
            lambda _epoch, **_options: [{"question": "?"}],
            "'made', item 0, key 'prompt': is missing, the row has 'question'",
        ),
        (lambda _epoch, **_options: [], "gives no items"),
        (None, "is not loaded"),
    ],
)
def test_what_is_wrong_is_told_when_it_is_opened(tmp_path: Path, factory: Factory | None, words: str) -> None:
    for on_end in ("restart", "stop"):
        with pytest.raises(InvalidArgumentError, match=words):
            open_source(of(on_end=on_end), tmp_path, factory)


def test_a_factory_that_fails_later_names_itself(tmp_path: Path) -> None:
    source = open_source(of(), tmp_path, raising_later)
    with pytest.raises(InvalidArgumentError, match="rows:made_rows failed in epoch 0: OSError: the table is gone"):
        source.take(2)


CONFIG = """
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Echo"
resource = { concurrency = 1 }
"""
TABLE = """
[[%s]]
name = "made"
kind = "python"
task_type = "echo"
factory = "tests.support.agents.app_handlers:made_rows"
options = { count = %d }
"""


async def test_a_server_has_it_by_name(tmp_path: Path) -> None:
    config = parse_config(CONFIG + TABLE % ("dataset", 3) + TABLE % ("eval_dataset", 2))
    steps = build(config, tmp_path).steps
    assert prompts(steps.fetch(4)) == ["0.0", "0.1", "0.2", "1.0"]
    assert prompts(steps.eval_sources[0].take(4)) == ["0.0", "0.1"]


async def test_a_server_does_not_start_with_one_that_is_not_there(tmp_path: Path) -> None:
    text = (CONFIG + TABLE % ("dataset", 3) + TABLE % ("eval_dataset", 2)).replace("made_rows", "mad_rows")
    with pytest.raises(ConfigError) as caught:
        build(parse_config(text), tmp_path)
    assert [fault.field for fault in caught.value.violations] == ["dataset[0].factory", "eval_dataset[0].factory"]
