"""Where the instructions and the cache misses of a token go, counted by valgrind: a busy machine changes none of it.

    make profile-placement, or: python benches/count_instructions.py [--binary PATH] [WHAT NODES BATCH]

Each line is one loop of placement_core/benches/placement_profile.rs: instructions, accesses that the first-level data
cache did not have, and those that the last-level one did not have either, all per token acquired and released; then the
functions that had most of the instructions. Valgrind's caches are a model: they prefetch nothing, so what they count as
a miss is an access that a real processor may have seen coming.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SCENARIOS = [
    *(
        (what, nodes, batch)
        for nodes, batch in ((16, 1), (10_000, 1), (16, 64), (10_000, 64))
        for what in ("touch", "locked", "pool")
    ),
    ("scan", 1, 1),
    ("pool", 1, 1),
    *(("half-full", nodes, 64) for nodes in (16, 10_000)),
]
TOKENS = 64_000
"""Measured for each scenario."""
_FUNCTION = re.compile(r"fn=\((\d+)\)(?: (.*))?")
_GENERICS = re.compile(r"<[^<>]*>")


class Counted(NamedTuple):
    """Per token."""

    instructions: float
    first_level_misses: float
    last_level_misses: float
    by_function: dict[str, float]
    """Instructions in the function itself."""


def built() -> Path:
    """The program to count in, made if need be."""
    command = ["cargo", "bench", "--locked", "--no-run", "--package", "placement_core", "--bench", "placement_profile"]
    lines = subprocess.run([*command, "--message-format=json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [json.loads(line).get("executable") for line in lines.splitlines() if line.startswith("{")]
    return Path(next(path for path in found if path))


def count(binary: Path, what: str, nodes: int, batch: int) -> Counted:
    """Raises CalledProcessError when valgrind cannot run it."""
    rounds = max(TOKENS // batch, 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        valgrind = ["valgrind", "--tool=callgrind", "--cache-sim=yes", f"--callgrind-out-file={out}"]
        collect = ["--toggle-collect=placement_profile::measured*"]
        command = [*valgrind, *collect, str(binary), what, str(nodes), str(batch), str(rounds)]
        # On stderr it tells what it makes of the real caches.
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return read(out.read_text(), rounds * batch)


def read(profile: str, tokens: int) -> Counted:
    """Of callgrind's output: lines of costs, each behind the function that it belongs to."""
    names: dict[str, str] = {}
    by_function: Counter[str] = Counter()
    events: list[str] = []
    total: Counter[str] = Counter()
    function = ""
    is_call = False
    for line in profile.splitlines():
        if match := _FUNCTION.fullmatch(line):
            function = names.setdefault(match[1], match[2] or "?")
        elif match := re.fullmatch(r"cfn=\((\d+)\)(?: (.*))?", line):
            names.setdefault(match[1], match[2] or "?")
        elif line.startswith("events: "):
            events = line.split()[1:]
        elif line.startswith("calls="):
            # The next line is what the callee cost, which stands at the callee too.
            is_call = True
        elif line[:1] in "0123456789+-*" and line:
            costs = [int(cost) for cost in line.split()[1:]]
            if not is_call:
                total.update(dict(zip(events, costs, strict=False)))
                by_function[function] += costs[0] if costs else 0
            is_call = False
    misses = {level: sum(total[f"D{level}m{way}"] for way in "rw") for level in ("1", "L")}
    per_token = {name: cost / tokens for name, cost in by_function.most_common(6)}
    return Counted(total["Ir"] / tokens, misses["1"] / tokens, misses["L"] / tokens, per_token)


def short(name: str) -> str:
    """The last two parts of a function's path."""
    while _GENERICS.search(name):
        name = _GENERICS.sub("", name)
    return "::".join(part for part in name.split("::")[-2:] if part)


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts instructions and cache misses of placing a token.")
    parser.add_argument("--binary", type=Path, help="the built placement_profile, to compare with an older one")
    parser.add_argument("scenario", nargs="*", metavar="WHAT NODES BATCH", help="one alone")
    options = parser.parse_args()
    binary = options.binary or built()
    scenarios = SCENARIOS
    if options.scenario:
        what, nodes, batch = options.scenario
        scenarios = [(what, int(nodes), int(batch))]
    print(f"{'what':>10} {'nodes':>6} {'batch':>5} {'instr.':>7} {'L1 miss':>7} {'LL miss':>7}  where")
    for what, nodes, batch in scenarios:
        found = count(binary, what, nodes, batch)
        where = ", ".join(f"{short(name)} {cost:.0f}" for name, cost in found.by_function.items() if cost >= 1)
        misses = f"{found.first_level_misses:7.2f} {found.last_level_misses:7.2f}"
        print(f"{what:>10} {nodes:>6} {batch:>5} {found.instructions:7.0f} {misses}  {where}", flush=True)


if __name__ == "__main__":
    main()
