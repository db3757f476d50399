"""What is made of a stream's events: every token once, with its log-prob and its weights, or a fault."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import msgspec
import pytest

from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import FinishReason, Generation, WeightSpan
from py_scheduler.errors import EngineUnavailableError
from tests.support.models.sglang_events import assert_first, assert_first_tokens, event, read

LENGTH = {"type": "length"}
ABORTED = {"type": "abort", "message": "Aborted"}


def test_each_increment_has_the_weights_that_the_server_named_with_it() -> None:
    output = read(event(0, 2, version="1"), event(2, 3, version="1"), event(3, 5, version="2"))
    assert output.streaming is Streaming.INCREMENTS
    assert output.partial().weight_spans == (WeightSpan("1", 0, 3), WeightSpan("2", 3, 5))


def test_the_spans_of_the_last_event_are_of_the_whole_output() -> None:
    spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 5}]
    output = read(event(0, 2), event(2, 5, finish_reason={"type": "length"}, weight_versions=spans))
    assert output.whole().weight_spans == (WeightSpan("1", 0, 3), WeightSpan("2", 3, 5))


def test_of_events_that_repeat_the_output_the_first_two_and_the_newest_are_read() -> None:
    never_read = event(0, 6).replace(b'"text":', b'"text":5,"other":')
    output = read(event(0, 1), event(0, 4), never_read, event(0, 9))
    assert output.streaming is Streaming.CUMULATIVE
    assert_first(output.partial(), 9)


def test_the_tokens_of_an_event_that_was_read_are_held_in_the_arrays_alone() -> None:
    count = 4_096
    events = [event(0, 1), event(0, count)]
    tracemalloc.start()
    try:
        output = read(*events)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_first(output.partial(), count)
    arrays, text = 2 * 4 * count, sys.getsizeof(output.partial().text)
    assert held < 1.25 * (arrays + text), "a token is held as an object too"


@pytest.mark.parametrize("behind", [0, 2], ids=["alone", "behind an increment"])
def test_who_is_aborted_while_it_waits_to_go_on_is_told_everything_again_but_its_ids(behind: int) -> None:
    """As SGLang does after it took back the memory of a generation, in a pause of mode retract for one."""
    known, end = 4, 4 + behind
    last = msgspec.json.decode(event(0, end, finish_reason={"type": "abort", "message": "Abort in waiting queue"}))
    unsent = msgspec.json.decode(event(known, end))
    last["output_ids"] = [*unsent["output_ids"], 100 + end - 1]
    last["text"] = unsent["text"] + last["text"]
    meta = last["meta_info"]
    meta["output_token_logprobs"] = unsent["meta_info"]["output_token_logprobs"] + meta["output_token_logprobs"]
    output = read(event(0, 1), event(1, known), msgspec.json.encode(last))
    assert output.whole().finish_reason is FinishReason.ABORT
    assert_first(output.whole(), end)


def test_an_abort_may_come_without_tokens_or_with_one_that_has_no_log_prob() -> None:
    for increments in (True, False):
        known = [event(0, 1), event(1 if increments else 0, 3)]
        assert_first(read(*known, event(3, 3, told=3, finish_reason=ABORTED)).whole(), 3)
        last = msgspec.json.decode(event(3 if increments else 0, 5, told=5, finish_reason=ABORTED))
        last["output_ids"].append(0)
        assert_first(read(*known, msgspec.json.encode(last)).whole(), 5)


@pytest.mark.parametrize("events", [1, 2])
def test_an_abort_without_tokens_may_repeat_the_text(events: int) -> None:
    known = [event(0, end) for end in (1, 3)][:events]
    count = (1, 3)[events - 1]
    last = msgspec.json.decode(event(count, count, told=count, finish_reason=ABORTED))
    last["text"] = msgspec.json.decode(known[-1])["text"]
    assert_first(read(*known, msgspec.json.encode(last)).whole(), count)


def without_length(payload: bytes) -> bytes:
    said = msgspec.json.decode(payload)
    del said["meta_info"]["output_token_logprobs_length"]
    return msgspec.json.encode(said)


def assert_fault_keeps_first(count: int, *events: bytes) -> None:
    with pytest.raises(EngineUnavailableError, match=r"SGLang (gave|sent)") as caught:
        read(*events).whole()
    assert isinstance(caught.value.partial, Generation)
    assert_first_tokens(caught.value.partial, count)


@pytest.mark.parametrize("increments", [True, False])
def test_an_event_that_does_not_tell_how_many_tokens_there_are_is_a_fault_once_some_are_known(increments: bool) -> None:
    def told(start: int, end: int, **meta: Any) -> bytes:
        return event(start if increments else 0, end, **meta)

    assert_fault_keeps_first(1, told(0, 1), without_length(told(1, 4)), told(4, 8, finish_reason=LENGTH))
    assert_fault_keeps_first(4, told(0, 1), told(1, 4), without_length(told(4, 8, finish_reason=LENGTH)))
    silent = without_length(event(0, 0, finish_reason=ABORTED))
    assert_first(read(told(0, 1), told(1, 4), silent).whole(), 4)


@pytest.mark.parametrize("completed", [3, 9])
def test_the_end_has_as_many_tokens_as_the_server_generated(completed: int) -> None:
    for events in (
        [without_length(event(0, 8, finish_reason=LENGTH, completion_tokens=completed))],
        [event(0, 1), event(1, 8, finish_reason=LENGTH, completion_tokens=completed)],
        [event(0, 1), event(0, 4), event(0, 8, finish_reason=LENGTH, completion_tokens=completed)],
    ):
        assert_fault_keeps_first(8, *events)


@pytest.mark.parametrize("told", [1, 4])
def test_an_abort_does_not_tell_how_the_tokens_come(told: int) -> None:
    assert read(event(0, 1), event(1, 1, finish_reason=ABORTED)).streaming is None
    again = read(event(0, 1), event(0, told, finish_reason=ABORTED))
    assert again.streaming is None
    assert_first(again.whole(), told)
    cumulative = read(event(0, 1), event(0, 4), event(4, 4, finish_reason=ABORTED))
    assert cumulative.streaming is Streaming.CUMULATIVE
    assert_first(cumulative.whole(), 4)


def test_what_was_not_read_yet_is_kept_when_something_comes_that_does_not_repeat_it() -> None:
    known = [event(0, 1), event(0, 4), event(0, 9)]
    for last in (
        b'{"error": {"message": "out of memory", "code": 500}}',
        event(9, 9, finish_reason=ABORTED),
        event(0, 9, told=9, finish_reason=ABORTED),
    ):
        assert_first(read(*known, last).partial(), 9)
    for last in (b"<html>", event(0, 5), without_length(event(0, 12))):
        assert_fault_keeps_first(9, *known, last)


def test_of_a_stream_that_repeats_its_output_each_token_has_the_weights_of_the_event_that_first_had_it() -> None:
    output = read(*(event(0, end, version=version) for end, version in ((1, "1"), (2, "1"), (7, "1"), (9, "2"))))
    assert output.partial().weight_spans == (WeightSpan("1", 0, 7), WeightSpan("2", 7, 9))


def test_what_only_an_abort_may_leave_out_is_a_fault_before_the_end() -> None:
    without_log_prob = msgspec.json.decode(event(0, 6, told=5))
    del without_log_prob["meta_info"]["output_token_logprobs"][5:]
    for first in (event(0, 3), event(0, 1)):
        assert_fault_keeps_first(5, first, msgspec.json.encode(without_log_prob), event(5, 8, finish_reason=LENGTH))
    assert_fault_keeps_first(3, event(0, 3), event(0, 2), event(3, 4, finish_reason=LENGTH))
