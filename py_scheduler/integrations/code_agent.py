"""A tool agent of several turns: the model gets a small programming task, tries code in a sandbox, reads what came of
it, and answers with a function; hidden tests call that function in the sandbox, and the score is the share of them that
passes.

Invariants: what the model or its code does is never this agent's error: it is shown to the model, or is a test that
fails; only a SandboxError leaves (outcome `infra_sandbox`). Expected values stay here, tests see their arguments only:
a solution cannot pass by ending the process or printing what looks like success. Nothing of a task is executed but
the model's own code: a test is a function's name and JSON values.

The model writes one block a turn:

    ```python      runs it and shows the output
    ```sh          likewise, for the shell
    ```answer      ends the episode with the function
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from py_scheduler.domain.episodes.sandbox import PYTHON, Sandbox, SandboxResult
from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.generation import ChatMessage, FinishReason
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.errors import ConfigError, ContextOverflowError, InvalidArgumentError, SandboxError
from py_scheduler.integrations.chat_turns import observe_reply

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.task import Task

METADATA_KEY = "code"
DEFAULT_MAX_TURNS = 6

SYSTEM_PROMPT = """\
You write Python functions. Each of your replies is one block and nothing else.
To try something, write a ```python or ```sh block: it is run and you see its output.
When you are sure, write an ```answer block with the whole function. Every block ends with a line of ```."""

EXAMPLE = (
    ChatMessage("user", "Write a function double(n) that gives twice the number n."),
    ChatMessage("assistant", "```python\ndef double(n):\n    return n * 2\n\nprint(double(4))\n```"),
    ChatMessage("user", "Output:\n8\n(exit code 0)"),
    ChatMessage("assistant", "```answer\ndef double(n):\n    return n * 2\n```"),
)

_LAST_REPLY = "This is your last reply: write the ```answer block."

_RETURNED = "returned "
_DRIVER = f"""\
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr
with open("test.json") as file:
    test = json.load(file)
with open("solution.py") as file:
    code = compile(file.read(), "solution.py", "exec")
names = {{"__name__": "solution"}}
exec(code, names)
value = json.dumps(names[test["function"]](*test["args"]))
sys.stdout.flush()
answers.write("\\n{_RETURNED}" + value + "\\n")
"""
_MAX_SAID = 300
_MAX_TEST_OUTPUT_BYTES = 1 << 20
"""Of a hidden test: what it prints and what it returns together; a value of half of it is always read whole."""


# The task


class CodeTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call: positional arguments, and what is to be returned. JSON values; a tuple counts as a list.

    expect: an int is met exactly (2.0 meets 2), a float to its ninth digit, by ints too.
    """

    args: list[Any]
    expect: Any


class CodeProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """It is `task.metadata["code"]`; the task's prompt says in words what is wanted."""

    function: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_]\w{0,63}$")]
    tests: Annotated[list[CodeTest], msgspec.Meta(min_length=1, max_length=64)]


def read_problem(task: Task) -> CodeProblem:
    """Raises InvalidArgumentError when the task brings no function and tests."""
    field = f"metadata.{METADATA_KEY}"
    if METADATA_KEY not in task.metadata:
        raise InvalidArgumentError('is missing: {"function": NAME, "tests": [{"args": [...], "expect": ...}]}', field)
    try:
        return msgspec.convert(task.metadata[METADATA_KEY], CodeProblem)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(str(error), field) from error


# What the model writes

_Kind = Literal["python", "shell", "answer"]
_KIND_OF_WORD: dict[str, _Kind] = {
    "python": "python",
    "sh": "shell",
    "shell": "shell",
    "bash": "shell",
    "answer": "answer",
}
_FENCE = "```"
_WORD = re.compile(r"\w*")
_MAX_REPLY_CHARACTERS = 100_000
_FORM = "Write one block: ```python, ```sh or ```answer, the code, and a line of ```."


class Action(msgspec.Struct, frozen=True):
    """One block of a reply."""

    kind: _Kind
    code: str


