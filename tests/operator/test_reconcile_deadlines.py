"""What time alone causes: deadlines, graceful stops, and when the operator reconciles next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import AttemptOutcome, ConditionStatus
from rljob_operator.reconcile.decision import ApplyNetworkPolicy, DeleteCluster, StopRayJob
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedRay,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C = ConditionType
LIMITS = inputs.spec(
    {
        "runPolicy": {
            "provisioningDeadlineSeconds": 300,
            "activeDeadlineSeconds": 1000,
            "gracePeriodSeconds": 50,
            "maxAppRetries": 0,
        }
    }
)
UNREACHABLE = inputs.silent_ray()


def pending(seconds_ago: float) -> Observed:
    return inputs.observed(inputs.provisioning(seconds_ago=seconds_ago), inputs.cluster(), job_spec=LIMITS)


def training(seconds_ago: float) -> Observed:
    """An attempt that has trained for this many seconds, with a checkpoint of step 4."""
    status = inputs.running(seconds_ago, inputs.condition(C.PROGRESSING, reason=Reason.TRAINING))
    return inputs.healthy(state=inputs.run_state(checkpoint_step=4), status=status, job_spec=LIMITS)


def test_provisioning_has_until_its_deadline_and_not_longer() -> None:
    worker = inputs.pod("w", problem=PodProblem(Reason.IMAGE_PULL_FAILED, "not found"))
    assert inputs.condition_of(inputs.decide(replace(pending(299), pods=(worker,))).status, C.FAILED) is None
    decision = inputs.decide(replace(pending(300), pods=(worker,)))
    assert inputs.condition_of(decision.status, C.FAILED) == (
        "True",
        "ProvisioningDeadlineExceeded",
        Mentions("300 s: 0 of 2 pods ready; 1 of 1 pods of pool main: not found (pod w)"),
    )
    assert decision.status.attempts[0].outcome == AttemptOutcome.FAILED
    assert decision.status.counters is not None
    assert decision.status.counters.failed_attempts == 1
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (inputs.ray(gpus=(1,)), Mentions("300 s: Ray has 1 of 2 GPUs")),
        (UNREACHABLE, Mentions("300 s: all pods are ready", "dashboard", "timeout")),
        (inputs.ray(), Mentions("300 s: Ray job example-1-1 is being submitted")),
    ],
)
def test_the_provisioning_deadline_names_what_was_missing(seen: ObservedRay, text: Mentions) -> None:
    ready = replace(pending(10), pods=inputs.ready_pods(), ray=seen)
    waited = inputs.with_status_written(ready, inputs.decide(ready))
    failed = inputs.condition_of(inputs.decide(waited, inputs.at(290)).status, C.FAILED)
    assert failed == ("True", "ProvisioningDeadlineExceeded", text)


def test_a_submitted_job_has_no_provisioning_deadline() -> None:
    unready = replace(training(301), pods=inputs.ready_pods()[:1])
    assert inputs.condition_of(inputs.decide(unready).status, C.FAILED) is None


def test_the_active_deadline_stops_the_trainer_first() -> None:
    assert inputs.decide(training(999)).effects == ()
    decision = inputs.decide(training(1000))
    assert decision.effects == (StopRayJob("example-1-1"),)
    assert inputs.condition_of(decision.status, C.FAILED) is None
    message = Mentions("asked to stop (ActiveDeadlineExceeded)")
    assert inputs.condition_of(decision.status, C.PROGRESSING) == ("False", "Stopping", message)
    assert decision.status.phase == "Stopping"
    requested = inputs.with_status_written(training(1000), decision)
    again = inputs.decide(requested, inputs.at(4))
    assert again.effects == decision.effects
    assert again.status == decision.status
    ended = replace(
        requested,
        ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED), inputs.run_state(RunPhase.STOPPED, checkpoint_step=7)),
    )
    last = inputs.decide(ended, inputs.at(8))
    assert inputs.condition_of(last.status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("stopped as requested", "checkpoint", "step 7"),
    )
    assert last.status.attempts[0].outcome == AttemptOutcome.STOPPED


@pytest.mark.parametrize(
    ("ray", "applies"),
    [
        (inputs.silent_ray(seconds=20), True),
        (inputs.silent_ray(seconds=19), False),
        (inputs.silent_ray(Reachability.REJECTED), False),
    ],
    ids=["silent", "silent for a moment", "it answers"],
)
def test_an_operator_that_moved_gets_access_to_a_dashboard_before_the_trainer_was_submitted(
    ray: ObservedRay, applies: bool
) -> None:
    """Otherwise the job would fail at its provisioning deadline."""
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), ray)
    effects = (ApplyNetworkPolicy("example-1"),) if applies else ()
    assert inputs.decide(seen).effects == effects
    unread = replace(seen, job=replace(seen.job, spec=None, spec_error="spec.new: not known here"))
    assert inputs.decide(unread).effects == effects


def test_a_trainer_that_does_not_stop_gets_its_grace_period_from_the_request() -> None:
    # The operator was away when the deadline passed, 4000 s ago.
    late = training(5000)
    decision = inputs.decide(late)
    assert decision.effects == (StopRayJob("example-1-1"),)
    requested = inputs.with_status_written(late, decision)
    assert inputs.condition_of(inputs.decide(requested, inputs.at(49)).status, C.FAILED) is None
    assert inputs.condition_of(inputs.decide(requested, inputs.at(50)).status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("asked to stop", "within 50 s"),
    )


def test_an_unreachable_dashboard_does_not_prolong_the_grace_period() -> None:
    requested = inputs.with_status_written(training(1000), inputs.decide(training(1000)))
    silent = replace(requested, ray=UNREACHABLE)
    decision = inputs.decide(silent, inputs.at(20))
    assert decision.effects == (ApplyNetworkPolicy("example-1"),)
    assert inputs.condition_of(decision.status, C.PROGRESSING) == inputs.condition_of(
        requested.job.status, C.PROGRESSING
    )
    assert (
        inputs.condition_of(inputs.decide(inputs.with_status_written(silent, decision), inputs.at(50)).status, C.FAILED)
        is not None
    )


def test_the_grace_period_begins_with_the_request() -> None:
    # The trainer has reported for 500 s that it stops, which somebody else requested.
    status = inputs.running(
        1000, inputs.condition(C.PROGRESSING, ConditionStatus.FALSE, Reason.STOPPING, seconds_ago=500)
    )
    stopping = inputs.healthy(state=inputs.run_state(RunPhase.STOPPING), status=status, job_spec=LIMITS)
    decision = inputs.decide(stopping)
    assert decision.effects == (StopRayJob("example-1-1"),)
    requested = inputs.with_status_written(stopping, decision)
    assert inputs.condition_of(inputs.decide(requested, inputs.at(49)).status, C.FAILED) is None
    assert inputs.condition_of(inputs.decide(requested, inputs.at(50)).status, C.FAILED) is not None


def test_an_unreachable_dashboard_is_not_reported_as_stopped_by_a_user() -> None:
    silent = replace(training(1000), ray=UNREACHABLE)
    decision = inputs.decide(silent)
    assert decision.effects == (ApplyNetworkPolicy("example-1"),)
    message = Mentions("(ActiveDeadlineExceeded)", "cannot be asked", "dashboard")
    assert inputs.condition_of(decision.status, C.PROGRESSING) == ("False", "Stopping", message)
    later = inputs.with_status_written(silent, decision)
    assert inputs.condition_of(inputs.decide(later, inputs.at(4)).status, C.PROGRESSING) == (
        "False",
        "Stopping",
        message,
    )
    assert inputs.condition_of(inputs.decide(later, inputs.at(50)).status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("50 s", "could not be asked to stop", "dashboard"),
    )
    answered = inputs.decide(replace(later, ray=training(0).ray), inputs.at(20))
    assert answered.effects == (StopRayJob("example-1-1"),)
    requested = Mentions("was asked to stop (ActiveDeadlineExceeded)")
    assert inputs.condition_of(answered.status, C.PROGRESSING) == ("False", "Stopping", requested)


def test_a_stop_request_is_not_withdrawn() -> None:
    requested = inputs.with_status_written(training(1000), inputs.decide(training(1000)))
    raised = inputs.spec({"runPolicy.activeDeadlineSeconds": 100_000})
    stopped = replace(
        requested, job=replace(requested.job, spec=raised), ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED))
    )
    condition = inputs.condition_of(inputs.decide(stopped, inputs.at(30)).status, C.FAILED)
    assert condition is not None
    assert condition[1] == "ActiveDeadlineExceeded"


def test_a_trainer_without_a_stop_request_has_no_grace_period() -> None:
    long = inputs.running(90_000, inputs.condition(C.PROGRESSING, reason=Reason.TRAINING, seconds_ago=80_000))
    decision = inputs.decide(inputs.healthy(state=inputs.run_state(), status=long))
    assert inputs.condition_of(decision.status, C.FAILED) is None
    assert decision.effects == ()


def test_success_at_the_deadline_is_success() -> None:
    done = replace(
        training(1000),
        ray=inputs.ray(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE)),
    )
    decision = inputs.decide(done)
    assert inputs.condition_of(decision.status, C.COMPLETE) is not None
    assert inputs.condition_of(decision.status, C.FAILED) is None


def test_a_deadline_can_be_raised_in_time() -> None:
    raised = replace(training(1000), job=replace(training(1000).job, spec=inputs.spec()))
    assert inputs.decide(raised).effects == ()


def hanging(phase: RunPhase, seconds_ago: float) -> Observed:
    """Ray reports that the trainer runs although its final state was seen this long ago; its grace period is 50 s."""
    error = RunError(kind="RewardError", message="no score") if phase is RunPhase.FAILED else None
    record = {"end_reported_at": timestamp(inputs.at(-seconds_ago))} if phase is not RunPhase.RUNNING else {}
    status = inputs.running(100, inputs.condition(C.PROGRESSING, reason=Reason.TRAINING), record=record)
    # The trainer's clock does not matter.
    state = inputs.run_state(phase, step=10, seconds_ago=-3600, error=error)
    return inputs.healthy(inputs.ray_job(), state, status, job_spec=LIMITS)


@pytest.mark.parametrize("phase", [RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED])
def test_a_trainer_that_reported_its_end_and_still_runs_is_stopped(phase: RunPhase) -> None:
    assert inputs.decide(hanging(phase, 49)).effects == ()
    for seconds_ago in (50, 99):
        decision = inputs.decide(hanging(phase, seconds_ago))
        assert decision.effects == (StopRayJob("example-1-1"),)
        assert decision.status.attempts[0].outcome == AttemptOutcome.RUNNING
    assert inputs.decide(hanging(RunPhase.RUNNING, 1000)).effects == ()


@pytest.mark.parametrize("status", [RayJobStatus.RUNNING, RayJobStatus.STOPPED])
@pytest.mark.parametrize(
    ("phase", "kind", "reason", "message"),
    [
        (RunPhase.COMPLETE, C.COMPLETE, "Succeeded", Mentions("10 of 10 steps")),
        (RunPhase.FAILED, C.FAILED, "ApplicationError", Mentions("process did not exit: RewardError: no score")),
        (RunPhase.STOPPED, C.FAILED, "StoppedThroughRay", Mentions("not by the operator", "through Ray")),
    ],
)
def test_a_stopped_trainer_keeps_the_result_it_reported(
    status: RayJobStatus, phase: RunPhase, kind: ConditionType, reason: str, message: Mentions
) -> None:
    seen = hanging(phase, 100)
    decision = inputs.decide(replace(seen, ray=replace(seen.ray, job=inputs.ray_job(status))))
    assert inputs.condition_of(decision.status, kind) == ("True", reason, message)
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)


def name_conflict(seconds_ago: float) -> Observed:
    """Another cluster has had the name for this long; the conflict was seen after a long wait for something else."""
    record = {"name_taken_since": timestamp(inputs.at(-seconds_ago))}
    seen = inputs.observed(inputs.provisioning(seen=False, seconds_ago=200, record=record), job_spec=LIMITS)
    return replace(seen, failure=EffectFailure(EffectKind.CREATE_CLUSTER, Reason.NAME_CONFLICT, "it is another's"))


def test_a_name_conflict_is_waited_for_from_when_it_is_seen() -> None:
    quota = EffectFailure(EffectKind.CREATE_CLUSTER, Reason.CREATION_REJECTED, "over quota")
    waited = replace(inputs.observed(inputs.provisioning(seen=False, seconds_ago=200), job_spec=LIMITS), failure=quota)
    waited = inputs.with_status_written(waited, inputs.decide(waited))
    conflicting = replace(
        waited, failure=EffectFailure(EffectKind.CREATE_CLUSTER, Reason.NAME_CONFLICT, "it is another's")
    )
    decision = inputs.decide(conflicting)
    assert decision.status.result is None
    recorded = inputs.with_status_written(conflicting, decision)
    assert inputs.decide(recorded, inputs.at(59)).status.result is None
    # An effect that is not tried for a while, as after a restart, gives no new information.
    untried = replace(recorded, failure=None)
    assert inputs.decide(untried, inputs.at(30)).status.attempts == recorded.job.status.attempts
    result = inputs.decide(recorded, inputs.at(60)).status.result
    assert result is not None
    assert result.reason == Reason.NAME_CONFLICT
    rejected = replace(recorded, failure=quota)
    assert inputs.decide(rejected, inputs.at(60)).status.attempts[0].name_taken_since is None
    created = replace(recorded, clusters=(inputs.cluster(),), failure=None)
    assert inputs.decide(created, inputs.at(59)).status.attempts[0].name_taken_since is None


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        # Pods start: their events are polled every 10 s, or at the deadline.
        (pending(100), 10),
        (pending(297), 3),
        (replace(pending(100), pods=inputs.ready_pods(), ray=inputs.ray(gpus=())), 4),
        (training(100), 4),
        (training(998), 2),
        (name_conflict(55), 5),
        (inputs.observed(inputs.decide(inputs.without_retries(inputs.observed(inputs.running()))).status), None),
    ],
)
def test_the_requeue_is_not_later_than_the_deadline(seen: Observed, seconds: float | None) -> None:
    assert inputs.decide(seen).requeue_after_seconds == seconds
