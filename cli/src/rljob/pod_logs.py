"""Reads the log of a pod. If the pod was deleted, says where copies of the log are kept."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rljob.cluster import Cluster
from rljob.errors import NoLogError, RejectedError
from rljob.job_attempts import attempt_text, is_over, newest_attempt, storage_uri
from rljob.job_conditions import moment, waits_for
from rljob.kubernetes_models import Pod
from rljob.log_options import Container, LogOptions
from rljob.plain_text import one_line, time_text
from rljob.polling import POLL_SECONDS, Clock
from rljob.stored_job import StoredJob
from rljob.waiting import Report
from rljob_api.constants import POD_LOGS_FOLDER, POD_STORAGE_FOLDER, ExitCode, attempt_logs_folder
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.status import Attempt


@dataclass(frozen=True)
class _Source:
    """The pod that has the log, or the reason why there is none."""

    attempt: int | None = None
    """Number of the attempt; None if the job has had no attempt."""
    pod: Pod | None = None
    missing: str = ""
    """Why there is no log (yet), for messages; empty if `pod` is set."""
    is_deleted: bool = False
    """Whether the attempt or the job has ended and its pod is deleted, so that only another attempt can create a
    pod."""
    may_come: bool = True
    """Whether the pod may still appear, so that it can be waited for."""


def read_log(cluster: Cluster, name: str, options: LogOptions, clock: Clock, report: Report) -> Iterator[bytes]:
    """Streams the log that the options select, in pieces of bytes. With `follow`, waits for the pod first. `report`
    gets messages about what is waited for, and about which attempts the log is of.

    Raises:
        JobNotFoundError: there is no such job.
        RejectedError: an option does not match the job.
        NoLogError: there is no log (yet). If it was deleted, the exit code is 1.
    """
    reported = ""
    while True:
        job = cluster.job(name)
        chosen = _with_attempt(job, options)
        source = _find(job, cluster.pods(job), chosen)
        if source.pod is not None:
            for text in _which_attempts(job, source, chosen):
                report(text)
            yield from cluster.pod_log(
                source.pod,
                chosen.container_name,
                follow=chosen.follow,
                num_lines=chosen.num_lines,
                since_seconds=chosen.since_seconds,
            )
            return
        if source.is_deleted and not (chosen.follow and source.may_come):
            raise NoLogError("\n".join(_where_copies_are(job, source, chosen)), ExitCode.APPLICATION)
        if not chosen.follow:
            raise NoLogError(
                f"{job.where}: {source.missing}; wait with --follow, or see `rljob explain {name}{cluster.flags}`"
            )
        if source.missing != reported:
            reported = source.missing
            report(f"waiting: {reported}")
        clock.sleep(POLL_SECONDS)


def _with_attempt(job: StoredJob, options: LogOptions) -> LogOptions:
    """The options with a number instead of `previous`. Raises RejectedError if there was no earlier attempt."""
    if not options.previous:
        return options
    newest = newest_attempt(job)
    if newest is None or newest.number == 1:
        had = "no attempt yet" if newest is None else "only one attempt"
        raise RejectedError(f"{job.where}: has had {had}, so there is no previous one; remove --previous")
    return replace(options, attempt=newest.number - 1, previous=False)


def _find(job: StoredJob, pods: list[Pod], options: LogOptions) -> _Source:
    """Finds the log in the newest attempt that has such a pod, or in the attempt of the options. Raises
    RejectedError."""
    _check_options(job, options)
    listed = {attempt.number: attempt for attempt in job.status.attempts}
    numbers = [options.attempt] if options.attempt is not None else sorted(listed, reverse=True)
    for number in numbers:
        matching = [pod for pod in pods if pod.group == options.group and _is_of(pod, number, listed)]
        if len(matching) > options.index:
            return _source(number, matching[options.index], options)
    wanted = numbers[0] if numbers else None
    record = listed.get(wanted) if wanted is not None else None
    will_not_go_on = is_over(job) or job.metadata.deletion_timestamp is not None
    is_past = wanted is not None and (record is None or record.ended is not None)
    may_come = not will_not_go_on and (options.attempt is None or not is_past)
    return _Source(wanted, None, _missing(job, options), will_not_go_on or is_past, may_come)


def _is_of(pod: Pod, number: int, listed: Mapping[int, Attempt]) -> bool:
    """Whether the pod belongs to the attempt: by its cluster or, if that is unknown, by its attempt number. Several
    attempts may share a cluster, or have had clusters with one name, of which the last one exists."""
    record = listed.get(number)
    if record is None or pod.cluster is None:
        return pod.attempt == str(number)
    last = max((each for each in listed.values() if each.cluster == record.cluster), key=lambda each: each.number)
    return pod.cluster == record.cluster and record.cluster_uid == last.cluster_uid


def _source(number: int, pod: Pod, options: LogOptions) -> _Source:
    """The pod, or why its container has no log yet."""
    status = pod.container(options.container_name)
    if status is not None and status.has_started:
        return _Source(number, pod)
    waiting = status.state.waiting if status else None
    why = f" ({waiting.reason})" if waiting else ""
    missing = f"container {options.container_name} of pod {pod.metadata.name} has not started{why}"
    return _Source(number, missing=missing)


def _missing(job: StoredJob, options: LogOptions) -> str:
    """Says that the pod does not exist yet, and why."""
    following, waits = job.status.next_attempt, waits_for(job.status)
    why = ""
    if job.wants_suspend:
        why = " (the job is suspended)"
    elif following is not None:
        why = f" (the next attempt starts at {time_text(moment(following.not_before))})"
    elif waits is not None:
        why = f" ({waits.type}={waits.status} {waits.reason}: {one_line(waits.message)})"
    which = "head pod" if options.pool is None else f"pod {options.index} of pool {options.pool}"
    of = "" if options.attempt is None else f" of attempt {options.attempt}"
    return f"the {which}{of} does not exist yet{why}"


def _check_options(job: StoredJob, options: LogOptions) -> None:
    """Raises RejectedError for an attempt that has not started, and for a pool, index or container that does not
    exist."""
    newest = newest_attempt(job)
    num_attempts = newest.number if newest else 0
    if options.attempt is not None and not 1 <= options.attempt <= num_attempts:
        advice = f"use a number from 1 to {num_attempts}" if num_attempts else "wait for the first attempt"
        raise RejectedError(
            f"{job.where}: has had no attempt {options.attempt} (seen: --attempt {options.attempt}); {advice}"
        )
    if options.index < 0:
        raise RejectedError(f"--index: must be at least 0 (seen: {options.index})")
    if options.pool is None:
        return
    pools = job.pool_sizes
    if options.pool not in pools:
        raise RejectedError(f"{job.where}: has no pool {options.pool}; use one of --pool {', '.join(pools)}")
    if options.index >= pools[options.pool]:
        raise RejectedError(
            f"{job.where}: pool {options.pool} has {pools[options.pool]} pods (seen: --index {options.index});"
            " the first pod has --index 0"
        )
    if options.container is Container.DRIVER:
        raise RejectedError("--container driver: only the head pod has it; remove --pool, or use --container ray")


def _which_attempts(job: StoredJob, source: _Source, options: LogOptions) -> Iterator[str]:
    """Lines that say which attempts the log belongs to, if it is not only the newest or the selected one."""
    newest, shown = newest_attempt(job), [each for each in job.status.attempts if each.number == source.attempt]
    if newest is None or not shown:
        return
    if options.attempt is None and newest.number != source.attempt:
        text = f"attempt {newest.number} has no such pod ({attempt_text(newest)}); this is the log of attempt"
        yield f"{text} {source.attempt} ({attempt_text(shown[0])})"
    of = shown[0].cluster, shown[0].cluster_uid
    sharing = [str(each.number) for each in job.status.attempts if (each.cluster, each.cluster_uid) == of]
    if len(sharing) > 1:
        yield f"attempts {', '.join(sharing)} ran in this pod; the log contains all of them"


def _where_copies_are(job: StoredJob, source: _Source, options: LogOptions) -> list[str]:
    """Lines that say where copies of a deleted log are, and how the attempt ended, from the job's status."""
    record = next((each for each in job.status.attempts if each.number == source.attempt), None)
    end, newest = job.ending, newest_attempt(job)
    if source.attempt is None or (record is not None and record.submissions == 0):
        what = "the job" if source.attempt is None else f"attempt {source.attempt}"
        lines = [f"{job.where}: {what} ended before its trainer was started, so there is no log"]
    else:
        lines = [f"{job.where}: the pods of attempt {source.attempt} and their logs were deleted"]
        lines += _copy_lines(job, source.attempt, options)
    if end is not None and (newest is None or source.attempt == newest.number):
        lines += [f"{end.kind}, {end.reason}:", printable(end.message)]
    elif record is not None:
        lines += [f"attempt {record.number}, {attempt_text(record)}:", printable(record.message or "")]
    return lines


def _copy_lines(job: StoredJob, attempt: int, options: LogOptions) -> Iterator[str]:
    """Lines with the location of the log's copies and the command that prints them; none if the job has no storage."""
    storage = job.storage
    if storage is None:
        return
    name, logs = job.metadata.name, POD_LOGS_FOLDER.removeprefix(POD_STORAGE_FOLDER)
    if options.container_name == Container.DRIVER:
        yield f"a copy of the driver's log is at {storage_uri(job)}{logs}/{attempt_logs_folder(attempt)}/driver.log"
    else:
        yield f"copies of the workers' logs are in {storage_uri(job)}{logs}/"
    if storage.s3 is not None:
        yield f"to copy them, run: rljob get-results {name} --only logs"
        return
    claim = storage.persistent_volume_claim
    folder = "FOLDER" if storage.sub_path is None else f"FOLDER/{shlex.quote(storage.sub_path)}"
    which = f" --attempt {attempt}" if options.pool is None else f" --pool {options.pool} --index RANK"
    yield f"to print it, mount claim {claim} at FOLDER and run: rljob logs {name} --storage {folder}{which}"
