"""Whether an iteration is rolled out, finished or read from a file. Source: seed 1, section 5 (reuse and resume).

A pure decision: files are opened by who acts on it. The order: an unfinished iteration first, then
STACX_FORCE_FRESH_ROLLOUT, STACX_REUSE_ROLLOUT, STACX_REUSE_PER_ITER_DIR, and last, where the mode is "auto", the
samples of iteration 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORCE_FRESH = "STACX_FORCE_FRESH_ROLLOUT"
REUSE = "STACX_REUSE_ROLLOUT"
REUSE_DIR = "STACX_REUSE_PER_ITER_DIR"
SAVE_PER_ITERATION = "STACX_SAVE_PER_ITER_PT"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


class ReuseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands where no variable says otherwise.

    mode: "auto" trains every iteration after the first on iteration 0's samples, the seed's default for multi-epoch
    SFT; "never" rolls out. reuse_dir: a folder of per-iteration files to be replayed in order.
    """

    mode: Literal["auto", "never"] = "never"
    force_fresh: bool = False
    reuse_rollout: bool = False
    reuse_dir: str = ""
    save_per_iteration: bool = True


class ReuseAction(StrEnum):
    """FINISH the unfinished iteration; ROLL_OUT anew; LOAD saved samples; REPLAY this iteration's file of a folder."""

    FINISH = "finish"
    ROLL_OUT = "roll_out"
    LOAD = "load"
    REPLAY = "replay"


class ReuseDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and because of what.

    rollout_id: the iteration to work on; FINISH may name an earlier one than was asked for. load_iteration: of LOAD,
    whose samples; None for the newest. reuse_dir: of REPLAY. saves, saves_per_iteration: what ROLL_OUT and FINISH
    write. warning: what a user ought to hear; empty mostly.
    """

    action: ReuseAction
    rollout_id: int
    because: str
    load_iteration: int | None = None
    reuse_dir: str = ""
    saves: bool = False
    saves_per_iteration: bool = False
    warning: str = ""


def decide_reuse(
    rollout_id: int,
    environment: Mapping[str, str],
    settings: ReuseSettings,
    unfinished: int | None = None,
) -> ReuseDecision:
    """unfinished: the iteration that the loop's state says is under way.

    Raises InvalidArgumentError when a variable is no switch, or when fresh samples are forced and reused at once.
    """
    said = _overlaid(environment, settings)
    if unfinished is not None:
        return _making(ReuseAction.FINISH, unfinished, f"iteration {unfinished} is unfinished", said)
    if said.force_fresh:
        return _making(ReuseAction.ROLL_OUT, rollout_id, FORCE_FRESH, said)
    if said.reuse_rollout:
        return ReuseDecision(action=ReuseAction.LOAD, rollout_id=rollout_id, because=REUSE)
    if said.reuse_dir:
        return ReuseDecision(
            action=ReuseAction.REPLAY, rollout_id=rollout_id, because=REUSE_DIR, reuse_dir=said.reuse_dir
        )
    if said.mode == "auto" and rollout_id > 0:
        return ReuseDecision(
            action=ReuseAction.LOAD,
            rollout_id=rollout_id,
            because='reuse = "auto"',
            load_iteration=0,
            warning=(
                f"iteration {rollout_id} trains on the samples of iteration 0 again, which the model has moved away "
                f'from: set {FORCE_FRESH}=1 or reuse = "never" to roll out'
            ),
        )
    return _making(ReuseAction.ROLL_OUT, rollout_id, "nothing is to be reused", said)


def _making(action: ReuseAction, rollout_id: int, because: str, said: ReuseSettings) -> ReuseDecision:
    return ReuseDecision(
        action=action,
        rollout_id=rollout_id,
        because=because,
        saves=True,
        saves_per_iteration=said.save_per_iteration,
    )


def _overlaid(environment: Mapping[str, str], settings: ReuseSettings) -> ReuseSettings:
    """The settings with what the variables say above them; every fault at once."""
    faults: list[FieldViolation] = []

    def switch(name: str, otherwise: bool) -> bool:
        text = environment.get(name)
        if text is None or text.strip().lower() in _TRUE | _FALSE:
            return otherwise if text is None else text.strip().lower() in _TRUE
        faults.append(FieldViolation(name, f"is {text!r}, must be 1 or 0"))
        return otherwise

    said = ReuseSettings(
        mode=settings.mode,
        force_fresh=switch(FORCE_FRESH, settings.force_fresh),
        reuse_rollout=switch(REUSE, settings.reuse_rollout),
        reuse_dir=environment.get(REUSE_DIR, settings.reuse_dir),
        save_per_iteration=switch(SAVE_PER_ITERATION, settings.save_per_iteration),
    )
    if said.force_fresh and (said.reuse_rollout or said.reuse_dir):
        other = REUSE if said.reuse_rollout else REUSE_DIR
        faults.append(
            FieldViolation(FORCE_FRESH, f"asks for fresh samples and {other} for saved ones: take one of them away")
        )
    if faults:
        raise InvalidArgumentError(faults)
    return said
