"""A trainer that runs and shows no progress: when it counts as stalled, and what is told and written of it before it is
stopped."""

from __future__ import annotations

from rljob_api.conditions import Reason
from rljob_api.constants import POD_LOGS_FOLDER, STACKS_SECONDS, attempt_logs_folder
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_operator.reconcile.attempts import MAX_MESSAGE
from rljob_operator.reconcile.messages import beginning_of
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.progress import claim_uri
from rljob_operator.reconcile.silence import seconds_without_progress
from rljob_operator.reconcile.status_draft import StatusDraft
from rljob_operator.reconcile.submission import ray_job
from rljob_operator.reconcile.timestamps import seconds_since


def is_stalled(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> bool:
    """Whether the trainer is to be stopped for want of progress. Of what was not looked at, no time has passed without
    progress."""
    runs = draft.attempt.running_since is not None and ray_job(draft, observed) is not None
    return runs and seconds_without_progress(draft) >= policy.stall_deadline_seconds


def stacks_are_due(draft: StatusDraft) -> bool:
    """Whether its processes have time to write their stacks, before it is asked to stop."""
    stop = draft.attempt.stop
    if stop is None or stop.reason != Reason.STALLED:
        return False
    return stop.told_at is None or seconds_since(stop.told_at, draft.now) < STACKS_SECONDS


def where_it_stood(draft: StatusDraft, observed: Observed) -> str:
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
