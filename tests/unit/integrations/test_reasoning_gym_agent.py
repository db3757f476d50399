"""ReasoningGymAgent against the real reasoning-gym, with a scripted episode in the model's place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.domain.generation import ChatMessage, FinishReason
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.training.problems import METADATA_KEY, PROBLEMS_PER_SEED, read_problem
from py_scheduler.errors import ConfigError, ContextOverflowError, InvalidArgumentError
from py_scheduler.integrations.reasoning_gym import (
    CODE_SCORING_DATASETS,
    ReasoningGymAgent,
    extract_answer,
    reasoning_gym_mixture,
    reasoning_gym_tasks,
)
from tests.support.models.scripted_episode import ScriptedEpisode

if TYPE_CHECKING:
    from collections.abc import Mapping


EASY: dict[str, Any] = {"min_words": 2, "max_words": 4}


@pytest.fixture(scope="module")
def agent() -> ReasoningGymAgent:
    return ReasoningGymAgent(examples=4)


async def play(agent: ReasoningGymAgent, episode: ScriptedEpisode) -> tuple[AgentResult, Reward]:
    result = await agent.run(episode)
    return result, await agent.eval(episode, result)


def letter_counting_answer(question: str) -> str:
    letter = question.split('"')[1]
    return str(question.split('"')[3].lower().count(letter))


def one_task(dataset: str = "letter_counting", config: Mapping[str, Any] = EASY) -> Task:
    return reasoning_gym_tasks(dataset, count=1, seed=5, config=config)[0]


async def test_a_right_answer_scores_one(agent: ReasoningGymAgent) -> None:
    episode = ScriptedEpisode(one_task(), letter_counting_answer)
    result, reward = await play(agent, episode)
    assert reward.score == 1.0
    assert result.termination_reason == "answered"
    assert reward.details["expected"] == result.answer
    assert reward.details["question"] == episode.messages[-1].content


async def test_a_wrong_answer_scores_zero(agent: ReasoningGymAgent) -> None:
    _, reward = await play(agent, ScriptedEpisode(one_task(), "none at all"))
    assert reward.score == 0.0


async def test_examples_are_solved_chat_turns_before_the_question(agent: ReasoningGymAgent) -> None:
    episode = ScriptedEpisode(one_task(), "1")
    await agent.run(episode)
    assert [message.role for message in episode.messages] == ["user", "assistant"] * 4 + ["user"]
    question = episode.messages[-1].content
    for asked, answered in zip(episode.messages[:-1:2], episode.messages[1::2], strict=True):
        assert asked.content != question
        assert answered.content == letter_counting_answer(asked.content)
    assert question in episode.observed_text


async def test_examples_never_give_the_question_away() -> None:
    agent = ReasoningGymAgent(examples=4)
    for task in reasoning_gym_tasks("products", count=40, config={"min_digits": 1, "max_digits": 1}):
        episode = ScriptedEpisode(task, "1")
        await agent.run(episode)
        assert episode.messages[-1].content not in {message.content for message in episode.messages[:-1]}


async def test_samples_of_one_task_see_one_problem(agent: ReasoningGymAgent) -> None:
    first, second = ScriptedEpisode(one_task()), ScriptedEpisode(one_task())
    await agent.run(first)
    await agent.run(second)
    assert first.messages == second.messages


async def test_a_cut_generation_says_so(agent: ReasoningGymAgent) -> None:
    result = await agent.run(ScriptedEpisode(one_task(), "1", FinishReason.LENGTH))
    assert result.termination_reason == "length"


async def test_a_context_overflow_is_not_swallowed(agent: ReasoningGymAgent) -> None:
    def overflow(question: str) -> str:
        raise ContextOverflowError(question)

    with pytest.raises(ContextOverflowError):
        await agent.run(ScriptedEpisode(one_task(), overflow))


async def test_system_prompt_and_tags() -> None:
    agent = ReasoningGymAgent(examples=1, system_prompt="Be brief.", answer_tags=True)
    episode = ScriptedEpisode(one_task(), "so <answer> 3 </answer>")
    result = await agent.run(episode)
    assert episode.messages[0] == ChatMessage("system", "Be brief.")
    assert episode.messages[2].content.startswith("<answer>")
    assert result.answer == "3"


@pytest.mark.parametrize(
    ("text", "required", "answer"),
    [
        (" 12\nbecause", False, "12"),
        ("\n\n 12 ", False, "12"),
        ("", False, ""),
        ("x <answer>1</answer> y <answer>\n2\n</answer>", False, "2"),
        ("12", True, ""),
    ],
)
def test_extract_answer(text: str, required: bool, answer: str) -> None:
    assert extract_answer(text, tags_required=required) == answer


async def test_data_sets_whose_entries_hold_tuples_score_right(agent: ReasoningGymAgent) -> None:
    task = one_task("rearc", {})
    _, empty = await play(agent, ScriptedEpisode(task))
    _, reward = await play(agent, ScriptedEpisode(task, f"<answer>{empty.details['expected']}</answer>"))
    assert reward.score == 1.0


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("prime_factorization", "no number"), ("boxnet", '"a"'), ("game_of_life", "{}"), ("coin_flip", "1e9999999")],
)
async def test_an_answer_that_the_scorer_trips_over_is_wrong(
    agent: ReasoningGymAgent, dataset: str, answer: str
) -> None:
    _, reward = await play(agent, ScriptedEpisode(one_task(dataset, {}), answer))
    assert reward.score == 0.0
    assert reward.details["scorer_error"]
    assert msgspec.json.encode(reward)


@pytest.mark.parametrize(
    ("problem", "field", "says"),
    [
        ({"dataset": "no_such"}, "metadata.reasoning_gym.dataset", "'no_such'"),
        ({"dataset": "composite"}, "metadata.reasoning_gym.dataset", "'composite'"),
        ({"dataset": "countdown"}, "metadata.reasoning_gym.dataset", "allow_code_scoring"),
        ({"dataset": "gcd", "config": {"min_numbers": 10**9}}, "metadata.reasoning_gym.config.min_numbers", "at most"),
        ({"dataset": "gcd", "config": {"nothing": 1}}, "metadata.reasoning_gym.config.nothing", "min_numbers"),
        ({"dataset": "gcd", "config": {"size": 1}}, "metadata.reasoning_gym.config.size", "no such setting"),
        ({"dataset": "gcd", "config": {"min_numbers": "2"}}, "metadata.reasoning_gym.config", "min_numbers"),
        ({"dataset": "gcd", "config": {"min_numbers": 0}}, "metadata.reasoning_gym.config", "min_numbers"),
        (
            {"dataset": "spell_backward", "config": {"data_file": "../../x"}},
            "metadata.reasoning_gym.config.data_file",
            "no such setting",
        ),
        (
            {"dataset": "basic_arithmetic", "config": {"operators": ["__import__('os')"]}},
            "metadata.reasoning_gym.config.operators",
            "brackets",
        ),
        ({"dataset": "gcd", "index": PROBLEMS_PER_SEED}, "metadata.reasoning_gym", "index"),
        ({"dataset": "gcd", "seed": -1}, "metadata.reasoning_gym", "seed"),
        ({"dataset": "gcd", "more": 1}, "metadata.reasoning_gym", "more"),
    ],
)
async def test_what_a_client_may_not_ask_for(
    agent: ReasoningGymAgent, problem: dict[str, Any], field: str, says: str
) -> None:
    task = Task(config=TaskConfig(task_type="reasoning_gym"), metadata={METADATA_KEY: problem})
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        await agent.run(ScriptedEpisode(task))
    assert caught.value.violations[0].field == field


async def test_a_task_of_another_kind_is_refused(agent: ReasoningGymAgent) -> None:
    with pytest.raises(InvalidArgumentError, match="reasoning_gym_tasks"):
        await agent.run(ScriptedEpisode(Task(config=TaskConfig(task_type="reasoning_gym"))))


async def test_code_scoring_is_admitted_on_request() -> None:
    agent = ReasoningGymAgent(allow_code_scoring=True)
    _, reward = await play(agent, ScriptedEpisode(one_task("spiral_matrix", {}), "1 2"))
    assert "spiral_matrix" in CODE_SCORING_DATASETS
    assert reward.score < 1.0


def test_tasks_are_named_and_distinct() -> None:
    tasks = reasoning_gym_tasks("gcd", count=PROBLEMS_PER_SEED + 2, seed=3, repeat_times=4)
    assert len({task.client_key for task in tasks}) == len(tasks)
    assert all(task.config.dataset == "gcd" and task.config.repeat_times == 4 for task in tasks)
    last = read_problem(tasks[-1])
    assert (last.seed, last.index) == (3 + PROBLEMS_PER_SEED, 1)
    assert msgspec.json.decode(msgspec.json.encode(tasks[0].metadata)) == tasks[0].metadata


def test_two_configurations_of_one_data_set_have_keys_of_their_own() -> None:
    plain, easy = (
        reasoning_gym_tasks("letter_counting", count=1),
        reasoning_gym_tasks("letter_counting", count=1, config=EASY),
    )
    assert plain[0].client_key != easy[0].client_key


def test_a_mixture_takes_data_sets_in_turn() -> None:
    tasks = reasoning_gym_mixture({"gcd": {}, "lcm": {}, "products": {"max_digits": 2}}, count=5)
    assert [task.config.dataset for task in tasks] == ["gcd", "lcm", "products", "gcd", "lcm"]
    assert read_problem(tasks[2]).config == {"max_digits": 2}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"the extra 'reasoning-gym' of py-scheduler"):
        ReasoningGymAgent()


def test_a_senseless_number_of_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="examples"):
        ReasoningGymAgent(examples=-1)
