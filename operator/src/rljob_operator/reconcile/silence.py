"""How long nothing was learned of a trainer, and how long it has shown no progress."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS
from rljob_operator.reconcile.observed import Observed, Reachability
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.submission import ray_job
from rljob_operator.reconcile.timestamps import seconds_since, timestamp

MIN_SECONDS_BETWEEN_NOTES = 60
"""A trainer that works is noted to have got further once in so long, or in a third of the stall deadline where that is
less: each note is a write."""


def report_silence(draft: StatusDraft, observed: Observed) -> tuple[Reason, str] | None:
    """Why nothing can be learned of a trainer that runs, and since when, in the attempt's record; None while something
    can, or while it may be a moment's trouble only."""
    blind = _blindness(draft, observed)
    if blind is None:
        if draft.attempt.silent_since is not None and observed.ray.reachability is Reachability.OK:
            draft.change_attempt(silent_since=None)
        return None
    if draft.attempt.silent_since is None:
        draft.change_attempt(silent_since=timestamp(draft.now))
    return blind


def note_progress(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> None:
    """Notes when the trainer got further, by what it writes: not by its clock, which need not be ours."""
    state = observed.ray.run_state if ray_job(draft, observed) is not None else None
    attempt = draft.attempt
    if attempt.progressed_at is None:
        draft.change_attempt(progressed_at=timestamp(draft.now))
    if state is None or state.written_at == attempt.run_state_at:
        return
    since = seconds_since(attempt.progressed_at, draft.now) if attempt.progressed_at is not None else None
    pause = min(MIN_SECONDS_BETWEEN_NOTES, policy.stall_deadline_seconds / 3)
    if attempt.run_state_at is None or since is None or since >= pause:
        draft.change_attempt(progressed_at=timestamp(draft.now), run_state_at=state.written_at)


def seconds_without_progress(draft: StatusDraft) -> float:
    """Of a trainer that runs."""
    attempt = draft.attempt
    since = attempt.progressed_at or attempt.running_since or attempt.started
    return seconds_since(since, draft.now)


def _blindness(draft: StatusDraft, observed: Observed) -> tuple[Reason, str] | None:
    ray = observed.ray
    if observed.forbidden is not None and ray.reachability is Reachability.NOT_ASKED:
        return Reason.READ_FORBIDDEN, observed.forbidden
    if ray.reachability is Reachability.NOT_ASKED:
        return Reason.DASHBOARD_UNREACHABLE, "the head pod is not ready"
    if ray.reachability is not Reachability.OK:
        if ray.silent_seconds < SHORT_SILENCE_SECONDS and draft.attempt.silent_since is None:
            return None
        rejected = ray.reachability is Reachability.REJECTED
        return Reason.TOKEN_REJECTED if rejected else Reason.DASHBOARD_UNREACHABLE, ray.error or "no reason is known"
    if ray.run_state_error is not None and ray_job(draft, observed) is not None:
        return Reason.RUN_STATE_UNREADABLE, ray.run_state_error
    return None
