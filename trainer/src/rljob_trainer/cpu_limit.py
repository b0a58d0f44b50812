"""How many cores this process may use: a container sees all cores of its machine, but may be held to fewer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rljob_trainer.control_groups import control_group_folders, read_or_empty


def num_usable_cores(file_system: Path = Path("/")) -> int:
    """At least 1; a limit of two and a half cores counts as two, because a thread that is held up holds up the rest."""
    allowed = len(os.sched_getaffinity(0))
    limits = list(_limits(file_system))
    return max(1, int(min([allowed, *limits])))


def _limits(file_system: Path) -> Iterator[float]:
    """Of this process's control group and of all above it that can be seen, in cores."""
    for folder in control_group_folders("cpu", file_system):
        # Version 2: `200000 100000` (microseconds of each period) or `max 100000`.
        quota, _, period = read_or_empty(folder / "cpu.max").strip().partition(" ")
        if not quota:
            # Version 1, where -1 stands for no limit.
            quota = read_or_empty(folder / "cpu.cfs_quota_us").strip()
            period = read_or_empty(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
