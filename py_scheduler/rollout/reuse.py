"""Whether an iteration is rolled out, finished or read from a file. Source: seed 1, section 5 (reuse and resume).

A pure decision: files are opened by who acts on it. The order: an unfinished iteration first, then
STACX_FORCE_FRESH_ROLLOUT, STACX_REUSE_ROLLOUT, STACX_REUSE_PER_ITER_DIR, and last, where the mode is "auto", the
samples of iteration 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.knobs import FORCE_FRESH, KNOBS, REUSE, REUSE_DIR, apply_overrides, overrides_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KEYS = "rollout.reuse."
_KNOBS = tuple(knob for knob in KNOBS if any(key.startswith(_KEYS) for key in knob.keys))


ReuseMode = Literal["auto", "never"]


class ReuseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a step rolls out or takes saved samples, where no variable says otherwise."""

    mode: ReuseMode | None = None
    """With "auto", every iteration after the first trains on the samples of iteration 0 where they are saved, which is
    the default of seed 1 for multi-epoch SFT. With "never" each rolls out.
    None: "auto" in-process, "never" in a server."""
    force_fresh: bool = False
    reuse_rollout: bool = False
    reuse_dir: str = ""
    """A folder of per-iteration files to be replayed in order."""
    save_per_iteration: bool = True

    def defaulting_to(self, mode: ReuseMode) -> ReuseSettings:
        """With `mode` where they name none: each interface has a default of its own."""
        return msgspec.structs.replace(self, mode=mode) if self.mode is None else self


class ReuseAction(StrEnum):
    """FINISH the unfinished iteration; ROLL_OUT anew; LOAD saved samples; REPLAY this iteration's file of a folder."""

    FINISH = "finish"
    ROLL_OUT = "roll_out"
    LOAD = "load"
    REPLAY = "replay"


class ReuseDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and because of what.

    load_iteration: of LOAD, whose samples; None for the newest. reuse_dir: of REPLAY. saves_per_iteration: whether
    ROLL_OUT and FINISH write a file of their own beside the newest. warning: what a user ought to hear; empty mostly.
    """

    action: ReuseAction
    because: str
    load_iteration: int | None = None
    reuse_dir: str = ""
    saves_per_iteration: bool = False
    warning: str = ""


def decide_reuse(
    rollout_id: int,
    environment: Mapping[str, str],
    settings: ReuseSettings,
    unfinished: int | None = None,
    *,
    first_is_saved: bool = True,
) -> ReuseDecision:
    """unfinished: the iteration that the loop's state says is under way. first_is_saved: whether there are samples
    of iteration 0.

    Raises InvalidArgumentError when a variable is no switch, or when fresh samples are forced and reused at once.
    """
    said = _overlaid(environment, settings)
    if unfinished is not None:
        return _making(ReuseAction.FINISH, f"iteration {unfinished} is unfinished", said)
    if said.force_fresh:
        return _making(ReuseAction.ROLL_OUT, FORCE_FRESH, said)
    if said.reuse_rollout:
        return ReuseDecision(action=ReuseAction.LOAD, because=REUSE)
    if said.reuse_dir:
        return ReuseDecision(action=ReuseAction.REPLAY, because=REUSE_DIR, reuse_dir=said.reuse_dir)
    if said.mode == "auto" and rollout_id > 0 and first_is_saved:
        return ReuseDecision(
            action=ReuseAction.LOAD,
            because='the reuse mode "auto"',
            load_iteration=0,
            warning=(
                f"iteration {rollout_id} trains on the samples of iteration 0 again, which the model has moved away "
                f'from: set {FORCE_FRESH}=1, or reuse mode "never" ([rollout.reuse] of a file, or ReuseSettings), to '
                "roll out"
            ),
        )
    return _making(ReuseAction.ROLL_OUT, "nothing is to be reused", said)


def check_reuse(settings: ReuseSettings) -> Iterator[FieldViolation]:
    """What contradicts itself, by dotted key of the configuration."""
    if settings.force_fresh and (settings.reuse_rollout or settings.reuse_dir):
        key, variable = ("reuse_rollout", REUSE) if settings.reuse_rollout else ("reuse_dir", REUSE_DIR)
        yield FieldViolation(
            f"{_KEYS}force_fresh",
            f"({FORCE_FRESH}) asks for fresh samples, {key} ({variable}) for saved ones: take one of them away",
        )


def _making(action: ReuseAction, because: str, said: ReuseSettings) -> ReuseDecision:
    return ReuseDecision(action=action, because=because, saves_per_iteration=said.save_per_iteration)


def _overlaid(environment: Mapping[str, str], settings: ReuseSettings) -> ReuseSettings:
    """The settings with what the variables say above them, by the rules of the knobs; every fault at once."""
    table = msgspec.structs.asdict(settings)
    tables: dict[str, Any] = {"rollout": {"reuse": table}}
    faults = apply_overrides(overrides_of({}, environment, _KNOBS), tables)
    said = settings if faults else msgspec.convert(table, ReuseSettings)
    faults.extend(check_reuse(said))
    if faults:
        raise InvalidArgumentError(faults)
    return said
