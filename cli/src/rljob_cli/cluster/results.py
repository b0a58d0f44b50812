"""`rljob get-results`, and the files for `rljob view` of a job on a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError, ResultsError, deleted_meanwhile
from rljob.job_attempts import attempt_state, attempt_under_way, is_over
from rljob.plain_text import bytes_text
from rljob.polling import MAX_UNREACHABLE_SECONDS, Clock
from rljob.results.download import Downloaded
from rljob.results.results_copy import ResultsCopy, newest_state, results_copy, write_run_state
from rljob.results.selection import DEFAULT_SELECTION, FOR_PAGE, MARKER_FILE, Selection
from rljob.stored_job import StoredJob
from rljob_api.constants import ExitCode
from rljob_api.v1alpha1.status import AttemptState
from rljob_cli.cluster.results_progress import ShownProgress
from rljob_cli.local.view import page_after_run
from rljob_cli.settings import view_folder

DEFAULT_FOLDER = Path("results")
"""Results of a job go to `results/NAME`."""
UNUSED_SECONDS = 7 * 24 * 3600.0
"""A copy for `rljob view` that was not used for so long is removed."""


@dataclass(frozen=True)
class ResultsOptions:
    """What is copied, and where."""

    folder: Path | None = None
    """None for `results/NAME`."""
    selection: Selection = DEFAULT_SELECTION
    image: str | None = None
    """Image of the pod; None for the image of the job."""


def get_results(
    cluster: Cluster, name: str, options: ResultsOptions, console: Console, clock: Clock | None = None
) -> int:
    """Copies results of a job into a folder. Returns 0; 1 if some of the files could not be copied; 130 for Ctrl-C.

    Raises:
        CliError: nothing can be copied, for example because the pod does not start.
    """
    clock = clock or Clock()
    job = cluster.job(name)
    folder = options.folder or DEFAULT_FOLDER / name
    try:
        with _copying(cluster, job, folder, options, console, clock) as copy:
            downloaded = copy.run()
            _print_summary(downloaded, folder, console)
        write_run_state(newest_state(cluster, job), folder)
        if options.selection.has_page:
            console.print(Text(page_after_run(folder)), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(Text("stopped; run the command again: it continues where it stopped"))
        return ExitCode.INTERRUPTED
    return ExitCode.APPLICATION if downloaded.problems else 0


@dataclass(frozen=True)
class ViewedJob:
    """A job whose page is shown: `folder` has what the page needs, and `refresh` copies what is new."""

    folder: Path
    refresh: Callable[[], bool]
    """Copies what is new. Returns whether the job goes on."""


@contextmanager
def viewed_job(
    cluster: Cluster, job: StoredJob, image: str | None, console: Console, clock: Clock | None = None
) -> Iterator[ViewedJob]:
    """Copies what the page of a job needs into a folder in the cache. The pod is deleted at the end.

    Raises:
        CliError: nothing can be copied, for example because the pod does not start.
    """
    clock = clock or Clock()
    _remove_unused(clock.now())
    folder = view_folder() / job.metadata.namespace / f"{job.name}-{job.metadata.uid[:8]}"
    options = ResultsOptions(folder, FOR_PAGE, image)
    with _copying(cluster, job, folder, options, console, clock, is_quiet=True) as copy:
        newest, printed = _Newest(cluster, job, clock), set[str]()
        is_complete = False
        has_copied = False
        failing_since: datetime | None = None

        def refresh() -> bool:
            nonlocal is_complete, has_copied, failing_since
            found = newest.read()
            if not is_complete or _is_written(found):
                try:
                    problems = copy.run().problems
                except ResultsError as error:
                    failing_since = failing_since or clock.now()
                    seconds = (clock.now() - failing_since).total_seconds()
                    is_outage = error.exit_code == ExitCode.INFRASTRUCTURE and seconds <= MAX_UNREACHABLE_SECONDS
                    if not has_copied or not is_outage:
                        raise
                    # The page is still that of the last copy.
                    is_complete = False
                    return True
                has_copied, failing_since = True, None
                for line in problems:
                    if line not in printed:
                        printed.add(line)
                        _print_problem(line, console)
            is_complete = not _is_written(found)
            if is_complete:
                # The next attempt may need the volume on another node.
                copy.release()
            write_run_state(found, folder)
            return not is_over(found)

        yield ViewedJob(folder, refresh)


def _is_written(job: StoredJob) -> bool:
    """Whether a trainer may be writing results."""
    attempt = attempt_under_way(job)
    return attempt is not None and attempt_state(attempt) not in (AttemptState.QUEUED, AttemptState.PROVISIONING)


def _remove_unused(now: datetime) -> None:
    """Removes the copies that `rljob view` has not used for a week."""
    for marker in view_folder().glob(f"*/*/{MARKER_FILE}"):
        with suppress(OSError):
            if now.timestamp() - marker.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(marker.parent)


class _Newest:
    """The newest state of a job; the last known one while the API server does not respond."""

    def __init__(self, cluster: Cluster, job: StoredJob, clock: Clock) -> None:
        self._cluster = cluster
        self._job = job
        self._clock = clock
        self._read_at = clock.now()

    def read(self) -> StoredJob:
        """Raises ClusterUnreachableError if the API server has not responded for long, and JobNotFoundError."""
        try:
            found = self._cluster.job(self._job.name)
            if found.metadata.uid != self._job.metadata.uid:
                raise deleted_meanwhile(self._job.where)
            self._job, self._read_at = found, self._clock.now()
        except ClusterUnreachableError:
            if (self._clock.now() - self._read_at).total_seconds() > MAX_UNREACHABLE_SECONDS:
                raise
        return self._job


@contextmanager
def _copying(
    cluster: Cluster,
    job: StoredJob,
    folder: Path,
    options: ResultsOptions,
    console: Console,
    clock: Clock,
    *,
    is_quiet: bool = False,
) -> Iterator[ResultsCopy]:
    """Prepares a copy whose progress is shown. The pod is deleted at the end."""
    with (
        ShownProgress(console, clock, is_quiet=is_quiet) as progress,
        results_copy(cluster, job, folder, options.selection, progress, options.image, clock) as copy,
    ):
        yield copy


def _print_summary(downloaded: Downloaded, folder: Path, console: Console) -> None:
    for line in (*downloaded.ignored, *downloaded.problems):
        _print_problem(line, console)
    unchanged = f", {downloaded.num_unchanged} were there already" if downloaded.num_unchanged else ""
    number = f"{len(downloaded.written)} new or changed file{'' if len(downloaded.written) == 1 else 's'}"
    console.print(Text(f"{folder}: {number}, {bytes_text(downloaded.num_bytes)} received{unchanged}"), soft_wrap=True)


def _print_problem(line: str, console: Console) -> None:
    console.print(Text(f"not copied: {line}", "yellow"), soft_wrap=True)
