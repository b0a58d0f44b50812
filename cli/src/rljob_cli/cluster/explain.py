"""`rljob explain`: explains what a job waits for or why it failed, what to do, and what happens next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

from rich.console import Console
from rich.text import Text

from rljob.cluster import Cluster, PlacedPods
from rljob.errors import NotAllowedError
from rljob.job_attempts import attempt_under_way, missing_capacity, newest_attempt, stop_asked_at, waits_in_queue
from rljob.job_conditions import Ending, condition, moment, waits_for
from rljob.kubernetes_models import ContainerStatus, Event, Pod
from rljob.plain_text import age, one_line, shortened, time_text
from rljob.polling import utc_now
from rljob.stored_job import StoredJob
from rljob_api.conditions import ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS
from rljob_api.standard_streams import printable
from rljob_api.v1alpha1.status import Attempt, Condition, NextAttempt, StopRequest
from rljob_cli.cluster.explain_memory import memory_text
from rljob_cli.cluster.next_steps import what_is_next
from rljob_cli.cluster.status import progress_text
from rljob_cli.errors import CliError

_MAX_PODS = 8
_MAX_WARNINGS = 5
_MAX_HOLDERS = 10
_PROCESSED_WITHIN_SECONDS = 10
"""A running operator processes a new job within this time."""


def explain_job(cluster: Cluster, name: str, console: Console, now: datetime | None = None) -> None:
    """Prints everything that helps to understand one job.

    Raises:
        JobNotFoundError: there is no such job.
    """
    now = now or utc_now()
    job = cluster.job(name)
    pods: list[Pod] = []
    warnings: list[Event] = []
    unreadable = ""
    try:
        pods = cluster.pods(job)
        warnings = cluster.warnings(job.metadata.namespace)
    except NotAllowedError as error:
        unreadable = f"\nPods and events could not be read: {error}"
    holders = None
    if job.status.waiting_since is not None and not waits_in_queue(job):
        with suppress(NotAllowedError):
            holders = cluster.placed_worker_pods(job.metadata.namespace)
    # Only warnings about RayClusters and pods, because the operator's events about the job repeat the conditions.
    names = {attempt.cluster for attempt in job.status.attempts} | {pod.metadata.name for pod in pods}
    warnings = [event for event in warnings if event.involved_object.name in names]
    for line in explanation(job, pods, warnings, now, cluster.flags, holders):
        console.print(line, soft_wrap=True)
    if unreadable:
        console.print(Text(unreadable, "yellow"), soft_wrap=True)


def explain_reason(text: str, console: Console) -> None:
    """Prints what a reason means and what to do about it.

    Raises:
        CliError: there is no such reason.
    """
    found = next((reason for reason in Reason if reason.lower() == text.lower()), None)
    if found is None:
        raise CliError(f"--reason {text}: unknown reason; use one of {', '.join(Reason)}")
    console.print(Text(f"{found}: {EXPLANATIONS[found].means}"), soft_wrap=True)
    console.print(Text(f"What to do: {EXPLANATIONS[found].advice}"), soft_wrap=True)


def explanation(
    job: StoredJob,
    pods: list[Pod],
    warnings: list[Event],
    now: datetime,
    flags: str = "",
    holders: PlacedPods | None = None,
) -> Iterator[Text]:
    """The whole text.

    Args:
        warnings: Events about the job's RayClusters and pods, oldest first.
        flags: Options that suggested commands need for the same cluster and namespace.
        holders: The worker pods of the namespace that hold GPUs, if the job waits for capacity; None if unknown.
    """
    yield Text.assemble((job.where, "bold"), f": {job.phase}, {age(job.metadata.creation_timestamp, now)} old")
    progress = progress_text(job)
    if progress is not None:
        yield Text(f"  {progress}")
    if job.unparsed_fields:
        yield Text(f"  {job.unparsed_note}", "yellow")
    yield Text()
    yield from _headline(job, now)
    yield from _alarms_text(job)
    yield from _queue_text(job)
    yield from _capacity_text(job, holders, now)
    yield from memory_text(job)
    waiting = [pod for pod in pods if not pod.is_ready and pod.metadata.deletion_timestamp is None]
    troubles = {pod.metadata.name: pod_trouble(pod) for pod in waiting} if job.ending is None else {}
    if troubles:
        yield Text("\nPods that are not ready:", "bold")
        for pod in waiting[:_MAX_PODS]:
            yield Text(f"  {pod.metadata.name} ({pod.group}): {shortened(one_line(troubles[pod.metadata.name]))}")
        if len(waiting) > _MAX_PODS:
            yield Text(f"  and {len(waiting) - _MAX_PODS} more")
    others = [event for event in warnings if not _repeats_pod_status(event, troubles)]
    if others:
        yield Text("\nLatest warnings:", "bold")
        for event in others[-_MAX_WARNINGS:]:
            yield Text(f"  {age(event.seen, now):>5}  {_event_text(event)}")
    yield Text("\nResults:" if _has_only_results(job) else "\nWhat comes next:", "bold")
    for line in what_is_next(job, now, flags):
        yield Text(f"  {line}")


def _has_only_results(job: StoredJob) -> bool:
    """Whether the job is Complete and stays as it is, so that nothing comes next."""
    end = job.ending
    is_being_deleted = job.metadata.deletion_timestamp is not None
    is_complete = end is not None and end.is_complete and not is_being_deleted
    return is_complete and job.run_policy.ttl_seconds_after_finished is None


def pod_trouble(pod: Pod) -> str:
    """Why a pod is not ready: the message of the scheduler or the kubelet; the pod's phase if there is no message."""
    status = pod.status
    for found in status.conditions:
        if found.type == "PodScheduled" and found.status == "False":
            return _reason_and_message(found.reason, found.message)
    if status.reason or status.message:
        return _reason_and_message(status.reason, status.message)
    for container in status.init_container_statuses:
        if container.state.running is not None:
            return f"init container {container.name} is still running"
    for container in (*status.init_container_statuses, *status.container_statuses):
        trouble = _container_trouble(container)
        if trouble:
            return f"container {container.name}: {trouble}"
    return status.phase


