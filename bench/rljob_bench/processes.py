"""Waits until processes have ended, so that their end is not part of the next measurement."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

GONE_SECONDS = 30.0


def wait_until_gone(process_ids: Iterable[int]) -> None:
    """Waits until none of the processes runs. Raises TimeoutError after half a minute."""
    deadline = time.monotonic() + GONE_SECONDS
    waiting = {process_id for process_id in process_ids if is_running(process_id)}
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(waiting)} did not end")
        time.sleep(0.05)
        waiting = {process_id for process_id in waiting if is_running(process_id)}


def is_running(process_id: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
