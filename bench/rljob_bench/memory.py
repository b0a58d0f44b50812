"""Memory of this process as Linux counts it, including touched pages of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_KIB = 1024


def peak_growth_bytes(work: Callable[[], object]) -> int:
    """Maximum growth of this process's resident memory while `work` runs."""
    before = _status("VmRSS")
    # Resets the peak to the current resident memory (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * _KIB
    raise ValueError(f"/proc/self/status has no {name}")
