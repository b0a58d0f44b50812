"""Losses during something else: during a stop, an outage of the operator, or with a trainer that may still exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import StopRequest
from rljob_operator.reconcile.decision import DeleteCluster, StopRayJob, SubmitRayJob
from rljob_operator.reconcile.observed import Observed, ObservedRay, PodProblem, RayJobStatus, Reachability
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import disrupted

R = Reason
GRACE_SECONDS = inputs.spec().run_policy.grace_period_seconds
RAY_NOT_ASKED = ObservedRay(Reachability.NOT_ASKED)


def without_head(seen: Observed) -> Observed:
    return replace(seen, pods=(inputs.pod("worker-0"),), ray=RAY_NOT_ASKED)


def without_cluster(seen: Observed) -> Observed:
    return replace(seen, clusters=(), pods=(), ray=RAY_NOT_ASKED)


@pytest.mark.parametrize("lose", [without_head, without_cluster])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_job_that_was_to_stop_stays_stopped_when_its_cluster_is_lost(lose: object, at_once: bool) -> None:
    assert callable(lose)
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state())
    seen = replace(seen, job=replace(seen.job, stop_request="now"))
    if not at_once:
        seen = inputs.with_status_written(seen, inputs.decide(seen))
    decision = inputs.decide(lose(seen), inputs.at(4))
    assert decision.status.result is not None
    assert decision.status.result.reason == R.STOPPED_BY_USER
    assert ("before it was asked to stop" in decision.status.result.message) == at_once
    assert decision.status.next_attempt is None


def test_a_kuberay_that_is_too_old_is_reported_also_while_the_job_stops() -> None:
    """A suspended job would fail again when it is resumed, without a reason."""
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state(), job_spec=inputs.spec({"suspend": True}))
    stopping = inputs.with_status_written(seen, inputs.decide(seen))
    result = inputs.decide(replace(stopping, clusters=(inputs.cluster(asks_for_token=False),))).status.result
    assert result is not None
    assert result.reason == R.KUBERAY_TOO_OLD


def test_a_head_whose_dashboard_responds_is_not_lost_with_its_node() -> None:
    head, *others = inputs.ready_pods()
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state())
    unreachable = replace(seen, pods=(replace(head, node_silent_seconds=600.0), *others))
    assert inputs.decide(unreachable).status.attempts[-1].ended is None
    silent = replace(unreachable, ray=inputs.silent_ray(seconds=20))
    assert inputs.decide(silent).status.attempts[-1].reason == R.HEAD_LOST


def test_a_suspending_job_that_loses_its_head_is_suspended_without_using_a_retry() -> None:
    suspended = inputs.spec({"suspend": True, "runPolicy": {"maxInfraRetries": 0}})
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state(), job_spec=suspended)
    status = inputs.decide(without_head(inputs.with_status_written(seen, inputs.decide(seen))), inputs.at(4)).status
    assert status.result is None
    assert status.attempts[-1].reason == R.SUSPENDED
    assert status.counters is not None
    assert (status.counters.infrastructure_retries, status.counters.failed_attempts) == (0, 0)


def test_a_trainer_that_could_not_be_asked_to_stop_is_removed_with_its_cluster() -> None:
    stop = StopRequest(reason=R.RESIZED.value, requested_at=timestamp(inputs.at(-GRACE_SECONDS)))
    seen = inputs.observed(
        inputs.running(9000, record={"stop": stop}), inputs.cluster(), inputs.ready_pods(), inputs.silent_ray()
    )
    following = inputs.decide(seen).status.next_attempt
    assert following is not None
    assert (following.reason, following.same_cluster) == (R.RESIZED, False)


@pytest.mark.parametrize(("in_ray", "same_cluster"), [(RayJobStatus.RUNNING, False), (RayJobStatus.FAILED, True)])
def test_a_failed_trainer_that_still_exists_is_removed_with_its_cluster(
    in_ray: RayJobStatus, same_cluster: bool
) -> None:
    status = inputs.running(9000, record={"end_reported_at": timestamp(inputs.at(-3 * GRACE_SECONDS))})
    run = inputs.ray_job(in_ray, 1 if in_ray is RayJobStatus.FAILED else None)
    following = inputs.decide(inputs.healthy(run, inputs.run_state(RunPhase.FAILED), status)).status.next_attempt
    assert following is not None
    assert (following.reason, following.same_cluster) == (R.APPLICATION_ERROR, same_cluster)


AFTER_OUTAGE = {"progressed_at": timestamp(inputs.at(-3700)), "run_state_at": timestamp(inputs.at(-3700))}


@pytest.mark.parametrize(
    "record",
    [AFTER_OUTAGE, AFTER_OUTAGE | {"state_unknown_since": timestamp(inputs.at(-3690))}],
    ids=["it was healthy", "its last poll had failed"],
)
def test_the_first_poll_after_an_operator_outage_may_fail(record: dict[str, object]) -> None:
    seen = inputs.observed(
        inputs.running(8000, record=record), inputs.cluster(), inputs.ready_pods(), inputs.silent_ray(seconds=1)
    )
    attempt = inputs.decide(seen).status.attempts[-1]
    assert (attempt.stop, attempt.ended) == (None, None)
    answered = replace(seen, ray=inputs.ray(inputs.ray_job(), inputs.run_state()))
    attempt = inputs.decide(answered).status.attempts[-1]
    assert (attempt.stop, attempt.ended, attempt.state_unknown_since) == (None, None, None)


def test_an_unreachability_that_this_operator_has_seen_still_ends_the_attempt() -> None:
    status = inputs.running(8000, record=AFTER_OUTAGE | {"state_unknown_since": timestamp(inputs.at(-3690))})
    seen = inputs.observed(status, inputs.cluster(), inputs.ready_pods(), inputs.silent_ray(seconds=20))
    assert inputs.decide(seen).status.attempts[-1].reason == R.DASHBOARD_UNREACHABLE


def test_a_submission_after_an_operator_outage_is_not_too_late() -> None:
    seen = inputs.observed(
        inputs.provisioning(seconds_ago=4000), inputs.cluster(provisioned=True), inputs.ready_pods(), inputs.ray()
    )
    decision = inputs.decide(seen)
    assert decision.status.result is None
    assert any(
        isinstance(effect, SubmitRayJob) for effect in inputs.decide(inputs.with_status_written(seen, decision)).effects
    )
    pulling = inputs.pod("worker-0", problem=PodProblem(R.IMAGE_PULL_FAILED, "not found"))
    late = replace(seen, pods=(*inputs.ready_pods()[:1], pulling))
    result = inputs.decide(late).status.result
    assert result is not None
    assert result.reason == R.PROVISIONING_DEADLINE_EXCEEDED


@pytest.mark.parametrize("deadline", [12, 30, 59, 61, 90])
def test_a_short_stall_deadline_does_not_stop_a_trainer_that_makes_progress(deadline: int) -> None:
    job_spec = inputs.spec({"runPolicy": {"stallDeadlineSeconds": deadline}})
    seen = inputs.healthy(
        inputs.ray_job(),
        inputs.run_state(),
        inputs.running(8000, record={"progressed_at": timestamp(inputs.NOW)}),
        job_spec=job_spec,
    )
    for seconds in range(0, 200, 4):
        state = inputs.run_state().model_copy(update={"written_at": timestamp(inputs.at(seconds - 1))})
        seen = replace(seen, ray=inputs.ray(inputs.ray_job(), state))
        seen = inputs.with_status_written(seen, inputs.decide(seen, inputs.at(seconds)))
        assert seen.job.status.attempts[-1].stop is None, f"after {seconds} s"
    # Its last report counts from when it is recorded.
    seen = inputs.with_status_written(seen, inputs.decide(seen, inputs.at(200 + deadline)))
    stop = inputs.decide(seen, inputs.at(200 + 2 * deadline)).status.attempts[-1].stop
    assert stop is not None
    assert stop.reason == R.STALLED


def test_a_head_evicted_by_its_kubelet_is_not_a_stop_by_a_user() -> None:
    """Its driver is stopped first; that the pod has ended is reported later."""
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.STOPPED))
    decision = inputs.decide(seen)
    assert decision.status.attempts[-1].ended is None
    head, *others = seen.pods
    ended = replace(
        inputs.with_status_written(seen, decision),
        pods=(replace(head, ready=False, ended=True), *others),
        ray=RAY_NOT_ASKED,
    )
    assert inputs.decide(ended, inputs.at(5)).status.attempts[-1].reason == R.HEAD_LOST
    assert (
        inputs.decide(inputs.with_status_written(seen, decision), inputs.at(30)).status.attempts[-1].reason
        == R.STOPPED_THROUGH_RAY
    )


def unread(seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, spec=None, spec_error="spec.new: not known here"))


def test_an_unreadable_spec_uses_no_retries() -> None:
    status = inputs.running(9000)
    assert status.counters is not None
    counters = status.counters.model_copy(update={"application_retries": 2, "infrastructure_retries": 10})
    seen = inputs.healthy(
        inputs.ray_job(RayJobStatus.FAILED, 1), None, status.model_copy(update={"counters": counters})
    )
    found = inputs.decide(unread(seen)).status
    assert found.result is None
    assert found.next_attempt is not None


def test_a_job_between_attempts_with_an_unreadable_spec_can_be_stopped() -> None:
    seen = unread(inputs.observed(inputs.waiting_for_retry()))
    result = inputs.decide(replace(seen, job=replace(seen.job, stop_request="now"))).status.result
    assert result is not None
    assert result.reason == R.STOPPED_BY_USER


PREEMPTED = PodProblem(R.DISRUPTED, "PreemptionByScheduler: for a/b")
TAKEN = replace(inputs.pod("worker-0", problem=PREEMPTED), deleting=True)


def uncounted(seen: Observed) -> int:
    """How many free restarts the job has had; checks that it has used no retry."""
    counters = inputs.decide(seen).status.counters
    assert counters is not None
    assert (counters.failed_attempts, counters.infrastructure_retries) == (0, 0)
    return counters.uncounted_restarts


def test_a_disrupted_trainer_is_asked_to_stop_and_resumes_on_the_same_cluster() -> None:
    seen = replace(inputs.healthy(inputs.ray_job(), inputs.run_state()), pods=(inputs.ready_pods()[0], TAKEN))
    asked = inputs.decide(seen)
    assert asked.effects == (StopRayJob("example-1-1"),)
    stopped = replace(inputs.with_status_written(seen, asked), ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED)))
    ended = inputs.decide(stopped, inputs.at(10))
    newest, following = ended.status.attempts[-1], ended.status.next_attempt
    assert (newest.reason, newest.outcome, newest.failure_class) == (R.DISRUPTED, "Stopped", "Resumable")
    assert following is not None
    assert following.same_cluster
    assert (ended.status.phase, ended.effects, uncounted(stopped)) == ("Retrying", (), 1)


@pytest.mark.parametrize("head", [{"ready": False}, {"deleting": True}, {"problem": PREEMPTED}], ids=str)
def test_a_disrupted_head_costs_the_cluster(head: dict[str, object]) -> None:
    seen = disrupted(stopped=True)
    first, *others = seen.pods
    decision = inputs.decide(replace(seen, pods=(replace(first, **head), *others)))  # type: ignore[arg-type]
    assert decision.effects == (DeleteCluster("example-1", "c1"),)


@pytest.mark.parametrize(
    "seen",
    [
        inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 75)),
        replace(inputs.healthy(), ray=RAY_NOT_ASKED),
        replace(inputs.healthy(), ray=inputs.ray()),
    ],
    ids=["trainer failed", "head gone", "driver lost"],
)
def test_a_trainer_that_is_lost_before_it_could_be_stopped_was_disrupted_too(seen: Observed) -> None:
    head = inputs.pod("head", "head")
    gone = seen.ray is RAY_NOT_ASKED
    pods = (replace(head, ended=True, ready=False, problem=PREEMPTED),) if gone else (head, TAKEN)
    lost = replace(seen, pods=pods)
    assert inputs.decide(lost).status.attempts[-1].reason == R.DISRUPTED
    assert uncounted(lost) == 1


def test_a_pod_that_kuberay_has_replaced_disturbs_the_next_attempt_no_longer() -> None:
    old = replace(TAKEN, name="worker-9")
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state())
    replaced = inputs.decide(replace(seen, pods=(*seen.pods, old)))
    assert (replaced.status.attempts[-1].stop, replaced.effects) == (None, ())
    failed = inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 75))
    assert inputs.decide(replace(failed, pods=(*failed.pods, old))).status.attempts[-1].reason == R.INFRASTRUCTURE_ERROR
    due = replace(inputs.pod("worker-9"), problem=PREEMPTED)
    assert inputs.decide(replace(seen, pods=(*seen.pods, due))).effects == (StopRayJob("example-1-1"),)


def test_pods_that_are_disrupted_before_the_trainer_starts_are_waited_for() -> None:
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), (inputs.ready_pods()[0], TAKEN), inputs.ray())
    assert inputs.decide(seen).status.attempts[-1].ended is None


@pytest.mark.parametrize("submitted", [False, True])
def test_a_worker_lost_with_its_node_ends_an_attempt_whose_trainer_is_not_started(submitted: bool) -> None:
    silent = replace(inputs.pod("worker-0", node_silent_seconds=60), ready=False)
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), (inputs.ready_pods()[0], silent), inputs.ray())
    if submitted:
        seen = replace(inputs.healthy(inputs.ray_job(), inputs.run_state()), pods=seen.pods)
    decision = inputs.decide(seen)
    newest = decision.status.attempts[-1]
    assert (newest.reason, newest.failed_pod) == ((None, None) if submitted else (R.INFRASTRUCTURE_ERROR, "worker-0"))
    assert decision.effects == (() if submitted else (DeleteCluster("example-1", "c1"),))


@pytest.mark.parametrize("provisioned", [True, False])
def test_a_head_that_is_taken_away_before_the_trainer_starts_uses_no_retry(*, provisioned: bool) -> None:
    """A node is drained while the next attempt waits for a worker. KubeRay replaces the head pod only before the
    cluster was complete."""
    problem = PodProblem(R.DISRUPTED, "EvictionByEvictionAPI: drained")
    head = inputs.pod("h", HEAD_GROUP, problem=problem, deleting=True)
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(provisioned=provisioned), (head,))
    status = inputs.decide(seen).status
    assert status.attempts[0].reason == ("Disrupted" if provisioned else None)
    assert status.counters is not None
    assert (status.counters.infrastructure_retries, status.counters.failed_attempts) == (0, 0)
