"""The demo's teacher: SmolLM2 with worked examples in its context, beside the same SmolLM2 without."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from py_scheduler.adapters.llama_cpp.backend import LlamaCppBackend, LlamaCppSettings
from py_scheduler.adapters.llama_cpp.model_store import fetch_smollm2
from py_scheduler.adapters.with_examples import WithExamplesBackend, WorkedExample
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import ChatMessage, Generation, GenerationRequest, SamplingParams
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import ContextOverflowError
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.ports import GenerationBackend

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None and not os.environ.get("CI"),
        reason="the extra [embedded] is not installed",
    ),
]

EXAMPLES = tuple(
    WorkedExample(prompt=f"What is {a} plus {b}?", answer=f"<answer>{a + b}</answer>")
    for a, b in ((2, 3), (4, 1), (5, 2), (3, 3))
)
LESSON = [
    ChatMessage(role, said)
    for example in EXAMPLES
    for role, said in (("user", example.prompt), ("assistant", example.answer))
]
PROBLEMS = tuple((a, b) for a in (1, 2, 3) for b in (1, 4, 5))


class Listening:
    """Passes everything on, and keeps the requests."""

    def __init__(self, engine: LlamaCppBackend) -> None:
        self.engine = engine
        self.requests: list[GenerationRequest] = []
        self.model_info = engine.model_info
        self.encode = engine.encode
        self.encode_chat = engine.encode_chat
        self.abort = engine.abort

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        return await self.engine.generate(request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def student(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LlamaCppBackend]:
    path = fetch_smollm2(tmp_path_factory.mktemp("models"))
    engine = LlamaCppBackend(path, settings=LlamaCppSettings(slots=2, context_length=1024))
    await engine.start()
    yield engine
    await engine.close()


def asked(ids: list[int], max_new_tokens: int = 16) -> GenerationRequest:
    return GenerationRequest(
        rid="r", token_ids=ids, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    )


@pytest.mark.parametrize("system", ["", "You are a calculator."])
async def test_the_model_reads_what_its_own_template_makes_of_the_examples(
    student: LlamaCppBackend, system: str
) -> None:
    base = Listening(student)
    teacher = WithExamplesBackend(base, examples=EXAMPLES)
    await teacher.start()
    conversation = [ChatMessage("user", "What is 2 plus 2?")]
    if system:
        conversation.insert(0, ChatMessage("system", system))
    generation = await teacher.generate(asked(await teacher.encode_chat(conversation)))
    expected = await student.encode_chat([*LESSON, *conversation])
    assert list(base.requests[0].token_ids) == expected
    assert len(generation.token_ids) == len(generation.log_probs)
    again = await student.generate(asked(expected))
    assert generation.token_ids == again.token_ids
    assert generation.weight_spans == again.weight_spans


async def test_room_is_what_the_examples_leave(student: LlamaCppBackend) -> None:
    teacher = WithExamplesBackend(student, examples=EXAMPLES)
    prompt = await teacher.encode_chat([ChatMessage("user", "What is 2 plus 2?")])
    room = (await teacher.model_info()).context_length
    assert 700 < room < 1024
    with pytest.raises(ContextOverflowError):
        await teacher.generate(asked(prompt, max_new_tokens=room - len(prompt) + 40))
    assert (await student.generate(asked(prompt, max_new_tokens=2))).token_ids, "the student still has the whole"


class SumsAgent(BaseAgent):
    """One turn; right when the sum stands in the tags that only the examples know of."""

    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", episode.sample.task.prompt)])
        generation = await episode.generate(role=episode.choose_role(), max_new_tokens=16)
        return AgentResult(answer=generation.text)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        left, right = (int(word) for word in episode.sample.task.prompt.rstrip("?").split() if word.isdecimal())
        said = result.answer.strip()
        return Reward(
            score=float(said == f"<answer>{left + right}</answer>"), details={"tagged": said.startswith("<answer>")}
        )


async def test_the_teacher_knows_the_form_that_the_student_does_not(student: LlamaCppBackend) -> None:
    engines: dict[str, GenerationBackend] = {
        "student": student,
        "teacher": WithExamplesBackend(student, examples=EXAMPLES),
    }
    tasks = [task_of(f"What is {a} plus {b}?", sampling=SamplingParams(temperature=0.0)) for a, b in PROBLEMS]
    tagged = {}
    async with running_engine(spec_of(SumsAgent()), generation_backends=engines) as harness:
        for beta in (0.0, 1.0):
            reply = await harness.submit(tasks, int(beta), iteration=IterationContext(rollout_id=0, beta=beta))
            samples = await harness.samples(reply)
            source = "teacher" if beta else "student"
            prompt_lengths = {turn.end for sample in samples for turn in sample.trajectory.turns[:1]}
            assert max(prompt_lengths) < 60, "the examples are in nobody's trajectory"
            assert {turn.source for sample in samples for turn in sample.trajectory.turns[1:]} == {source}
            tagged[source] = sum(sample.reward.details["tagged"] for sample in samples)
    assert tagged["student"] == 0
    assert tagged["teacher"] >= len(PROBLEMS) - 1
