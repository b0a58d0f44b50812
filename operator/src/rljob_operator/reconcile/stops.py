"""Whether an attempt should stop, and how.

A trainer that runs is asked to stop: for people, a suspension, its active deadline, a stall, or nodes that are back. An
attempt whose trainer does not come to run, does not end or tells nothing ends at its deadlines.
"""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.constants import POD_LOGS_FOLDER, STACKS_SECONDS, attempt_logs_folder
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import AttemptState, StopRequest
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS
from rljob_operator.reconcile.creation import should_grow
from rljob_operator.reconcile.endings import Ending, reason_of_stop
from rljob_operator.reconcile.observed import EffectKind, Observed, Reachability
from rljob_operator.reconcile.plan_types import DumpStacks, Effect, StopJob
from rljob_operator.reconcile.status_draft import (
    MAX_MESSAGE,
    StatusDraft,
    beginning_of,
    moment,
    seconds_since,
    timestamp,
)
from rljob_operator.reconcile.trainer import claim_uri, newest_submission, ray_job, seconds_without_progress

NAME_CONFLICT_SECONDS = 60
"""How long another cluster may have the name: that of a job which was deleted and made again is about to go."""


def request_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> None:
    """Writes down that the attempt is to stop, where there is a reason to, and when it could be asked."""
    job = ray_job(draft, observed)
    if job is not None and job.status.has_ended:
        # It ended by itself, and by its own reason; what people ask for is seen to between attempts.
        return
    if draft.attempt.stop is None:
        reason = _reason_to_stop(draft, observed, policy)
        if reason is None:
            return
        message = _where_it_stood(draft, observed) if reason is Reason.STALLED else None
        request = StopRequest(reason=reason.value, message=message, requested_at=timestamp(draft.now))
        draft.change_attempt(stop=request, state=AttemptState.STOPPING.value)
    stop = draft.attempt.stop
    if stop is None or observed.ray.reachability is not Reachability.OK:
        return
    if stop.told_at is None or _has_time_for_stacks(observed, stop, stop.told_at):
        draft.change_attempt(stop=stop.model_copy(update={"told_at": timestamp(draft.now)}))


def stop_when_due(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> tuple[Effect, ...]:
    """Asks a trainer to stop, and again until it has ended: asking twice does no harm. Also one that has told how it
    ended, but whose process does not end."""
    job, attempt = ray_job(draft, observed), draft.attempt
    if job is None or job.status.has_ended:
        return ()
    seen = attempt.ending_seen_at
    hangs = seen is not None and seconds_since(seen, draft.now) >= policy.grace_period_seconds
    if attempt.stop is None and not hangs:
        return ()
    name = newest_submission(draft, observed.job)
    if _stacks_are_due(draft):
        return (DumpStacks(name, attempt.number),)
    return (StopJob(name),)


def ending_by_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy, open_point: str) -> Ending | None:
    """The end of an attempt that is to stop: at once where no trainer runs, else when its time is over, which begins
    when it could be asked. None while it has time. `open_point`: what the attempt waits for."""
    stop = draft.attempt.stop
    if stop is None:
        return None
    reason = reason_of_stop(stop)
    if draft.attempt.running_since is None:
        return Ending(reason, f"the attempt was to stop before its trainer ran: {open_point}")
    if _seconds_to_end_of_stop(draft, observed, stop, policy) > 0:
        return None
    grace = _seconds_to_stop(stop, policy)
    if stop.told_at is None:
        text = f"the trainer could not be asked to stop for {grace} s: Ray's dashboard does not answer"
        return Ending(reason, text)
    why = f"{stop.message}; " if stop.message is not None else ""
    return Ending(reason, f"{why}the trainer was asked to stop and did not end within {grace} s")


def exceeded_deadline(
    draft: StatusDraft, observed: Observed, policy: RunPolicy, open_point: str, blind: tuple[Reason, str] | None
) -> Ending | None:
    """The ending that is due, if one is. `open_point`: what the attempt waits for; `blind`: why nothing is learned of
    its trainer."""
    due = [
        (seconds, ending) for seconds, ending in _endings(draft, observed, policy, open_point, blind) if seconds <= 0
    ]
    return min(due, key=lambda pair: pair[0])[1] if due else None


