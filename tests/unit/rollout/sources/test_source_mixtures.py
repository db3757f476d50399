"""Iterables as sources, and mixtures of sources."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.episodes.cascade import DatasetConfig
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.rollout.sources.iterable import IterableSource
from py_scheduler.rollout.sources.mixture import MultiDataSource, WeightedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from py_scheduler.domain.training.data import DataSource


def task_of(item: Any) -> Task:
    return Task(config=TaskConfig(task_type="t"), prompt=str(item), client_key=f"key-{item}")


def source_of(items: Iterable[Any] | Callable[[int], Iterable[Any]], name: str = "s", **changes: Any) -> IterableSource:
    return IterableSource(name, items, make_task=task_of, **changes)


def prompts(source: DataSource, number: int) -> list[str]:
    return [task.prompt for task in source.take(number)]


# Iterables


def test_tasks_are_taken_as_they_are() -> None:
    tasks = [task_of(number) for number in range(3)]
    assert IterableSource("s", tasks).take(3) == tasks


def test_a_collection_is_begun_again_and_its_keys_stay_unique() -> None:
    source = source_of("ab")
    tasks = source.take(5)
    assert [task.prompt for task in tasks] == list("ababa")
    assert [task.client_key for task in tasks] == ["key-a", "key-b", "key-a@1", "key-b@1", "key-a@2"]


def test_a_factory_may_give_each_epoch_its_own_order() -> None:
    source = source_of(lambda epoch: range(3) if epoch % 2 == 0 else reversed(range(3)))
    assert prompts(source, 7) == ["0", "1", "2", "2", "1", "0", "0"]


def test_an_iterator_ends() -> None:
    source = source_of(iter("abc"))
    assert prompts(source, 2) == ["a", "b"]
    assert prompts(source, 2) == ["c"]
    assert prompts(source, 2) == []


def test_a_collection_may_be_told_to_end() -> None:
    assert prompts(source_of("abc", on_end="stop"), 9) == ["a", "b", "c"]


def test_an_endless_generator_is_read_no_further_than_asked() -> None:
    read = []

    def endless(epoch: int) -> Iterator[int]:
        for number in count():
            read.append(number)
            yield number

    assert prompts(source_of(endless), 3) == ["0", "1", "2"]
    assert read == [0, 1, 2]


def test_an_iterator_cannot_be_told_to_begin_again() -> None:
    with pytest.raises(InvalidArgumentError, match="data set 's': an iterator cannot be restarted: give a factory"):
        source_of(iter("abc"), on_end="restart")


def test_an_item_that_is_no_task_is_named() -> None:
    source = IterableSource("s", [task_of(0), "prompt"])
    with pytest.raises(InvalidArgumentError, match="data set 's', item 1: is a str, no Task: give make_task"):
        source.take(2)


def test_a_source_that_gives_nothing_does_not_spin() -> None:
    with pytest.raises(InvalidArgumentError, match="gives no items in epoch"):
        source_of([]).take(1)
    with pytest.raises(InvalidArgumentError, match="gives no items in epoch 1"):
        source_of(lambda epoch: "ab" if epoch == 0 else "").take(3)


@given(
    st.integers(1, 6), st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4), st.booleans()
)
def test_a_restored_iterable_goes_on_exactly(size: int, before: list[int], after: list[int], stops: bool) -> None:
    def opened() -> IterableSource:
        items = lambda epoch: [f"{epoch}/{number}" for number in range(size)]  # noqa: E731
        return source_of(items, on_end="stop" if stops else "restart")

    source = opened()
    for number in before:
        source.take(number)
    state = json.loads(json.dumps(source.state()))
    expected = [source.take(number) for number in after]
    restored = opened()
    restored.restore(state)
    assert [restored.take(number) for number in after] == expected


def test_an_iterator_skips_forward_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(iter("abcdef"))
    source.take(3)
    restored = source_of(iter("abcdef"))
    with caplog.at_level(logging.WARNING):
        restored.restore(source.state())
    assert "its first 3 items are skipped" in caplog.text
    assert prompts(restored, 2) == prompts(source, 2) == ["d", "e"]


def test_an_iterator_does_not_go_back() -> None:
    source = source_of(iter("abcdef"))
    state = source.state()
    source.take(3)
    with pytest.raises(FailedPreconditionError, match="cannot go back from item 3 to 0"):
        source.restore(state)


def test_items_that_are_gone_are_missed() -> None:
    source = source_of("abcdef")
    source.take(5)
    with pytest.raises(FailedPreconditionError, match="gives 2 items, but 5 were taken"):
        source_of("ab").restore(source.state())


# Mixtures


def mixed(*members: tuple[str, float, int], stops: bool = False) -> MultiDataSource:
    """Members of (name, weight, size)."""
    return MultiDataSource(
        [
            WeightedSource(
                source=source_of([f"{name}{n}" for n in range(size)], name, on_end="stop" if stops else "restart"),
                weight=weight,
            )
            for name, weight, size in members
        ]
    )


def test_weights_are_met_smoothly() -> None:
    order = [task.prompt[0] for task in mixed(("a", 5, 9), ("b", 1, 9), ("c", 1, 9)).take(14)]
    assert "".join(order) == "aabacaaaabacaa"


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 5))
def test_after_a_whole_round_every_source_had_exactly_its_share(weights: list[int], rounds: int) -> None:
    names = "abcd"[: len(weights)]
    mixture = mixed(*((name, weight, 5) for name, weight in zip(names, weights, strict=True)))
    taken = Counter(task.config.dataset for task in mixture.take(rounds * sum(weights)))
    assert taken == {name: rounds * weight for name, weight in zip(names, weights, strict=True)}


def test_every_task_says_what_its_data_set_says() -> None:
    config = DatasetConfig(sampling=SamplingParams(temperature=0.2))
    own = Task(
        config=TaskConfig(task_type="t", dataset="renamed"),
        metadata={"_dataset_cfg": {"sampling": {"top_k": 3}}, "x": 1},
    )
    mixture = MultiDataSource(
        [
            WeightedSource(source=IterableSource("told", [task_of(0)]), config=config),
            WeightedSource(source=IterableSource("own", [own])),
        ]
    )
    told, kept = mixture.take(2)
    assert told.metadata["_dataset_cfg"] == {"name": "told", "sampling": {"temperature": 0.2}}
    assert kept.metadata == {"x": 1, "_dataset_cfg": {"name": "own", "sampling": {"top_k": 3}}}
    assert (told.config.dataset, kept.config.dataset) == ("told", "renamed")


def test_a_wrong_key_of_a_tasks_own_is_named() -> None:
    bad = Task(config=TaskConfig(task_type="t"), metadata={"_dataset_cfg": {"name": "own", "temprature": 1}})
    mixture = MultiDataSource([WeightedSource(source=IterableSource("own", [bad]))])
    with pytest.raises(InvalidArgumentError, match=r"data set 'own'.*temprature"):
        mixture.take(1)


def test_a_source_that_ends_leaves_its_share_to_the_others() -> None:
    mixture = mixed(("a", 1, 2), ("b", 1, 6), stops=True)
    assert prompts(mixture, 20) == ["a0", "b0", "a1", "b1", "b2", "b3", "b4", "b5"]
    assert mixture.take(1) == []


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.booleans(),
)
def test_a_restored_mixture_goes_on_exactly(
    shape: list[tuple[float, int]], before: list[int], after: list[int], stops: bool
) -> None:
    members = [(name, weight, size) for name, (weight, size) in zip("abcd", shape, strict=False)]
    mixture = mixed(*members, stops=stops)
    for number in before:
        mixture.take(number)
    state = json.loads(json.dumps(mixture.state(), sort_keys=True))
    expected = [mixture.take(number) for number in after]
    restored = mixed(*members, stops=stops)
    restored.restore(state)
    assert [restored.take(number) for number in after] == expected
    assert restored.state() == mixture.state()


@pytest.mark.parametrize(
    "state", [{}, {"source": "mixture"}, {"source": "x", "members": {}, "credits": {}, "ended": []}]
)
def test_the_state_of_another_mixture_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(FailedPreconditionError, match="mixture"):
        mixed(("a", 1, 2)).restore(state)


def test_the_state_of_other_members_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match="'mixture' with a, b, not of 'mixture' with a"):
        mixed(("a", 1, 2)).restore(mixed(("a", 1, 2), ("b", 1, 2)).state())


def test_names_must_differ_and_weights_be_above_0() -> None:
    same = [WeightedSource(source=source_of("ab", "twin")) for _ in range(2)]
    with pytest.raises(InvalidArgumentError, match="data set 'twin': is there twice") as caught:
        MultiDataSource([*same, WeightedSource(source=source_of("a", "heavy"), weight=-1.0)])
    assert [violation.field for violation in caught.value.violations] == [
        "data set 'twin'",
        "data set 'heavy', weight",
    ]
    with pytest.raises(InvalidArgumentError, match="there is none"):
        MultiDataSource([])


@pytest.mark.parametrize("weight", [0.0, 1e308, 1e-308, float("inf"), float("nan")])
def test_weights_whose_sums_would_be_lost_are_refused(weight: float) -> None:
    with pytest.raises(InvalidArgumentError, match="must be above 0: from 1e-06 to 1e"):
        MultiDataSource([WeightedSource(source=source_of("a", "odd"), weight=weight)])


def test_mixtures_may_be_mixed() -> None:
    inner = MultiDataSource([WeightedSource(source=source_of("ab", name)) for name in ("x", "y")], "inner")
    outer = MultiDataSource([WeightedSource(source=inner), WeightedSource(source=source_of("c", "z"))], "outer")
    assert list(islice((task.config.dataset for task in outer.take(4)), 4)) == ["x", "z", "y", "z"]
    state = outer.state()
    expected = outer.take(7)
    outer.restore(state)
    assert outer.take(7) == expected
