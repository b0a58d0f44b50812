"""How much of the host's memory is left: a container sees all of its machine's, but may be held to less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rljob_trainer.control_groups import control_group_folders, read_or_empty

_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use, of both versions of control groups."""
_CACHED = ("inactive_file", "active_file")
"""Of what a group uses: copies of files, and lent pages (`engines/rollout/host_pages`; also those that were written to
since), which the kernel drops when memory is wanted."""


def available_host_bytes(file_system: Path = Path("/")) -> int | None:
    """What this process and its peers on the machine, or in the container, can still have; None where nothing says."""
    return min([*_of_machine(file_system), *_of_groups(file_system)], default=None)


def _of_machine(file_system: Path) -> Iterator[int]:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", read_or_empty(file_system / "proc/meminfo"), re.MULTILINE)
    if found:
        yield int(found[1]) * 1024


def _of_groups(file_system: Path) -> Iterator[int]:
    for folder in control_group_folders("memory", file_system):
        for limit_file, use_file in _FILES:
            limit, used = (read_or_empty(folder / name).strip() for name in (limit_file, use_file))
            if limit.isdecimal() and used.isdecimal():
                lines = (line.split() for line in read_or_empty(folder / "memory.stat").splitlines())
                counts = {name: int(count) for name, count in lines}
                # Version 1 counts the groups below under names of their own.
                dropped = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in _CACHED)
                yield max(0, int(limit) - int(used) + dropped)
