"""`rljob view s3://BUCKET/FOLDER`: writes the page of a run from its files in a bucket, without a cluster."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rljob.errors import ResultsError
from rljob.polling import Clock
from rljob.results.bucket_source import BucketSource
from rljob.results.connection import BrokenConnectionError
from rljob.results.download import Download
from rljob.results.selection import FOR_PAGE, MARKER_FILE, RUN_FOLDER
from rljob_api.constants import RUN_STATE_FILE_NAME, ExitCode
from rljob_bucket.paths import BucketPath, parsed_uri
from rljob_cli.cluster.results_progress import ShownProgress
from rljob_cli.cluster.view_job import WATCH_SECONDS
from rljob_cli.errors import CliError
from rljob_cli.local.view import ENDED, WATCHING, ViewOptions, print_page, write_view
from rljob_cli.settings import view_folder


def view_bucket(uri: str, options: ViewOptions, console: Console, clock: Clock | None = None) -> int:
    """Writes the page; with `options.watch`, again and again until the run ends. Returns 0, or 130 for Ctrl-C.

    Args:
        uri: The job's folder, such as `s3://bucket/team/run-1`. Endpoint, region and credentials are in the
            environment.
        options: `folder` is not used.

    Raises:
        CliError: the URI is not valid, or the files cannot be read.
    """
    clock = clock or Clock()
    source = parsed_uri(uri)
    if source is None:
        raise CliError(f"{uri}: is not the folder of a job in a bucket; use s3://BUCKET/FOLDER")
    of_copy = replace(options, folder=_local_folder(source))
    try:
        _copy(source, of_copy.folder, console, clock)
        page = write_view(of_copy)
        print_page(page, console)
        if options.watch and page.is_active:
            console.print(WATCHING, soft_wrap=True)
        while options.watch and page.is_active:
            clock.sleep(WATCH_SECONDS)
            _copy(source, of_copy.folder, console, clock)
            page = write_view(of_copy)
        if options.watch:
            console.print(ENDED, soft_wrap=True)
        return 0
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _local_folder(source: BucketPath) -> Path:
    name = hashlib.sha256(source.as_uri().encode()).hexdigest()[:8]
    return view_folder() / source.bucket / f"{source.name}-{name}"


def _copy(source: BucketPath, folder: Path, console: Console, clock: Clock) -> None:
    """Copies what is new. Raises ResultsError."""
    folder.mkdir(parents=True, exist_ok=True)
    # By its time, copies that were not used for a week are removed.
    (folder / MARKER_FILE).touch()
    with ShownProgress(console, clock, is_quiet=True) as progress:
        files = BucketSource(source)
        copied = Download(lambda: files, FOR_PAGE, folder, progress, clock.sleep).run()
        if not copied.written and not copied.num_unchanged:
            raise ResultsError(f"{source}: has no files of a run; use the folder of a job, such as s3://bucket/my-job")
        try:
            files.download(f"{RUN_FOLDER}/{RUN_STATE_FILE_NAME}", folder / RUN_STATE_FILE_NAME)
        except FileNotFoundError:
            pass
        except BrokenConnectionError as error:
            raise ResultsError(str(error), ExitCode.INFRASTRUCTURE) from None
