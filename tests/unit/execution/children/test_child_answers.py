"""Each question of a child gets one answer or refusal, however soon it is withdrawn."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from py_scheduler.domain.runners.frames import Answer, Ask, Generate, Refused, read_server_frame
from py_scheduler.execution.children.answers import ChildAnswers

GENERATE = Generate(role="student", max_new_tokens=None, sampling=None)


class PatientEpisode:
    """Answers after some turns of the loop, and heeds a cancellation."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def generate(self, **_said: object) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)


def answers_of(turns: int) -> tuple[ChildAnswers, list[Answer | Refused]]:
    sent: list[Answer | Refused] = []
    answers = ChildAnswers(lambda frame: sent.append(cast("Any", read_server_frame(frame))))
    answers.episode = cast("Any", PatientEpisode(turns))
    return answers, sent


@pytest.mark.parametrize("turns_before", range(5))
@pytest.mark.parametrize("all_at_once", [False, True])
async def test_a_question_that_is_withdrawn_at_any_turn_is_answered_once(turns_before: int, all_at_once: bool) -> None:
    """Also before its work has begun: a child that cancels at once sends both in one write."""
    answers, sent = answers_of(turns=2)
    answers.asked(Ask(call_no=1, question=GENERATE))
    for _ in range(turns_before):
        await asyncio.sleep(0)
    if all_at_once:
        answers.cancel()
    else:
        answers.withdraw(1)
    async with asyncio.timeout(5):
        await answers.until_none_is_under_way()
    assert [said.call_no for said in sent] == [1]
    assert not answers.are_under_way
    if turns_before == 0:
        assert isinstance(sent[0], Refused)
        assert sent[0].kind == "CancelledError"
