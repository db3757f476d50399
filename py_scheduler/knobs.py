"""Every flag and every environment variable, defined once: command line, README and tests read this.

A knob changes one key of the configuration, in each table that has it. A flag beats its variable, which beats the file.
The `STACX_` names are those of seed 1; three of them are published by the rollout itself and are never set by hand.
"""

from __future__ import annotations

import argparse
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OWN_PREFIX = "PY_SCHEDULER_"

FORCE_FRESH = "STACX_FORCE_FRESH_ROLLOUT"
REUSE = "STACX_REUSE_ROLLOUT"
REUSE_DIR = "STACX_REUSE_PER_ITER_DIR"
SAVE_PER_ITERATION = "STACX_SAVE_PER_ITER_PT"
ROLLOUT_ID = "STACX_ROLLOUT_ID"
BETA = "STACX_DAGGER_BETA"
EVAL_BETA = "STACX_DAGGER_EVAL_BETA"
T_MAX = "STACX_DAGGER_T_MAX"

DEFAULT_ENV_CONCURRENCY = 4
"""Samples of one batch at once, for an evaluator whose resource names no concurrency."""


_MOST = 2**31


class Kind(StrEnum):
    """What a knob's text is read as. A path that was typed counts from the folder it was typed in."""

    TEXT = "text"
    NUMBER = "a number"
    COUNT = "a whole number below 2^31"
    SWITCH = "1 or 0"
    PATH = "a path"
    LAYOUT = "JSON or a path"


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with the names by which it is turned."""

    flag: str = ""
    """Empty for a variable without one."""
    variable: str
    keys: tuple[str, ...] = ()
    """Dotted keys of the file; `[]` stands for every table of a list."""
    kind: Kind = Kind.TEXT
    metavar: str = ""
    help: str
    choices: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    """Keys that cannot stand beside it; when it is turned on, what the file says under them does not count."""
    default: str = ""
    """As the README shows it."""
    is_code_set: bool = False
    """Published by the rollout for its handlers; nobody sets it by hand."""

    @property
    def name(self) -> str:
        return self.flag or self.variable


def _own(flag: str, key: str, kind: Kind, metavar: str, text: str, **more: Any) -> Knob:
    """A flag, with the variable that its name gives."""
    variable = OWN_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
    return Knob(flag=flag, variable=variable, keys=(key,) if key else (), kind=kind, metavar=metavar, help=text, **more)


_LOG_LEVELS = ("debug", "info", "warning", "error")
CONFIG = _own(
    "--config", "", Kind.PATH, "FILE", "the TOML file; its folder is searched for handlers, and its paths count from it"
)
KNOBS = (
    _own(
        "--listen",
        "server.listen",
        Kind.TEXT,
        "ADDRESS",
        'where to serve: "host:port" (port 0: any free one) or "unix:/path"',
        default="127.0.0.1:50051",
    ),
    _own(
        "--log-level",
        "server.log_level",
        Kind.TEXT,
        "LEVEL",
        ", ".join(_LOG_LEVELS),
        choices=_LOG_LEVELS,
        default="info",
    ),
    _own(
        "--state-dir",
        "journal.state_dir",
        Kind.PATH,
        "FOLDER",
        "where the journal lies, for one server at a time; without it each configuration file has a folder of its own "
        "under $XDG_STATE_HOME/py-scheduler",
    ),
    _own(
        "--journal",
        "journal.enabled",
        Kind.SWITCH,
        "",
        "write the journal; with --no-journal nothing survives the process",
        default="1",
    ),
    _own(
        "--env-cluster-layout",
        "cluster.layout",
        Kind.LAYOUT,
        "LAYOUT",
        "the cluster: inline JSON, or the path of a JSON file; without it batches are not gated by placement",
    ),
    _own("--env-num-cpus", "cluster.num_cpus", Kind.NUMBER, "CORES", "cores of each node whose layout names none"),
    _own("--env-memory-gb", "cluster.memory_gb", Kind.NUMBER, "GIB", "GiB of each node whose layout names none"),
    _own(
        "--evaluator-batch-size",
        "evaluator[].batch_size",
        Kind.COUNT,
        "N",
        "tasks to a batch, 0 for no limit",
        default="1",
    ),
    # Before the flag that sets the same key: what is applied later wins.
    Knob(
        variable="STACX_DAGGER_ENV_CONCURRENCY",
        keys=("evaluator[].resource.concurrency",),
        kind=Kind.COUNT,
        metavar="N",
        help="samples of one batch running at once; --evaluator-concurrency and its variable beat it",
        default=str(DEFAULT_ENV_CONCURRENCY),
    ),
    _own(
        "--evaluator-concurrency",
        "evaluator[].resource.concurrency",
        Kind.COUNT,
        "N",
        "samples of one batch running at once",
        default=str(DEFAULT_ENV_CONCURRENCY),
    ),
    _own(
        "--n-samples-per-eval-prompt",
        "rollout.n_samples_per_eval_prompt",
        Kind.COUNT,
        "N",
        "copies of each eval prompt; from 2 on there is pass@k",
        default="1",
    ),
    _own(
        "--save-eval-details",
        "rollout.save_eval_details",
        Kind.SWITCH,
        "",
        "write eval_details/: a line for each sample, the placement of each turn, and summaries",
        default="0",
    ),
    Knob(
        variable=FORCE_FRESH,
        keys=("rollout.reuse.force_fresh",),
        kind=Kind.SWITCH,
        excludes=("rollout.reuse.reuse_rollout", "rollout.reuse.reuse_dir"),
        help="always roll out, and save the samples",
        default="0",
    ),
    Knob(
        variable=REUSE,
        keys=("rollout.reuse.reuse_rollout",),
        kind=Kind.SWITCH,
        excludes=("rollout.reuse.force_fresh",),
        help="always load the newest saved samples instead of rolling out",
        default="0",
    ),
    Knob(
        variable=REUSE_DIR,
        keys=("rollout.reuse.reuse_dir",),
        kind=Kind.PATH,
        excludes=("rollout.reuse.force_fresh",),
        metavar="FOLDER",
        help="replay a folder of per-iteration files, in order",
    ),
    Knob(
        variable=SAVE_PER_ITERATION,
        keys=("rollout.reuse.save_per_iteration",),
        kind=Kind.SWITCH,
        help="keep a file for each iteration, not only the newest",
        default="1",
    ),
    Knob(
        variable=EVAL_BETA,
        keys=("rollout.eval_beta",),
        kind=Kind.NUMBER,
        metavar="BETA",
        help="how probably the teacher generates a turn of an eval; read when an eval begins",
        default="0.0",
    ),
    Knob(
        variable=ROLLOUT_ID,
        kind=Kind.COUNT,
        metavar="N",
        help="the index of the iteration under way",
        is_code_set=True,
    ),
    Knob(
        variable=BETA,
        kind=Kind.NUMBER,
        metavar="BETA",
        help="how probably the teacher generates a turn; absent in evals unless STACX_DAGGER_EVAL_BETA is set",
        is_code_set=True,
    ),
    Knob(
        variable=T_MAX,
        kind=Kind.COUNT,
        metavar="N",
        help="the tail length of the iteration; published only when the schedule gives one above 0",
        is_code_set=True,
    ),
)


class Override(msgspec.Struct, frozen=True):
    """A knob that was turned: `text` as it was typed, `origin` for messages ("--listen", "PY_SCHEDULER_LISTEN")."""

    knob: Knob
    text: str
    origin: str


def add_flags(parser: argparse.ArgumentParser, knobs: Iterable[Knob] = KNOBS) -> None:
    """The flags of `knobs` as options of a command; `overrides_of(vars(options), ...)` reads them back."""
    for knob in knobs:
        text = f"{knob.help} ({', '.join((*knob.keys, knob.variable))})"
        if knob.flag and knob.kind is Kind.SWITCH:
            parser.add_argument(knob.flag, dest=knob.flag, action=argparse.BooleanOptionalAction, help=text)
        elif knob.flag:
            parser.add_argument(knob.flag, dest=knob.flag, metavar=knob.metavar, help=text)


def variables_alone(knobs: Iterable[Knob] = KNOBS) -> list[str]:
    """The variables that no flag goes with."""
    return [knob.variable for knob in knobs if not knob.flag]


def overrides_of(
    flags: Mapping[str, Any], environment: Mapping[str, str], knobs: Iterable[Knob] = KNOBS
) -> list[Override]:
    """What was said outside of the file, in the order in which it is to be applied: flags after variables.

    `flags` maps a flag to its text, to a bool if it is a switch, or to None. An empty variable says nothing.
    """
    from_flags, from_variables = [], []
    for knob in knobs:
        flag, text = flags.get(knob.flag), environment.get(knob.variable)
        if flag is not None:
            from_flags.append(Override(knob, flag if isinstance(flag, str) else str(int(flag)), knob.flag))
        elif text and not knob.is_code_set:
            from_variables.append(Override(knob, text, knob.variable))
    return from_variables + from_flags


def hand_set_warnings(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that somebody set although the rollout publishes it itself."""
    return [
        f"{knob.variable} is set by hand: the rollout publishes it itself for each iteration, so what is set is not "
        "used; say it in the configuration's [rollout.dagger] instead"
        for knob in KNOBS
        if knob.is_code_set and environment.get(knob.variable)
    ]


