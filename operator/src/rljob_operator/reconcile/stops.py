"""Stopping a trainer that runs: why it is to stop, asking it, and how long it may take."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.constants import STACKS_SECONDS
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import AttemptState, StopRequest
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS
from rljob_operator.reconcile.elastic import should_grow
from rljob_operator.reconcile.endings import Ending, reason_of_stop
from rljob_operator.reconcile.observed import Observed, Reachability
from rljob_operator.reconcile.plan_types import DumpStacks, Effect, StopJob
from rljob_operator.reconcile.progress import ENDED_IN_RAY
from rljob_operator.reconcile.stall import is_stalled, stacks_are_due, where_it_stood
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.submission import newest_submission, ray_job
from rljob_operator.reconcile.suspension import is_suspended, note_stop, wants_to_be_stopped
from rljob_operator.reconcile.timestamps import moment, seconds_since, timestamp


def request_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> None:
    """Writes down that the attempt is to stop, where there is a reason to, and when it could be asked."""
    if draft.attempt.stop is None:
        job = ray_job(draft, observed)
        if job is not None and job.status in ENDED_IN_RAY:
            # It ended by itself, and by its own reason; what people ask for is seen to between attempts.
            return
        reason = _reason_to_stop(draft, observed, policy)
        if reason is None:
            return
        message = where_it_stood(draft, observed) if reason is Reason.STALLED else None
        request = StopRequest(reason=reason.value, message=message, requested_at=timestamp(draft.now))
        draft.change_attempt(stop=request, state=AttemptState.STOPPING.value)
    stop, job = draft.attempt.stop, ray_job(draft, observed)
    has_ended = job is not None and job.status in ENDED_IN_RAY
    if stop is None or has_ended or observed.ray.reachability is not Reachability.OK:
        return
    if stop.told_at is None or _has_time_for_stacks(observed, stop, stop.told_at):
        draft.change_attempt(stop=stop.model_copy(update={"told_at": timestamp(draft.now)}))


def ending_by_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy, open_point: str) -> Ending | None:
    """The end of an attempt that is to stop: at once where no trainer runs, else when its time is over, which begins
    when it could be asked. None while it has time. `open_point`: what the attempt waits for."""
    stop = draft.attempt.stop
    if stop is None:
        return None
    reason = reason_of_stop(stop)
    if draft.attempt.running_since is None:
        return Ending(reason, f"the attempt was to stop before its trainer ran: {open_point}")
    if seconds_to_end_of_stop(draft, observed, stop, policy) > 0:
        return None
    grace = _seconds_to_stop(stop, policy)
    if stop.told_at is None:
        text = f"the trainer could not be asked to stop for {grace} s: Ray's dashboard does not answer"
        return Ending(reason, text)
    why = f"{stop.message}; " if stop.message is not None else ""
    return Ending(reason, f"{why}the trainer was asked to stop and did not end within {grace} s")


def seconds_to_end_of_stop(draft: StatusDraft, observed: Observed, stop: StopRequest, policy: RunPolicy) -> float:
    """Until a trainer that is to stop is waited for no longer."""
    left = _seconds_to_stop(stop, policy) - seconds_since(stop.told_at or stop.requested_at, draft.now)
    if stop.told_at is None and observed.ray.reachability in (Reachability.UNREACHABLE, Reachability.REJECTED):
        # Whoever has not looked for long has not been without an answer for long.
        return max(left, SHORT_SILENCE_SECONDS - observed.ray.silent_seconds)
    return left


def _has_time_for_stacks(observed: Observed, stop: StopRequest, told_at: str) -> bool:
    """Whether the time for the stacks begins only now: who wrote down that it began was gone before asking for them.
    Not for ever: where Ray takes no such program, the trainer is stopped without."""
    is_early = seconds_since(stop.requested_at, moment(told_at)) < STACKS_SECONDS
    return observed.ray.stacks_missing and is_early


def _seconds_to_stop(stop: StopRequest, policy: RunPolicy) -> int:
    return policy.grace_period_seconds + (STACKS_SECONDS if stop.reason == Reason.STALLED else 0)


def stop_when_due(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Effect, ...]:
    """Asks a trainer to stop, and again until it has ended: asking twice does no harm. Also one that has told how it
    ended, but whose process does not end."""
    job, attempt = ray_job(draft, observed), draft.attempt
    if job is None or job.status in ENDED_IN_RAY:
        return ()
    seen = attempt.ending_seen_at
    hangs = seen is not None and seconds_since(seen, draft.now) >= policy.grace_period_seconds
    if attempt.stop is None and not hangs:
        return ()
    name = newest_submission(draft, observed.job)
    if stacks_are_due(draft):
        return (DumpStacks(name, attempt.number),)
    return (StopJob(name),)


def seconds_of_activity_left(draft: StatusDraft, policy: RunPolicy) -> float | None:
    """What is left of the active deadline; None where there is none."""
    if policy.active_deadline_seconds is None:
        return None
    since = draft.attempt.admitted_at if draft.is_under_way else None
    current = max(0.0, seconds_since(since, draft.now)) if since is not None else 0.0
    return policy.active_deadline_seconds - draft.counters.active_seconds - current


def _reason_to_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> Reason | None:
    if wants_to_be_stopped(draft, observed):
        note_stop(draft, observed)
        return Reason.STOPPED_BY_USER
    if is_suspended(observed):
        return Reason.SUSPENDED
    left = seconds_of_activity_left(draft, policy)
    if left is not None and left <= 0:
        return Reason.ACTIVE_DEADLINE_EXCEEDED
    if is_stalled(draft, observed, policy):
        return Reason.STALLED
    # Of a spec that cannot be read the next attempt would wait.
    if observed.job.spec is not None and ray_job(draft, observed) is not None and should_grow(draft):
        return Reason.RESIZED
    return None
