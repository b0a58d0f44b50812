"""`rljob list`: a table with the columns of `kubectl get rlj`, or the jobs as JSON or YAML."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.text import Text
from ruamel.yaml import YAML

from rljob_api.standard_streams import write_utf8
from rljob_cli.arguments import ListFormat, OutputFormat
from rljob_cli.cluster.job_state import UNREADABLE, is_unparsed, newest_attempt, phase, reason
from rljob_cli.cluster.kubernetes_models import Json
from rljob_cli.cluster.stored_job import StoredJob
from rljob_cli.plain_text import age, number_text, one_line, table


def show_list(
    jobs: Sequence[StoredJob],
    output_format: ListFormat | None,
    now: datetime,
    out: Console,
    notes: Console,
    *,
    everywhere: bool,
) -> None:
    """Prints the jobs to `out`, as a table unless the format is JSON or YAML. In the table, `?` stands for values that
    cannot be parsed; a message about them goes to `notes`."""
    if output_format in (ListFormat.JSON, ListFormat.YAML):
        whole: Json = {"apiVersion": "v1", "kind": "List", "items": [_without_managed_fields(job) for job in jobs]}
        _print(whole, OutputFormat(output_format.value), out)
        return
    for line in list_lines(jobs, now, everywhere=everywhere, wide=output_format is ListFormat.WIDE):
        out.print(line, soft_wrap=True)
    for job in jobs:
        if job.unparsed_fields:
            notes.print(Text(f"{job.where}: {job.unparsed_note}", "yellow"), soft_wrap=True)


def list_lines(jobs: Sequence[StoredJob], now: datetime, *, everywhere: bool, wide: bool = False) -> list[Text]:
    """The table of at least one job: a line with the names of the columns, then a line for each job."""
    rows = [_cells(job, now, wide=wide) for job in jobs]
    head = list(rows[0]) if rows else []
    if not everywhere:
        head.remove("NAMESPACE")
    return table(head, [[Text(one_line(row[name])) for name in head] for row in rows])


def _cells(job: StoredJob, now: datetime, *, wide: bool) -> dict[str, str]:
    """The cells of a job's row, by column. Unlike kubectl's, the default table shows the total steps in STEP."""
    status, progress, newest = job.status, job.status.progress, newest_attempt(job)
    attempt = status.counters.attempts if status.counters else newest.number if newest else None
    step = "" if progress is None else str(progress.step) if wide else f"{progress.step}/{progress.total_steps}"
    phase_text = phase(job)
    cells = {
        "NAMESPACE": job.metadata.namespace,
        "NAME": job.metadata.name,
        "PHASE": phase_text,
        "REASON": "StatusUnreadable" if phase_text == UNREADABLE else reason(job),
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
    return UNREADABLE if is_unparsed(job, field) else ""


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
