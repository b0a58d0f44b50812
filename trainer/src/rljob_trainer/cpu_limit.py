"""How many cores this process may use: a container sees all cores of its machine, but may be held to fewer.

Only the limits of the kernel's control groups say so, in files that differ between the two versions of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_V1_CONTROLLER = "cpu"


def num_usable_cores(file_system: Path = Path("/")) -> int:
    """At least 1; a limit of two and a half cores counts as two, because a thread that is held up holds up the rest."""
    allowed = len(os.sched_getaffinity(0))
    limits = list(_limits(file_system))
    return max(1, int(min([allowed, *limits])))


def _limits(file_system: Path) -> Iterator[float]:
    """Of this process's control group and of all above it that can be seen, in cores."""
    mounted = file_system / "sys/fs/cgroup"
    for hierarchy, group in _groups(file_system / "proc/self/cgroup"):
        top = mounted / hierarchy
        # Inside a container the path may be one of the machine, which is not there: then the top is its own group.
        for folder in (top / group, *(top / parent for parent in PurePosixPath(group).parents)):
            limit = _limit_v1(folder) if hierarchy else _limit_v2(folder)
            if limit is not None:
                yield limit


def _groups(file: Path) -> Iterator[tuple[str, str]]:
    """The hierarchy's folder (empty for version 2) and the group's relative path, from lines `id:controllers:path`."""
    for line in _read(file).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "", path.lstrip("/")
        elif _V1_CONTROLLER in controllers.split(","):
            # `cpu` is a link to the folder of all controllers that share the hierarchy.
            yield _V1_CONTROLLER, path.lstrip("/")


def _limit_v2(folder: Path) -> float | None:
    """From `200000 100000` (microseconds of each period) or `max 100000`."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _limit_v1(folder: Path) -> float | None:
    """-1 stands for no limit."""
    quota = _read(folder / "cpu.cfs_quota_us").strip()
    period = _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