def _container_trouble(container: ContainerStatus) -> str:
    """Why a container is not ready; empty if it is ready, or if it only waits for the init containers."""
    state = container.state
    if state.waiting is not None and state.waiting.reason != "PodInitializing":
        trouble = _reason_and_message(state.waiting.reason, state.waiting.message)
        last = container.last_state.terminated
        return f"{trouble}; it last terminated with {last.reason}, exit code {last.exit_code}" if last else trouble
    if state.terminated is not None and state.terminated.exit_code != 0:
        ended = state.terminated
        return f"{_reason_and_message(ended.reason, ended.message)} (exit code {ended.exit_code})"
    return "is running, but not ready" if state.running is not None and not container.ready else ""


def _reason_and_message(reason: str, message: str) -> str:
    return one_line(": ".join(part for part in (reason, message) if part))


def _repeats_pod_status(event: Event, troubles: dict[str, str]) -> bool:
    """Whether the event only repeats a pod's status, as the kubelet's events often do."""
    message = one_line(event.message).removeprefix("Error: ")
    return message in troubles.get(event.involved_object.name, "")


def _event_text(event: Event) -> str:
    times = f" (x{event.times})" if event.times > 1 else ""
    about = f"{event.involved_object.kind} {event.involved_object.name}"
    return f"{one_line(f'{about}: {event.reason}{times}')}: {shortened(one_line(event.message))}"


