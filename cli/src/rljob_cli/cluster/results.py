"""`rljob get-results`, and the files for `rljob view` of a job on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError
from rljob.plain_text import bytes_text
from rljob.polling import MAX_UNREACHABLE_SECONDS, Clock
from rljob.results.copying import copying, newest_state, write_run_state
from rljob.results.fetching import Fetched
from rljob.results.selection import DEFAULT_SELECTION, FOR_PAGE, Selection
from rljob.stored_job import StoredJob
from rljob_api.constants import ExitCode
from rljob_cli.cluster.results_progress import ShownProgress
from rljob_cli.local.view import page_after_run
from rljob_cli.settings import view_folder

DEFAULT_FOLDER = Path("results")
"""Results of a job go into the folder of this folder that has the job's name."""


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
            fetched = copy()
        if options.selection.has_page:
            write_run_state(newest_state(cluster, job), folder)
            console.print(Text(page_after_run(folder)), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(Text("stopped; run the command again: it continues with the bytes that are there"))
        return ExitCode.INTERRUPTED
    return ExitCode.APPLICATION if fetched.problems else 0


@dataclass(frozen=True)
class ViewedJob:
    """A job whose page is shown: `folder` has what the page needs, and `refresh` copies what is new."""

    folder: Path
    refresh: Callable[[], bool]
    """Copies what is new. Returns whether the job goes on."""


@contextmanager
def viewed_job(
    cluster: Cluster, name: str, image: str | None, console: Console, clock: Clock | None = None
) -> Iterator[ViewedJob]:
    """Copies what the page of a job needs into a folder in the cache. The pod is deleted at the end.

    Raises:
        CliError: nothing can be copied, for example because the pod does not start.
    """
    clock = clock or Clock()
    job = cluster.job(name)
    folder = view_folder() / job.metadata.namespace / f"{name}-{job.metadata.uid[:8]}"
    options = ResultsOptions(folder, FOR_PAGE, image)
    with _copying(cluster, job, folder, options, console, clock, is_quiet=True) as copy:
        newest = _Newest(cluster, job, clock)

        def refresh() -> bool:
            found = newest.read()
            copy()
            write_run_state(found, folder)
            return found.ending is None

        yield ViewedJob(folder, refresh)


class _Newest:
    """The newest state of a job; the one before while the API server does not respond."""

    def __init__(self, cluster: Cluster, job: StoredJob, clock: Clock) -> None:
        self._cluster = cluster
        self._job = job
        self._clock = clock
        self._read_at = clock.now()

    def read(self) -> StoredJob:
        """Raises ClusterUnreachableError if the API server has not responded for long, and JobNotFoundError."""
        try:
            self._job = self._cluster.job(self._job.metadata.name)
            self._read_at = self._clock.now()
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
) -> Iterator[Callable[[], Fetched]]:
    """Yields a function that copies what is new, and shows the progress. The pod is deleted at the end."""
    with (
        ShownProgress(console, clock, is_quiet=is_quiet) as progress,
        copying(cluster, job, folder, options.selection, progress, options.image, clock) as copy,
    ):

        def copy_and_report() -> Fetched:
            fetched = copy()
            if not is_quiet:
                _print_summary(fetched, folder, console)
            return fetched

        yield copy_and_report


def _print_summary(fetched: Fetched, folder: Path, console: Console) -> None:
    for line in (*fetched.ignored, *fetched.problems):
        console.print(Text(f"not copied: {line}", "yellow"), soft_wrap=True)
    unchanged = f", {fetched.num_unchanged} were there already" if fetched.num_unchanged else ""
    text = f"{folder}: {len(fetched.written)} new files, {bytes_text(fetched.num_bytes)} received{unchanged}"
    console.print(Text(text), soft_wrap=True)
