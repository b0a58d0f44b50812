"""`rljob explain`, for a job that does not do what was wanted: what it waits for, why, what to do, what is next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from rich.console import Console
from rich.text import Text

from rljob_api.conditions import ConditionType, Reason
from rljob_api.explanations import EXPLANATIONS
from rljob_api.printable import printable
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_api.v1alpha1.status import Condition
from rljob_cli.cluster import Cluster
from rljob_cli.errors import CliError, NotAllowedError
from rljob_cli.job_state import condition, ending, is_complete, is_true, moment, phase, storage_uri, waits_for
from rljob_cli.kube_objects import ContainerStatus, Event, Pod, StoredJob
from rljob_cli.plain_text import age, length, one_line, shortened
from rljob_cli.status import progress_text
from rljob_cli.watching import utc_now

_MAX_PODS = 8
_MAX_WARNINGS = 5
_UNSEEN_SECONDS = 10
"""An operator that works has looked at a job by then."""

_NEXT = {
    ConditionType.SPEC_VALID: "the operator makes its RayCluster",
    ConditionType.CLUSTER_READY: "the operator compares Ray's nodes with the pools, then submits the training",
    ConditionType.PLACEMENT_FEASIBLE: "the operator submits the training",
    ConditionType.JOB_SUBMITTED: "the trainer loads the model and starts its workers",
    ConditionType.PROGRESSING: "the trainer trains",
}


def explain_job(cluster: Cluster, name: str, console: Console, now: datetime | None = None) -> None:
    """Prints everything that helps to understand one job.

    Raises:
        JobNotFoundError: there is no such job.
    """
    now = now or utc_now()
    job = cluster.job(name)
    pods: list[Pod] = []
    warnings: list[Event] = []
    unknown = ""
    try:
        pods = cluster.pods(job)
        warnings = cluster.warnings(job.metadata.namespace)
    except NotAllowedError as error:
        unknown = f"\nMore cannot be said: {error}"
    # What the operator itself says about the job stands in the conditions.
    about = {attempt.cluster for attempt in job.status.attempts} | {pod.metadata.name for pod in pods}
    warnings = [event for event in warnings if event.involved_object.name in about]
    for line in explanation(job, pods, warnings, now):
        console.print(line, soft_wrap=True)
    if unknown:
        console.print(Text(unknown, "yellow"), soft_wrap=True)


def explain_reason(text: str, console: Console) -> None:
    """Prints what a reason means and what to do about it.

    Raises:
        CliError: there is no such reason.
    """
    found = next((reason for reason in Reason if reason.lower() == text.lower()), None)
    if found is None:
        raise CliError(f"--reason {text}: there is no such reason; it is one of {', '.join(Reason)}")
    console.print(Text(f"{found}: {EXPLANATIONS[found].means}"), soft_wrap=True)
    console.print(Text(f"What to do: {EXPLANATIONS[found].advice}"), soft_wrap=True)


def explanation(job: StoredJob, pods: list[Pod], warnings: list[Event], now: datetime) -> Iterator[Text]:
    """The whole text. `warnings`: those about the job's clusters and pods, oldest first."""
    yield Text.assemble((job.where, "bold"), f": {phase(job)}, {age(job.metadata.creation_timestamp, now)} old")
    progress = progress_text(job)
    if progress is not None:
        yield Text(f"  {progress}")
    yield Text()
    yield from _headline(job, now)
    waiting = [pod for pod in pods if not pod.is_ready and pod.metadata.deletion_timestamp is None]
    troubles = {pod.metadata.name: pod_trouble(pod) for pod in waiting} if ending(job.status) is None else {}
    if troubles:
        yield Text("\nPods that are not ready:", "bold")
        for pod in waiting[:_MAX_PODS]:
            yield Text(f"  {pod.metadata.name} ({pod.group}): {shortened(troubles[pod.metadata.name])}")
        if len(waiting) > _MAX_PODS:
            yield Text(f"  and {len(waiting) - _MAX_PODS} more")
    new = [event for event in warnings if not _says_what_is_known(event, troubles)]
    if new:
        yield Text("\nLatest warnings:", "bold")
        for event in new[-_MAX_WARNINGS:]:
            yield Text(f"  {age(event.seen, now):>5}  {_warning(event)}")
    yield Text("\nWhat comes next:", "bold")
    for line in _what_is_next(job, now):
        yield Text(f"  {line}")


def pod_trouble(pod: Pod) -> str:
    """Why a pod is not ready, in the words of the scheduler or the kubelet."""
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
    state = container.state
    if state.waiting is not None and state.waiting.reason != "PodInitializing":
        trouble = _reason_and_message(state.waiting.reason, state.waiting.message)
        last = container.last_state.terminated
        return f"{trouble}; it ended with {last.reason}, exit code {last.exit_code}" if last else trouble
    if state.terminated is not None and state.terminated.exit_code != 0:
        ended = state.terminated
        return f"{_reason_and_message(ended.reason, ended.message)} (exit code {ended.exit_code})"
    return "runs, but is not ready" if state.running is not None and not container.ready else ""


def _reason_and_message(reason: str, message: str) -> str:
    return one_line(": ".join(part for part in (reason, message) if part))