def _headline(job: StoredJob, now: datetime) -> Iterator[Text]:
    """The most important fact about the job, and what to do about it."""
    status, attempt, end = job.status, attempt_under_way(job), job.ending
    found = waits_for(status)
    if job.metadata.deletion_timestamp is not None:
        since = age(job.metadata.deletion_timestamp, now)
        yield Text(f"The job is being deleted: the deletion started {since} ago.", "bold")
        yield Text("What to do: Wait; its cluster and pods are deleted after the RLJob.", "cyan")
    elif end is not None:
        yield from _end_text(job, end, now)
    elif attempt is not None and attempt.stop is not None:
        yield from _stop_text(attempt, attempt.stop, now)
    elif stop_asked_at(job) is not None:
        yield Text("A user asked to stop the job; the operator has not applied the request yet.", "bold")
        yield _advice(Reason.STOPPED_BY_USER)
    elif job.wants_suspend:
        yield from _suspension_text(job, now)
    elif status.next_attempt is not None:
        yield from _waiting_for_attempt_text(job, status.next_attempt, now)
    elif found is not None:
        named = f" (attempt {attempt.number})" if attempt is not None and attempt.number > 1 else ""
        yield Text(f"The job is waiting{named}: {_condition_text(found, attempt, now)}", "bold")
        yield from _message_lines(found.message)
        yield from _unobserved_text(attempt, now)
        yield _advice(found.reason)
    elif not status.conditions:
        yield from _new_job_text(job, now)
    else:
        yield Text(f"{_unblocked_text(job, attempt, now)}.", "bold")
        yield from _unobserved_text(attempt, now)
        checkpointed = condition(status, ConditionType.CHECKPOINTED)
        if checkpointed is not None and checkpointed.reason == Reason.NO_CHECKPOINT_YET:
            yield Text(f"No checkpoint yet: {EXPLANATIONS[Reason.NO_CHECKPOINT_YET].advice}")


def _alarms_text(job: StoredJob) -> Iterator[Text]:
    """The alarms of the training: the first one with its number and what to do, and the names of the others."""
    found = condition(job.status, ConditionType.TRAINING_HEALTHY)
    if not job.status.alarms or found is None:
        return
    first, *others = job.status.alarms
    yield Text()
    yield Text(one_line(f"Alarm of the training: {first}. It stops nothing."), "yellow")
    yield from _message_lines(found.message)
    yield _advice(found.reason)
    if others:
        yield Text(
            one_line(f"Other alarms: {', '.join(others)}; `rljob explain --reason REASON` explains them."), "yellow"
        )


def _queue_text(job: StoredJob) -> Iterator[Text]:
    """For a job in a queue without a message of Kueue: what this may mean, and what to check."""
    found = waits_for(job.status)
    is_queued = attempt_under_way(job) is not None and found is not None and found.reason == Reason.QUEUED
    if not is_queued or found is None or ": " in found.message:
        return
    namespace, check = job.metadata.namespace, "kubectl get workloads.kueue.x-k8s.io"
    yield Text(
        "  Kueue's reason is not known. If several equal jobs do not fit, Kueue gives it only for the first one."
    )
    yield Text(
        "  The job waits for ever if Kueue is not installed, or if its integration ray.io/raycluster is off: then"
        f" `{check} -n {namespace}` fails, or lists nothing for the RayCluster; ask an administrator"
    )


def _capacity_text(job: StoredJob, holders: PlacedPods | None, now: datetime) -> Iterator[Text]:
    """For a job that waits for quota or capacity: since when, and which other jobs of its namespace hold GPUs."""
    if job.status.waiting_since is None:
        return
    since = moment(job.status.waiting_since)
    yield Text(f"  It has waited for {missing_capacity(job)} since {time_text(since)}, for {age(since, now)}.")
    if holders is None:
        return
    others = [f"{name} ({number})" for name, number in holders.by_job.items() if name != job.metadata.name]
    more = ", ..." if len(others) > _MAX_HOLDERS or not holders.is_complete else ""
    held = ", ".join(others[:_MAX_HOLDERS]) + more if others else "none" if holders.is_complete else "unknown"
    yield Text(f"  Other jobs of this namespace that hold GPUs (worker pods on nodes): {held}.")


def _end_text(job: StoredJob, end: Ending, now: datetime) -> Iterator[Text]:
    newest = newest_attempt(job)
    attempt = f" in attempt {newest.number}" if newest is not None else ""
    yield Text(f"The job has finished{attempt}: {end.kind}, reason {end.reason}, {age(end.at, now)} ago", "bold")
    yield from _message_lines(end.message)
    yield _advice(end.reason)


def _stop_text(attempt: Attempt, stop: StopRequest, now: datetime) -> Iterator[Text]:
    since = age(moment(stop.requested_at), now)
    yield Text(f"Attempt {attempt.number} has been stopping for {since}, reason {one_line(stop.reason)}", "bold")
    if stop.message is not None:
        yield from _message_lines(stop.message)
    sent = f"Ray was asked {age(moment(stop.sent_at), now)} ago" if stop.sent_at else "Ray could not be asked yet"
    yield Text(f"  {sent} to stop the trainer of this attempt")
    yield _advice(stop.reason)


