"""`rljob list`: a table with the columns of `kubectl get rlj`, or the jobs as JSON or YAML."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from ruamel.yaml import YAML

from rljob.cluster import Cluster
from rljob.errors import ClusterUnreachableError
from rljob.job_attempts import newest_attempt
from rljob.kubernetes_models import Json
from rljob.plain_text import age, number_text, one_line
from rljob.polling import MAX_UNREACHABLE_SECONDS, Clock, utc_now
from rljob.stored_job import UNREADABLE, StoredJob
from rljob_api.constants import ExitCode
from rljob_api.names import similar_names
from rljob_api.standard_streams import write_utf8
from rljob_cli.arguments import ListFormat, OutputFormat
from rljob_cli.errors import CliError
from rljob_cli.table import table

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class JobList:
    """The jobs to list, and how to show them."""

    cluster: Cluster
    everywhere: bool = False
    selector: str | None = None
    sort_by: str | None = None
    """A column in any letter case, after `-` for descending order; None for the order of namespaces and names."""
    output_format: ListFormat | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the table has all columns."""
        return self.output_format is ListFormat.WIDE

    def jobs(self) -> list[StoredJob]:
        """The jobs of the cluster, sorted. Raises CliError for an unknown column."""
        key = None if self.sort_by is None else _sort_key(self.sort_by.removeprefix("-"))
        jobs = self.cluster.jobs(everywhere=self.everywhere, selector=self.selector)
        if key is None or self.sort_by is None:
            return jobs
        known = [job for job in jobs if key(job) is not None]
        known.sort(key=_comparable(key), reverse=self.sort_by.startswith("-"))
        return [*known, *(job for job in jobs if key(job) is None)]

    def lines(self, jobs: Sequence[StoredJob], now: datetime) -> list[Text]:
        """The table of at least one job."""
        return list_lines(jobs, now, everywhere=self.everywhere, wide=self.is_wide)

    @property
    def none_text(self) -> str:
        """The message if there are no jobs."""
        where = "the cluster" if self.everywhere else f"namespace {self.cluster.namespace}"
        return f"no jobs in {where}" + (f" with labels {self.selector}" if self.selector else "")


def show_list(jobs: JobList, out: Console, notes: Console, now: datetime | None = None) -> None:
    """Prints the jobs to `out`, as a table unless the format is JSON or YAML. In the table, `?` stands for values that
    cannot be parsed; a message about them goes to `notes`."""
    found = jobs.jobs()
    if jobs.output_format in (ListFormat.JSON, ListFormat.YAML):
        whole: Json = {"apiVersion": "v1", "kind": "List", "items": [_without_managed_fields(job) for job in found]}
        _print(whole, OutputFormat(jobs.output_format.value), out)
        return
    if not found:
        notes.print(Text(jobs.none_text), soft_wrap=True)
        return
    for line in jobs.lines(found, now or utc_now()):
        out.print(line, soft_wrap=True)
    for job in found:
        if job.unparsed_fields:
            notes.print(Text(f"{job.where}: {job.unparsed_note}", "yellow"), soft_wrap=True)


def watch_list(jobs: JobList, out: Console, notes: Console, clock: Clock | None = None) -> int:
    """Shows the jobs until Ctrl-C, with a request every five seconds: on a terminal the whole table, otherwise the rows
    that have changed. Returns 130.

    Raises:
        ClusterUnreachableError: the API server was unreachable for ten minutes, or at the start.
    """
    clock = clock or Clock()
    try:
        if not out.is_terminal:
            _watch_rows(jobs, out, notes, clock)
        with Live(console=out, auto_refresh=False) as live:
            for found, note in _polled(jobs, clock):
                table_lines = jobs.lines(found, clock.now()) if found else [Text(jobs.none_text)]
                shown = table_lines if note is None else [*table_lines, Text(note, "bold yellow")]
                live.update(Group(*shown), refresh=True)
    except KeyboardInterrupt:
        pass
    return ExitCode.INTERRUPTED


def _watch_rows(jobs: JobList, out: Console, notes: Console, clock: Clock) -> None:
    printed: dict[str, list[str]] = {}
    former: dict[str, StoredJob] | None = None
    has_head = False
    for found, note in _polled(jobs, clock):
        if note is not None:
            notes.print(Text(note), soft_wrap=True)
            continue
        rows = {job.metadata.uid: job for job in found}
        if former is None and not rows:
            notes.print(Text(jobs.none_text), soft_wrap=True)
        for uid, job in (former or {}).items():
            if uid not in rows:
                end = "was deleted" + (", or has other labels now" if jobs.selector else "")
                out.print(Text(f"{job.where}: {end}"), soft_wrap=True)
        former = rows
        # The age changes without an event.
        cells = {uid: [*_cells(job, clock.now(), wide=jobs.is_wide).values()][:-1] for uid, job in rows.items()}
        changed = [rows[uid] for uid in rows if printed.get(uid) != cells[uid]]
        for line in jobs.lines(changed, clock.now())[has_head:] if changed else ():
            out.print(line, soft_wrap=True)
        has_head = has_head or bool(changed)
        printed = cells


