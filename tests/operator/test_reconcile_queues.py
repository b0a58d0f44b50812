"""Jobs in queues of Kueue, which suspends their RayClusters. `test_reconcile_crashes` has a whole job in a queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_api.v1alpha1.status import FailureClass, PoolNodes, RLJobStatus
from rljob_operator.kube.observed_objects import observed_cluster
from rljob_operator.raw_json import JsonObject
from rljob_operator.reconcile.decision import DeleteCluster, StopRayJob
from rljob_operator.reconcile.observed import (
    Observed,
    ObservedRay,
    ObservedRayJob,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import PREEMPTED, WAITS, evicted, in_queue

C, R = ConditionType, Reason
RAY_NOT_ASKED = ObservedRay(Reachability.NOT_ASKED)


def status_after(seen: Observed, seconds: float = 0) -> RLJobStatus:
    return inputs.decide(seen, inputs.at(seconds)).status


def test_a_job_waits_in_its_queue_without_deadline_and_without_polls() -> None:
    seen = in_queue()
    decision = inputs.decide(seen)
    assert (decision.status.phase, decision.status.reason) == ("Queued", "Queued")
    assert (decision.effects, decision.requeue_after_seconds) == ((), None)
    assert decision.status.waiting_since == "2026-03-01T12:00:00Z"
    year_later = inputs.decide(inputs.with_status_written(seen, decision), inputs.at(365 * 86_400))
    assert year_later.status == decision.status
    assert year_later.effects == ()


def test_the_time_in_a_queue_counts_toward_no_deadline() -> None:
    spec = inputs.spec({"runPolicy": {"provisioningDeadlineSeconds": 300, "activeDeadlineSeconds": 300}})
    seen = in_queue(suspended=False)
    seen = replace(seen, job=replace(seen.job, spec=spec))
    admitted = inputs.decide(seen, inputs.at(9000))
    newest = admitted.status.attempts[-1]
    assert (newest.state, newest.active_since) == ("Provisioning", "2026-03-01T14:30:00Z")
    later = inputs.with_status_written(seen, admitted)
    assert status_after(later, 9299).attempts[-1].ended is None
    ended = status_after(later, 9300)
    assert ended.attempts[-1].reason == R.ACTIVE_DEADLINE_EXCEEDED
    assert ended.counters is not None
    assert ended.counters.active_seconds == 300


def test_a_queued_job_can_be_suspended_and_stopped() -> None:
    seen = in_queue()
    stopped = inputs.decide(replace(seen, job=replace(seen.job, stop_request="now")))
    assert stopped.status.result is not None
    assert stopped.status.result.reason == R.STOPPED_BY_USER
    suspended = inputs.decide(replace(seen, job=replace(seen.job, spec=inputs.spec({"suspend": True}))))
    assert suspended.status.attempts[-1].reason == R.SUSPENDED
    assert suspended.effects == stopped.effects == (DeleteCluster("example-1", "c1"),)


def test_an_evicted_trainer_is_asked_to_stop_and_the_next_attempt_waits_on_the_same_cluster() -> None:
    seen = evicted()
    asked = inputs.decide(seen)
    assert asked.effects == (StopRayJob("example-1-1"),)
    leaving = (inputs.pod("h", HEAD_GROUP, deleting=True), inputs.pod("w", deleting=True))
    stopped = replace(
        inputs.with_status_written(seen, asked), pods=leaving, ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED))
    )
    ended = inputs.decide(stopped, inputs.at(5))
    attempt = ended.status.attempts[-1]
    assert (attempt.number, attempt.reason, attempt.outcome, attempt.failure_class) == (
        *(1, "Evicted", "Stopped", "Resumable"),
    )
    assert attempt.message == Mentions(PREEMPTED, "stopped as requested")
    assert (ended.status.phase, ended.status.reason, ended.effects) == ("Queued", "Evicted", ())
    waits = replace(inputs.with_status_written(stopped, ended), ray=RAY_NOT_ASKED)
    assert status_after(waits, 60).attempts[-1].number == 1, "its pods are still there"
    gone = inputs.decide(replace(waits, pods=()), inputs.at(60))
    newest = gone.status.attempts[-1]
    assert (newest.number, newest.state, newest.cluster_uid, newest.active_since) == (2, "Queued", "c1", None)
    assert gone.status.waiting_since == "2026-03-01T12:00:05Z"
    counters = gone.status.counters
    assert counters is not None
    assert (counters.failed_attempts, counters.infrastructure_retries, counters.uncounted_restarts) == (0, 0, 0)
    assert gone.effects == ()


def test_an_attempt_whose_pods_start_is_evicted_at_once() -> None:
    seen = in_queue(active=True)
    status = status_after(seen)
    assert [(each.reason, each.state) for each in status.attempts] == [("Evicted", "Ended"), (None, "Queued")]
    assert status.attempts[-1].cluster_uid == "c1"


@pytest.mark.parametrize("pods", [inputs.ready_pods(), ()], ids=["pods left", "pods gone"])
def test_a_cluster_that_is_admitted_again_while_its_pods_are_deleted_is_evicted_all_the_same(
    pods: tuple[object, ...],
) -> None:
    """KubeRay finishes the suspension first."""
    there = inputs.cluster(suspended=False, suspending=True, queue="team")
    seen = replace(evicted(), clusters=(there,), pods=pods, ray=RAY_NOT_ASKED)
    first = status_after(seen)
    assert first.attempts[0].stop is not None
    assert first.attempts[0].stop.reason == R.EVICTED
    if not pods:
        seen = inputs.with_status_written(seen, inputs.decide(seen))
        assert status_after(seen, 60).attempts[-1].number == 1, "KubeRay is not done yet"
        empty = replace(seen, clusters=(replace(there, suspending=False),))
        started = status_after(empty, 61)
        assert (started.attempts[-1].number, started.attempts[-1].state) == (2, "Provisioning")
        assert started.attempts[-1].active_since == "2026-03-01T12:01:01Z"


def test_a_cluster_that_is_being_suspended_at_its_creation_is_not_active_yet() -> None:
    """KubeRay reports Suspending for a moment also for a cluster that was created suspended."""
    seen = in_queue(suspended=False)
    begun = replace(seen, clusters=(replace(seen.clusters[0], suspending=True),))
    assert status_after(begun).attempts[-1].active_since is None
    after = inputs.with_status_written(begun, inputs.decide(begun))
    assert status_after(after, 1).attempts[-1].reason is None


def test_a_trainer_that_may_still_run_on_a_readmitted_cluster_is_removed_with_it() -> None:
    """KubeRay has deleted no pods, because the queue admitted the cluster again before it could."""
    attempt = inputs.ended_attempt(R.EVICTED, FailureClass.RESUMABLE).model_copy(update={"trainer_may_run": True})
    waiting = inputs.waiting_for_retry(0, same_cluster=True, attempts=(attempt,))
    seen = inputs.observed(waiting, inputs.cluster(queue="team"), inputs.ready_pods())
    decision = inputs.decide(seen)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert decision.status.attempts[-1].number == 1
    assert status_after(replace(seen, pods=())).attempts[-1].number == 2
    stopped = waiting.model_copy(update={"attempts": (attempt.model_copy(update={"trainer_may_run": False}),)})
    assert status_after(replace(seen, job=replace(seen.job, status=stopped))).attempts[-1].number == 2


@pytest.mark.parametrize("how", ["label", "webhook", "suspended"])
def test_the_cluster_of_a_finished_job_in_a_queue_is_not_kept(how: str) -> None:
    keep = inputs.spec({"runPolicy.cleanup": "KeepCluster"})
    result = {"outcome": "Succeeded", "reason": "Succeeded", "at": "2026-03-01T12:00:00Z"}
    status = RLJobStatus.from_wire({"result": result, "attempts": [inputs.completed_attempt().to_wire()]})
    there = inputs.cluster(queue="team" if how == "webhook" else "", suspended=how == "suspended")
    seen = inputs.observed(status, there, inputs.ready_pods(), job_spec=keep)
    if how == "label":
        seen = replace(seen, job=replace(seen.job, labels={QUEUE_LABEL: "team"}))
    decision = inputs.decide(seen)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert inputs.decide(inputs.observed(status, inputs.cluster(), job_spec=keep)).effects == ()


@pytest.mark.parametrize(
    "ray_job",
    [
        inputs.ray_job(RayJobStatus.STOPPED),
        inputs.ray_job(RayJobStatus.FAILED, 130),
        inputs.ray_job(RayJobStatus.FAILED, 75),
        inputs.ray_job(RayJobStatus.FAILED, 1),
    ],
    ids=["stopped", "interrupted", "infrastructure", "application"],
)
def test_an_eviction_that_is_seen_after_the_end_of_the_trainer_uses_no_retry(ray_job: ObservedRayJob) -> None:
    leaving = (inputs.pod("h", HEAD_GROUP, deleting=True), inputs.pod("w", deleting=True))
    ended = status_after(replace(evicted(), pods=leaving, ray=inputs.ray(ray_job)))
    assert (ended.attempts[-1].reason, ended.result) == ("Evicted", None)
    assert ended.counters is not None
    assert (ended.counters.failed_attempts, ended.counters.infrastructure_retries) == (0, 0)


@pytest.mark.parametrize("has_new_head", [False, True])
def test_an_eviction_that_no_operator_saw_uses_no_retry(*, has_new_head: bool) -> None:
    """The cluster was admitted again, and KubeRay has reset its condition RayClusterProvisioned."""
    there = inputs.cluster(queue="team", provisioned=False)
    pods = (inputs.pod("new", HEAD_GROUP),) if has_new_head else ()
    ray = inputs.ray() if has_new_head else RAY_NOT_ASKED
    seen = replace(evicted(), clusters=(there,), pods=pods, ray=ray)
    decision = inputs.decide(seen)
    assert [(each.reason, each.cluster_uid) for each in decision.status.attempts] == [("Evicted", "c1"), (None, "c1")]
    assert decision.effects == ()
    provisioned = replace(seen, clusters=(replace(there, provisioned=True),))
    assert status_after(provisioned).attempts[0].failure_class == FailureClass.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("head", "nodes", "reason"),
    [
        ("new", (), R.EVICTED),
        ("old", (), R.DRIVER_LOST),
        ("new", (PoolNodes(name="main", nodes=1),), R.DRIVER_LOST),
    ],
)
def test_another_head_pod_than_that_of_the_trainer_shows_an_eviction_that_no_operator_saw(
    head: str, nodes: tuple[PoolNodes, ...], reason: Reason
) -> None:
    """The cluster is complete again. KubeRay also replaces the head pod of a cluster that was never complete."""
    status = inputs.running(record={"ready_at": timestamp(inputs.NOW), "head_pod_uid": "old", "nodes": nodes})
    pods = (inputs.pod("h", HEAD_GROUP, uid=head), inputs.pod("w"))
    seen = replace(inputs.healthy(status=status), clusters=(inputs.cluster(queue="team", provisioned=True),), pods=pods)
    ended = status_after(replace(seen, ray=inputs.ray()), 3600)
    assert ended.attempts[0].reason == reason


def test_the_head_pod_is_recorded_when_all_pods_are_ready() -> None:
    pods = (inputs.pod("h", HEAD_GROUP, uid="u-h"), inputs.pod("w", uid="u-w"))
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), pods, inputs.ray())
    assert status_after(seen).attempts[-1].head_pod_uid == "u-h"


def test_a_readmitted_cluster_is_used_again_after_another_failure() -> None:
    """It was evicted and admitted again during the backoff, and its new pods are starting."""
    failed = inputs.waiting_for_retry(-1, same_cluster=True)
    there = inputs.cluster(queue="team", provisioned=False)
    seen = inputs.observed(failed, there, (inputs.pod("new", HEAD_GROUP, ready=False),))
    decision = inputs.decide(seen)
    assert (decision.status.attempts[-1].number, decision.status.attempts[-1].cluster_uid) == (2, "c1")
    assert decision.effects == ()


def test_a_suspended_cluster_with_a_pod_on_a_lost_node_is_given_back() -> None:
    """KubeRay would wait for the pod for ever."""
    ended = inputs.ended_attempt(R.EVICTED, FailureClass.RESUMABLE)
    waits = inputs.waiting_for_retry(-1, same_cluster=True, attempts=(ended,))
    there = inputs.cluster(suspended=True, suspending=True, queue="team")
    lost = inputs.pod("w", deleting=True)
    seen = inputs.observed(waits, there, (lost,))
    assert inputs.decide(seen).effects == ()
    overdue = replace(seen, pods=(replace(lost, overdue=True),))
    assert inputs.decide(overdue).effects == (DeleteCluster("example-1", "c1"),)


def test_no_attempt_starts_on_the_same_cluster_while_pods_cannot_be_read() -> None:
    """The pods of the former attempt may be there."""
    seen = inputs.observed(inputs.waiting_for_retry(-1, same_cluster=True), inputs.cluster(), inputs.ready_pods())
    assert status_after(seen).attempts[-1].number == 2
    assert status_after(replace(seen, forbidden="pods is forbidden")).attempts[-1].number == 1


def test_the_quota_of_a_job_that_has_ended_is_not_reported() -> None:
    seen = in_queue()
    queued = inputs.with_status_written(seen, inputs.decide(seen))
    assert inputs.condition_of(queued.job.status, C.QUOTA_RESERVED) is not None
    stopped = status_after(replace(queued, job=replace(queued.job, stop_request="now")))
    assert inputs.condition_of(stopped, C.QUOTA_RESERVED) is None


@pytest.mark.parametrize(
    ("pod_problem", "ends"),
    [
        (R.IMAGE_PULL_FAILED, R.PROVISIONING_DEADLINE_EXCEEDED),
        (R.INFRASTRUCTURE_ERROR, R.INFRASTRUCTURE_ERROR),
        (None, R.INFRASTRUCTURE_ERROR),
        (R.UNSCHEDULABLE, None),
        (R.DISRUPTED, None),
    ],
)
def test_a_job_that_cannot_start_ends_although_kueue_evicts_it_again_and_again(
    pod_problem: Reason | None, ends: Reason | None
) -> None:
    """Kueue evicts a cluster whose pods are not ready within five minutes. The status lists only ten attempts."""
    policy = inputs.spec({"runPolicy": {"provisioningDeadlineSeconds": 3600, "maxInfraRetries": 0}})
    problem = PodProblem(pod_problem, "why") if pod_problem is not None else None
    pods = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", ready=False, problem=problem))
    admitted, suspended = inputs.cluster(queue="team"), inputs.cluster(suspended=True, queue="team")
    status, num_evictions = in_queue(active=True).job.status, 0
    while status.result is None and num_evictions < 20:
        start = 300 * num_evictions
        for second, there, present in ((1, admitted, pods), (290, suspended, pods), (299, suspended, ())):
            if status.result is None:
                seen = inputs.observed(status, there, present, job_spec=policy)
                status = inputs.decide(seen, inputs.at(start + second)).status
        num_evictions += 1
    assert (status.result.reason if status.result is not None else None) == ends
    assert num_evictions == (20 if ends is None else 13)


def test_an_elastic_job_in_a_queue_is_refused() -> None:
    elastic = inputs.spec({"pools[0].nodes": 2, "runPolicy": {"elastic": {"minNodes": 1}}})
    seen = inputs.observed(job_spec=elastic)
    refused = status_after(replace(seen, job=replace(seen.job, labels={QUEUE_LABEL: "team"})))
    found = inputs.condition_of(refused, C.FAILED)
    assert found == ("True", "InvalidSpec", Mentions("spec.runPolicy.elastic", "Kueue"))
    assert status_after(seen).result is None


PENDING = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": WAITS}
RESERVED = {"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": "Quota reserved in cq"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": PREEMPTED}
NOT_EVICTED = {"type": "Evicted", "status": "False", "reason": "QuotaReserved", "message": "Previously: Preempted"}
PODS_NOT_READY = {"type": "PodsReady", "status": "False", "reason": "WaitForStart", "message": "Not all pods are ready"}


@pytest.mark.parametrize(
    ("conditions", "waits_for", "evicted_because"),
    [
        ([], "", ""),
        ([PODS_NOT_READY], "", ""),
        ([PENDING], WAITS, ""),
        ([RESERVED], "", ""),
        ([RESERVED, EVICTED], "", PREEMPTED),
        ([PENDING, EVICTED], WAITS, PREEMPTED),
        ([RESERVED, NOT_EVICTED], "", ""),
    ],
    ids=["new", "not evaluated", "pending", "reserved", "evicted", "evicted and pending", "admitted again"],
)
def test_what_kueue_reports_is_read(conditions: list[JsonObject], waits_for: str, evicted_because: str) -> None:
    raw = ray_cluster(suspend=True, suspending="False")
    found = observed_cluster(raw, {"status": {"conditions": conditions}}).workload
    assert found is not None
    assert (found.waits_for, found.evicted_because) == (waits_for, evicted_because)
    assert observed_cluster(raw).workload is None


def check(name: str, state: str, message: str = "") -> JsonObject:
    return {"name": name, "state": state, "message": message}


ADMITTED = {"type": "Admitted", "status": "True"}


@pytest.mark.parametrize(
    ("conditions", "checks", "waits_for"),
    [
        ([RESERVED], [check("budget", "Ready", "fine"), check("nodes", "Pending", "no machines yet")], True),
        ([RESERVED, ADMITTED], [check("budget", "Ready"), check("nodes", "Ready")], False),
        ([PENDING], [check("nodes", "Pending", "no machines yet")], False),
        ([PENDING], [check("nodes", "Rejected", "no machines yet")], True),
    ],
    ids=["reserved", "all ready", "not begun", "rejected"],
)
def test_an_admission_check_that_keeps_a_job_waiting_is_named(
    conditions: list[JsonObject], checks: list[JsonObject], waits_for: bool
) -> None:
    raw, workload = ray_cluster(suspend=True, suspending="False"), {"conditions": conditions, "admissionChecks": checks}
    found = observed_cluster(raw, {"status": workload}).workload
    assert found is not None
    named = Mentions("admission check nodes", str(checks[-1]["state"]), "no machines yet", without=["budget", "Ready"])
    assert (found.waits_for == named) is waits_for
    assert (WAITS in found.waits_for) is (PENDING in conditions)
    assert ("quota is reserved" in found.waits_for) is (waits_for and RESERVED in conditions)


@pytest.mark.parametrize(
    ("suspend", "suspending", "expected"),
    [
        (True, "True", (True, True)),
        (True, "False", (True, False)),
        (False, "True", (False, True)),
        (False, "False", (False, False)),
        (None, None, (False, False)),
    ],
)
def test_the_suspension_of_a_cluster_is_read(
    suspend: bool | None, suspending: str | None, expected: tuple[bool, bool]
) -> None:
    found = observed_cluster(ray_cluster(suspend=suspend, suspending=suspending))
    assert (found.suspended, found.suspending) == expected
    assert found.is_suspended == any(expected)
    assert (found.queue, found.priority_class) == ("team", "high")


def ray_cluster(*, suspend: bool | None, suspending: str | None) -> JsonObject:
    """A RayCluster in the queue `team`, as KubeRay reports it."""
    conditions = [{"type": "RayClusterSuspending", "status": suspending}] if suspending is not None else []
    labels = {QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "high"}
    return {
        "metadata": {"name": "example-1", "uid": "c1", "labels": labels},
        "spec": {} if suspend is None else {"suspend": suspend},
        "status": {"conditions": conditions},
    }
