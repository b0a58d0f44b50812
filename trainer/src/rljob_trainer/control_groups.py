"""The kernel's control groups that this process is in: the limits of its container, and what was counted there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_group_folders(controller: str, file_system: Path = Path("/")) -> Iterator[Path]:
    """Folders with a controller's files (`cpu`, `memory`): this process's own group first, then all above it that can
    be seen. Files of the two versions of control groups have different names; some folders may be missing."""
    mounted = file_system / "sys/fs/cgroup"
    for hierarchy, group in _groups(file_system / "proc/self/cgroup", controller):
        top = mounted / hierarchy
        # Inside a container the path may be one of the machine, which is not there: then the top is its own group.
        yield from (top / group, *(top / parent for parent in PurePosixPath(group).parents))


def read_or_empty(file: Path) -> str:
    """The text of a file; none for one that is not there or cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _groups(file: Path, controller: str) -> Iterator[tuple[str, str]]:
    """The hierarchy's folder (empty for version 2) and the group's relative path, from lines `id:controllers:path`."""
    for line in read_or_empty(file).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "", path.lstrip("/")
        elif controller in controllers.split(","):
            # It is a link to the folder of all controllers that share the hierarchy.
            yield controller, path.lstrip("/")


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
