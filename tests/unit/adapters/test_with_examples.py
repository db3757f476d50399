"""The teacher with worked examples in its context: what the base is asked, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.with_examples import WithExamplesBackend, WorkedExample
from py_scheduler.app import build_generation
from py_scheduler.config import parse_config
from py_scheduler.domain.generation import (
    ChatMessage,
    FinishReason,
    Generation,
    GenerationRequest,
    LogProbKind,
    ModelInfo,
    SamplingParams,
    WeightSpan,
)
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EXAMPLES = (WorkedExample(prompt="1+1", answer="2"), WorkedExample(prompt="2+3", answer="5"))
LESSON = [
    ChatMessage("user", "1+1"),
    ChatMessage("assistant", "2"),
    ChatMessage("user", "2+3"),
    ChatMessage("assistant", "5"),
]


class Templated:
    """An engine whose tokens are characters and whose chat template is one of the usual kinds."""

    def __init__(self, kind: str, context_length: int = 10_000) -> None:
        self.kind = kind
        self.context_length = context_length
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []

    def write(self, messages: Sequence[ChatMessage]) -> str:
        if self.kind == "merged":
            # A system message is a part of the first user message, and may stand nowhere else.
            system = messages[0].content + "\n\n" if messages[0].role == "system" else ""
            rest = messages[1:] if system else messages
            if any(message.role == "system" for message in rest):
                raise EngineRejectedError("conversation roles must alternate")
            turns = [
                f"[INST] {system if number == 0 else ''}{m.content} [/INST]"
                if m.role == "user"
                else f" {m.content}</s>"
                for number, m in enumerate(rest)
            ]
            return "<s>" + "".join(turns)
        written = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        if self.kind == "default system" and messages[0].role != "system":
            written = "<|im_start|>system\nYou are helpful.<|im_end|>\n" + written
        return {"bos": "<s>"}.get(self.kind, "") + written + "<|im_start|>assistant\n"

    async def start(self) -> None:
        raise AssertionError("the base is started in its own role")

    close = start

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="templated",
            vocab_size=256,
            context_length=self.context_length,
            weight_version="7",
            log_prob_kind=LogProbKind.MODEL,
        )

    async def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return await self.encode(self.write(messages))

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        return Generation.of(
            token_ids=[52, 2],
            log_probs=[-0.5, -0.25],
            text="4",
            finish_reason=FinishReason.STOP,
            weight_spans=(WeightSpan("7", 0, 2),),
        )

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)


def request(token_ids: list[int]) -> GenerationRequest:
    return GenerationRequest(rid="r", token_ids=token_ids, sampling=SamplingParams(max_new_tokens=8), session_id="s")


KINDS = ("plain", "bos", "default system", "merged")
QUESTION = [ChatMessage("user", "2+2")]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_base_sees_what_its_template_makes_of_the_examples_and_the_question(kind: str) -> None:
    base = Templated(kind)
    teacher = WithExamplesBackend(base, examples=EXAMPLES)
    await teacher.start()
    generation = await teacher.generate(request(await teacher.encode_chat(QUESTION)))
    assert bytes(base.requests[0].token_ids).decode() == base.write([*LESSON, *QUESTION])
    assert (generation.token_ids, generation.log_probs, generation.text) == ([52, 2], [-0.5, -0.25], "4")
    assert generation.weight_spans == (WeightSpan("7", 0, 2),)
    assert (base.requests[0].rid, base.requests[0].session_id) == ("r", "s")
    assert await teacher.encode_chat(QUESTION) == await base.encode_chat(QUESTION), "whoever asks sees no examples"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_of_several_turns_and_raw_tokens_in_it(kind: str) -> None:
    base = Templated(kind)
    teacher = WithExamplesBackend(base, examples=EXAMPLES)
    so_far = [*await base.encode_chat(QUESTION), 52, 2, 9, 9, 9]
    await teacher.generate(request(so_far))
    taught = base.write([*LESSON, *QUESTION])
    assert list(base.requests[0].token_ids) == [*taught.encode(), 52, 2, 9, 9, 9]


@pytest.mark.parametrize("kind", ["plain", "bos", "default system"])
async def test_a_conversation_that_brings_its_own_system_message(kind: str) -> None:
    base = Templated(kind)
    conversation = [ChatMessage("system", "You are a calculator."), *QUESTION]
    await WithExamplesBackend(base, examples=EXAMPLES).generate(request(await base.encode_chat(conversation)))
    assert bytes(base.requests[0].token_ids).decode() == base.write([*LESSON, *conversation])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", [EXAMPLES, ()])
async def test_an_instruction_takes_the_place_of_the_templates_own(
    kind: str, examples: tuple[WorkedExample, ...]
) -> None:
    base = Templated(kind)
    teacher = WithExamplesBackend(base, examples=examples, instruction="Answer with a number.")
    await teacher.generate(request(await base.encode_chat(QUESTION)))
    lesson = [ChatMessage("system", "Answer with a number."), *(LESSON if examples else [])]
    assert bytes(base.requests[0].token_ids).decode() == base.write([*lesson, *QUESTION])


@pytest.mark.parametrize("question", ["?", "? what", "user", "\n", "", "<|im_start|>"])
async def test_whatever_the_question_is(question: str) -> None:
    for kind in KINDS:
        base = Templated(kind)
        conversation = [ChatMessage("user", question)]
        await WithExamplesBackend(base, examples=EXAMPLES).generate(request(await base.encode_chat(conversation)))
        assert bytes(base.requests[0].token_ids).decode() == base.write([*LESSON, *conversation])


@pytest.mark.parametrize("kind", ["bos", "merged"])
async def test_a_context_that_is_no_conversation_is_refused(kind: str) -> None:
    teacher = WithExamplesBackend(Templated(kind), examples=EXAMPLES)
    with pytest.raises(EngineRejectedError, match="encode it with encode_chat"):
        await teacher.generate(request([1, 2, 3]))


async def test_the_examples_take_their_room_of_the_context() -> None:
    base = Templated("plain")
    added = len(base.write(LESSON)) - len("<|im_start|>assistant\n")
    teacher = WithExamplesBackend(base, examples=EXAMPLES)
    info = await teacher.model_info()
    assert (info.context_length, info.name) == (10_000 - added, "templated with examples")
    assert (info.vocab_size, info.weight_version, info.log_prob_kind) == (256, "7", LogProbKind.MODEL)
    with pytest.raises(EngineUnavailableError, match=f"take {added} of {added} tokens"):
        await WithExamplesBackend(Templated("plain", added), examples=EXAMPLES).start()


async def test_an_abort_reaches_the_base() -> None:
    base = Templated("plain")
    await WithExamplesBackend(base, examples=EXAMPLES).abort("r")
    assert base.aborted == ["r"]


async def test_over_sglang_with_the_context_checked_examples_included() -> None:
    async with ScriptedSglang() as server:
        base = SglangBackend(server.base_url)
        await base.start()
        try:
            teacher = WithExamplesBackend(base, examples=EXAMPLES)
            await teacher.start()
            prompt = await teacher.encode_chat(QUESTION)
            generation = await teacher.generate(request(prompt))
            assert generation.token_ids == list(range(100, 108))
            assert len(generation.log_probs) == 8
            assert server.bodies[-1]["input_ids"] == [
                ord(c) for c in "<user>1+1<assistant>2<user>2+3<assistant>5<user>2+2"
            ]
            room = (await teacher.model_info()).context_length
            assert room == (await base.model_info()).context_length - 42
            with pytest.raises(ContextOverflowError, match="exceed the context"):
                await teacher.generate(request([*prompt, *[1] * (room - len(prompt) - 7)]))
            assert len(server.bodies) == 1, "it was refused before it was sent"
        finally:
            await base.close()


# In the configuration

STUDENT = """
[generation.student]
kind = "sglang"
base_url = "http://127.0.0.1:1"
"""


def built(text: str, base_dir: Path) -> tuple[dict[str, Any], dict[str, str]]:
    faults: list[Any] = []
    evaluator = """
