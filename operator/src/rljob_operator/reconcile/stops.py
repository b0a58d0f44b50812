"""Decides whether an attempt should stop, and stops it.

The operator asks a running trainer to stop on a user's request, for a suspension, at the active deadline, after a
stall, or when all worker pods of an elastic job are ready again. An attempt whose trainer does not start, does not exit
or cannot be observed ends at a deadline.
"""

from __future__ import annotations

from rljob_api.conditions import NO_ROOM, Reason
from rljob_api.constants import POD_LOGS_FOLDER, STACKS_SECONDS, attempt_logs_folder
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import AttemptState, StopRequest
from rljob_operator.reconcile.attempt_endings import Ending, reason_of_stop
from rljob_operator.reconcile.cluster import (
    SHORT_SILENCE_SECONDS,
    disrupted_pod,
    head_pod,
    readiness_problem,
    was_head_replaced,
)
from rljob_operator.reconcile.creation import create_cluster, should_use_all_pods, spec_of_attempt
from rljob_operator.reconcile.decision import DumpStacks, Effect, StopRayJob
from rljob_operator.reconcile.observed import EffectKind, Observed, Reachability
from rljob_operator.reconcile.status_draft import (
    MAX_ATTEMPT_MESSAGE,
    StatusDraft,
    beginning_of,
    moment,
    seconds_since,
    timestamp,
)
from rljob_operator.reconcile.trainer import (
    claim_uri,
    newest_ray_job,
    newest_submission,
    seconds_since_termination,
    seconds_without_progress,
)

_MAY_START_LATER = (Reason.CREATING, Reason.PODS_PENDING, Reason.INFRASTRUCTURE_ERROR)
"""Reasons for which a new attempt may start although this one did not: slow or failing nodes, not the job."""
NAME_CONFLICT_SECONDS = 60
"""How long a RayCluster of another owner may have the name of the attempt's cluster before the attempt ends: after a
job is deleted and created again, the cluster of the deleted job is deleted some time later."""


def request_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> None:
    """Records that the attempt should stop, if there is a reason, and when the operator asks the trainer to stop. The
    effect follows in `stop_when_due`."""
    ray_job = newest_ray_job(draft, observed)
    if ray_job is not None and ray_job.status.has_ended and not _is_evicted(draft, observed):
        # The trainer has already exited, so it is not asked to stop. A user's request to stop the job is applied
        # between attempts. But if the cluster was evicted, the trainer exited for this reason.
        return
    if draft.attempt.stop is None:
        found = _reason_to_stop(draft, observed, policy)
        if found is None:
            return
        reason, message = found
        shortened = beginning_of(message, MAX_ATTEMPT_MESSAGE) if message is not None else None
        request = StopRequest(reason=reason.value, message=shortened, requested_at=timestamp(draft.now))
        draft.change_attempt(stop=request, state=AttemptState.STOPPING.value)
    stop = draft.attempt.stop
    if stop is None or observed.ray.reachability is not Reachability.OK:
        return
    if stop.sent_at is None or _restarts_time_for_stacks(observed, stop, stop.sent_at):
        draft.change_attempt(stop=stop.model_copy(update={"sent_at": timestamp(draft.now)}))


def stop_when_due(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Effect, ...]:
    """Asks a trainer that should stop to do so, in every pass until it has exited; repeated requests do no harm. A
    stalled trainer first has time to write its stack traces. A trainer that has reported its end, but does not exit
    within the grace period, is also asked to stop."""
    ray_job, attempt = newest_ray_job(draft, observed), draft.attempt
    if ray_job is None or ray_job.status.has_ended:
        return ()
    waited_seconds = seconds_since_termination(draft)
    hangs = waited_seconds is not None and waited_seconds >= policy.grace_period_seconds
    if attempt.stop is None and not hangs:
        return ()
    name = newest_submission(draft, observed.job)
    if _stacks_are_due(draft):
        return (DumpStacks(name, attempt.number),)
    return (StopRayJob(name),)


