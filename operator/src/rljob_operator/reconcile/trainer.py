"""Reports the attempt's trainer: sets JobSubmitted, Progressing, Checkpointed, TrainingHealthy, progress, checkpoint,
alarms and export.

This module finds out whether Ray has the trainer, which step the trainer has reached, and since when the trainer cannot
be observed or makes no progress.
"""

from __future__ import annotations

from rljob_api.conditions import ALARMS, ConditionType, Reason
from rljob_api.constants import POD_STORAGE_FOLDER
from rljob_api.run_state import Alarm, RunPhase, RunState
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import AttemptState, Progress
from rljob_operator.manifests.naming import submission_id
from rljob_operator.reconcile.cluster import SHORT_SILENCE_SECONDS, Finding, head_pod
from rljob_operator.reconcile.decision import EventRecord, EventType, bounded_note
from rljob_operator.reconcile.observed import (
    EffectKind,
    Observed,
    ObservedJob,
    ObservedRayJob,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import (
    FALSE,
    MAX_URI_LENGTH,
    TRUE,
    UNKNOWN,
    StatusDraft,
    beginning_of,
    seconds_since,
    timestamp,
)

FINAL_PHASES = (RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED)

END_WITHOUT_STATE = "Ray reports that the trainer succeeded; waiting for the trainer's final run state"
"""Message of Progressing while the operator waits for the final run state."""

SIGNIFICANT_DIGITS = 4
"""Number of significant digits of the reward, the score and the tokens per second in `status.progress`."""
MIN_SECONDS_BETWEEN_PROGRESSED_AT = 60
"""Minimum time between two changes of an attempt's `progressedAt`, because each change is a write to the API server. If
a third of the stall deadline is shorter, that is the minimum time."""


def report_submission(draft: StatusDraft, observed: Observed) -> Finding | None:
    """Sets JobSubmitted: True as soon as Ray has the trainer. Then also records since when the trainer is running.
    Returns JobSubmitted; None if the trainer was not submitted, or if Ray had the trainer and does not respond now."""
    finding = _submission_finding(draft, observed)
    if finding is None:
        return None
    draft.set(ConditionType.JOB_SUBMITTED, finding.status, finding.reason, finding.message)
    if finding.is_true and draft.attempt.running_since is None:
        draft.change_attempt(running_since=timestamp(draft.now), state=AttemptState.STARTING.value)
    return finding


def newest_ray_job(draft: StatusDraft, observed: Observed) -> ObservedRayJob | None:
    """What Ray reports about the newest submission; None if there is no submission, or Ray does not report it."""
    ray_job = observed.ray.job
    if draft.attempt.submissions == 0 or observed.ray.reachability is not Reachability.OK or ray_job is None:
        return None
    return ray_job if ray_job.submission_id == newest_submission(draft, observed.job) else None


def newest_submission(draft: StatusDraft, job: ObservedJob) -> str:
    """Id of the newest attempt's newest submission. Only for attempts that have one."""
    return submission_id(job.name, draft.attempt.number, draft.attempt.submissions)


def record_unobservable(draft: StatusDraft, observed: Observed) -> tuple[Reason, str] | None:
    """Records in the attempt since when a running trainer cannot be observed. Returns the reason and a message; None if
    the trainer can be observed, or if polls have failed only since a moment ago."""
    unobservable = _unobservable(draft, observed)
    if unobservable is None:
        if draft.attempt.state_unknown_since is not None:
            draft.change_attempt(state_unknown_since=None)
        return None
    if draft.attempt.state_unknown_since is None:
        draft.change_attempt(state_unknown_since=timestamp(draft.now))
    return unobservable


def record_progress(draft: StatusDraft, observed: Observed, policy: RunPolicy) -> None:
    """Records when the trainer last made progress: a new run state counts as progress. The recorded time is from the
    operator's clock, because the trainer's clock may differ."""
    state = _newest_state(draft, observed)
    attempt = draft.attempt
    if attempt.progressed_at is None:
        draft.change_attempt(progressed_at=timestamp(draft.now))
    if state is None or state.written_at == attempt.run_state_at:
        return
    since = seconds_since(attempt.progressed_at, draft.now) if attempt.progressed_at is not None else None
    pause = min(MIN_SECONDS_BETWEEN_PROGRESSED_AT, policy.stall_deadline_seconds / 3)
    if attempt.run_state_at is None or since is None or since >= pause:
        draft.change_attempt(progressed_at=timestamp(draft.now), run_state_at=state.written_at)


def seconds_without_progress(draft: StatusDraft) -> float:
    """Seconds since a running trainer last made progress."""
    attempt = draft.attempt
    since = attempt.progressed_at or attempt.running_since or attempt.started
    return seconds_since(since, draft.now)


def report_run(
    draft: StatusDraft, observed: Observed, spec: RLJobSpec | None, unobservable: tuple[Reason, str] | None
) -> None:
    """Copies a running trainer's run state into the status, and sets Checkpointed, TrainingHealthy and Progressing. If
    the spec cannot be read (`spec` is None), the checkpoint and the export are not copied, because their URIs depend on
    the spec. `unobservable`: why the trainer cannot be observed."""
    if draft.attempt.running_since is None:
        return
    state = _newest_state(draft, observed)
    if state is not None:
        _copy_run_state(draft, _with_claim_uris(state, spec, observed.job.name))
    if draft.checkpoint is None:
        draft.set(ConditionType.CHECKPOINTED, FALSE, Reason.NO_CHECKPOINT_YET, "")
    else:
        draft.set(ConditionType.CHECKPOINTED, TRUE, Reason.SAVED, f"checkpoint of step {draft.checkpoint.step}")
    _report_alarms(draft, state)
    _report_progressing(draft, observed, state, unobservable)


def new_alarms(draft: StatusDraft, observed: Observed) -> tuple[EventRecord, ...]:
    """One event for each alarm that this pass adds to the status; those that this operator does not know share one."""
    added, state = set(draft.alarms) - set(observed.job.status.alarms), observed.ray.run_state
    texts: dict[Reason, list[str]] = {}
    for alarm in (state.alarms if state is not None else None) or ():
        if alarm.reason in added:
            texts.setdefault(_alarm_reason(alarm), []).append(_alarm_text(alarm))
    return tuple(
        EventRecord(EventType.WARNING, reason, bounded_note(beginning_of("; ".join(each))))
        for reason, each in texts.items()
    )


def record_termination(draft: StatusDraft, observed: Observed) -> None:
    """Records when the trainer or Ray first reported the trainer's end."""
    ray_job, state = newest_ray_job(draft, observed), observed.ray.run_state
    if ray_job is None or draft.attempt.end_reported_at is not None:
        return
    if ray_job.status.has_ended or (state is not None and state.phase in FINAL_PHASES):
        draft.change_attempt(end_reported_at=timestamp(draft.now))


def seconds_since_termination(draft: StatusDraft) -> float | None:
    """Seconds since the trainer or Ray first reported the trainer's end; None if neither has."""
    seen = draft.attempt.end_reported_at
    return None if seen is None else seconds_since(seen, draft.now)


def trainer_may_run(draft: StatusDraft, observed: Observed) -> bool:
    """Whether the newest attempt's trainer may still be running. If Ray responds: it has not reported that the trainer
    ended, or does not list the submitted trainer yet. Else: the head pod exists and has not ended, or the operator is
    not allowed to read pods."""
    attempt, ray_job = draft.attempt, newest_ray_job(draft, observed)
    if attempt.submissions == 0:
        return False
    if ray_job is not None:
        return not ray_job.status.has_ended
    if observed.ray.reachability is Reachability.OK:
        return attempt.running_since is None
    head = head_pod(observed.pods_of(attempt.cluster))
    return observed.forbidden is not None or (head is not None and not head.ended)


def claim_uri(uri: str, spec: RLJobSpec, job: str) -> str:
    """The `file://` URI of a path in the claim, as seen inside the pods, as a URI that users can find:
    `pvc://claim/folder/...`. Other URIs are returned unchanged, and so is a URI that would become too long. `job`: name
    of the job."""
    storage, pod_folder = spec.checkpoint.storage, f"file://{POD_STORAGE_FOLDER}/"
    if storage is None or storage.persistent_volume_claim is None or not uri.startswith(pod_folder):
        return uri
    claim_folder = f"pvc://{storage.persistent_volume_claim}/{(storage.sub_path or job).strip('/')}/"
    found = claim_folder + uri.removeprefix(pod_folder)
    return found if len(found) <= MAX_URI_LENGTH else uri


def _submission_finding(draft: StatusDraft, observed: Observed) -> Finding | None:
    """JobSubmitted, as this pass found it; None as for `report_submission`."""
    if draft.attempt.submissions == 0:
        return None
    name, failure = newest_submission(draft, observed.job), observed.failure
    if newest_ray_job(draft, observed) is not None:
        return Finding(TRUE, Reason.SUBMITTED, f"Ray job {name}")
    if draft.attempt.running_since is not None:
        if observed.ray.reachability is not Reachability.OK:
            return None
        text = f"Ray no longer knows Ray job {name}: the Ray head was restarted"
        return Finding(FALSE, Reason.DRIVER_LOST, text)
    if failure is not None and failure.kind is EffectKind.SUBMIT_JOB:
        return Finding(FALSE, failure.reason, failure.message)
    return Finding(FALSE, Reason.SUBMITTING, f"Ray job {name} is being submitted")


def _unobservable(draft: StatusDraft, observed: Observed) -> tuple[Reason, str] | None:
    """Why a running trainer cannot be observed: reason and message; None as for `record_unobservable`."""
    ray = observed.ray
    if observed.forbidden is not None and ray.reachability is Reachability.NOT_ASKED:
        return Reason.READ_FORBIDDEN, observed.forbidden
    if ray.reachability is Reachability.NOT_ASKED:
        return Reason.DASHBOARD_UNREACHABLE, "the head pod is not ready"
    if ray.reachability is not Reachability.OK:
        if ray.silent_seconds < SHORT_SILENCE_SECONDS and draft.attempt.state_unknown_since is None:
            return None
        rejected = ray.reachability is Reachability.REJECTED
        return Reason.TOKEN_REJECTED if rejected else Reason.DASHBOARD_UNREACHABLE, ray.error or "reason unknown"
    if ray.run_state_error is not None and newest_ray_job(draft, observed) is not None:
        return Reason.RUN_STATE_UNREADABLE, ray.run_state_error
    return None


def _copy_run_state(draft: StatusDraft, state: RunState) -> None:
    """Copies progress, checkpoint and export into the status, and the steps of the attempt's checkpoints into its
    record."""
    checkpoint = state.checkpoint
    draft.progress = _rounded(state.progress)
    draft.checkpoint = checkpoint or draft.checkpoint
    draft.export_uri = state.export_uri or draft.export_uri
    if state.resumed_from_step is not None:
        draft.change_attempt(resumed_from_step=state.resumed_from_step)
    if checkpoint is not None and checkpoint.step != state.resumed_from_step:
        # A checkpoint of this attempt, not the one from which it resumed.
        draft.change_attempt(checkpoint_step=checkpoint.step)


def _newest_state(draft: StatusDraft, observed: Observed) -> RunState | None:
    """The run state of the newest submission; None if it is unknown."""
    return observed.ray.run_state if newest_ray_job(draft, observed) is not None else None


def _report_alarms(draft: StatusDraft, state: RunState | None) -> None:
    """Sets TrainingHealthy and copies the alarms. In a new attempt, the old alarms stay until its trainer has resumed
    or completed a step."""
    kind = ConditionType.TRAINING_HEALTHY
    if state is None or not _has_alarms_to_report(state):
        if not draft.has(kind):
            draft.set(kind, UNKNOWN, Reason.STARTING, "the trainer has not completed a step")
    elif state.alarms is None:
        draft.alarms = ()
        draft.set(kind, UNKNOWN, Reason.NOT_REPORTED, "the trainer does not report whether there are alarms")
    elif not state.alarms:
        draft.alarms = ()
        draft.set(kind, TRUE, Reason.NO_ALARMS, "")
    else:
        first = state.alarms[0]
        draft.alarms = tuple(dict.fromkeys(alarm.reason for alarm in state.alarms))
        draft.set(kind, FALSE, _alarm_reason(first), _alarm_text(first))


def _has_alarms_to_report(state: RunState) -> bool:
    """Whether the run state says something about alarms. A trainer that fails while it starts may have the
    step of the checkpoint from which it would resume, and no alarms."""
    has_ended_early = state.phase in (RunPhase.FAILED, RunPhase.STOPPED) and state.alarms is None
    return state.phase is not RunPhase.STARTING and state.progress.step > 0 and not has_ended_early


def _alarm_reason(alarm: Alarm) -> Reason:
    """The alarm's reason; OtherAlarm if this operator does not know it."""
    return Reason(alarm.reason) if alarm.reason in ALARMS else Reason.OTHER_ALARM


def _alarm_text(alarm: Alarm) -> str:
    """The alarm's message and steps, with the name of an unknown alarm before it."""
    name = "" if alarm.reason in ALARMS else f"{alarm.reason}: "
    return f"{name}{alarm.message} ({alarm.steps})" if alarm.steps else name + alarm.message


def _rounded(progress: Progress) -> Progress:
    """The progress with rounded numbers: `kubectl get` prints the numbers of a status as they are."""
    numbers = {
        "reward_mean": progress.reward_mean,
        "eval_score": progress.eval_score,
        "tokens_per_second": progress.tokens_per_second,
    }
    rounded = {
        name: float(f"{number:.{SIGNIFICANT_DIGITS}g}") for name, number in numbers.items() if number is not None
    }
    return progress.model_copy(update=rounded)


def _report_progressing(
    draft: StatusDraft, observed: Observed, state: RunState | None, unobservable: tuple[Reason, str] | None
) -> None:
    """Sets Progressing, and the attempt's state where the trainer reports a later one."""
    kind, stop, ray_job = ConditionType.PROGRESSING, draft.attempt.stop, newest_ray_job(draft, observed)
    head = head_pod(observed.pods_of(draft.attempt.cluster))
    if stop is not None:
        text = f"the trainer was asked to stop ({stop.reason})"
        if stop.sent_at is None:
            text = f"the trainer should stop ({stop.reason}), but cannot be asked: Ray's dashboard is unreachable"
        draft.set(kind, FALSE, Reason.STOPPING, text)
    elif head is not None and head.deleting:
        draft.change_attempt(state=AttemptState.STOPPING.value)
        draft.set(kind, FALSE, Reason.STOPPING, f"the head pod {head.name} is being deleted")
    elif unobservable is not None:
        draft.set(kind, UNKNOWN, *unobservable)
    elif observed.ray.reachability is not Reachability.OK:
        # Polls have failed only since a moment ago: the condition stays as it is.
        return
    elif state is None and ray_job is not None and ray_job.status is RayJobStatus.SUCCEEDED:
        draft.set(kind, FALSE, Reason.DASHBOARD_UNREACHABLE, END_WITHOUT_STATE)
    elif state is None or state.phase is RunPhase.STARTING:
        draft.set(kind, TRUE, Reason.STARTING, "the trainer is loading the model and starting its workers")
    elif state.phase is RunPhase.STOPPING:
        draft.change_attempt(state=AttemptState.STOPPING.value)
        draft.set(kind, FALSE, Reason.STOPPING, "the trainer was asked to stop")
    elif state.phase is RunPhase.RUNNING:
        if draft.attempt.state == AttemptState.STARTING:
            draft.change_attempt(state=AttemptState.RUNNING.value)
        draft.set(kind, TRUE, Reason.TRAINING, f"{state.progress.total_steps} steps in total")


def _with_claim_uris(state: RunState, spec: RLJobSpec | None, job: str) -> RunState:
    """The run state with URIs that users can find (`claim_uri`); without a spec, without checkpoint and export."""
    if spec is None:
        return state.model_copy(update={"checkpoint": None, "export_uri": None})
    checkpoint, export_uri = state.checkpoint, state.export_uri
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"uri": claim_uri(checkpoint.uri, spec, job)})
    if export_uri is not None:
        export_uri = claim_uri(export_uri, spec, job)
    return state.model_copy(update={"checkpoint": checkpoint, "export_uri": export_uri})
