"""The trainer at work: Progressing, Checkpointed, progress, checkpoint and export, from its RunState."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import POD_STORAGE_FOLDER
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState, CheckpointStatus, Progress
from rljob_operator.reconcile.observed import Observed, RayJobStatus, Reachability
from rljob_operator.reconcile.pod_readiness import head_pod
from rljob_operator.reconcile.status_draft import FALSE, MAX_URI_LENGTH, TRUE, UNKNOWN, StatusDraft
from rljob_operator.reconcile.submission import ray_job
from rljob_operator.reconcile.timestamps import seconds_since, timestamp

ENDED_IN_RAY = (RayJobStatus.SUCCEEDED, RayJobStatus.FAILED, RayJobStatus.STOPPED)

LAST_PHASES = (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED)

END_WITHOUT_STATE = "Ray says that the trainer has ended well; its last run state is looked for"
"""Of Progressing, while it is."""

MIN_SECONDS_BETWEEN_PROGRESS = 5
MAX_SECONDS_OF_OLD_PROGRESS = 9


def report_run(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, blind: tuple[Reason, str] | None
) -> None:
    """Takes over what the trainer says, once it was submitted; of places only those that the spec tells how to name.
    `blind`: why nothing is learned of it."""
    if draft.attempt.running_since is None:
        return
    state = observed.ray.run_state if ray_job(draft, observed) is not None else None
    if state is not None:
        named = _without_uris(state) if spec is None else _with_claim_uris(state, spec, observed.job.name)
        _take_over(draft, observed, named)
    if draft.checkpoint is None:
        draft.set(ConditionType.CHECKPOINTED, FALSE, Reason.NO_CHECKPOINT_YET, "")
    else:
        draft.set(ConditionType.CHECKPOINTED, TRUE, Reason.SAVED, f"checkpoint of step {draft.checkpoint.step}")
    _report_progressing(draft, observed, state, blind)


def note_last_words(draft: StatusDraft, observed: Observed) -> None:
    """Notes when it was first seen that the trainer, or Ray, tells of its end."""
    job, state = ray_job(draft, observed), observed.ray.run_state
    if job is None or draft.attempt.ending_seen_at is not None:
        return
    if job.status in ENDED_IN_RAY or (state is not None and state.phase in LAST_PHASES):
        draft.change_attempt(ending_seen_at=timestamp(draft.now))


def seconds_since_last_words(draft: StatusDraft) -> float | None:
    """Since that was seen; None where it was not."""
    seen = draft.attempt.ending_seen_at
    return None if seen is None else seconds_since(seen, draft.now)


def trainer_may_run(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the trainer of the newest attempt was not seen to end: neither does Ray say so, nor is the head gone in
    which it runs. Of one that is about to be submitted, too."""
    attempt, job = draft.attempt, ray_job(draft, observed)
    if attempt.submissions == 0:
        return False
    if job is not None:
        return job.status not in ENDED_IN_RAY
    if observed.ray.reachability is Reachability.OK:
        return attempt.running_since is None
    head = head_pod(observed.pods_of(attempt.cluster))
    return observed.forbidden is not None or (head is not None and not head.ended)


def _take_over(draft: StatusDraft, observed: Observed, state: RunState) -> None:
    checkpoint = state.checkpoint
    job = ray_job(draft, observed)
    at_once = checkpoint not in (None, draft.checkpoint) or (job is not None and job.status in ENDED_IN_RAY)
    if at_once or _is_due(draft, state.progress):
        draft.progress = state.progress
    draft.checkpoint = checkpoint or draft.checkpoint
    draft.export_uri = state.export_uri or draft.export_uri
    if state.resumed_from_step is not None:
        draft.change_attempt(resumed_from_step=state.resumed_from_step)
    if checkpoint is not None and _is_own(checkpoint, state):
        draft.change_attempt(checkpoint_step=checkpoint.step)


