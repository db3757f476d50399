"""What `py-scheduler try-handler` shows of a sample: for people, or as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.requests import ServerInfo
from py_scheduler.domain.results import NO_REWARD, Outcome, Reward, SampleDone
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console

    from py_scheduler.domain.trajectory import Turn

_SHORT_TEXT = 240
_SHORT_DETAIL = 400

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What moves a terminal's cursor or colours it, line ends and tabs aside; models and tools print anything."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One tried sample. sample: None when none ever ran. traceback: lines, when the handler raised."""

    handler: str
    info: ServerInfo
    sample: SampleDone | None
    done: TaskDone
    traceback: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stranded_workers: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether run and eval came to their ends, whatever the score."""
        return self.sample is not None and not self.sample.error and not self.done.reason

    @property
    def reward(self) -> Reward:
        """What `eval_group` gave, where the handler has one."""
        if self.done.rewards:
            return self.done.rewards[0]
        return self.sample.reward if self.sample else NO_REWARD

    @property
    def outcome(self) -> Outcome | None:
        """What that makes of it; None when no sample ever ran."""
        if self.done.group_outcomes:
            return self.done.group_outcomes[0]
        return self.sample.outcome if self.sample else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of generation alone; None when nothing was generated."""
        if self.sample is None or not self.sample.timings.generate_seconds:
            return None
        return self.sample.trajectory.generated_tokens / self.sample.timings.generate_seconds


# JSON


def show_json(trial: Trial, console: Console) -> None:
    """One object, with whole texts."""
    text = msgspec.json.format(msgspec.json.encode(_as_object(trial), enc_hook=repr), indent=2).decode()
    # JSON lets the upper ones stand as they are; they can only stand in strings.
    console.out(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text), highlight=False)


def _as_object(trial: Trial) -> dict[str, Any]:
    sample = trial.sample
    trajectory = sample.trajectory if sample else EMPTY_TRAJECTORY
    evaluator = trial.info.evaluators[0]
    return {
        "handler": trial.handler,
        "evaluator": evaluator.evaluator_id,
        "engines": {engine.role: engine.model_name or engine.error for engine in trial.info.engines},
        "is_finished": trial.is_finished,
        "outcome": trial.outcome,
        "termination_reason": sample.termination_reason if sample else "",
        "error": sample.error if sample else trial.done.reason,
        "phase": sample.phase if sample else "",
        "traceback": trial.traceback,
        "reward": trial.reward,
        "turns": [_turn_object(turn) for turn in trajectory.turns],
        "tokens": len(trajectory),
        "generated_tokens": trajectory.generated_tokens,
        "tokens_per_second": trial.tokens_per_second,
        "timings": msgspec.structs.asdict(sample.timings) if sample else None,
        "held": {
            "node_ip": sample.node_ip if sample else "",
            "gpu_ids": sample.gpu_ids if sample else (),
            "resource": evaluator.sample_resource,
        },
        "warnings": trial.warnings,
    }


def _turn_object(turn: Turn) -> dict[str, Any]:
    return {
        "source": turn.source,
        "start": turn.start,
        "end": turn.end,
        "loss_mask": int(turn.source != ENVIRONMENT),
        "finish_reason": turn.finish_reason,
        "text": turn.text,
    }


# For people


def show_trial(trial: Trial, console: Console, *, whole_text: bool) -> None:
    engines = ", ".join(f"{engine.role} {engine.model_name or engine.error}" for engine in trial.info.engines)
    _say(console, f"handler   {trial.handler}  evaluator {trial.info.evaluators[0].evaluator_id}")
    _say(console, f"engine    {engines or 'none: the handler cannot generate'}")
    sample = trial.sample
    if sample is None:
        _say(console, f"outcome   {trial.done.state}: {trial.done.reason}")
    else:
        _show_turns(sample, console, whole_text=whole_text)
        _show_end(trial, sample, console, whole_text=whole_text)
    for warning in trial.warnings:
        _say(console, f"warning   {warning}")
    if trial.traceback:
        console.print("traceback, from the handler's first line on:")
    for line in trial.traceback:
        _say(console, line)


def _show_turns(sample: SampleDone, console: Console, *, whole_text: bool) -> None:
    if not sample.trajectory.turns:
        console.print("turns     none: nothing was observed and nothing generated through the episode")
        return
    table = Table(box=box.ASCII2)
    for heading in ("turn", "source", "tokens", "loss mask", "ended by", "text"):
        table.add_column(heading, overflow="fold", justify="right" if heading in {"turn", "tokens"} else "left")
    for number, turn in enumerate(sample.trajectory.turns, start=1):
        text = turn.text if whole_text else _shortened(turn.text, _SHORT_TEXT)
        mask = "0" if turn.source == ENVIRONMENT else "1"
        table.add_row(
            str(number), turn.source, f"{turn.end - turn.start:,}", mask, turn.finish_reason or "", Text(_visible(text))
        )
    console.print(table)


def _show_end(trial: Trial, sample: SampleDone, console: Console, *, whole_text: bool) -> None:
    reason = f"  the agent's reason: {sample.termination_reason}" if sample.termination_reason else ""
    _say(console, f"outcome   {trial.outcome}{reason}")
    if sample.error:
        _say(console, f"error     in {sample.phase}: {sample.error}")
    elif trial.done.reason:
        _say(console, f"error     {trial.done.reason}")
    console.print(f"reward    {trial.reward.score:g}")
    for key, value in trial.reward.details.items():
        said = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=repr).decode()
        _say(console, f"  {key}: {said if whole_text else _shortened(said, _SHORT_DETAIL)}")
    times = sample.timings
    speed = trial.tokens_per_second
    _say(
        console,
        f"time      wait {times.wait_seconds:.3f} s, run {times.run_seconds:.3f} s (generate "
        f"{times.generate_seconds:.3f} s, the rest {max(0.0, times.run_seconds - times.generate_seconds):.3f} s), "
        f"eval {times.eval_seconds:.3f} s",
    )
    generated = f"{sample.trajectory.generated_tokens:,} of {len(sample.trajectory):,} generated"
    console.print(f"tokens    {generated}" + (f", {speed:.1f} a second" if speed else ""))
    held = trial.info.evaluators[0].sample_resource.words
    where = f"node {sample.node_ip}, gpus {list(sample.gpu_ids)}" if sample.node_ip else "no node: there is no cluster"
    _say(console, f"held      {where}; {held}")


def _say(console: Console, text: str) -> None:
    console.print(_visible(text), soft_wrap=True)


def _visible(text: str) -> str:
    """Control characters as Python writes them: nothing of a sample is a command to the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _shortened(text: str, limit: int) -> str:
    """The beginning and the end: a prompt's question stands last."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
