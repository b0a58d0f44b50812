"""The trainer at work: Progressing, Checkpointed, progress, checkpoint and export, from its RunState."""

from __future__ import annotations

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import POD_STORAGE_FOLDER
from rljob_api.run_state import RunPhase, RunState
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Progress
from rljob_operator.reconcile.observed import Observed, RayJobStatus, Reachability
from rljob_operator.reconcile.pod_readiness import head_pod
from rljob_operator.reconcile.status_draft import FALSE, MAX_URI_LENGTH, TRUE, UNKNOWN, StatusDraft
from rljob_operator.reconcile.submission import ray_job
from rljob_operator.reconcile.timestamps import seconds_since

ENDED_IN_RAY = (RayJobStatus.SUCCEEDED, RayJobStatus.FAILED, RayJobStatus.STOPPED)

LAST_PHASES = (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED)

MIN_SECONDS_BETWEEN_PROGRESS = 5
MAX_SECONDS_OF_OLD_PROGRESS = 9


END_WITHOUT_STATE = "Ray says that the trainer has ended well; its last run state cannot be read yet"
"""Of Progressing, while the run state is looked for."""


def report_run(draft: StatusDraft, observed: Observed, spec: RLJobSpec | None) -> None:
    """Takes over what the trainer says, once it was submitted; of places only those that the spec tells how to name."""
    if not draft.is_true(ConditionType.JOB_SUBMITTED):
        return
    state = observed.ray.run_state if ray_job(draft, observed) is not None else None
    if state is not None:
        named = _without_uris(state) if spec is None else _with_claim_uris(state, spec, observed.job.name)
        _take_over(draft, observed, named)
    if draft.checkpoint is None:
        draft.set(ConditionType.CHECKPOINTED, FALSE, Reason.NO_CHECKPOINT_YET, "")
    else:
        draft.set(ConditionType.CHECKPOINTED, TRUE, Reason.SAVED, f"checkpoint of step {draft.checkpoint.step}")
    _report_progressing(draft, observed, state)


def report_stop_request(draft: StatusDraft, observed: Observed) -> None:
    """Progressing, from the moment when the attempt has a reason to be stopped."""
    if observed.ray.reachability is Reachability.OK or was_asked_to_stop(draft):
        message = _stop_request(draft)
    else:
        silence = "Ray's dashboard does not answer"
        message = f"the trainer is to stop ({draft.attempt.reason}), but cannot be asked: {silence}"
    draft.set(ConditionType.PROGRESSING, FALSE, Reason.STOPPING, message)


def was_asked_to_stop(draft: StatusDraft) -> bool:
    """Whether the dashboard could be asked to stop the trainer, since there was a reason to."""
    told = draft.condition(ConditionType.PROGRESSING)
    return told is not None and told.message == _stop_request(draft)


def _stop_request(draft: StatusDraft) -> str:
    return f"the trainer was asked to stop ({draft.attempt.reason})"


def seconds_since_last_word(draft: StatusDraft, observed: Observed) -> float | None:
    """Since the trainer wrote how it ended, while its process has not; None of any other trainer."""
    job, state = ray_job(draft, observed), observed.ray.run_state
    if job is None or job.status in ENDED_IN_RAY or state is None or state.phase not in LAST_PHASES:
        return None
    return seconds_since(state.written_at, draft.now)


def _take_over(draft: StatusDraft, observed: Observed, state: RunState) -> None:
    checkpoint = state.checkpoint
    job = ray_job(draft, observed)
    at_once = checkpoint not in (None, draft.checkpoint) or (job is not None and job.status in ENDED_IN_RAY)
    if at_once or _is_due(draft, state.progress):
        draft.progress = state.progress
    draft.checkpoint = checkpoint or draft.checkpoint
    draft.export_uri = state.export_uri or draft.export_uri
    if state.resumed_from_step is not None:
        draft.change_attempt(draft.attempt.model_copy(update={"resumed_from_step": state.resumed_from_step}))


def _is_due(draft: StatusDraft, progress: Progress) -> bool:
    """Whether this progress is worth a write: not more often than every 5 s on the average, nor later than the pass
    after 9 s."""
    if draft.progress is None:
        return True
    written = draft.progress.updated_at
    step_seconds = seconds_since(written, draft.now) - seconds_since(progress.updated_at, draft.now)
    waited_seconds = seconds_since(written, draft.now)
    return step_seconds >= MIN_SECONDS_BETWEEN_PROGRESS or waited_seconds >= MAX_SECONDS_OF_OLD_PROGRESS


def _report_progressing(draft: StatusDraft, observed: Observed, state: RunState | None) -> None:
    kind, ray = ConditionType.PROGRESSING, observed.ray
    head = head_pod(observed.pods)
    if draft.attempt.reason is not None:
        report_stop_request(draft, observed)
    elif head is not None and head.deleting:
        draft.set(kind, FALSE, Reason.STOPPING, f"the head pod {head.name} is being removed")
    elif ray.reachability is Reachability.REJECTED:
        draft.set(kind, UNKNOWN, Reason.TOKEN_REJECTED, ray.error or "")
    elif ray.reachability is not Reachability.OK:
        draft.set(kind, UNKNOWN, Reason.DASHBOARD_UNREACHABLE, ray.error or "the head pod is not ready")
    elif state is None and _has_succeeded(draft, observed):
        draft.set(kind, FALSE, Reason.DASHBOARD_UNREACHABLE, END_WITHOUT_STATE)
    elif state is None or state.phase is RunPhase.STARTING:
        draft.set(kind, TRUE, Reason.STARTING, "the trainer loads the model and builds its workers")
    elif state.phase is RunPhase.STOPPING:
        draft.set(kind, FALSE, Reason.STOPPING, "the trainer was asked to stop")
    elif state.phase is RunPhase.RUNNING:
        draft.set(kind, TRUE, Reason.TRAINING, f"{state.progress.total_steps} steps in all")


def _has_succeeded(draft: StatusDraft, observed: Observed) -> bool:
    job = ray_job(draft, observed)
    return job is not None and job.status is RayJobStatus.SUCCEEDED


def _without_uris(state: RunState) -> RunState:
    return state.model_copy(update={"checkpoint": None, "export_uri": None})


def _with_claim_uris(state: RunState, spec: RLJobSpec, job: str) -> RunState:
    """Places in the pods as people find them: by the claim, and the folder within it."""
    storage = spec.checkpoint.storage
    if storage is None:
        return state
    folder = f"pvc://{storage.persistent_volume_claim}/{(storage.sub_path or job).strip('/')}/"
    checkpoint, export_uri = state.checkpoint, state.export_uri
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"uri": _claim_uri(checkpoint.uri, folder)})
    if export_uri is not None:
        export_uri = _claim_uri(export_uri, folder)
    return state.model_copy(update={"checkpoint": checkpoint, "export_uri": export_uri})


def _claim_uri(uri: str, folder: str) -> str:
    inside = f"file://{POD_STORAGE_FOLDER}/"
    found = folder + uri.removeprefix(inside) if uri.startswith(inside) else uri
    return found if len(found) <= MAX_URI_LENGTH else uri