def _is_own(checkpoint: CheckpointStatus, state: RunState) -> bool:
    """Whether the start that tells of a checkpoint has saved it, and does not go on from it. One that has not begun to
    train is at step 0."""
    return checkpoint.step != state.resumed_from_step and checkpoint.step <= state.progress.step


def _is_due(draft: StatusDraft, progress: Progress) -> bool:
    """Whether this progress is worth a write: not more often than every 5 s on the average, nor later than the pass
    after 9 s; whatever the trainer's clock says, which may have been set back."""
    if draft.progress is None:
        return True
    written = draft.progress.updated_at
    step_seconds = seconds_since(written, draft.now) - seconds_since(progress.updated_at, draft.now)
    waited_seconds = seconds_since(written, draft.now)
    is_recent = 0 <= waited_seconds < MAX_SECONDS_OF_OLD_PROGRESS
    return step_seconds >= MIN_SECONDS_BETWEEN_PROGRESS or not is_recent


def _report_progressing(
    draft: StatusDraft, observed: Observed, state: RunState | None, blind: tuple[Reason, str] | None
) -> None:
    kind, stop = ConditionType.PROGRESSING, draft.attempt.stop
    head = head_pod(observed.pods_of(draft.attempt.cluster))
    if stop is not None:
        cannot = "" if stop.told_at is not None else ", but cannot be asked: Ray's dashboard does not answer"
        asked = "the trainer was asked to stop" if stop.told_at is not None else "the trainer is to stop"
        draft.set(kind, FALSE, Reason.STOPPING, f"{asked} ({stop.reason}){cannot}")
    elif head is not None and head.deleting:
        draft.change_attempt(state=AttemptState.STOPPING.value)
        draft.set(kind, FALSE, Reason.STOPPING, f"the head pod {head.name} is being removed")
    elif blind is not None:
        draft.set(kind, UNKNOWN, *blind)
    elif observed.ray.reachability is not Reachability.OK:
        # A moment's silence: what was told before still stands.
        return
    elif state is None and _has_succeeded(draft, observed):
        draft.set(kind, FALSE, Reason.DASHBOARD_UNREACHABLE, END_WITHOUT_STATE)
    elif state is None or state.phase is RunPhase.STARTING:
        draft.set(kind, TRUE, Reason.STARTING, "the trainer loads the model and builds its workers")
    elif state.phase is RunPhase.STOPPING:
        draft.change_attempt(state=AttemptState.STOPPING.value)
        draft.set(kind, FALSE, Reason.STOPPING, "the trainer was asked to stop")
    elif state.phase is RunPhase.RUNNING:
        if draft.attempt.state == AttemptState.STARTING:
            draft.change_attempt(state=AttemptState.RUNNING.value)
        draft.set(kind, TRUE, Reason.TRAINING, f"{state.progress.total_steps} steps in all")


def _has_succeeded(draft: StatusDraft, observed: Observed) -> bool:
    job = ray_job(draft, observed)
    return job is not None and job.status is RayJobStatus.SUCCEEDED


def _without_uris(state: RunState) -> RunState:
    return state.model_copy(update={"checkpoint": None, "export_uri": None})


def claim_uri(uri: str, spec: RLJobSpec, job: str) -> str:
    """A place in the pods as people find it: by the claim, and the folder within it."""
    storage, inside = spec.checkpoint.storage, f"file://{POD_STORAGE_FOLDER}/"
    if storage is None or not uri.startswith(inside):
        return uri
    folder = f"pvc://{storage.persistent_volume_claim}/{(storage.sub_path or job).strip('/')}/"
    found = folder + uri.removeprefix(inside)
    return found if len(found) <= MAX_URI_LENGTH else uri


def _with_claim_uris(state: RunState, spec: RLJobSpec, job: str) -> RunState:
    checkpoint, export_uri = state.checkpoint, state.export_uri
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"uri": claim_uri(checkpoint.uri, spec, job)})
    if export_uri is not None:
        export_uri = claim_uri(export_uri, spec, job)
    return state.model_copy(update={"checkpoint": checkpoint, "export_uri": export_uri})
