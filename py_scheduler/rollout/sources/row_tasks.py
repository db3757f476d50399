"""From a row of a data set to a task, by what the data set's settings say of prompts, metadata and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.episodes.cascade import DATASET_CONFIG_KEY, DatasetConfig
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.sources.mixture import said_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.rollout.sources.settings import SourceSettings


def task_config_of(settings: SourceSettings) -> TaskConfig:
    """Of all tasks of a data set."""
    return TaskConfig(task_type=settings.task_type, repeat_times=settings.repeat_times, dataset=settings.name)


class RowTasks:
    """Makes tasks of rows. prompt_key: where the settings name none; empty: rows have no prompt."""

    def __init__(self, settings: SourceSettings, prompt_key: str) -> None:
        self._name = settings.name
        self._config = task_config_of(settings)
        self._metadata_keys = settings.metadata_keys
        self._prompt_key = prompt_key if settings.prompt_key is None else settings.prompt_key
        self._dataset_config = said_by(
            DatasetConfig(name=settings.name, sampling=settings.sampling, stopping=settings.stopping)
        )

    def task(self, row: Mapping[str, Any], client_key: str, where: str) -> Task:
        """Raises InvalidArgumentError for a row without the prompt; `where` says which row that is."""
        keys = self._metadata_keys
        metadata = {
            key: value
            for key, value in row.items()
            if (key != self._prompt_key if keys is None else key in keys) and key != DATASET_CONFIG_KEY
        }
        return Task(
            config=self._config,
            prompt=self._prompt(row, where),
            # Dates, bytes and decimals of a Parquet file become what JSON can say.
            metadata=msgspec.to_builtins(metadata, str_keys=True) | {DATASET_CONFIG_KEY: self._dataset_config},
            client_key=client_key,
        )

    def _prompt(self, row: Mapping[str, Any], where: str) -> str:
        key = self._prompt_key
        if not key:
            return ""
        prompt = row.get(key)
        if isinstance(prompt, str):
            return prompt
        field = f"data set {self._name!r}, {where}, key {key!r}"
        if key not in row:
            raise InvalidArgumentError(f"is missing, the row has {', '.join(map(repr, row)) or 'no keys'}", field)
        raise InvalidArgumentError(f"is a {type(prompt).__name__}, must be text", field)
