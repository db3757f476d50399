"""The `[rollout]` table: what one training step asks for, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from py_scheduler.domain.limits import MAX_GROUPS_PER_STEP, MAX_REPEAT_TIMES
from py_scheduler.rollout.dagger import DAggerSchedule
from py_scheduler.rollout.filters import FilterSettings
from py_scheduler.rollout.reuse import ReuseSettings

Groups = Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS_PER_STEP)]
Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_REPEAT_TIMES)]


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training loop does beyond running tasks. Relative paths count from the configuration's folder."""

    groups_per_step: Groups = 32
    """Groups that a step hands out."""
    samples_per_group: Samples | None = None
    """Repeats of every task; None: as its data set says."""
    n_samples_per_eval_prompt: Samples = 1
    """Copies of each eval prompt."""
    refill_aborted: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 0
    """How often a sample that the infrastructure ended is rolled out again instead of costing its group."""
    eval_beta: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """How probably the teacher generates a turn of an eval."""
    over_sampling: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    """Groups that are fetched for each that is missing; survivors beyond groups_per_step are dropped. With 1.5 and 32
    groups, 48 are fetched at first."""
    retained_reports: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 64
    """Finished steps whose reports a server tells again to those who ask for them again."""
    export_environment: bool = False
    """Publishes the iteration as STACX_* variables too, for handlers that read those."""
    artifact_dir: str = "rollouts"
    """The folder of everything that is written."""
    file_format: Literal["parquet", "pt"] = "parquet"
    """Of saved samples; "pt" needs torch."""
    save_eval_details: bool = False
    """A line for each sample and the placement of each turn; summaries are written anyway."""
    filters: FilterSettings = FilterSettings()
    dagger: DAggerSchedule | None = None
    """The schedule of β and t_max; None: no teacher."""
    reuse: ReuseSettings = ReuseSettings()