def ending_by_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy, waits_for: str) -> Ending | None:
    """The ending of an attempt that should stop; None while it has time left. Without a running trainer the attempt
    ends immediately, else after the grace period. The grace period starts when the operator asks the trainer to stop,
    or, as long as Ray cannot be reached, when the operator decided to stop it. `waits_for`: what the attempt waits
    for."""
    stop = draft.attempt.stop
    if stop is None:
        return None
    reason = reason_of_stop(stop)
    if draft.attempt.running_since is None and reason is Reason.EVICTED:
        return _ending_by_eviction_before_start(draft, observed, policy, waits_for)
    if draft.attempt.running_since is None:
        return Ending(reason, f"the attempt was stopped before its trainer started: {waits_for}")
    if _seconds_to_end_of_stop(draft, observed, stop, policy) > 0:
        return None
    limit = _stop_limit_seconds(stop, policy)
    if stop.sent_at is None:
        text = f"the trainer could not be asked to stop within {limit} s: Ray's dashboard is unreachable"
        return Ending(reason, text)
    why = f"{stop.message}; " if stop.message is not None else ""
    return Ending(reason, f"{why}the trainer was asked to stop and did not exit within {limit} s")


def _ending_by_eviction_before_start(
    draft: StatusDraft, observed: Observed, policy: RunPolicy, waits_for: str
) -> Ending:
    """The ending of an attempt that was evicted before its trainer started. Kueue may do this because the pods were not
    ready in time, again and again: the provisioning deadline counts over all such attempts in a row."""
    spec, cluster = observed.job.spec, observed.cluster(draft.attempt.cluster)
    error = cluster.pod_creation_error if cluster is not None else None
    pods = observed.pods_of(draft.attempt.cluster)
    problem = readiness_problem(spec_of_attempt(spec, draft.attempt), pods, error) if spec is not None else None
    text = f"the attempt was evicted before its trainer started: {waits_for}"
    if problem is None:
        return Ending(Reason.EVICTED, text)
    text += f"; {problem.message}"
    active = seconds_since(draft.counts_since, draft.now) if draft.counts_since is not None else 0.0
    reason = _reason_at_deadline(draft, observed, problem.reason)
    is_late = draft.counters.evicted_seconds + active >= policy.provisioning_deadline_seconds
    return Ending(reason if is_late and reason not in (*NO_ROOM, Reason.DISRUPTED) else Reason.EVICTED, text)


def exceeded_deadline(
    draft: StatusDraft,
    observed: Observed,
    policy: RunPolicy,
    waits_for: tuple[Reason | None, str],
    unobservable: tuple[Reason, str] | None,
) -> Ending | None:
    """The ending by the deadline that passed first; None if no deadline has passed. `waits_for`: what the attempt waits
    for, with the reason of the condition if one is not True; `unobservable`: why its trainer cannot be observed."""
    endings = _endings_by_deadline(draft, observed, policy, waits_for, unobservable)
    due = [(seconds, ending) for seconds, ending in endings if seconds <= 0]
    return min(due, key=lambda pair: pair[0])[1] if due else None


def seconds_to_next_limit(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> float | None:
    """Seconds until the next time at which the current attempt may have to stop or end; None if there is none."""
    limits = [seconds for seconds, _ in _endings_by_deadline(draft, observed, policy, (None, ""), None)]
    attempt, grace = draft.attempt, policy.grace_period_seconds
    if attempt.stop is not None:
        limits.append(_seconds_to_end_of_stop(draft, observed, attempt.stop, policy))
    if attempt.end_reported_at is not None:
        waited = seconds_since(attempt.end_reported_at, draft.now)
        limits += [grace - waited, 2 * grace - waited]
    if attempt.running_since is not None:
        limits.append(policy.stall_deadline_seconds - seconds_without_progress(draft))
    until_active_deadline = _seconds_to_active_deadline(draft, policy)
    if until_active_deadline is not None:
        limits.append(until_active_deadline)
    return min((seconds for seconds in limits if seconds > 0), default=None)


def _reason_to_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Reason, str | None] | None:
    """Why the attempt should stop, and a message; None if there is no reason. A user's stop request is recorded as
    applied."""
    if draft.has_stop_request:
        draft.record_stop_applied()
        return Reason.STOPPED_BY_USER, None
    if observed.job.should_be_suspended:
        return Reason.SUSPENDED, None
    if _is_evicted(draft, observed):
        cluster = observed.cluster(draft.attempt.cluster)
        workload = cluster.workload if cluster is not None else None
        return Reason.EVICTED, (workload.evicted_because or None) if workload is not None else None
    if _is_queue_changed(draft, observed):
        return Reason.QUEUE_CHANGED, None
    left = _seconds_to_active_deadline(draft, policy)
    if left is not None and left <= 0:
        return Reason.ACTIVE_DEADLINE_EXCEEDED, None
    disruption = _disruption(draft, observed)
    if disruption is not None:
        return Reason.DISRUPTED, disruption
    if _is_stalled(draft, observed, policy):
        return Reason.STALLED, _stall_message(draft, observed)
    # With a spec that cannot be read, the next attempt would wait instead of using all worker pods.
    if observed.job.spec is not None and newest_ray_job(draft, observed) is not None:
        return (Reason.RESIZED, None) if should_use_all_pods(draft, policy) else None
    return None


