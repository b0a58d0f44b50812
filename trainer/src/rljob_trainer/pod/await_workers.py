"""Stop hook of a worker pod: lets the trainer's processes of this pod finish, which save a checkpoint meanwhile.

They end with the driver in the head pod, which is stopped at the same time (see `stop_driver`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rljob_trainer.settings import read_pod_settings

TITLE = b"ray::RayWorker"
"""How the command line of a worker process begins: Ray writes the actor's class there, `cluster.ray_worker.RayWorker`,
and after it the role and method that run."""
POLL_SECONDS = 0.5


def main() -> int:
    """Always 0: a hook that fails would end the pod at once."""
    await_workers(read_pod_settings().grace_seconds)
    return 0


def await_workers(grace_seconds: float, processes: Path = Path("/proc")) -> bool:
    """Waits until no worker process is left; False when the time is over."""
    deadline = time.monotonic() + grace_seconds
    while worker_processes(processes):
        if time.monotonic() + POLL_SECONDS > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def worker_processes(processes: Path) -> list[int]:
    """Ids of the worker processes of this pod; another pod's cannot be seen."""
    return sorted(int(folder.name) for folder in processes.iterdir() if folder.name.isdecimal() and _is_worker(folder))


def _is_worker(folder: Path) -> bool:
    try:
        return (folder / "cmdline").read_bytes().startswith(TITLE)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
