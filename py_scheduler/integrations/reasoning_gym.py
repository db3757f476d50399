"""Tasks of reasoning-gym (procedural problems with verifiers) as a handler, and their making for trainers.

A task names its problem (data set, configuration, seed, index) and the server makes it: question, answer and scorer
come from one place, nothing has to survive a trip as JSON (some entries hold tuples, and score differently without
them), and a trainer needs no reasoning-gym of its own. The question and the answer come back in the reward's details.

Invariants: a client chooses among registered data sets and their own configuration fields, within bounds, and never
names a file; all of reasoning-gym runs in one worker thread of the agent, because data sets are not written for
threads and some take a second to make; the samples of one task see the same problem as long as the server lives (a few
data sets depend on Python's string hashing, so another process may give another problem under the same name).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import msgspec

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.generation import ChatMessage, FinishReason, SamplingParams
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.training.problems import (
    MAX_SEED,
    METADATA_KEY,
    PROBLEMS_PER_SEED,
    Problem,
    numbered_problem,
    read_problem,
)
from py_scheduler.errors import ConfigError, InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TASK_TYPE = "reasoning_gym"
MAX_EXAMPLES = 64
# Far from every seed that people choose, so that examples are not the problems of a training run.
EXAMPLE_SEED = MAX_SEED - 1_000_003

# Their scorers evaluate the model's answer as Python code (eval, or sympy's parse_expr, which is built on it).
CODE_SCORING_DATASETS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
# "composite" is a mixture of others: mix tasks instead. The fields are the server's own: they choose files and sizes.
_UNUSABLE_DATASETS = frozenset({"composite"})
_SERVER_FIELDS = frozenset({"seed", "size", "data_file"})

_NO_SAMPLING = SamplingParams()
_MAX_CONFIG_BYTES = 4_096
_MAX_ANSWER_CHARACTERS = 8_192
# No brackets and no quotes: some generators evaluate expressions that they build from configured strings.
_CONFIG_STRING = re.compile(r"[\w .,:;|+*/<>=-]{0,64}")
# Several scorers read any number exactly, and write out every digit of 1e9999999 (45 seconds).
_ENDLESS_NUMBER = re.compile(r"\d[eE][+-]?\d{4}")
# What scorers raise over an answer that has not the form they expect: such an answer is wrong, not a fault of ours.
_TRIPPED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_tasks(
    dataset: str,
    *,
    count: int,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    repeat_times: int = 1,
    task_type: str = DEFAULT_TASK_TYPE,
    sampling: SamplingParams = _NO_SAMPLING,
) -> list[Task]:
    """`count` tasks of one data set; reasoning-gym itself isn't needed here.

    config: the data set's own settings (`{"min_words": 2}`). Seeds at least `count` apart give other problems.
    """
    settings = dict(config or {})
    mark = f"/{zlib.crc32(msgspec.json.encode(settings, order='sorted')):08x}" if settings else ""
    task_config = TaskConfig(task_type=task_type, repeat_times=repeat_times, dataset=dataset, sampling=sampling)
    tasks = []
    for number in range(count):
        problem = numbered_problem(dataset, settings, seed, number)
        tasks.append(
            Task(
                config=task_config,
                metadata={METADATA_KEY: msgspec.to_builtins(problem)},
                client_key=f"{dataset}{mark}/{seed}/{number}",
            )
        )
    return tasks


def reasoning_gym_mixture(
    datasets: Mapping[str, Mapping[str, Any]],
    *,
    count: int,
    seed: int = 0,
    repeat_times: int = 1,
    task_type: str = DEFAULT_TASK_TYPE,
    sampling: SamplingParams = _NO_SAMPLING,
) -> list[Task]:
    """`count` tasks over several data sets (name -> its settings), in turn, so that every stretch of them is mixed."""
    each = math.ceil(count / len(datasets))
    rows = zip(
        *(
            reasoning_gym_tasks(
                name,
                count=each,
                seed=seed,
                config=config,
                repeat_times=repeat_times,
                task_type=task_type,
                sampling=sampling,
            )
            for name, config in datasets.items()
        ),
        strict=True,
    )
    return list(chain.from_iterable(rows))[:count]


class ReasoningGymAgent(BaseAgent):
    """One question, one answer, the data set's own score.

    examples: solved problems of the same data set that precede the question as chat turns. system_prompt: empty for
    the chat template's own. answer_tags: only what stands in <answer></answer> counts; else tags are optional and the
    first line is the answer. allow_code_scoring: admits CODE_SCORING_DATASETS, whose scorers run what the model wrote.
    max_config_number: bounds every number in a task's configuration, because most of them are sizes.
    """

    def __init__(
        self,
        *,
        examples: int = 0,
        system_prompt: str = "",
        answer_tags: bool = False,
        allow_code_scoring: bool = False,
        max_config_number: int = 10_000,
    ) -> None:
        if not 0 <= examples <= MAX_EXAMPLES:
            raise ConfigError(f"is {examples}, must be from 0 to {MAX_EXAMPLES}", "examples")
        self._example_count = examples
        self._system_prompt = system_prompt
        self._answer_tags = answer_tags
        self._problems = _ProblemSource(allow_code_scoring, max_config_number)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reasoning-gym")

    async def run(self, episode: Episode) -> AgentResult:
        """Asks and reads the answer. Raises InvalidArgumentError for a task that names no problem to be had here."""
        problem = read_problem(episode.sample.task)
        question, examples = await self._in_thread(self._problems.prompt, problem, self._example_count)
        messages = self._conversation(question, examples)
        await episode.observe_chat(messages)
        generation = await episode.generate(role=episode.choose_role())
        cut = generation.finish_reason is FinishReason.LENGTH
        return AgentResult(
            termination_reason="length" if cut else "answered",
            answer=extract_answer(generation.text, tags_required=self._answer_tags),
        )

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        """The data set's own score, from 0 to 1 in nearly all of them."""
        problem = read_problem(episode.sample.task)
        score, details = await self._in_thread(self._problems.score, problem, result.answer)
        return Reward(score=score, details=details)

    def _conversation(self, question: str, examples: Sequence[tuple[str, str]]) -> list[ChatMessage]:
        messages = [ChatMessage("system", self._system_prompt)] if self._system_prompt else []
        for asked, answered in examples:
            answer = f"<answer>{answered}</answer>" if self._answer_tags else answered
            messages += [ChatMessage("user", asked), ChatMessage("assistant", answer)]
        messages.append(ChatMessage("user", question))
        return messages

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))


