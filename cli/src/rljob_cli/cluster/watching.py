"""Watches a job until it finishes: a live view on a terminal, otherwise a line for every change."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from rljob.cluster import Cluster
from rljob.errors import NOT_FOUND_EXIT_CODE
from rljob.job_attempts import attempt_text, is_over, stop_asked_at
from rljob.plain_text import one_line
from rljob.polling import Clock, poll_until_finished
from rljob.stored_job import StoredJob
from rljob_api.constants import ExitCode
from rljob_cli.cluster.status import job_lines, next_attempt_text, progress_text

_BAR_WIDTH = 60


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


def _watch(cluster: Cluster, name: str, view: _View, clock: Clock) -> int:
    for job in poll_until_finished(cluster, name, clock, view.note):
        view.show(job, clock.now())
    end = job.ending
    if end is not None and is_over(job):
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
        if progress is not None and job.ending is None:
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
