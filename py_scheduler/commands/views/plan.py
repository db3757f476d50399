"""How a plan is printed. Every fact stands in the text: colour only repeats it, and a pipe gets none."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from py_scheduler.domain.resources import NODE_AMOUNTS, NodeResource
from py_scheduler.placement import NodeUsage
from py_scheduler.planning import BatchNeed, SpecPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

_CELLS = 4
"""Characters to a GPU."""
_MAX_ROWS = 40
_LIMIT_WORDS = {"memory": "memory", "fragmentation": "gpu fragmentation", "budget": "its own budget"}


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown. packing: the nodes filled with batches of `drawn`; None when it never fits."""

    nodes: list[NodeResource]
    plans: list[SpecPlan]
    drawn: BatchNeed
    packing: list[NodeUsage] | None


class _Row(msgspec.Struct, frozen=True):
    """What nodes that look alike have in common. used_gpus: the used share of each GPU; named: how much of what.

    amounts: used and in all, in the order of NODE_AMOUNTS.
    """

    used_gpus: tuple[float, ...]
    tokens: int
    amounts: tuple[str, ...]
    named: str


def show_plan(view: PlanView, console: Console) -> None:
    gpus = sum(len(node.gpus) for node in view.nodes)
    amounts = [f"{sum(getattr(node, kind) for node in view.nodes):,.10g} {unit}" for kind, unit in NODE_AMOUNTS.items()]
    named: Counter[str] = Counter()
    for node in view.nodes:
        named.update(node.named)
    others = "".join(f", {count:,} {name}" for name, count in sorted(named.items()))
    console.print(
        f"cluster: {_counted(len(view.nodes), 'node')}, {_counted(gpus, 'GPU')}, {', '.join(amounts)}{others}",
        soft_wrap=True,
    )
    console.print(_table(view.plans))
    if view.packing is not None:
        console.print(f"filled with batches of {view.drawn.evaluator_id}, {_sample(view.drawn)}:")
        console.print(_drawing(view.packing, ascii_only=console.options.ascii_only))
    for plan in view.plans:
        if plan.problem:
            console.print(Text(f"never: {plan.problem}", style="red"), soft_wrap=True)


def _table(plans: Sequence[SpecPlan]) -> Table:
    table = Table(box=box.ASCII2)
    likes = [plan.one_more_node.like for plan in plans if plan.one_more_node is not None]
    table.add_column("evaluator", overflow="fold")
    for heading in ("tokens needed", "tokens possible", "batches at once"):
        table.add_column(heading, justify="right")
    for heading in ("a batch is bounded by", "limited by"):
        table.add_column(heading, overflow="fold")
    table.add_column(f"one more node like {likes[0]}" if likes else "one more node", overflow="fold")
    for plan in plans:
        table.add_row(
            plan.evaluator_id,
            _number(plan.tokens_needed, "-"),
            _number(plan.tokens_possible, "any"),
            _number(plan.batches_at_once, "any"),
            _bounds(plan.bounds_batch),
            ", ".join(_limit(what, nodes) for what, nodes in plan.limits) or "nothing",
            _one_more(plan),
            style="red" if plan.problem else None,
        )
    return table


def _bounds(names: tuple[str, ...]) -> str:
    """Says "budget" once, however many of its parts it is."""
    return ", ".join(names[:1] + tuple(name.removeprefix("budget ") for name in names[1:]))


def _number(value: int | None, none: str) -> str:
    return none if value is None else f"{value:,}"


def _limit(what: str, nodes: int) -> str:
    word = _LIMIT_WORDS.get(what, what)
    return f"{word} on {_counted(nodes, 'node')}" if nodes else word


def _one_more(plan: SpecPlan) -> str:
    more = plan.one_more_node
    if more is None:
        return "nothing"
    tokens = f"{more.tokens:+,} {'token' if more.tokens == 1 else 'tokens'}"
    return f"{tokens}, {more.batches:+,} {'batch' if more.batches == 1 else 'batches'}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _sample(need: BatchNeed) -> str:
    return f"a sample holds {need.per_sample.words}"


def _drawing(packing: Iterable[NodeUsage], *, ascii_only: bool) -> Table:
    """One row to a node, or to a run of nodes that look alike."""
    full, part, free = "#-." if ascii_only else "█▒·"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("node", overflow="fold")
    table.add_column(f"GPUs ({full} used, {part} in part, {free} free)", overflow="fold")
    for heading in ("tokens", *(f"{unit} used" for unit in NODE_AMOUNTS.values())):
        table.add_column(heading, justify="right")
    rows = list(_rows(packing))
    has_named = any(row.named for _, row in rows)
    if has_named:
        table.add_column("named used", overflow="fold")
    for names, row in rows[:_MAX_ROWS]:
        bars = " ".join(_bar(used, full, part, free) for used in row.used_gpus) or "none"
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} alike"
        named = [row.named] if has_named else []
        table.add_row(label, Text(bars, style="green"), f"{row.tokens:,}", *row.amounts, *named)
    if len(rows) > _MAX_ROWS:
        hidden = sum(len(names) for names, _ in rows[_MAX_ROWS:])
        table.add_row(f"and {_counted(hidden, 'more node')}")
    return table


def _rows(packing: Iterable[NodeUsage]) -> Iterator[tuple[list[str], _Row]]:
    for row, nodes in itertools.groupby(packing, _row):
        yield [node.node_ip for node in nodes], row


def _row(node: NodeUsage) -> _Row:
    return _Row(
        used_gpus=tuple(1.0 - free for free in node.gpu_free),
        tokens=node.tokens,
        amounts=tuple(
            f"{(supply := getattr(node, kind)) - getattr(node, f'{kind}_free'):g}/{supply:g}" for kind in NODE_AMOUNTS
        ),
        named=", ".join(f"{name} {count - node.named_free[name]:,}/{count:,}" for name, count in node.named.items()),
    )


def _bar(used: float, full: str, part: str, free: str) -> str:
    whole = int(used * _CELLS + 1e-9)
    rest = "" if used * _CELLS - whole < 1e-9 else part  # noqa: PLR2004 - a rounding error is no share
    return (full * whole + rest).ljust(_CELLS, free)
