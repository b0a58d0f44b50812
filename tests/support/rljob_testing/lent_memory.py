"""Memory that a process has lent to the system (MADV_FREE)."""

from __future__ import annotations

from pathlib import Path


def lent_bytes() -> int:
    """Of this process, what the system may take."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("LazyFree:"))
