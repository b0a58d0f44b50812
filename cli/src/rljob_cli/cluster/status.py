"""`rljob status`: formats the state of a job as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.text import Text

from rljob.job_attempts import (
    application_retries_used,
    attempt_reason,
    attempt_resumed_from,
    attempt_state,
    infrastructure_retries_used,
    missing_capacity,
    newest_attempt,
    retry_asked_at,
    stop_asked_at,
    with_failure_class,
)
from rljob.job_conditions import ending, moment
from rljob.plain_text import age, duration_text, in_time, number_text, one_line, shortened, time_text
from rljob.stored_job import StoredJob
from rljob_api.conditions import ConditionType
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.status import Attempt, Condition, ConditionStatus, NextAttempt
from rljob_cli.table import table

_STYLES = {ConditionStatus.TRUE: "green", ConditionStatus.FALSE: "yellow", ConditionStatus.UNKNOWN: "magenta"}
_STYLES_WHEN_TRUE = {
    ConditionType.SUSPENDED: "yellow",
    ConditionType.RETRYING: "yellow",
    ConditionType.FINISHED: "",
    ConditionType.COMPLETE: "green",
    ConditionType.FAILED: "bold red",
}
"""Styles of conditions that are not needed for the training. False is normal for them and has no style."""
_MAX_ATTEMPTS = 8


def job_lines(job: StoredJob, now: datetime, flags: str = "") -> list[Text]:
    """The whole state of one job, for a terminal, a file or the live view. `flags`: options that suggested commands
    need for the same cluster and namespace."""
    words = one_line(", ".join(dict.fromkeys(word for word in (job.phase, _reason_in_status(job)) if word)))
    created = job.metadata.creation_timestamp
    lines = [Text.assemble((job.where, "bold"), "   ", words, f"   age {age(created, now)}")]
    facts = [*_requests(job, now), *_training(job, now), *_attempts(job, now)]
    lines += [Text(f"  {label:<12} {value}") for label, value in facts]
    if job.status.conditions:
        rows = [_condition_row(found, now) for found in job.status.conditions]
        lines += [Text(), *table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), rows, indent="  ")]
    elif not job.unparsed_fields:
        explain = f"rljob explain {job.metadata.name}{flags}"
        lines.append(Text(f"  no operator has processed it yet; `{explain}` shows what to check", style="yellow"))
    for found in job.status.conditions:
        # Finished has the same message as Complete or Failed.
        if "\n" in found.message.strip() and found.type != ConditionType.FINISHED:
            lines += [Text(), Text(f"  {found.type}, {found.reason}:", style="bold"), *_indented(found.message, "    ")]
    if job.unparsed_fields:
        lines += [Text(), Text(f"  {job.unparsed_note}", "yellow")]
    return lines


def progress_text(job: StoredJob) -> str | None:
    """One line about the training: step, reward, held-out score, checkpoint, time left. None before the operator has
    seen a first run state."""
    progress = job.status.progress
    if progress is None:
        return None
    parts = [f"step {progress.step}/{progress.total_steps}"]
    if progress.reward_mean is not None:
        parts.append(f"reward {number_text(progress.reward_mean)}")
    if progress.eval_score is not None:
        parts.append(f"eval {number_text(progress.eval_score)}")
    if job.status.checkpoint is not None:
        parts.append(f"checkpoint {job.status.checkpoint.step}")
    if progress.eta_seconds is not None and job.ending is None:
        parts.append(f"ETA {duration_text(progress.eta_seconds)}")
    return ", ".join(parts)


def next_attempt_text(job: StoredJob, following: NextAttempt) -> str:
    """The time, cluster and reason of the next attempt; without values that change every second."""
    newest = newest_attempt(job)
    number = f"attempt {newest.number + 1}" if newest else "the next attempt"
    where = "on the same cluster" if following.same_cluster else "on a new cluster"
    message = f": {following.message}" if following.message else ""
    why = with_failure_class(following.reason, following.failure_class)
    return one_line(f"{number} at {time_text(moment(following.not_before))}, {where}, after {why}{message}")


def _reason_in_status(job: StoredJob) -> str:
    """The value of `status.reason`; empty if unset. The reasons of conditions are in the table of conditions."""
    return job.reason if job.status.reason is not None else ""


def _requests(job: StoredJob, now: datetime) -> Iterator[tuple[str, str]]:
    """Rows about the job's result, its suspension, and requests that the operator has not applied yet."""
    result, suspended_at = job.status.result, job.status.suspended_at
    if result is not None:
        at = f"{result.outcome}, {result.reason}, {age(moment(result.at), now)} ago"
        left = (
            f"cleaned up {age(moment(result.cleaned_up_at), now)} ago" if result.cleaned_up_at else "being cleaned up"
        )
        yield "result", one_line(f"{at}; {left}")
    if job.status.waiting_since is not None:
        yield "waiting", f"for {missing_capacity(job)} since {time_text(moment(job.status.waiting_since))}"
    if suspended_at is not None:
        yield "suspended", f"for {age(moment(suspended_at), now)}; its pods are deleted"
    elif job.wants_suspend and result is None:
        yield "suspended", "requested, not done yet"
    for what, asked_at in (("stop", stop_asked_at(job)), ("retry", retry_asked_at(job))):
        if asked_at is not None:
            yield f"{what} request", shortened(one_line(f"at {asked_at}, not applied by the operator yet"))