def _is_evicted(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the attempt's cluster was suspended after it had been admitted. It may have been admitted again while no
    operator was running; then its Ray does not know the trainer, which must not be submitted a second time."""
    attempt, cluster = draft.attempt, observed.cluster(draft.attempt.cluster)
    if cluster is not None and cluster.is_suspended and attempt.active_since is not None:
        return True
    return attempt.submissions > 0 and was_head_replaced(attempt, observed.pods_of(attempt.cluster))


def _is_queue_changed(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the attempt waits in a queue, and the job's labels now name another queue or priority. A cluster may also
    be in a queue without a label of the job; so a job whose label was removed stays in its queue."""
    cluster, labels = observed.cluster(draft.attempt.cluster), observed.job.queue_labels
    waits = cluster is not None and cluster.suspended and draft.attempt.active_since is None
    return waits and cluster is not None and bool(labels) and not cluster.has_queue_labels(labels)


def _disruption(draft: StatusDraft, observed: Observed) -> str | None:
    """The pod that Kubernetes takes away from a running trainer, and why; None if there is none. Before the trainer is
    running, only the head pod of a cluster that was complete counts, because KubeRay replaces other pods."""
    spec, pods = observed.job.spec, observed.pods_of(draft.attempt.cluster)
    if draft.attempt.running_since is None:
        head, cluster = head_pod(pods), observed.cluster(draft.attempt.cluster)
        was_complete = cluster is not None and cluster.provisioned is True
        return disrupted_pod((head,)) if was_complete and head is not None else None
    needed = spec_of_attempt(spec, draft.attempt) if spec is not None else None
    is_complete = needed is not None and readiness_problem(needed, pods, None) is None
    return disrupted_pod(pods, is_complete=is_complete)


def _is_stalled(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> bool:
    """Whether the trainer should be stopped because it makes no progress. Only a trainer that Ray reports now can be
    stalled: a trainer that cannot be observed may make progress."""
    is_observed = draft.attempt.running_since is not None and newest_ray_job(draft, observed) is not None
    return is_observed and seconds_without_progress(draft) >= policy.stall_deadline_seconds


def _stall_message(draft: StatusDraft, observed: Observed) -> str:
    """A message with the step and activity at which the trainer stalled, and the location of its stack traces."""
    seconds = seconds_without_progress(draft)
    parts = [f"no progress for {seconds:.0f} s"]
    state = observed.ray.run_state
    if state is not None:
        activity = f" ({state.activity})" if state.activity is not None else ""
        parts.append(f"stalled at step {state.progress.step} of {state.progress.total_steps}{activity}")
    spec = observed.job.spec
    folder = f"{POD_LOGS_FOLDER}/{attempt_logs_folder(draft.attempt.number)}"
    location = claim_uri(f"file://{folder}", spec, observed.job.name) if spec is not None else folder
    parts.append(f"see the stack traces in {location}")
    return "; ".join(parts)


def _stacks_are_due(draft: StatusDraft) -> bool:
    """Whether a stalled trainer still has time to write its stack traces before it is asked to stop."""
    stop = draft.attempt.stop
    if stop is None or stop.reason != Reason.STALLED:
        return False
    return stop.sent_at is None or seconds_since(stop.sent_at, draft.now) < STACKS_SECONDS


def _restarts_time_for_stacks(observed: Observed, stop: StopRequest, sent_at: str) -> bool:
    """Whether the time for writing the stack traces starts again, because Ray does not have the Ray job that
    writes them: an operator may have exited after it recorded the start of this time, and before it submitted this job.
    The time starts again only if its recorded start is within `STACKS_SECONDS` after the request. So if Ray never
    accepts the job, the trainer is stopped without stack traces."""
    is_early = seconds_since(stop.requested_at, moment(sent_at)) < STACKS_SECONDS
    return observed.ray.stacks_missing and is_early


def _stop_limit_seconds(stop: StopRequest, policy: RunPolicy) -> int:
    """How much time a trainer has to stop: the grace period; for a stalled trainer, also the time for its stack
    traces."""
    return policy.grace_period_seconds + (STACKS_SECONDS if stop.reason == Reason.STALLED else 0)


def _seconds_to_end_of_stop(draft: StatusDraft, observed: Observed, stop: StopRequest, policy: RunPolicy) -> float:
    """Seconds until the operator no longer waits for a trainer that should stop; 0 or less if it no longer waits."""
    left = _stop_limit_seconds(stop, policy) - seconds_since(stop.sent_at or stop.requested_at, draft.now)
    return left if stop.sent_at is not None else _remaining_after_silence(left, observed)


def _seconds_to_active_deadline(draft: StatusDraft, policy: RunPolicy) -> float | None:
    """Seconds until the job has been active for `runPolicy.activeDeadlineSeconds`, if its attempt continues; None
    without such a deadline."""
    if policy.active_deadline_seconds is None:
        return None
    since = draft.counts_since if draft.is_under_way else None
    current = max(0.0, seconds_since(since, draft.now)) if since is not None else 0.0
    return policy.active_deadline_seconds - draft.counters.active_seconds - current


def _endings_by_deadline(
    draft: StatusDraft,
    observed: Observed,
    policy: RunPolicy,
    waits_for: tuple[Reason | None, str],
    unobservable: tuple[Reason, str] | None,
) -> list[tuple[float, Ending]]:
    """The deadlines that apply to the attempt now: for each, the seconds until it passes, and how the attempt then
    ends."""
    attempt = draft.attempt
    if attempt.running_since is not None:
        if unobservable is None or attempt.state_unknown_since is None:
            return []
        limit = policy.stall_deadline_seconds
        text = f"the trainer could not be observed for {limit} s: {unobservable[1]}"
        left = limit - seconds_since(attempt.state_unknown_since, draft.now)
        return [(_remaining_after_silence(left, observed), Ending(unobservable[0], text))]
    if attempt.active_since is None and attempt.state == AttemptState.QUEUED:
        # The cluster waits in a queue, as long as it takes.
        return []
    if waits_for[0] is Reason.CREATING and create_cluster(draft, observed):
        # An operator that has just started does not know yet why the cluster could not be created.
        return []
    limit = policy.provisioning_deadline_seconds
    since = attempt.counted_since or attempt.started
    if waits_for[0] in NO_ROOM and draft.waiting_since is not None:
        # After this time without capacity, the job deletes its cluster.
        since = max(draft.waiting_since, attempt.active_since or attempt.started)
    waited = seconds_since(since, draft.now)
    text = f"the trainer did not start within {limit} s: {waits_for[1]}"
    found = [(limit - waited, Ending(_reason_at_deadline(draft, observed, waits_for[0]), text))]
    failure = observed.failure
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER and failure.reason is Reason.NAME_CONFLICT:
        taken_seconds = seconds_since(attempt.name_taken_since or timestamp(draft.now), draft.now)
        found.append((NAME_CONFLICT_SECONDS - taken_seconds, Ending(Reason.NAME_CONFLICT, failure.message)))
    return found


def _reason_at_deadline(draft: StatusDraft, observed: Observed, waits_for: Reason | None) -> Reason:
    """The reason of an attempt that ends at its provisioning deadline. Without room, the job tries again later. A
    new job fails if the cause is the job or the installation. A job that has run before was correct, so this is an
    infrastructure failure."""
    if waits_for in (*NO_ROOM, Reason.DISRUPTED):
        return waits_for
    if observed.job.spec is None:
        return Reason.PROVISIONING_DEADLINE_EXCEEDED
    has_run = draft.checkpoint is not None or any(each.running_since is not None for each in draft.attempts)
    may_start_later = has_run or waits_for in _MAY_START_LATER
    return Reason.INFRASTRUCTURE_ERROR if may_start_later else Reason.PROVISIONING_DEADLINE_EXCEEDED


def _remaining_after_silence(seconds: float, observed: Observed) -> float:
    """Returns `seconds`. If polls of the dashboard fail, returns at least the time until they will have failed for
    `SHORT_SILENCE_SECONDS`: an operator that has just started must not end an attempt after its first failed poll."""
    if observed.ray.reachability in (Reachability.UNREACHABLE, Reachability.REJECTED):
        return max(seconds, SHORT_SILENCE_SECONDS - observed.ray.silent_seconds)
    return seconds
