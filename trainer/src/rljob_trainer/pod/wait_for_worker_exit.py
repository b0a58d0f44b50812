"""Stop hook of a worker pod: waits until the trainer's processes in this pod have saved a checkpoint and exited.

They exit together with the driver. The stop hook of the head pod stops the driver at the same time (see `stop_driver`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rljob_trainer.settings import read_pod_settings

TITLE = b"ray::RayWorker"
"""Start of a worker process's command line. Ray writes the class of the Ray actor there, followed by the role and the
method that run now."""
POLL_SECONDS = 0.5


def main() -> int:
    """Always returns 0, because a failing hook would end the pod immediately."""
    wait_for_worker_exit(read_pod_settings().grace_seconds)
    return 0


def wait_for_worker_exit(grace_seconds: float, proc: Path = Path("/proc")) -> bool:
    """Waits until no worker process runs, and returns True; False if one still runs after `grace_seconds`. `proc`: the
    folder of the processes."""
    deadline = time.monotonic() + grace_seconds
    while worker_processes(proc):
        if time.monotonic() + POLL_SECONDS > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def worker_processes(proc: Path) -> list[int]:
    """Returns the ids of the worker processes in this pod; processes of other pods are not visible."""
    return sorted(int(folder.name) for folder in proc.iterdir() if folder.name.isdecimal() and _is_worker(folder))


def _is_worker(folder: Path) -> bool:
    try:
        return (folder / "cmdline").read_bytes().startswith(TITLE)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