def parse_action(text: str) -> Action | str:
    """The one block of a reply, or what is wrong with it, in words for the model."""
    if len(text) > _MAX_REPLY_CHARACTERS:
        return f"The reply has {len(text)} characters, more than {_MAX_REPLY_CHARACTERS}. {_FORM}"
    blocks, is_open = _blocks(text)
    if len(blocks) > 1:
        return f"There are {len(blocks)} blocks. {_FORM}"
    if not blocks:
        return f"The block is not closed. {_FORM}" if is_open else f"There is no block. {_FORM}"
    word, code = blocks[0]
    kind = _KIND_OF_WORD.get(word)
    if kind is None:
        return f"A block named {word!r} is nothing that can be run. {_FORM}"
    if not code.strip():
        return f"The block is empty. {_FORM}"
    return Action(kind, code)


def _blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """The closed blocks, as (word, code), and whether one more was begun; each line is looked at once."""
    blocks: list[tuple[str, str]] = []
    word: str | None = None
    code: list[str] = []
    for line in text.split("\n"):
        said = line.removeprefix(_FENCE).strip(" \t\r") if line.startswith(_FENCE) else None
        if word is None:
            if said is not None and _WORD.fullmatch(said):
                word = said
        elif said == "":
            blocks.append((word, "".join(code)))
            word, code = None, []
        else:
            code.append(line + "\n")
    return blocks, word is not None


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of one reply. action: what was run, or "none" with the error that the model was shown.

    exit_code, signal, timed_out, dropped_bytes, seconds: of the tool, as in SandboxResult.
    """

    role: str
    action: Literal["python", "shell", "answer", "none"]
    error: str = ""
    exit_code: int | None = None
    signal: str = ""
    timed_out: bool = False
    dropped_bytes: int = 0
    seconds: float = 0.0


class CodeAgent(BaseAgent):
    """sandbox: where code runs; the server makes one from the table `sandbox` of handler_args.

    max_turns: replies at most, where the cascade says nothing. example: whether a solved task precedes the question.
    test_timeout_seconds: of each hidden test.
    """

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        max_turns: int = DEFAULT_MAX_TURNS,
        example: bool = True,
        system_prompt: str = SYSTEM_PROMPT,
        test_timeout_seconds: float = 5.0,
    ) -> None:
        for name, value, most in (
            ("max_turns", max_turns, 1_000),
            ("test_timeout_seconds", test_timeout_seconds, 3_600),
        ):
            if not 0 < value <= most:
                raise ConfigError(f"is {value}, must be above 0 and at most {most}", name)
        self._sandbox = sandbox
        self._max_turns = max_turns
        self._opening = [ChatMessage("system", system_prompt)] if system_prompt else []
        self._opening += EXAMPLE if example else ()
        self._test_timeout_seconds = test_timeout_seconds

    async def run(self, episode: Episode) -> AgentResult:
        """Plays turns until there is an answer, or `max_turns` or `max_context_len` is reached.

        Raises InvalidArgumentError for a task without tests, SandboxError.
        """
        read_problem(episode.sample.task)
        scratch = await asyncio.to_thread(_folder, episode.workdir, "scratch")
        turns: list[TurnRecord] = []
        max_turns = episode.stopping.max_turns or self._max_turns
        try:
            await episode.observe_chat([*self._opening, ChatMessage("user", episode.sample.task.prompt)])
            while len(turns) < max_turns:
                answer, shown = await self._play_turn(episode, scratch, turns)
                if answer:
                    return _result("answered", turns, answer)
                if len(turns) < max_turns:
                    is_last = len(turns) == max_turns - 1
                    await observe_reply(episode, f"{shown}\n{_LAST_REPLY}" if is_last else shown)
        except ContextOverflowError:
            return _result(Outcome.CONTEXT_OVERFLOW, turns)
        except SandboxError:
            episode.termination_reason = f"the sandbox failed in turn {len(turns) + 1}"
            raise
        return _result(Outcome.MAX_TURNS, turns)

    async def _play_turn(self, episode: Episode, scratch: Path, turns: list[TurnRecord]) -> tuple[str, str]:
        """One reply and what comes of it, as (answer, what the model is shown); one of the two is empty."""
        role = episode.choose_role()
        generation = await episode.generate(role=role)
        action = parse_action(generation.text)
        if isinstance(action, str):
            cut = "Your reply was too long and was cut off. " if generation.finish_reason is FinishReason.LENGTH else ""
            turns.append(TurnRecord(role=role, action="none", error=cut + action))
            return "", cut + action
        if action.kind == "answer":
            turns.append(TurnRecord(role=role, action="answer"))
            return action.code, ""
        result = await self._run_tool(action, scratch)
        turns.append(
            TurnRecord(
                role=role,
                action=action.kind,
                exit_code=result.exit_code,
                signal=result.signal,
                timed_out=result.timed_out,
                dropped_bytes=result.dropped_bytes,
                seconds=round(result.seconds, 3),
            )
        )
        return "", _shown(result)

    async def _run_tool(self, action: Action, scratch: Path) -> SandboxResult:
        # Unbuffered: what a program that is stopped has printed by then is to be seen.
        command, name = (
            ((PYTHON, "-u", "main.py"), "main.py") if action.kind == "python" else (("sh", "main.sh"), "main.sh")
        )
        return await self._sandbox.run(command, workdir=scratch, files={name: action.code})

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        """The share of hidden tests that pass, from 0 to 1. Raises SandboxError."""
        problem = read_problem(episode.sample.task)
        details: dict[str, Any] = {"answer": result.answer, "turns": result.reward_inputs["turns"]}
        tests: list[dict[str, Any]] = []
        if result.answer:
            for number, test in enumerate(problem.tests):
                # A folder each, which no code of the episode has seen: nothing is carried from one test to the next.
                folder = await asyncio.to_thread(_folder, episode.workdir, f"test_{number}")
                tests.append(await self._test(result.answer, problem.function, test, folder))
        passed = sum(test["passed"] for test in tests)
        details |= {"tests": tests, "passed": passed, "planned": len(problem.tests)}
        return Reward(score=passed / len(problem.tests), details=details)

    async def _test(self, answer: str, function: str, test: CodeTest, folder: Path) -> dict[str, Any]:
        result = await self._sandbox.run(
            (PYTHON, "driver.py"),
            workdir=folder,
            files={
                "solution.py": answer,
                "driver.py": _DRIVER,
                "test.json": msgspec.json.encode({"function": function, "args": test.args}).decode(),
            },
            timeout_seconds=self._test_timeout_seconds,
            max_output_bytes=_MAX_TEST_OUTPUT_BYTES,
        )
        returned = _returned(result)
        # Long values take their time.
        passed = returned is not None and await asyncio.to_thread(_is_expected, returned, test.expect)
        said = returned if returned is not None else _last_line(result)
        return {"passed": passed, "said": said[:_MAX_SAID], "seconds": round(result.seconds, 3)}


def _folder(workdir: Path, name: str) -> Path:
    folder = workdir / name
    folder.mkdir(mode=0o700)
    return folder


def _result(reason: str, turns: list[TurnRecord], answer: str = "") -> AgentResult:
    records = [msgspec.to_builtins(turn) | {"turn": number} for number, turn in enumerate(turns, start=1)]
    return AgentResult(termination_reason=reason, answer=answer, reward_inputs={"turns": records})


def _shown(result: SandboxResult) -> str:
    """Without times, so that the same code gives the model the same words."""
    output = result.output.strip("\n") or "(nothing was printed)"
    return f"Output:\n{output}\n({_ending(result)})"


def _ending(result: SandboxResult) -> str:
    if result.timed_out:
        return "stopped: it ran too long"
    return f"ended by {result.signal}" if result.signal else f"exit code {result.exit_code}"


def _returned(result: SandboxResult) -> str | None:
    """The JSON of what the function returned; None when it did not return."""
    _, mark, rest = f"\n{result.output}".rpartition(f"\n{_RETURNED}")
    return rest.partition("\n")[0] if result.is_ok and mark else None


def _last_line(result: SandboxResult) -> str:
    line = result.output.strip().rpartition("\n")[2]
    return _ending(result) if result.timed_out or not line else line


def _is_expected(returned: str, expected: Any) -> bool:
    """Whatever was printed in place of a value is a wrong one: no JSON, nested too deep, a number beyond a float."""
    try:
        return _same(msgspec.json.decode(returned), expected)
    except (ValueError, RecursionError, OverflowError):
        return False


def _same(said: Any, expected: Any) -> bool:
    """Equal as JSON: a bool is no number; where a float is expected, it agrees when the ninth digit does."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, float):
        return said == expected or math.isclose(said, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_same, said, expected))
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(_same(said[key], expected[key]) for key in said)
    return bool(said == expected)