def extract_answer(text: str, *, tags_required: bool = False) -> str:
    """What stands in the last <answer></answer>; without tags the first line that isn't empty, or nothing."""
    tagged = _ANSWER_TAGS.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    lines = text.strip().splitlines()
    return "" if tags_required or not lines else lines[0].strip()


class _ProblemSource:
    """Data sets by configuration and seed, as reasoning-gym makes them. Runs in one thread at a time."""

    def __init__(self, allow_code_scoring: bool, max_config_number: int) -> None:
        self._registry, self._create = _load_reasoning_gym()
        self._allow_code_scoring = allow_code_scoring
        self._max_config_number = max_config_number
        self._dataset = lru_cache(maxsize=32)(self._make_dataset)
        self._entry = lru_cache(maxsize=1_024)(self._make_entry)

    def prompt(self, problem: Problem, example_count: int) -> tuple[str, list[tuple[str, str]]]:
        """The question, and as many solved others of the same data set."""
        config = self._checked_config(problem)
        question = str(self._entry(problem.dataset, config, problem.seed, problem.index)["question"])
        # Twice as many as needed, for data sets so small that an example may be the question itself.
        pool = (self._entry(problem.dataset, config, EXAMPLE_SEED, index) for index in range(2 * example_count))
        solved = (
            (str(entry["question"]), str(entry["answer"]))
            for entry in pool
            if entry["answer"] is not None and entry["question"] != question
        )
        return question, [example for example, _ in zip(solved, range(example_count), strict=False)]

    def score(self, problem: Problem, answer: str) -> tuple[float, dict[str, Any]]:
        """The score of an answer, and what a trainer wants to see beside it."""
        config = self._checked_config(problem)
        entry = self._entry(problem.dataset, config, problem.seed, problem.index)
        dataset = self._dataset(problem.dataset, config, problem.seed)
        expected = None if entry["answer"] is None else str(entry["answer"])
        details = {"question": str(entry["question"]), "answer": answer, "expected": expected}
        if len(answer) > _MAX_ANSWER_CHARACTERS or _ENDLESS_NUMBER.search(answer):
            return 0.0, details | {"scorer_error": "not given to the scorer: too large"}
        try:
            score = float(dataset.score_answer(answer, entry))
        except _TRIPPED as error:
            return 0.0, details | {"scorer_error": repr(error)}
        if not math.isfinite(score):
            return 0.0, details | {"scorer_error": f"the score was {score}"}
        return score, details

    def _checked_config(self, problem: Problem) -> bytes:
        """The configuration as canonical JSON. Raises InvalidArgumentError that names what is wrong with the task."""
        field = f"metadata.{METADATA_KEY}"
        name = problem.dataset
        if name not in self._registry or name in _UNUSABLE_DATASETS:
            raise InvalidArgumentError(f"{name!r} is no data set that reasoning-gym has registered", f"{field}.dataset")
        if name in CODE_SCORING_DATASETS and not self._allow_code_scoring:
            raise InvalidArgumentError(
                f"the scorer of {name!r} runs the model's answer as code: admit it by the handler's allow_code_scoring",
                f"{field}.dataset",
            )
        known = {spec.name for spec in dataclasses.fields(self._registry[name][1])} - _SERVER_FIELDS
        for key, value in problem.config.items():
            if key not in known:
                raise InvalidArgumentError(
                    f"{name!r} has no such setting, it has {', '.join(sorted(known)) or 'none'}",
                    f"{field}.config.{key}",
                )
            self._check_value(value, f"{field}.config.{key}")
        encoded = msgspec.json.encode(problem.config, order="sorted")
        if len(encoded) > _MAX_CONFIG_BYTES:
            raise InvalidArgumentError(
                f"has {len(encoded)} bytes, at most {_MAX_CONFIG_BYTES} are taken", f"{field}.config"
            )
        return encoded

    def _check_value(self, value: Any, field: str) -> None:
        if isinstance(value, str) and not _CONFIG_STRING.fullmatch(value):
            raise InvalidArgumentError("must be at most 64 plain characters without brackets and quotes", field)
        if isinstance(value, int | float) and not abs(value) <= self._max_config_number:
            raise InvalidArgumentError(
                f"is {value}, at most {self._max_config_number} is taken: raise the handler's max_config_number", field
            )
        if isinstance(value, Mapping):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list | tuple):
            for item in value:
                self._check_value(item, field)

    def _make_dataset(self, name: str, config: bytes, seed: int) -> Any:
        settings = msgspec.json.decode(config) | {"seed": seed, "size": PROBLEMS_PER_SEED}
        try:
            typed = msgspec.convert(settings, self._registry[name][1])
            return self._create(name, **{spec.name: getattr(typed, spec.name) for spec in dataclasses.fields(typed)})
        # Configurations check themselves with assert; one that passes may still break the constructor.
        except (AssertionError, ValueError, TypeError, ArithmeticError, LookupError) as error:
            raise InvalidArgumentError(
                f"the data set {name!r} does not take this configuration: {str(error) or repr(error)}",
                f"metadata.{METADATA_KEY}.config",
            ) from error

    def _make_entry(self, name: str, config: bytes, seed: int, index: int) -> Any:
        return self._dataset(name, config, seed)[index]


def _load_reasoning_gym() -> tuple[dict[str, tuple[Any, Any]], Callable[..., Any]]:
    """Registry and factory. Raises ConfigError that names the extra."""
    try:
        with warnings.catch_warnings():
            # Some of its dependencies compare with `is` a literal, which Python reports whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS, create_dataset  # noqa: PLC0415 (an optional extra)
    except ImportError as error:
        raise ConfigError(
            f"ReasoningGymAgent needs reasoning-gym ({error}): install the extra 'reasoning-gym' of py-scheduler",
            "handler",
        ) from error
    return DATASETS, create_dataset