def _says_what_is_known(event: Event, troubles: dict[str, str]) -> bool:
    """The kubelet says the same thing in a pod's status and in several events."""
    message = one_line(event.message).removeprefix("Error: ")
    return message in troubles.get(event.involved_object.name, "")


def _warning(event: Event) -> str:
    times = f" (x{event.times})" if event.times > 1 else ""
    about = f"{event.involved_object.kind} {event.involved_object.name}"
    return f"{about}: {event.reason}{times}: {shortened(one_line(event.message))}"


def _headline(job: StoredJob, now: datetime) -> Iterator[Text]:
    """The condition that matters most, and what to do about it."""
    status = job.status
    found = ending(status) or waits_for(status)
    if found is not None:
        yield from _condition_text(found, now, "It has ended" if ending(status) else "It is waiting for")
    elif not status.conditions:
        seconds = (now - job.metadata.creation_timestamp).total_seconds()
        yield Text("No operator has looked at it yet.", "bold")
        if seconds > _UNSEEN_SECONDS:
            yield Text(
                "What to do: see whether the operator runs and handles this namespace (Helm value watchNamespaces):"
                " kubectl get pods --all-namespaces -l app.kubernetes.io/name=rljob-operator"
            )
    else:
        yield Text(f"Nothing keeps it from going on{_how_it_goes(job, now)}.", "bold")
        checkpointed = condition(status, ConditionType.CHECKPOINTED)
        if checkpointed is not None and checkpointed.reason == Reason.NO_CHECKPOINT_YET:
            yield Text(f"No checkpoint yet: {EXPLANATIONS[Reason.NO_CHECKPOINT_YET].advice}")


def _how_it_goes(job: StoredJob, now: datetime) -> str:
    found = condition(job.status, ConditionType.PROGRESSING)
    return f": {found.reason} for {age(moment(found.last_transition_time), now)}" if found is not None else ""


def _condition_text(found: Condition, now: datetime, lead: str) -> Iterator[Text]:
    since = age(moment(found.last_transition_time), now)
    yield Text(f"{lead}: {found.type}={found.status}, reason {found.reason}, for {since}", "bold")
    for line in printable(found.message).strip().split("\n"):
        yield Text(f"  {line}")
    known = EXPLANATIONS[Reason(found.reason)].advice if found.reason in list(Reason) else None
    yield Text(f"What to do: {known or 'Update rljob; this version does not know the reason.'}", "cyan")


def _what_is_next(job: StoredJob, now: datetime) -> Iterator[str]:
    status = job.status
    if ending(status) is not None:
        yield from _after_the_end(job)
        return
    if job.metadata.deletion_timestamp is not None:
        yield "it is being deleted; its pods stop within their grace period"
        return
    if not status.conditions:
        yield "the operator checks it and makes its RayCluster"
    else:
        yield _next_step(job, waits_for(status))
    yield from _deadlines(job, now)


def _next_step(job: StoredJob, waits: Condition | None) -> str:
    if waits is None:
        return "Complete when the last step is done, with the export at status.exportUri"
    if waits.reason == Reason.STOPPING:
        grace_seconds = job.spec().run_policy.grace_period_seconds
        return f"the trainer saves a checkpoint and ends, within {length(grace_seconds)} (runPolicy.gracePeriodSeconds)"
    if is_true(job.status, ConditionType.JOB_SUBMITTED):
        return "the trainer was started before this; it goes on, or Failed says how it ended"
    return f"when {waits.type} is True: {_NEXT[ConditionType(waits.type)]}"


def _deadlines(job: StoredJob, now: datetime) -> Iterator[str]:
    """When the job fails by itself."""
    policy, attempts = job.spec().run_policy, job.status.attempts
    if not attempts:
        return
    if not is_true(job.status, ConditionType.JOB_SUBMITTED):
        yield _deadline("the trainer does not run by", attempts[-1].started, policy.provisioning_deadline_seconds, now)
    if policy.active_deadline_seconds is not None:
        yield _deadline("it has not ended by", attempts[0].started, policy.active_deadline_seconds, now)


def _deadline(cause: str, started: str, deadline_seconds: int, now: datetime) -> str:
    end = moment(started) + timedelta(seconds=deadline_seconds)
    left = (end - now).total_seconds()
    return f"Failed if {cause} {end:%Y-%m-%dT%H:%M:%SZ} ({f'in {length(left)}' if left > 0 else 'now'})"


def _after_the_end(job: StoredJob) -> Iterator[str]:
    name, status = job.metadata.name, job.status
    if is_complete(status):
        yield (
            f"the model: {status.export_uri}"
            if status.export_uri
            else "no model was exported (checkpoint.exportHuggingFace)"
        )
    else:
        yield f"remove the cause, then `rljob delete {name}` and `rljob submit` again"
        if status.checkpoint is not None:
            yield f"it goes on from step {status.checkpoint.step}, unless checkpoint.resume is Never"
    folder = storage_uri(job)
    if folder is not None:
        yield f"results, logs and checkpoints: {folder}"
    if job.spec().run_policy.cleanup is Cleanup.KEEP_CLUSTER:
        yield f"its cluster is kept, GPUs included; `rljob delete {name}` frees them"