def _training(job: StoredJob, now: datetime) -> Iterator[tuple[str, str]]:
    status, progress = job.status, job.status.progress
    if progress is not None:
        yield "step", f"{progress.step}/{progress.total_steps}, {age(moment(progress.updated_at), now)} ago"
        if progress.reward_mean is not None:
            yield "reward", number_text(progress.reward_mean)
        if progress.eval_score is not None:
            yield "eval score", number_text(progress.eval_score)
        if progress.tokens_per_second is not None:
            yield "tokens/s", f"{progress.tokens_per_second:,.0f}"
        if progress.eta_seconds is not None and ending(status) is None:
            yield "ETA", duration_text(progress.eta_seconds)
    if status.alarms:
        yield "alarms", shortened(one_line(", ".join(status.alarms)))
    if status.checkpoint is not None:
        saved = age(moment(status.checkpoint.saved_at), now)
        yield "checkpoint", f"step {status.checkpoint.step}, {saved} ago, {status.checkpoint.uri}"
    if status.export_uri is not None:
        yield "export", status.export_uri
    if status.pools:
        yield "pools", ", ".join(f"{pool.name} {pool.ready}/{pool.desired} ready" for pool in status.pools)
    if status.gpus is not None:
        yield "GPUs", str(status.gpus)


def _attempts(job: StoredJob, now: datetime) -> Iterator[tuple[str, str]]:
    status, counters, following = job.status, job.status.counters, job.status.next_attempt
    shown = status.attempts[-_MAX_ATTEMPTS:]
    if shown and shown[0].number > 1:
        yield "attempts", f"the first {shown[0].number - 1} are not shown; --output yaml shows those still recorded"
    for attempt in shown:
        yield f"attempt {attempt.number}", _attempt(attempt, now)
        if attempt.message:
            yield "", f"  {shortened(one_line(attempt.message))}"
    if following is not None:
        yield "next", f"{next_attempt_text(job, following)} ({in_time(moment(following.not_before), now)})"
    if counters is not None:
        policy = job.run_policy
        yield (
            "retries",
            f"application {application_retries_used(job)} of {policy.max_app_retries} used, infrastructure"
            f" {infrastructure_retries_used(job)} of {policy.max_infra_retries} used;"
            f" {counters.attempts} attempt{'' if counters.attempts == 1 else 's'} so far, {counters.failed_attempts}"
            " failed",
        )


def _attempt(attempt: Attempt, now: datetime) -> str:
    until = attempt.ended
    lasted = (moment(until) if until else now) - moment(_since(attempt))
    state = f"{attempt_state(attempt)} {'after' if until else 'for'} {duration_text(lasted.total_seconds())}"
    parts = [state, *attempt_reason(attempt), f"cluster {attempt.cluster}", *attempt_resumed_from(attempt)]
    if attempt.checkpoint_step is not None:
        parts.append(f"saved step {attempt.checkpoint_step}")
    if attempt.state_unknown_since is not None and until is None:
        parts.append(f"not observed for {age(moment(attempt.state_unknown_since), now)}")
    return one_line(", ".join(parts))


def _since(attempt: Attempt) -> str:
    """The start of the attempt's present state: running or stopping; for other states, the start of the attempt."""
    if attempt.ended is not None:
        return attempt.started
    if attempt.stop is not None:
        return attempt.stop.requested_at
    return attempt.running_since or attempt.started


def _condition_row(found: Condition, now: datetime) -> list[Text]:
    style = _STYLES[found.status]
    if found.type in list(_STYLES_WHEN_TRUE) and found.status is not ConditionStatus.UNKNOWN:
        is_true = found.status is ConditionStatus.TRUE
        style = _STYLES_WHEN_TRUE[ConditionType(found.type)] if is_true else ""
    first, *others = found.message.strip().split("\n")
    message = one_line(first) + (" ..." if others else "")
    since = age(moment(found.last_transition_time), now)
    cells = (Text(found.type), Text(found.status, style), Text(found.reason), Text(since), Text(message))
    return list(cells)


def _indented(message: str, indent: str) -> list[Text]:
    return [Text(indent + line) for line in printable(message).strip().split("\n")]
