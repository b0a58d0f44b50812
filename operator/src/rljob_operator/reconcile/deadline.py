"""The limits in time: until the trainer runs, in all, and for stopping."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import Observed, Reachability
from rljob_operator.reconcile.plan_types import Effect, StopJob
from rljob_operator.reconcile.progress import report_stop_request, seconds_since_last_word, was_asked_to_stop
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.submission import newest_submission
from rljob_operator.reconcile.timestamps import seconds_since

NAME_CONFLICT_SECONDS = 60
"""How long another cluster may have the name: that of a job which was deleted and made again is about to go."""

_BEFORE_RUNNING = (ConditionType.CLUSTER_READY, ConditionType.PLACEMENT_FEASIBLE, ConditionType.JOB_SUBMITTED)


def exceeded_deadline(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> Ending | None:
    """The ending that is due, if one is."""
    due = [(seconds, ending) for seconds, ending in _endings(draft, observed, policy) if seconds <= 0]
    return min(due, key=lambda pair: pair[0])[1] if due else None


def stop_when_due(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Effect, ...]:
    """Asks a running trainer to stop at the active deadline, and again until it has ended: asking twice does no harm.
    That it was asked stands in the attempt, as the reason of its ending to come."""
    if draft.attempt.reason is None:
        seconds = _seconds_of_activity(draft, policy)
        if seconds is None or seconds > 0:
            return _stop_when_done(draft, observed, policy)
        reason = Reason.ACTIVE_DEADLINE_EXCEEDED
        draft.change_attempt(draft.attempt.model_copy(update={"reason": reason.value}))
        report_stop_request(draft, observed)
    return (StopJob(newest_submission(draft, observed.job)),) if observed.ray.reachability is Reachability.OK else ()


def _stop_when_done(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Effect, ...]:
    """Stops a trainer that has told how it ended, but whose process does not end."""
    waited_seconds = seconds_since_last_word(draft, observed)
    if waited_seconds is None or waited_seconds < policy.grace_period_seconds:
        return ()
    return (StopJob(newest_submission(draft, observed.job)),)


def seconds_to_deadline(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> float | None:
    """Until time alone changes something; None where it does not."""
    limits = [seconds for seconds, _ in _endings(draft, observed, policy)]
    activity = _seconds_of_activity(draft, policy)
    if activity is not None:
        limits.append(activity)
    return min((seconds for seconds in limits if seconds > 0), default=None)


def _endings(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> list[tuple[float, Ending]]:
    """What ends the attempt, and in how many seconds."""
    attempt = draft.attempt
    if draft.is_true(ConditionType.JOB_SUBMITTED):
        return [] if attempt.reason is None else [_end_of_grace(draft, Reason(attempt.reason), policy)]
    age = seconds_since(attempt.started, draft.now)
    limit = policy.provisioning_deadline_seconds
    text = f"the trainer did not run within {limit} s: {_open_point(draft)}"
    found = [(limit - age, Ending(Reason.PROVISIONING_DEADLINE_EXCEEDED, text))]
    cluster = observed.cluster
    if draft.has_reason(ConditionType.CLUSTER_READY, Reason.NAME_CONFLICT) and cluster and not cluster.deleting:
        found.append((NAME_CONFLICT_SECONDS - age, Ending(Reason.NAME_CONFLICT, _open_point(draft))))
    activity = _seconds_of_activity(draft, policy)
    if activity is not None:
        text = f"the trainer did not run within the job's {policy.active_deadline_seconds} s: {_open_point(draft)}"
        found.append((activity, Ending(Reason.ACTIVE_DEADLINE_EXCEEDED, text)))
    return found


def _end_of_grace(draft: StatusDraft, reason: Reason, policy: RunPolicy) -> tuple[float, Ending]:
    """The end of a trainer that is to stop. It was not progressing before, perhaps, so its grace begins at the deadline
    at the earliest. A deadline that lies ahead was raised too late."""
    told = draft.condition(ConditionType.PROGRESSING)
    assert told is not None, "a request to stop is always reported"
    waited, activity = seconds_since(told.last_transition_time, draft.now), _seconds_of_activity(draft, policy)
    if activity is not None and activity <= 0:
        waited = min(waited, -activity)
    grace = policy.grace_period_seconds
    text = f"the trainer was asked to stop and did not end within {grace} s"
    if not was_asked_to_stop(draft):
        text = f"the trainer could not be asked to stop for {grace} s: Ray's dashboard does not answer"
    return grace - waited, Ending(reason, text)


def _seconds_of_activity(draft: StatusDraft, policy: RunPolicy) -> float | None:
    """What is left of the active deadline, which counts from the first attempt; None where there is none."""
    if policy.active_deadline_seconds is None:
        return None
    return policy.active_deadline_seconds - seconds_since(draft.attempts[0].started, draft.now)


def _open_point(draft: StatusDraft) -> str:
    """What the job still waits for."""
    for kind in _BEFORE_RUNNING:
        condition = draft.condition(kind)
        if condition is not None and not draft.is_true(kind):
            return condition.message
    return "it was about to be submitted"
