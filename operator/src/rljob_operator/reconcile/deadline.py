"""The limits in time of one attempt: until its trainer runs, and while nothing is learned of it."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS
from rljob_operator.reconcile.endings import Ending
from rljob_operator.reconcile.observed import EffectKind, Observed, Reachability
from rljob_operator.reconcile.silence import seconds_without_progress
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.stops import seconds_of_activity_left, seconds_to_end_of_stop
from rljob_operator.reconcile.timestamps import seconds_since, timestamp

NAME_CONFLICT_SECONDS = 60
"""How long another cluster may have the name: that of a job which was deleted and made again is about to go."""


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
        limits.append(seconds_to_end_of_stop(draft, observed, attempt.stop, policy))
    if attempt.ending_seen_at is not None:
        waited = seconds_since(attempt.ending_seen_at, draft.now)
        limits += [grace - waited, 2 * grace - waited]
    if attempt.running_since is not None:
        limits.append(policy.stall_deadline_seconds - seconds_without_progress(draft))
    activity = seconds_of_activity_left(draft, policy)
    if activity is not None:
        limits.append(activity)
    return min((seconds for seconds in limits if seconds > 0), default=None)


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
        if observed.ray.reachability in (Reachability.UNREACHABLE, Reachability.REJECTED):
            # Whoever has not looked for long has not been without an answer for long.
            left = max(left, SHORT_SILENCE_SECONDS - observed.ray.silent_seconds)
        return [(left, Ending(blind[0], text))]
    limit = policy.provisioning_deadline_seconds
    waited = seconds_since(attempt.admitted_at or attempt.started, draft.now)
    text = f"the trainer did not run within {limit} s: {open_point}"
    found = [(limit - waited, Ending(Reason.PROVISIONING_DEADLINE_EXCEEDED, text))]
    failure = observed.failure
    if failure is not None and failure.kind is EffectKind.CREATE_CLUSTER and failure.reason is Reason.NAME_CONFLICT:
        taken = seconds_since(attempt.name_taken_since or timestamp(draft.now), draft.now)
        found.append((NAME_CONFLICT_SECONDS - taken, Ending(Reason.NAME_CONFLICT, failure.message)))
    return found