def _suspension_text(job: StoredJob, now: datetime) -> Iterator[Text]:
    since = job.status.suspended_at
    if since is None:
        yield Text("The job is being suspended.", "bold")
        yield _advice(Reason.SUSPENDING)
    else:
        yield Text(f"The job is suspended, for {age(moment(since), now)}, and has no pods.", "bold")
        yield _advice(Reason.SUSPENDED)


def _waiting_for_attempt_text(job: StoredJob, following: NextAttempt, now: datetime) -> Iterator[Text]:
    newest = newest_attempt(job)
    which = f"attempt {newest.number} has ended" if newest is not None else "an attempt has ended"
    since = f", {age(moment(newest.ended), now)} ago" if newest is not None and newest.ended else ""
    why = f"{following.reason} ({following.failure_class})"
    yield Text(f"The job is waiting for its next attempt: {which}, reason {one_line(why)}{since}", "bold")
    yield from _message_lines(following.message)
    yield _advice(following.reason)


def _unobserved_text(attempt: Attempt | None, now: datetime) -> Iterator[Text]:
    if attempt is not None and attempt.state_unknown_since is not None:
        since = moment(attempt.state_unknown_since)
        yield Text(
            f"  The trainer of attempt {attempt.number} has not been observed since {time_text(since)},"
            f" for {age(since, now)}"
        )


def _new_job_text(job: StoredJob, now: datetime) -> Iterator[Text]:
    seconds = (now - job.metadata.creation_timestamp).total_seconds()
    if job.other_controller is not None:
        yield Text(f"The operator ignores the job: spec.managedBy is {one_line(job.other_controller)}.", "bold")
        return
    yield Text("No operator has processed the job yet.", "bold")
    if seconds > _PROCESSED_WITHIN_SECONDS:
        yield Text(
            "What to do: check that the operator is running and handles this namespace (Helm value watchNamespaces):"
            " kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator"
        )


def _unblocked_text(job: StoredJob, attempt: Attempt | None, now: datetime) -> str:
    """The state of a job that nothing blocks. It does not say whether the job makes progress: a step may take hours,
    and a trainer that has stalled looks the same until the stall deadline."""
    found, progress = condition(job.status, ConditionType.PROGRESSING), job.status.progress
    since = "" if found is None else f": {found.reason} for {age(moment(found.last_transition_time), now)}"
    named = f", attempt {attempt.number}" if attempt is not None and attempt.number > 1 else ""
    if found is not None and found.reason == Reason.TRAINING:
        step = "" if progress is None else f"step {progress.step} of {progress.total_steps}, "
        return f"Running: {step}{_last_progress(job, attempt, now)}{named}"
    if found is None or found.reason == Reason.STARTING:
        return f"Nothing blocks the job; it waits for its first step{since}{named}"
    return f"Nothing blocks the job{since}{named}"


def _last_progress(job: StoredJob, attempt: Attempt | None, now: datetime) -> str:
    """The age of the newest sign of progress: the time at which the trainer finished a step, or the time at which the
    operator last saw a changed run state (recorded to the minute)."""
    seen = [attempt.progressed_at] if attempt is not None and attempt.progressed_at is not None else []
    seen += [job.status.progress.updated_at] if job.status.progress is not None else []
    return f"last progress {age(max(map(moment, seen)), now)} ago" if seen else "no progress is recorded"


def _condition_text(found: Condition, attempt: Attempt | None, now: datetime) -> str:
    """The condition, and how long the attempt has waited for it. The time begins with the attempt if the condition
    changed before the attempt."""
    since = moment(found.last_transition_time)
    if attempt is not None and attempt.number > 1:
        since = max(since, moment(attempt.started))
    return f"{found.type}={found.status}, reason {found.reason}, for {age(since, now)}"


def _message_lines(message: str) -> Iterator[Text]:
    for line in printable(message).strip().split("\n"):
        yield Text(f"  {line}")


def _advice(reason: str) -> Text:
    known = EXPLANATIONS[Reason(reason)].advice if reason in list(Reason) else None
    return Text(f"What to do: {known or 'Update rljob; this version does not know this reason.'}", "cyan")
