"""`rljob view NAME`: writes the page of a job on a cluster, from a copy of its files."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from rljob.cluster import Cluster, ClusterOptions, connect
from rljob.errors import ClusterError
from rljob.polling import Clock
from rljob.stored_job import StoredJob
from rljob_api.constants import ExitCode
from rljob_cli.cluster.results import viewed_job
from rljob_cli.errors import CliError
from rljob_cli.local.view import ENDED, WATCHING, ViewOptions, print_page, write_view

WATCH_SECONDS = 10.0
"""Between two copies."""


def view_job(
    selected: ClusterOptions,
    name: str,
    image: str | None,
    options: ViewOptions,
    console: Console,
    clock: Clock | None = None,
    *,
    may_be_folder: bool = True,
) -> int:
    """Writes the page of a job; with `options.watch`, again and again until the job finishes. Returns 0, or 130 for
    Ctrl-C.

    Args:
        image: Image of the pod that reads the files; None for the image of the job.
        options: `folder` is not used.
        may_be_folder: Whether the user may have meant a folder, which does not exist.

    Raises:
        CliError: there is no such job, or its files cannot be copied, for example because the pod does not start.
    """
    clock = clock or Clock()
    cluster, job = _find(selected, name, may_be_folder)
    try:
        with viewed_job(cluster, job, image, console, clock) as viewed:
            of_copy = replace(options, folder=viewed.folder)
            is_active = viewed.refresh()
            print_page(write_view(replace(of_copy, is_active=is_active)), console)
            if options.watch and is_active:
                console.print(WATCHING, soft_wrap=True)
            while options.watch and is_active:
                clock.sleep(WATCH_SECONDS)
                is_active = viewed.refresh()
                write_view(replace(of_copy, is_active=is_active))
            if options.watch:
                console.print(ENDED, soft_wrap=True)
            return 0
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _find(selected: ClusterOptions, name: str, may_be_folder: bool) -> tuple[Cluster, StoredJob]:
    try:
        cluster = connect(selected)
        return cluster, cluster.job(name)
    except ClusterError as error:
        if not may_be_folder:
            raise
        raise CliError(f"{name}: no such folder; looked for a job of this name: {error}", error.exit_code) from None
