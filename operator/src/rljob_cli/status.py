"""`rljob status` and `rljob list`: where jobs are, as lines for people or as the object for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from enum import StrEnum

from rich.console import Console
from rich.text import Text
from ruamel.yaml import YAML

from rljob_api.printable import printable
from rljob_api.v1alpha1.status import Attempt, Condition, ConditionStatus
from rljob_cli.job_state import ending, moment, phase
from rljob_cli.kube_objects import StoredJob
from rljob_cli.plain_text import age, length, one_line

_STYLES = {ConditionStatus.TRUE: "green", ConditionStatus.FALSE: "yellow", ConditionStatus.UNKNOWN: "magenta"}
_BAD = "bold red"


class OutputFormat(StrEnum):
    """For programs."""

    JSON = "json"
    YAML = "yaml"


def print_object(job: StoredJob, output: OutputFormat, console: Console) -> None:
    """The whole resource, without the bookkeeping of who wrote which field."""
    metadata = job.wire.get("metadata")
    assert isinstance(metadata, dict), "every object has metadata"
    shown = {**job.wire, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}}
    if output is OutputFormat.JSON:
        text = json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
    else:
        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        writer.width = 120
        stream = io.StringIO()
        writer.dump(shown, stream)
        text = stream.getvalue()
    console.file.write(text)


def job_lines(job: StoredJob, now: datetime) -> list[Text]:
    """Everything about one job. The same for a terminal, a file and the live view."""
    name = f"{job.metadata.namespace}/{job.metadata.name}"
    lines = [Text.assemble((f"RLJob {name}", "bold"), "   ", phase(job), f"   age {age(_created(job), now)}")]
    facts = list(_facts(job, now))
    lines += [Text(f"  {label:<12} {value}") for label, value in facts]
    if job.status.conditions:
        rows = [_condition_row(found, now) for found in job.status.conditions]
        lines += [Text(), *_table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), rows, indent="  ")]
    else:
        lines.append(Text("  no operator has looked at it yet; `rljob explain` says what to check", style="yellow"))
    for found in job.status.conditions:
        if "\n" in found.message.strip():
            lines += [Text(), Text(f"  {found.type}, {found.reason}:", style="bold"), *_indented(found.message, "    ")]
    return lines


def list_lines(jobs: Iterable[StoredJob], now: datetime, *, everywhere: bool) -> list[Text]:
    """One line per job, with the columns of `kubectl get rlj`."""
    rows = []
    for job in jobs:
        status = job.status
        progress, newest = status.progress, status.attempts[-1] if status.attempts else None
        row = (
            job.metadata.name,
            phase(job),
            f"{progress.step}/{progress.total_steps}" if progress else "",
            _number(progress.reward_mean if progress else None),
            str(status.checkpoint.step) if status.checkpoint else "",
            str(newest.number) if newest else "",
            age(_created(job), now),
        )
        rows.append((job.metadata.namespace, *row) if everywhere else row)
    head = ("NAME", "PHASE", "STEP", "REWARD", "CKPT", "ATTEMPT", "AGE")
    return _table(("NAMESPACE", *head) if everywhere else head, [[Text(cell) for cell in row] for row in rows])


def progress_text(job: StoredJob) -> str | None:
    """One line about the training: step, reward, evaluation score, speed, time left. None before it has started."""
    progress = job.status.progress
    if progress is None:
        return None
    parts = [f"step {progress.step}/{progress.total_steps}"]
    if progress.reward_mean is not None:
        parts.append(f"reward {_number(progress.reward_mean)}")
    if progress.eval_score is not None:
        parts.append(f"eval {_number(progress.eval_score)}")
    if job.status.checkpoint is not None:
        parts.append(f"checkpoint {job.status.checkpoint.step}")
    if progress.eta_seconds is not None and ending(job.status) is None:
        parts.append(f"ETA {length(progress.eta_seconds)}")
    return ", ".join(parts)


def _facts(job: StoredJob, now: datetime) -> Iterator[tuple[str, str]]:
    status, progress = job.status, job.status.progress
    if progress is not None:
        yield "step", f"{progress.step}/{progress.total_steps}, {age(moment(progress.updated_at), now)} ago"
        if progress.reward_mean is not None:
            yield "reward", _number(progress.reward_mean)
        if progress.eval_score is not None:
            yield "eval score", _number(progress.eval_score)
        if progress.tokens_per_second is not None:
            yield "tokens/s", f"{progress.tokens_per_second:,.0f}"
        if progress.eta_seconds is not None and ending(status) is None:
            yield "ETA", length(progress.eta_seconds)
    if status.checkpoint is not None:
        saved = age(moment(status.checkpoint.saved_at), now)
        yield "checkpoint", f"step {status.checkpoint.step}, {saved} ago, {status.checkpoint.uri}"
    if status.export_uri is not None:
        yield "export", status.export_uri
    if status.pools:
        yield "pools", ", ".join(f"{pool.name} {pool.ready}/{pool.desired} ready" for pool in status.pools)
    for attempt in status.attempts:
        yield f"attempt {attempt.number}", _attempt(attempt, now)


def _attempt(attempt: Attempt, now: datetime) -> str:
    started = moment(attempt.started)
    lasted = (moment(attempt.ended) if attempt.ended else now) - started
    parts = [f"{attempt.outcome} {'after' if attempt.ended else 'for'} {length(lasted.total_seconds())}"]
    if attempt.reason not in (None, attempt.outcome):
        parts.append(str(attempt.reason))
    parts.append(f"cluster {attempt.cluster}")
    if attempt.resumed_from_step is not None:
        parts.append(f"resumed from step {attempt.resumed_from_step}")
    return ", ".join(parts)


def _condition_row(found: Condition, now: datetime) -> list[Text]:
    style = _BAD if found.type == "Failed" and found.status is ConditionStatus.TRUE else _STYLES[found.status]
    if found.type == "Failed" and found.status is ConditionStatus.FALSE:
        style = ""
    first, *others = found.message.strip().split("\n")
    message = one_line(first) + (" ..." if others else "")
    since = age(moment(found.last_transition_time), now)
    return [Text(found.type), Text(found.status, style), Text(found.reason), Text(since), Text(message)]


def _table(head: tuple[str, ...], rows: list[list[Text]], indent: str = "") -> list[Text]:
    """Columns as wide as their widest cell; the last one has no width, so that it can be long."""
    widths = [max(len(name), *(len(row[at]) for row in rows), 0) for at, name in enumerate(head)]
    lines = []
    for cells in ([Text(name, "dim") for name in head], *rows):
        line = Text(indent)
        for cell, width in zip(cells, widths, strict=True):
            line.append_text(cell)
            line.append(" " * (width - len(cell) + 2))
        line.rstrip()
        lines.append(line)
    return lines


def _indented(message: str, indent: str) -> list[Text]:
    return [Text(indent + line) for line in printable(message).strip().split("\n")]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _created(job: StoredJob) -> datetime:
    return job.metadata.creation_timestamp