def apply_overrides(overrides: Iterable[Override], tables: dict[str, Any]) -> list[FieldViolation]:
    """Puts what was said outside into the file's tables; returns what is wrong with it."""
    faults: list[FieldViolation] = []
    said: list[tuple[Knob, Any]] = []
    for override in overrides:
        try:
            said.append((override.knob, _read(override)))
        except InvalidArgumentError as error:
            faults.extend(error.violations)
    # First all that is excluded by any, then all that was said: two that exclude each other stand, for a check to find.
    for knob, value in said:
        for key in knob.excludes if value else ():
            for table, last in _targets(tables, key):
                table.pop(last, None)
    for knob, value in said:
        for key in knob.keys:
            for table, last in _targets(tables, key):
                table[last] = value
    return faults


_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _read(override: Override) -> str | int | float | bool:
    """Raises InvalidArgumentError when the text is not what the knob takes."""
    knob, text = override.knob, override.text
    try:
        value = _as_kind(knob.kind, text)
    except ValueError:
        raise InvalidArgumentError(f"is {text!r}, must be {knob.kind}", override.origin) from None
    if knob.choices and value not in knob.choices:
        raise InvalidArgumentError(f"is {text!r}, must be one of {', '.join(knob.choices)}", override.origin)
    return value


def _as_kind(kind: Kind, text: str) -> str | int | float | bool:
    """Raises ValueError when the text is none of that kind."""
    match kind:
        case Kind.COUNT:
            count = int(text)
            if abs(count) >= _MOST:
                raise ValueError(text)
            return count
        case Kind.NUMBER:
            return float(text)
        case Kind.SWITCH:
            if text.lower() not in _SWITCHES:
                raise ValueError(text)
            return _SWITCHES[text.lower()]
        case Kind.LAYOUT if text.lstrip().startswith("{"):
            return text
        case Kind.PATH | Kind.LAYOUT:
            return str(Path(text).expanduser().absolute())
        case _:
            return text


def _targets(tables: dict[str, Any], key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each table that a dotted key leads to, made where it is absent, and the key in it."""
    *path, last = key.split(".")
    found: list[Any] = [tables]
    for name in path:
        if name.endswith("[]"):
            inner = [table.get(name.removesuffix("[]")) for table in found if isinstance(table, dict)]
            found = [table for tables_of_list in inner if isinstance(tables_of_list, list) for table in tables_of_list]
        else:
            found = [table.setdefault(name, {}) for table in found if isinstance(table, dict)]
    return ((table, last) for table in found if isinstance(table, dict))


def knob_table(knobs: Iterable[Knob] = (CONFIG, *KNOBS)) -> str:
    """Markdown: one row to a knob."""
    lines = ["| flag | variable | key of the file | default | what it sets |", "|---|---|---|---|---|"]
    for knob in knobs:
        key = ", ".join(f"`{key}`" for key in knob.keys) or (
            "set by the rollout, not by hand" if knob.is_code_set else ""
        )
        flag, default = (f"`{text}`" if text else "" for text in (knob.flag, knob.default))
        lines.append(f"| {flag} | `{knob.variable}` | {key} | {default} | {knob.help} |")
    return "\n".join(lines) + "\n"
