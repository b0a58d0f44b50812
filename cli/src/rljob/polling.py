"""Polls a job every two seconds.

It does not use a Kubernetes watch, because the responses are small and there is no state to restore after a broken
connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError, JobNotFoundError
from rljob.job_attempts import is_over
from rljob.stored_job import StoredJob

POLL_SECONDS = 2.0
MAX_UNREACHABLE_SECONDS = 600.0
"""How long the API server may be unreachable before the command gives up."""

Note = Callable[[str, datetime], None]
"""Is called with a message about the API server, and the time."""


def utc_now() -> datetime:
    """The current time in UTC."""
    return datetime.fromtimestamp(time.time(), UTC)


@dataclass(frozen=True)
class Clock:
    """Functions that return the current time and that sleep; tests replace both."""

    now: Callable[[], datetime] = utc_now
    sleep: Callable[[float], None] = time.sleep


def poll_job(cluster: Cluster, name: str, clock: Clock, note: Note) -> Iterator[StoredJob]:
    """Yields the job every two seconds, until it is deleted. While the API server is unreachable, calls `note` instead.

    Raises:
        JobNotFoundError: there was no such job at the start.
        ClusterUnreachableError: the API server was unreachable for ten minutes, or at the start.
    """
    was_found = False
    unreachable_since: datetime | None = None
    while True:
        now = clock.now()
        try:
            job = cluster.job(name)
        except JobNotFoundError:
            if not was_found:
                raise
            return
        except ClusterUnreachableError as error:
            unreachable_since = unreachable_since or now
            if not was_found or (now - unreachable_since).total_seconds() > MAX_UNREACHABLE_SECONDS:
                raise
            note(f"no usable response from the API server ({error.reason}); retrying", now)
        else:
            was_found, unreachable_since = True, None
            yield job
        clock.sleep(POLL_SECONDS)


def poll_until_finished(cluster: Cluster, name: str, clock: Clock, note: Note) -> Iterator[StoredJob]:
    """Yields the job as `poll_job` does, and ends when it has finished and no retry was requested."""
    for job in poll_job(cluster, name, clock, note):
        yield job
        if is_over(job):
            return
