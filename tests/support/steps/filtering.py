"""Filters over groups that are all there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from py_scheduler.rollout.filters import GroupFilter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.domain.training.steps import FilterReport
    from py_scheduler.rollout.filters import FilterSettings
    from py_scheduler.rollout.groups import Group


class Survivors(NamedTuple):
    """The groups that are left, in their order, with the samples that are left in them."""

    groups: tuple[Group, ...]
    reports: tuple[FilterReport, ...]


def apply_filters(groups: Iterable[Group], settings: FilterSettings) -> Survivors:
    both = GroupFilter(settings)
    left = tuple(admitted for group in groups if (admitted := both.admit(group)) is not None)
    return Survivors(left, both.reports)
