from __future__ import annotations

import pytest

from py_scheduler.domain.episodes.cascade import dataset_config, resolve_sampling, resolve_stopping
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.errors import InvalidArgumentError


def test_each_field_comes_from_the_first_level_that_says_it() -> None:
    resolved = resolve_sampling(
        [
            SamplingParams(temperature=0.1),
            SamplingParams(temperature=0.2, top_p=0.9),
            SamplingParams(),
            SamplingParams(temperature=0.4, top_p=0.8, max_new_tokens=64, stop=("END",)),
        ]
    )
    assert resolved == SamplingParams(temperature=0.1, top_p=0.9, max_new_tokens=64, stop=("END",))


def test_zero_and_false_are_said() -> None:
    levels = [SamplingParams(temperature=0.0, ignore_eos=False), SamplingParams(temperature=1.0, ignore_eos=True)]
    assert resolve_sampling(levels) == SamplingParams(temperature=0.0, ignore_eos=False)


def test_stopping_cascades_the_same_way() -> None:
    levels = [StoppingCriteria(max_turns=3), StoppingCriteria(max_turns=9, max_context_len=100)]
    assert resolve_stopping(levels) == StoppingCriteria(max_turns=3, max_context_len=100)


def test_a_data_set_may_say_nothing() -> None:
    assert dataset_config({}) == dataset_config({"_dataset_cfg": {}})


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"name": "gsm8k", "temprature": 1.0}, ["'gsm8k'", "temprature"]),
        ({"name": "gsm8k", "sampling": {"temprature": 1.0}}, ["'gsm8k'", "temprature"]),
        ({"name": "gsm8k", "sampling": {"temperature": "hot"}}, ["'gsm8k'", "temperature"]),
        ({"name": "gsm8k", "stopping": {"max_turns": 1.5}}, ["'gsm8k'", "max_turns"]),
        ([1], ["object"]),
    ],
)
def test_faults_name_the_data_set_and_the_key(config: object, parts: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        dataset_config({"_dataset_cfg": config})
    assert raised.value.violations[0].field == "metadata._dataset_cfg"
    for part in parts:
        assert part in str(raised.value)
