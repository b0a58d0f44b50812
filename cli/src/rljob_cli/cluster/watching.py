"""Watches a job until it finishes: a live view on a terminal, otherwise a line for every change.

It polls every two seconds instead of using a Kubernetes watch, because the responses are small and there is no state to
restore after a broken connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from rljob_api.constants import ExitCode
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.job_state import ending, retry_asked_at, stop_asked_at
from rljob_cli.cluster.status import attempt_text, job_lines, next_attempt_text, progress_text
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.errors import NOT_FOUND_EXIT_CODE, ClusterUnreachableError, JobNotFoundError
from rljob_cli.plain_text import one_line

POLL_SECONDS = 2.0
MAX_UNREACHABLE_SECONDS = 600.0
"""How long the API server may be unreachable before the command gives up."""
_BAR_WIDTH = 60


def utc_now() -> datetime:
    """The current time in UTC."""
    return datetime.fromtimestamp(time.time(), UTC)


@dataclass(frozen=True)
class Clock:
    """Functions that return the current time and that sleep; tests replace both."""

    now: Callable[[], datetime] = utc_now
    sleep: Callable[[float], None] = time.sleep


class _View(Protocol):
    """Shows a watched job."""

    def show(self, job: StoredJob, now: datetime) -> None: ...

    def note(self, text: str, now: datetime) -> None: ...


def watch_job(cluster: Cluster, name: str, console: Console, clock: Clock | None = None) -> int:
    """Shows the job until it finishes. Returns 0 for Complete, 1 for Failed, 3 if the job was deleted, 130 for Ctrl-C,
    which does not stop the job.

    Raises:
        JobNotFoundError: there was no such job at the start.
        ClusterUnreachableError: the API server was unreachable for ten minutes, or at the start.
    """
    clock = clock or Clock()
    try:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                return _watch(cluster, name, _LiveView(live, cluster.flags), clock)
        lines = _Lines(console, cluster.flags)
        code = _watch(cluster, name, lines, clock)
        lines.summary(clock.now())
        return code
    except KeyboardInterrupt:
        text = "stopped watching; the job continues. To watch it again: "
        text += f"rljob status {name}{cluster.flags} --watch"
        console.print(Text(text), soft_wrap=True)
        return ExitCode.INTERRUPTED


def poll_job(cluster: Cluster, name: str, clock: Clock, note: Callable[[str, datetime], None]) -> Iterator[StoredJob]:
    """Yields the job every two seconds, until it is deleted. While the API server is unreachable, calls `note` with a
    message and the time instead.

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


def _watch(cluster: Cluster, name: str, view: _View, clock: Clock) -> int:
    for job in poll_job(cluster, name, clock, view.note):
        view.show(job, clock.now())
        end = ending(job.status)
        # A failed job with a pending retry request will continue, so keep watching.
        if end is not None and (end.is_complete or retry_asked_at(job) is None):
            return ExitCode.SUCCESS if end.is_complete else ExitCode.APPLICATION
    view.note(f"RLJob {name} was deleted", clock.now())
    return NOT_FOUND_EXIT_CODE


class _LiveView:
    """Shows the whole status, redrawn in place."""

    def __init__(self, live: Live, flags: str) -> None:
        self._live = live
        self._flags = flags
        self._job: StoredJob | None = None

    def show(self, job: StoredJob, now: datetime) -> None:
        self._job = job
        self._draw(job, now)

    def note(self, text: str, now: datetime) -> None:
        assert self._job is not None, "notes come after the first poll"
        self._draw(self._job, now, Text(text, "bold yellow"))

    def _draw(self, job: StoredJob, now: datetime, *notes: Text) -> None:
        head, *rest = job_lines(job, now, self._flags)
        bar = []
        progress = job.status.progress
        if progress is not None and progress.total_steps > 0:
            bar = [ProgressBar(total=progress.total_steps, completed=progress.step, width=_BAR_WIDTH)]
        self._live.update(Group(head, *bar, *rest, *notes), refresh=True)


class _Lines:
    """Prints a line with the time for every change."""

    def __init__(self, console: Console, flags: str) -> None:
        self._console = console
        self._flags = flags
        self._printed: dict[str, str] = {}
        """The last line about each subject, to print a line only if it has changed."""
        self._job: StoredJob | None = None

    def show(self, job: StoredJob, now: datetime) -> None:
        self._job = job
        if not job.status.conditions:
            self._say("conditions", "no operator has processed the job yet", now)
        self._show_attempts(job, now)
        for found in job.status.conditions:
            message = f": {one_line(found.message)}" if found.message else ""
            self._say(found.type, f"{found.type}={found.status} {found.reason}{message}", now)
        progress = progress_text(job)
        # When the job has finished, the summary shows the progress.
        if progress is not None and ending(job.status) is None:
            self._say("progress", progress, now)

    def _show_attempts(self, job: StoredJob, now: datetime) -> None:
        """Prints the state of every attempt (except for attempt 1 while it has not ended), the next attempt, a stop
        request that is not applied yet, and the time of a suspension."""
        following = job.status.next_attempt
        for attempt in job.status.attempts:
            if attempt.number > 1 or attempt.ended is not None:
                message = f": {one_line(attempt.message)}" if attempt.message else ""
                self._say(
                    f"attempt {attempt.number}", f"attempt {attempt.number}: {attempt_text(attempt)}{message}", now
                )
        if following is not None:
            self._say("next", f"next: {next_attempt_text(job, following)}", now)
        asked_at = stop_asked_at(job)
        if asked_at is not None:
            self._say("stop", f"asked to stop at {one_line(asked_at)}", now)
        if job.status.suspended_at is not None:
            self._say("suspended", f"suspended since {job.status.suspended_at}", now)

    def note(self, text: str, now: datetime) -> None:
        self._say("note", text, now)

    def summary(self, now: datetime) -> None:
        """Prints the whole status at the end."""
        if self._job is not None:
            for line in job_lines(self._job, now, self._flags):
                self._console.print(line, soft_wrap=True)

    def _say(self, subject: str, text: str, now: datetime) -> None:
        if self._printed.get(subject) != text:
            self._printed[subject] = text
            self._console.print(Text(f"{now:%Y-%m-%dT%H:%M:%SZ}  {text}"), soft_wrap=True)
