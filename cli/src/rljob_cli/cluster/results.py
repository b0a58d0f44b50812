"""`rljob get-results`, and `rljob view` for a job on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob_api.constants import RUN_STATE_FILE_NAME, ExitCode
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.job_state import ending, storage_uri
from rljob_cli.cluster.results_page import write_page_of
from rljob_cli.cluster.results_progress import ShownProgress
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.cluster.watching import Clock
from rljob_cli.errors import CliError
from rljob_cli.plain_text import bytes_text
from rljob_cli.results.fetching import Fetch, Fetched, ResultsError
from rljob_cli.results.pod import ResultsPod
from rljob_cli.results.run_state import run_state
from rljob_cli.results.selection import DEFAULT_SELECTION, FOR_PAGE, MARKER_FILE, Selection
from rljob_cli.settings import view_folder

DEFAULT_FOLDER = Path("results")
"""Results of a job go into the folder of this folder that has the job's name."""
WATCH_SECONDS = 10.0


@dataclass(frozen=True)
class ResultsOptions:
    """Options of both commands."""

    folder: Path | None = None
    """None: `results/NAME`, or for `rljob view` a folder in the cache."""
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
            console.print(Text(f"page: {_write_page(cluster.job(name), folder)}"), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(Text("stopped; run the command again: it continues with the bytes that are there"))
        return ExitCode.INTERRUPTED
    return ExitCode.APPLICATION if fetched.problems else 0


def view_job(
    cluster: Cluster,
    name: str,
    options: ResultsOptions,
    console: Console,
    *,
    watch: bool = False,
    clock: Clock | None = None,
) -> int:
    """Copies what the page of a job needs, and writes the page. With `watch`, repeats this until the job finishes.
    Returns 0, or 130 for Ctrl-C.

    Raises:
        CliError: nothing can be copied, for example because the pod does not start.
    """
    clock = clock or Clock()
    job = cluster.job(name)
    folder = options.folder or view_folder() / job.metadata.namespace / f"{name}-{job.metadata.uid[:8]}"
    for_page = ResultsOptions(folder, FOR_PAGE, options.image)
    try:
        with _copying(cluster, job, folder, for_page, console, clock, is_quiet=watch) as copy:
            printed = False
            while True:
                job = cluster.job(name)
                copy()
                page = _write_page(job, folder)
                if not printed:
                    console.print(Text(f"page: {page}"), soft_wrap=True)
                    printed = True
                if not watch or ending(job.status) is not None:
                    return 0
                clock.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


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
    """Yields a function that copies what is new. The pod is deleted at the end."""
    _claim_folder(folder, job)
    with (
        ShownProgress(console, clock, is_quiet=is_quiet) as progress,
        ResultsPod(cluster, job, progress.note, options.image, clock) as pod,
    ):
        fetch = Fetch(pod.connect, options.selection, folder, progress, clock.sleep)

        def copy() -> Fetched:
            fetched = fetch.run()
            if not fetched.written and not fetched.num_unchanged and not fetched.problems:
                raise ResultsError(f"{job.where}: its folder {storage_uri(job)} has none of these files yet")
            if not is_quiet:
                _print_summary(fetched, folder, console)
            return fetched

        try:
            yield copy
        finally:
            fetch.close()


def _write_page(job: StoredJob, folder: Path) -> Path:
    """Writes the page, and before that the state of the run, which is not among the files of the claim."""
    state = run_state(job)
    if state is not None:
        temporary = folder / f"{RUN_STATE_FILE_NAME}.tmp"
        temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
        temporary.replace(folder / RUN_STATE_FILE_NAME)
    return write_page_of(folder)


def _claim_folder(folder: Path, job: StoredJob) -> None:
    """Writes the file that names the job. Raises CliError if the folder has other files: those of a run on this machine
    or of another job would be overwritten."""
    marker = folder / MARKER_FILE
    content = json.dumps({"job": f"{job.metadata.namespace}/{job.metadata.name}", "storage": storage_uri(job)})
    try:
        if marker.is_file():
            is_ours = marker.read_text(encoding="utf-8") == content
        else:
            is_ours = not folder.exists() or not any(folder.iterdir())
        if not is_ours:
            raise CliError(f"{folder}: has files of something else than {job.where}; choose an empty or a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(content, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None


def _print_summary(fetched: Fetched, folder: Path, console: Console) -> None:
    for line in (*fetched.ignored, *fetched.problems):
        console.print(Text(f"not copied: {line}", "yellow"), soft_wrap=True)
    unchanged = f", {fetched.num_unchanged} were there already" if fetched.num_unchanged else ""
    text = f"{folder}: {len(fetched.written)} new files, {bytes_text(fetched.num_bytes)} received{unchanged}"
    console.print(Text(text), soft_wrap=True)