def seconds_to_deadline(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> float | None:
    """Until time alone changes something about an attempt under way; None where it does not."""
    limits = [seconds for seconds, _ in _endings(draft, observed, policy, "", None)]
    attempt, grace = draft.attempt, policy.grace_period_seconds
    if attempt.stop is not None:
        limits.append(_seconds_to_end_of_stop(draft, observed, attempt.stop, policy))
    if attempt.ending_seen_at is not None:
        waited = seconds_since(attempt.ending_seen_at, draft.now)
        limits += [grace - waited, 2 * grace - waited]
    if attempt.running_since is not None:
        limits.append(policy.stall_deadline_seconds - seconds_without_progress(draft))
    activity = _seconds_of_activity_left(draft, policy)
    if activity is not None:
        limits.append(activity)
    return min((seconds for seconds in limits if seconds > 0), default=None)


def _reason_to_stop(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> Reason | None:
    if draft.is_to_be_stopped:
        draft.note_stop()
        return Reason.STOPPED_BY_USER
    if observed.job.is_suspended:
        return Reason.SUSPENDED
    left = _seconds_of_activity_left(draft, policy)
    if left is not None and left <= 0:
        return Reason.ACTIVE_DEADLINE_EXCEEDED
    if _is_stalled(draft, observed, policy):
        return Reason.STALLED
    # Of a spec that cannot be read the next attempt would wait.
    if observed.job.spec is not None and ray_job(draft, observed) is not None and should_grow(draft):
        return Reason.RESIZED
    return None


def _is_stalled(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> bool:
    """Whether the trainer is to be stopped for want of progress. Of what was not looked at, no time has passed without
    progress."""
    runs = draft.attempt.running_since is not None and ray_job(draft, observed) is not None
    return runs and seconds_without_progress(draft) >= policy.stall_deadline_seconds


def _where_it_stood(draft: StatusDraft, observed: Observed) -> str:
    """Step and activity, and where its stacks will be."""
    seconds = seconds_without_progress(draft)
    parts = [f"no progress for {seconds:.0f} s"]
    state = observed.ray.run_state
    if state is not None:
        activity = f" ({state.activity})" if state.activity is not None else ""
        parts.append(f"it stood at step {state.progress.step} of {state.progress.total_steps}{activity}")
    spec = observed.job.spec
    folder = f"{POD_LOGS_FOLDER}/{attempt_logs_folder(draft.attempt.number)}"
    place = claim_uri(f"file://{folder}", spec, observed.job.name) if spec is not None else folder
    parts.append(f"its stacks are in {place}")
    return beginning_of("; ".join(parts), MAX_MESSAGE)


def _stacks_are_due(draft: StatusDraft) -> bool:
    """Whether its processes have time to write their stacks, before it is asked to stop."""
    stop = draft.attempt.stop
    if stop is None or stop.reason != Reason.STALLED:
        return False
    return stop.told_at is None or seconds_since(stop.told_at, draft.now) < STACKS_SECONDS


def _has_time_for_stacks(observed: Observed, stop: StopRequest, told_at: str) -> bool:
    """Whether the time for the stacks begins only now: who wrote down that it began was gone before asking for them.
    Not for ever: where Ray takes no such program, the trainer is stopped without."""
    is_early = seconds_since(stop.requested_at, moment(told_at)) < STACKS_SECONDS
    return observed.ray.stacks_missing and is_early


def _seconds_to_stop(stop: StopRequest, policy: RunPolicy) -> int:
    return policy.grace_period_seconds + (STACKS_SECONDS if stop.reason == Reason.STALLED else 0)


def _seconds_to_end_of_stop(draft: StatusDraft, observed: Observed, stop: StopRequest, policy: RunPolicy) -> float:
    """Until a trainer that is to stop is waited for no longer."""
    left = _seconds_to_stop(stop, policy) - seconds_since(stop.told_at or stop.requested_at, draft.now)
    return left if stop.told_at is not None else _left_of_silence(left, observed)


def _seconds_of_activity_left(draft: StatusDraft, policy: RunPolicy) -> float | None:
    """What is left of the active deadline; None where there is none."""
    if policy.active_deadline_seconds is None:
        return None
    since = draft.attempt.admitted_at if draft.is_under_way else None
    current = max(0.0, seconds_since(since, draft.now)) if since is not None else 0.0
    return policy.active_deadline_seconds - draft.counters.active_seconds - current


def _endings(
    draft: StatusDraft, observed: Observed, policy: RunPolicy, open_point: str, blind: tuple[Reason, str] | None
) -> list[tuple[float, Ending]]:
    """What ends the attempt, and in how many seconds."""
    attempt = draft.attempt
    if attempt.running_since is not None:
        if blind is None or attempt.silent_since is None:
            return []
        limit = policy.stall_deadline_seconds
        text = f"nothing was learned of the trainer for {limit} s: {blind[1]}"
        left = limit - seconds_since(attempt.silent_since, draft.now)
        return [(_left_of_silence(left, observed), Ending(blind[0], text))]
    limit = policy.provisioning_deadline_seconds
    waited = seconds_since(attempt.admitted_at or attempt.started, draft.now)
    text = f"the trainer did not run within {limit} s: {open_point}"
    found = [(limit - waited, Ending(Reason.PROVISIONING_DEADLINE_EXCEEDED, text))]
    failure = observed.failure
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER and failure.reason is Reason.NAME_CONFLICT:
        taken = seconds_since(attempt.name_taken_since or timestamp(draft.now), draft.now)
        found.append((NAME_CONFLICT_SECONDS - taken, Ending(Reason.NAME_CONFLICT, failure.message)))
    return found


def _left_of_silence(seconds: float, observed: Observed) -> float:
    """Whoever has not looked for long has not been without an answer for long."""
    if observed.ray.reachability in (Reachability.UNREACHABLE, Reachability.REJECTED):
        return max(seconds, SHORT_SILENCE_SECONDS - observed.ray.silent_seconds)
    return seconds
