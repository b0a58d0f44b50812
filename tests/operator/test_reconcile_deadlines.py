"""What time alone does: the deadlines, stopping in good order, and when the operator looks again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import AttemptOutcome, ConditionStatus
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, Observed, ObservedRay, RayJobStatus
from rljob_operator.reconcile.plan_types import ApplyNetworkPolicy, DeleteCluster, StopJob
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import samples
from rljob_testing.operator.samples import condition_of, decide

C = ConditionType
LIMITS = samples.spec(
    {
        "runPolicy": {
            "provisioningDeadlineSeconds": 300,
            "activeDeadlineSeconds": 1000,
            "gracePeriodSeconds": 50,
            "maxAppRetries": 0,
        }
    }
)
UNREACHABLE = samples.silent_ray()


def pending(seconds_ago: float) -> Observed:
    return samples.moment(samples.provisioning(seconds_ago=seconds_ago), samples.cluster(), job_spec=LIMITS)


def training(seconds_ago: float) -> Observed:
    """Since so many seconds, with a checkpoint of step 4."""
    status = samples.running(seconds_ago, samples.condition(C.PROGRESSING, reason=Reason.TRAINING))
    return samples.healthy(state=samples.run_state(checkpoint_step=4), status=status, job_spec=LIMITS)


def test_provisioning_has_until_its_deadline_and_not_longer() -> None:
    assert condition_of(decide(pending(299)).status, C.FAILED) is None
    plan = decide(pending(300))
    assert condition_of(plan.status, C.FAILED) == (
        "True",
        "ProvisioningDeadlineExceeded",
        Mentions("300 s: 0 of 2 pods ready; waiting for the head pod and 1 of pool main"),
    )
    assert plan.status.attempts[0].outcome == AttemptOutcome.FAILED
    assert plan.effects == (DeleteCluster("example-1", samples.CLUSTER_UID),)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (samples.ray(gpus=(1,)), Mentions("300 s: Ray has 1 of 2 GPUs")),
        (UNREACHABLE, Mentions("300 s: all pods are ready", "dashboard", "timeout")),
        (samples.ray(), Mentions("300 s: Ray job example-1-1 is being submitted")),
    ],
)
def test_the_deadline_names_what_was_missing(seen: ObservedRay, text: Mentions) -> None:
    ready = replace(pending(10), pods=samples.ready_pods(), ray=seen)
    waited = samples.with_status_written(ready, decide(ready))
    failed = condition_of(decide(waited, samples.at(290)).status, C.FAILED)
    assert failed == ("True", "ProvisioningDeadlineExceeded", text)


def test_a_job_that_was_submitted_has_no_provisioning_deadline() -> None:
    unready = replace(training(301), pods=samples.ready_pods()[:1])
    assert condition_of(decide(unready).status, C.FAILED) is None


def test_the_active_deadline_stops_the_trainer_first() -> None:
    assert decide(training(999)).effects == ()
    plan = decide(training(1000))
    assert plan.effects == (StopJob("example-1-1"),)
    assert condition_of(plan.status, C.FAILED) is None
    message = Mentions("asked to stop (ActiveDeadlineExceeded)")
    assert condition_of(plan.status, C.PROGRESSING) == ("False", "Stopping", message)
    assert plan.status.phase == "Stopping"
    asked = samples.with_status_written(training(1000), plan)
    again = decide(asked, samples.at(4))
    assert again.effects == plan.effects
    assert again.status == plan.status
    ended = replace(
        asked,
        ray=samples.ray(samples.ray_job(RayJobStatus.STOPPED), samples.run_state(RunPhase.STOPPED, checkpoint_step=7)),
    )
    last = decide(ended, samples.at(8))
    assert condition_of(last.status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("stopped as requested", "checkpoint", "step 7"),
    )
    assert last.status.attempts[0].outcome == AttemptOutcome.STOPPED


def test_a_trainer_that_does_not_stop_gets_its_grace_from_the_request() -> None:
    # The operator was away when the deadline passed, 4000 s ago.
    late = training(5000)
    plan = decide(late)
    assert plan.effects == (StopJob("example-1-1"),)
    asked = samples.with_status_written(late, plan)
    assert condition_of(decide(asked, samples.at(49)).status, C.FAILED) is None
    assert condition_of(decide(asked, samples.at(50)).status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("asked to stop", "within 50 s"),
    )


def test_a_silent_dashboard_does_not_prolong_the_grace() -> None:
    asked = samples.with_status_written(training(1000), decide(training(1000)))
    silent = replace(asked, ray=UNREACHABLE)
    plan = decide(silent, samples.at(20))
    assert plan.effects == (ApplyNetworkPolicy("example-1"),)
    assert condition_of(plan.status, C.PROGRESSING) == condition_of(asked.job.status, C.PROGRESSING)
    assert condition_of(decide(samples.with_status_written(silent, plan), samples.at(50)).status, C.FAILED) is not None


def test_the_grace_begins_with_the_request() -> None:
    # The trainer has said for 500 s that it stops, which somebody else asked for.
    status = samples.running(
        1000, samples.condition(C.PROGRESSING, ConditionStatus.FALSE, Reason.STOPPING, seconds_ago=500)
    )
    stopping = samples.healthy(state=samples.run_state(RunPhase.STOPPING), status=status, job_spec=LIMITS)
    plan = decide(stopping)
    assert plan.effects == (StopJob("example-1-1"),)
    asked = samples.with_status_written(stopping, plan)
    assert condition_of(decide(asked, samples.at(49)).status, C.FAILED) is None
    assert condition_of(decide(asked, samples.at(50)).status, C.FAILED) is not None


def test_nobody_is_said_to_have_asked_a_dashboard_that_does_not_answer() -> None:
    silent = replace(training(1000), ray=UNREACHABLE)
    plan = decide(silent)
    assert plan.effects == (ApplyNetworkPolicy("example-1"),)
    message = Mentions("(ActiveDeadlineExceeded)", "cannot be asked", "dashboard")
    assert condition_of(plan.status, C.PROGRESSING) == ("False", "Stopping", message)
    later = samples.with_status_written(silent, plan)
    assert condition_of(decide(later, samples.at(4)).status, C.PROGRESSING) == ("False", "Stopping", message)
    assert condition_of(decide(later, samples.at(50)).status, C.FAILED) == (
        "True",
        "ActiveDeadlineExceeded",
        Mentions("could not be asked to stop for 50 s", "dashboard"),
    )
    answered = decide(replace(later, ray=training(0).ray), samples.at(20))
    assert answered.effects == (StopJob("example-1-1"),)
    asked = Mentions("was asked to stop (ActiveDeadlineExceeded)")
    assert condition_of(answered.status, C.PROGRESSING) == ("False", "Stopping", asked)


def test_a_request_to_stop_is_not_taken_back() -> None:
    asked = samples.with_status_written(training(1000), decide(training(1000)))
    raised = samples.spec({"runPolicy.activeDeadlineSeconds": 100_000})
    stopped = replace(
        asked, job=replace(asked.job, spec=raised), ray=samples.ray(samples.ray_job(RayJobStatus.STOPPED))
    )
    told = condition_of(decide(stopped, samples.at(30)).status, C.FAILED)
    assert told is not None
    assert told[1] == "ActiveDeadlineExceeded"


def test_nobody_who_was_not_asked_to_stop_runs_out_of_grace() -> None:
    long = samples.running(90_000, samples.condition(C.PROGRESSING, reason=Reason.TRAINING, seconds_ago=80_000))
    plan = decide(samples.healthy(state=samples.run_state(), status=long))
    assert condition_of(plan.status, C.FAILED) is None
    assert plan.effects == ()


def test_success_at_the_deadline_is_success() -> None:
    done = replace(
        training(1000),
        ray=samples.ray(samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE)),
    )
    plan = decide(done)
    assert condition_of(plan.status, C.COMPLETE) is not None
    assert condition_of(plan.status, C.FAILED) is None


def test_a_deadline_can_be_raised_in_time() -> None:
    raised = replace(training(1000), job=replace(training(1000).job, spec=samples.spec()))
    assert decide(raised).effects == ()


def hanging(phase: RunPhase, seconds_ago: float) -> Observed:
    """Ray says that the trainer runs, which was seen so long ago to tell that it has ended; its grace is 50 s."""
    error = RunError(kind="RewardError", message="no score") if phase is RunPhase.FAILED else None
    told = {"ending_seen_at": timestamp(samples.at(-seconds_ago))} if phase is not RunPhase.RUNNING else {}
    status = samples.running(100, samples.condition(C.PROGRESSING, reason=Reason.TRAINING), record=told)
    # What the trainer's clock says does not matter.
    state = samples.run_state(phase, step=10, seconds_ago=-3600, error=error)
    return samples.healthy(samples.ray_job(), state, status, job_spec=LIMITS)


@pytest.mark.parametrize("phase", [RunPhase.COMPLETE, RunPhase.FAILED, RunPhase.STOPPED])
def test_a_trainer_that_has_told_its_end_and_does_not_end_is_stopped(phase: RunPhase) -> None:
    assert decide(hanging(phase, 49)).effects == ()
    for seconds_ago in (50, 99):
        plan = decide(hanging(phase, seconds_ago))
        assert plan.effects == (StopJob("example-1-1"),)
        assert plan.status.attempts[0].outcome == AttemptOutcome.RUNNING
    assert decide(hanging(RunPhase.RUNNING, 1000)).effects == ()


@pytest.mark.parametrize("status", [RayJobStatus.RUNNING, RayJobStatus.STOPPED])
@pytest.mark.parametrize(
    ("phase", "kind", "reason", "message"),
    [
        (RunPhase.COMPLETE, C.COMPLETE, "Succeeded", Mentions("10 of 10 steps")),
        (RunPhase.FAILED, C.FAILED, "ApplicationError", Mentions("process did not exit: RewardError: no score")),
        (RunPhase.STOPPED, C.FAILED, "StoppedOutside", Mentions("else than the operator", "through Ray")),
    ],
)
def test_it_ends_as_it_told(
    status: RayJobStatus, phase: RunPhase, kind: ConditionType, reason: str, message: Mentions
) -> None:
    seen = hanging(phase, 100)
    plan = decide(replace(seen, ray=replace(seen.ray, job=samples.ray_job(status))))
    assert condition_of(plan.status, kind) == ("True", reason, message)
    assert plan.effects == (DeleteCluster("example-1", samples.CLUSTER_UID),)


def name_conflict(seconds_ago: float) -> Observed:
    """Another cluster has had the name for so long, as was seen after a long wait for something else."""
    record = {"name_taken_since": timestamp(samples.at(-seconds_ago))}
    seen = samples.moment(samples.provisioning(seen=False, seconds_ago=200, record=record), job_spec=LIMITS)
    return replace(seen, failure=EffectFailure(EffectKind.CREATE_CLUSTER, Reason.NAME_CONFLICT, "it is another's"))


def test_a_name_is_waited_for_from_when_it_is_seen_to_be_taken() -> None:
    quota = EffectFailure(EffectKind.CREATE_CLUSTER, Reason.CREATION_REFUSED, "over quota")
    waited = replace(samples.moment(samples.provisioning(seen=False, seconds_ago=200), job_spec=LIMITS), failure=quota)
    waited = samples.with_status_written(waited, decide(waited))
    taken = replace(waited, failure=EffectFailure(EffectKind.CREATE_CLUSTER, Reason.NAME_CONFLICT, "it is another's"))
    plan = decide(taken)
    assert plan.status.result is None
    noted = samples.with_status_written(taken, plan)
    assert decide(noted, samples.at(59)).status.result is None
    # What is not tried for a while, as after a restart, tells nothing new.
    untried = replace(noted, failure=None)
    assert decide(untried, samples.at(30)).status.attempts == noted.job.status.attempts
    result = decide(noted, samples.at(60)).status.result
    assert result is not None
    assert result.reason == Reason.NAME_CONFLICT
    refused = replace(noted, failure=quota)
    assert decide(refused, samples.at(60)).status.attempts[0].name_taken_since is None
    made = replace(noted, clusters=(samples.cluster(),), failure=None)
    assert decide(made, samples.at(59)).status.attempts[0].name_taken_since is None


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        # Pods start: their events are looked at every 10 s, or at the deadline.
        (pending(100), 10),
        (pending(297), 3),
        (replace(pending(100), pods=samples.ready_pods(), ray=samples.ray(gpus=())), 4),
        (training(100), 4),
        (training(998), 2),
        (name_conflict(55), 5),
        (samples.moment(decide(samples.without_retries(samples.moment(samples.running()))).status), None),
    ],
)
def test_the_operator_looks_again_in_time(seen: Observed, seconds: float | None) -> None:
    assert decide(seen).requeue_after_seconds == seconds