[[evaluator]]
evaluator_id = "a"
handler = "tests.support.agents.app_handlers:Echo"
resource = { concurrency = 1 }
"""
    engines = build_generation(parse_config(text + evaluator), base_dir, faults)
    return engines, {fault.field: fault.description for fault in faults}


async def test_a_teacher_of_the_configuration_asks_the_students_engine(tmp_path: Path) -> None:
    (tmp_path / "lesson.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n\n{"prompt": "2+3", "answer": "5"}\n')
    teacher = """
[generation.teacher]
kind = "with_examples"
base = "student"
"""
    inline = 'examples = [{ prompt = "1+1", answer = "2" }, { prompt = "2+3", answer = "5" }]'
    for said in (inline, 'examples = "lesson.jsonl"', 'instruction = "Be right."'):
        for text in (STUDENT + teacher + said, teacher + said + STUDENT):
            engines, faults = built(text, tmp_path)
            assert not faults
            assert set(engines) == {"student", "teacher"}
            assert engines["teacher"]._base is engines["student"]
    engines, _ = built(STUDENT + teacher + 'examples = "lesson.jsonl"', tmp_path)
    assert engines["teacher"]._lesson == LESSON


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ('base = "tutor"\ninstruction = "x"', "generation.teacher.base", "is 'tutor', must be one of the roles"),
        ('base = "teacher"\ninstruction = "x"', "generation.teacher.base", "leads back to itself: teacher -> teacher"),
        ('instruction = "x"', "generation.teacher.base", "is missing"),
        ("base = 7", "generation.teacher.base", "must be"),
        ('base = "student"', "generation.teacher.examples", "no instruction"),
        ('base = "student"\nexamples = "nowhere.jsonl"', "generation.teacher.examples", "No such file"),
        ('base = "student"\nexamples = "bad.jsonl"', "generation.teacher.examples", "line 2"),
        ('base = "student"\nexamples = [{ prompt = "x" }]', "generation.teacher.examples[0].answer", "is missing"),
        ('base = "student"\nexample = []', "generation.teacher.example", "did you mean examples?"),
    ],
)
def test_a_faulty_teacher_is_named(text: str, field: str, description: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": 3}\n')
    engines, faults = built(f'{STUDENT}[generation.teacher]\nkind = "with_examples"\n{text}', tmp_path)
    assert list(engines) == ["student"]
    assert list(faults) == [field]
    assert description in faults[field]


def test_a_circle_is_told_once_and_what_rests_on_a_fault_is_left_out(tmp_path: Path) -> None:
    text = "".join(
        f'[generation.{role}]\nkind = "with_examples"\nbase = "{base}"\ninstruction = "x"\n'
        for role, base in {"a": "b", "b": "c", "c": "b", "d": "nobody", "e": "d"}.items()
    )
    engines, faults = built(STUDENT + text, tmp_path)
    assert list(engines) == ["student"]
    assert faults == {
        "generation.b.base": "leads back to itself: b -> c -> b",
        "generation.d.base": "is 'nobody', must be one of the roles student, a, b, c, d, e",
    }
