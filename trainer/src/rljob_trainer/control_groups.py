"""Linux control groups (cgroups v1 and v2) of this process: resource limits and counters of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_group_folders(controller: str, file_system: Path = Path("/")) -> Iterator[Path]:
    """Yields the folders with the files of a cgroup controller (`cpu` or `memory`): first this process's own group,
    then all visible parents. File names differ between cgroup versions 1 and 2, and some folders may not exist."""
    mounted = file_system / "sys/fs/cgroup"
    for hierarchy, group in _groups(file_system / "proc/self/cgroup", controller):
        top = mounted / hierarchy
        # Inside a container `group` may be the path on the host, which does not exist in the container. Then the folder
        # `top` is the container's own group.
        yield from (top / group, *(top / parent for parent in PurePosixPath(group).parents))


def read_or_empty(file: Path) -> str:
    """Returns the text of a file, or an empty string if it does not exist or cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _groups(file: Path, controller: str) -> Iterator[tuple[str, str]]:
    """Yields the folder of the hierarchy (empty for version 2) and the relative path of the group, from lines
    `id:controllers:path`."""
    for line in read_or_empty(file).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "", path.lstrip("/")
        elif controller in controllers.split(","):
            # The controller's name is a link to the folder of all controllers that share the hierarchy.
            yield controller, path.lstrip("/")


def num_usable_cores(file_system: Path = Path("/")) -> int:
    """Returns the CPU cores that this process may use, at least 1. A limit of 2.5 cores counts as 2, because one
    throttled thread slows down all others."""
    allowed = len(os.sched_getaffinity(0))
    limits = list(_limits(file_system))
    return max(1, int(min([allowed, *limits])))


def _limits(file_system: Path) -> Iterator[float]:
    """Yields the CPU limits, in cores, of this process's control group and of its visible parents."""
    for folder in control_group_folders("cpu", file_system):
        # Version 2: `200000 100000` (microseconds of each period) or `max 100000`.
        quota, _, period = read_or_empty(folder / "cpu.max").strip().partition(" ")
        if not quota:
            # Version 1, where -1 stands for no limit.
            quota = read_or_empty(folder / "cpu.cfs_quota_us").strip()
            period = read_or_empty(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
