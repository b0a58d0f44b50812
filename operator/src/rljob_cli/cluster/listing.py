"""`rljob list`: a line for each job, with the columns of `kubectl get rlj`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from rljob_cli.cluster.job_state import UNREADABLE, is_unread, newest_attempt, phase, reason
from rljob_cli.cluster.printed_objects import OutputFormat, print_list
from rljob_cli.cluster.stored_job import OTHER_VERSION, StoredJob
from rljob_cli.plain_text import age, number_text, one_line
from rljob_cli.tables import table


class ListFormat(StrEnum):
    """How a list is printed, where not as a table of the usual columns."""

    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


def show_list(
    jobs: Sequence[StoredJob], form: ListFormat | None, now: datetime, out: Console, notes: Console, *, everywhere: bool
) -> None:
    """Prints the jobs to `out`. A job whose status cannot be read here has a row like all others, with `?` for what is
    not known of it; `notes` gets its name and what cannot be read."""
    if form in (ListFormat.JSON, ListFormat.YAML):
        print_list(jobs, OutputFormat(form.value), out)
        return
    for line in list_lines(jobs, now, everywhere=everywhere, wide=form is ListFormat.WIDE):
        out.print(line, soft_wrap=True)
    for job in jobs:
        if job.unread:
            text = f"{job.where}: cannot be read here: {one_line('; '.join(job.unread))}; {OTHER_VERSION}"
            notes.print(Text(text, "yellow"), soft_wrap=True)


def list_lines(jobs: Sequence[StoredJob], now: datetime, *, everywhere: bool, wide: bool = False) -> list[Text]:
    """The table."""
    rows = [_cells(job, now, wide=wide) for job in jobs]
    head = list(rows[0]) if rows else []
    if not everywhere:
        head.remove("NAMESPACE")
    return table(head, [[Text(one_line(row[name])) for name in head] for row in rows])


def _cells(job: StoredJob, now: datetime, *, wide: bool) -> dict[str, str]:
    """What stands under each heading. Unlike kubectl's, the usual table has the steps in all beside those done."""
    status, progress, newest = job.status, job.status.progress, newest_attempt(job)
    attempt = status.counters.attempts if status.counters else newest.number if newest else None
    step = "" if progress is None else str(progress.step) if wide else f"{progress.step}/{progress.total_steps}"
    phase_text = phase(job)
    cells = {
        "NAMESPACE": job.metadata.namespace,
        "NAME": job.metadata.name,
        "PHASE": phase_text,
        "REASON": "StatusUnreadable" if phase_text == UNREADABLE else reason(job),
        "STEP": step or _missing(job, "progress"),
        "REWARD": number_text(progress.reward_mean if progress else None) or _missing(job, "progress"),
        "CKPT": str(status.checkpoint.step) if status.checkpoint else _missing(job, "checkpoint"),
        "ATTEMPT": _missing(job, "counters") if attempt is None else str(attempt),
        "GPUS": _missing(job, "gpus") if status.gpus is None else str(status.gpus),
    }
    if wide:
        failures = status.counters.failed_attempts if status.counters else None
        cells |= {
            "TOTAL": str(progress.total_steps) if progress else _missing(job, "progress"),
            "FAILURES": _missing(job, "counters") if failures is None else str(failures),
            "CLUSTER": newest.cluster if newest else _missing(job, "attempts"),
        }
    return cells | {"AGE": age(job.metadata.creation_timestamp, now)}


def _missing(job: StoredJob, field: str) -> str:
    return UNREADABLE if is_unread(job, field) else ""
