"""A lock on the one cluster of this machine, for processes that change it or test on it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from rljob_kind.progress import Progress
from rljob_kind.settings import cluster_folder


@contextmanager
def cluster_lock(progress: Progress) -> Iterator[None]:
    """Holds the lock, across processes. Prints a line if it has to wait."""
    cluster_folder().mkdir(parents=True, exist_ok=True)
    with (cluster_folder() / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another process that uses the cluster")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