def _polled(jobs: JobList, clock: Clock) -> Iterator[tuple[list[StoredJob], str | None]]:
    """Yields the jobs every five seconds. While the API server is unreachable, yields the former jobs and a message."""
    found: list[StoredJob] | None = None
    unreachable_since: datetime | None = None
    while True:
        try:
            found, unreachable_since = jobs.jobs(), None
            yield found, None
        except ClusterUnreachableError as error:
            unreachable_since = unreachable_since or clock.now()
            if found is None or (clock.now() - unreachable_since).total_seconds() > MAX_UNREACHABLE_SECONDS:
                raise
            yield found, f"no usable response from the API server ({error.reason}); retrying"
        clock.sleep(_POLL_SECONDS)


def list_lines(jobs: Sequence[StoredJob], now: datetime, *, everywhere: bool, wide: bool = False) -> list[Text]:
    """The table of at least one job: a line with the names of the columns, then a line for each job."""
    rows = [_cells(job, now, wide=wide) for job in jobs]
    head = list(rows[0]) if rows else []
    if not everywhere:
        head.remove("NAMESPACE")
    return table(head, [[Text(one_line(row[name])) for name in head] for row in rows])


_Value = str | float | None


def require_column(sort_by: str | None) -> None:
    """Raises CliError if there is no such column to sort by. A `-` before the column is ignored; None is valid."""
    if sort_by is not None:
        _sort_key(sort_by.removeprefix("-"))


def _sort_key(column: str) -> Callable[[StoredJob], _Value]:
    """The value of a job in a column, for sorting. Raises CliError for an unknown column."""
    keys: dict[str, Callable[[StoredJob], _Value]] = {
        "namespace": lambda job: job.metadata.namespace,
        "name": lambda job: job.name,
        "phase": lambda job: job.phase,
        "reason": lambda job: job.reason or None,
        "step": lambda job: job.status.progress.step if job.status.progress else None,
        "reward": lambda job: job.status.progress.reward_mean if job.status.progress else None,
        "ckpt": lambda job: job.status.checkpoint.step if job.status.checkpoint else None,
        "attempt": lambda job: newest.number if (newest := newest_attempt(job)) else None,
        "gpus": lambda job: job.status.gpus,
        "failures": lambda job: job.status.counters.failed_attempts if job.status.counters else None,
        # The youngest job has the smallest age.
        "age": lambda job: -job.metadata.creation_timestamp.timestamp(),
    }
    if column.lower() not in keys:
        near = similar_names(column, keys)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(keys)}"
        raise CliError(f"--sort-by {column}: there is no such column; {advice}")
    return keys[column.lower()]


def _comparable(key: Callable[[StoredJob], _Value]) -> Callable[[StoredJob], tuple[float, str]]:
    """A key that never compares a number with a string, which Python cannot do."""

    def compared(job: StoredJob) -> tuple[float, str]:
        value = key(job)
        return (0.0, value) if isinstance(value, str) else (value or 0.0, "")

    return compared


def _cells(job: StoredJob, now: datetime, *, wide: bool) -> dict[str, str]:
    """The cells of a job's row, by column. Unlike kubectl's, the default table shows the total steps in STEP."""
    status, progress, newest = job.status, job.status.progress, newest_attempt(job)
    attempt = status.counters.attempts if status.counters else newest.number if newest else None
    step = "" if progress is None else str(progress.step) if wide else f"{progress.step}/{progress.total_steps}"
    phase_text = job.phase
    cells = {
        "NAMESPACE": job.metadata.namespace,
        "NAME": job.metadata.name,
        "PHASE": phase_text,
        "REASON": "StatusUnreadable" if phase_text == UNREADABLE else job.reason,
        "STEP": step or _cell_without_value(job, "progress"),
        "REWARD": number_text(progress.reward_mean if progress else None) or _cell_without_value(job, "progress"),
        "CKPT": str(status.checkpoint.step) if status.checkpoint else _cell_without_value(job, "checkpoint"),
        "ATTEMPT": _cell_without_value(job, "counters") if attempt is None else str(attempt),
        "GPUS": _cell_without_value(job, "gpus") if status.gpus is None else str(status.gpus),
    }
    if wide:
        failures = status.counters.failed_attempts if status.counters else None
        cells |= {
            "TOTAL": str(progress.total_steps) if progress else _cell_without_value(job, "progress"),
            "FAILURES": _cell_without_value(job, "counters") if failures is None else str(failures),
            "CLUSTER": newest.cluster if newest else _cell_without_value(job, "attempts"),
        }
    return cells | {"AGE": age(job.metadata.creation_timestamp, now)}


def _cell_without_value(job: StoredJob, field: str) -> str:
    """The cell of a status field that has no value: `?` if the field cannot be parsed, else empty."""
    return UNREADABLE if job.is_unparsed(field) else ""


def print_object(job: StoredJob, output: OutputFormat, console: Console) -> None:
    """Prints the whole RLJob, without managedFields."""
    _print(_without_managed_fields(job), output, console)


def _without_managed_fields(job: StoredJob) -> Json:
    metadata = job.wire.get("metadata")
    assert isinstance(metadata, dict), "every object has metadata"
    return {**job.wire, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}


def _print(document: Json, output: OutputFormat, console: Console) -> None:
    if output is OutputFormat.JSON:
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    else:
        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        writer.width = 120
        stream = io.StringIO()
        writer.dump(document, stream)
        text = stream.getvalue()
    write_utf8(console.file, text)
