"""`rljob view FOLDER`: writes the page of a run, from the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rljob.differences import differing_values
from rljob_api.constants import ExitCode
from rljob_api.job_file import HIDDEN_VALUE
from rljob_api.v1alpha1.job import RLJob
from rljob_cli.errors import CliError
from rljob_page.errors import PageError
from rljob_page.page import PageOptions, WrittenPage, write_page
from rljob_page.page_data import Difference, OtherRun
from rljob_page.run_files import RunFiles, newest_change, read_files

_POLL_SECONDS = 2.0
_RELOAD_SECONDS = 5
_SILENT_POLLS = 30
"""After so many polls without a change, a watched page is written again, because it shows how much time has passed."""
WATCHING = "The page is written again until the run ends; Ctrl-C ends this command only."
ENDED = "The run has ended."


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The options of `rljob view`."""

    folder: Path
    """The run's folder."""
    against: Path | None = None
    """The folder of a run to compare with."""
    output: Path | None = None
    """None for `view.html` in the run's folder."""
    json_file: Path | None = None
    watch: bool = False
    is_active: bool | None = None
    """Whether the job goes on; None: as its files say."""


def view(options: ViewOptions, console: Console, wait: Callable[[float], None] = time.sleep) -> int:
    """Writes the page; with `watch`, again and again until the run ends. `wait` is called between two polls. Returns
    the exit code. Raises CliError."""
    page = write_view(options)
    print_page(page, console)
    if not options.watch:
        return int(ExitCode.SUCCESS)
    if page.is_active:
        console.print(WATCHING, soft_wrap=True)
    try:
        while page.is_active:
            page = _next_page(options, wait)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    console.print(ENDED, soft_wrap=True)
    return int(ExitCode.SUCCESS)


def write_view(options: ViewOptions) -> WrittenPage:
    """Writes the page once. Raises CliError."""
    try:
        files = read_files(options.folder)
        other = None if options.against is None else _other_run(files, options.against)
        return write_page(
            files,
            PageOptions(
                output=options.output,
                json_file=options.json_file,
                other=other,
                advice=advice_for(files),
                reload_seconds=_RELOAD_SECONDS if options.watch else None,
                is_active=options.is_active,
            ),
        )
    except PageError as error:
        raise CliError(str(error)) from None


def page_after_run(folder: Path) -> str:
    """Writes the page of a run that has ended. Returns a line for the terminal. Never raises an error, because the page
    must not change how the run ends."""
    try:
        return f"page: {write_view(ViewOptions(folder)).path}"
    except (Exception, KeyboardInterrupt) as error:
        return f"note: no page was written: {error or type(error).__name__}"


def _next_page(options: ViewOptions, wait: Callable[[float], None]) -> WrittenPage:
    """Waits for a change of the run's files, then writes the page."""
    before = newest_change(options.folder)
    for _ in range(_SILENT_POLLS):
        wait(_POLL_SECONDS)
        if newest_change(options.folder) != before:
            break
    return write_view(options)


def advice_for(files: RunFiles) -> list[str]:
    """The advice of `rljob plan --from-run` for a run on this machine, as lines. Sends no request. Empty if there is
    none, for example because the shape of the model is not known on this machine."""
    if not files.curves or files.job is None:
        return []
    # Runs without steps do not need the planner.
    from rljob_cli.plan.from_run import report_of
    from rljob_cli.plan.options import PlanOptions
    from rljob_cli.plan.run_record import record_of
    from rljob_cli.plan.run_text import advice_lines
    from rljob_planner.errors import PlanError

    try:
        report = report_of(record_of(files), PlanOptions(offline=True))
        return [line.plain for line in advice_lines(report)]
    except (CliError, PlanError):
        return []


def _other_run(files: RunFiles, folder: Path) -> OtherRun:
    """The run to compare with. Raises PageError."""
    other = read_files(folder)
    return OtherRun(other, _differences(files.job, other.job))


def _differences(this: RLJob | None, other: RLJob | None) -> tuple[Difference, ...] | None:
    """The fields that differ; None if there is no job. Values of environment variables may be secret, so they are not
    shown."""
    if this is None or other is None:
        return None
    return tuple(
        Difference(field, *((HIDDEN_VALUE, HIDDEN_VALUE) if field.partition("[")[0] == "spec.env" else values))
        for field, *values in differing_values(this.spec, other.spec)
    )


def print_page(page: WrittenPage, console: Console) -> None:
    """Prints where the page is, and what was left out."""
    for line in page.omitted:
        console.print(Text(f"note: not on the page: {line}"), soft_wrap=True)
    console.print(Text(f"page: {page.path} ({page.num_bytes / 2**20:.1f} MiB); open it in a browser"), soft_wrap=True)
