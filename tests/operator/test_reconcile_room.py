"""What follows when an attempt cannot start: jobs wait for room without a limit; what can never start ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.v1alpha1.status import Counters, RLJobStatus
from rljob_operator.reconcile.cluster import readiness_problem
from rljob_operator.reconcile.decision import CreateCluster, DeleteCluster, SubmitRayJob
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, Observed, PodProblem
from rljob_operator.reconcile.status_draft import moment, timestamp
from rljob_testing.operator import inputs
from rljob_testing.operator.reasons_of_waiting import QUOTA, QUOTA_TOO_SMALL, having_waited, in_queue, without_room

C, R = ConditionType, Reason
NO_ROOM = [R.UNSCHEDULABLE, R.QUOTA_EXCEEDED]
DEADLINE = 1800


def counters(status: RLJobStatus) -> Counters:
    assert status.counters is not None
    return status.counters


def pause_seconds(status: RLJobStatus, start_seconds: float = 0) -> float:
    assert status.next_attempt is not None
    return (moment(status.next_attempt.not_before) - inputs.at(start_seconds)).total_seconds()


def with_problem(reason: Reason, seconds_ago: float = DEADLINE) -> Observed:
    """A new job whose worker pod has had this problem since its start."""
    pods = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", problem=PodProblem(reason, "why")))
    return inputs.observed(inputs.provisioning(seconds_ago=seconds_ago), inputs.cluster(), pods)


def after_progress(seen: Observed) -> Observed:
    """The same job, if it has trained before."""
    former = inputs.ended_attempt().model_copy(update={"cluster": "example-0", "cluster_uid": "c0"})
    status = seen.job.status.model_copy(update={"attempts": (former, *seen.job.status.attempts)})
    return replace(seen, job=replace(seen.job, status=status))


@pytest.mark.parametrize("reason", NO_ROOM)
def test_without_room_a_job_waits_until_its_deadline_and_then_gives_back_what_it_holds(reason: Reason) -> None:
    waiting = inputs.decide(without_room(reason, DEADLINE - 1))
    assert waiting.effects == ()
    assert waiting.status.waiting_since == timestamp(inputs.at(1 - DEADLINE))
    seen = inputs.with_status_written(without_room(reason, DEADLINE), waiting)
    decision = inputs.decide(seen, inputs.at(1))
    status = decision.status
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert (status.phase, status.reason, status.result) == ("Pending", reason.value, None)
    assert (status.attempts[-1].outcome, status.attempts[-1].failure_class) == ("Stopped", "Resumable")
    assert status.next_attempt is not None
    assert not status.next_attempt.same_cluster
    assert status.waiting_since == waiting.status.waiting_since
    used = counters(status)
    assert (used.failed_attempts, used.application_retries, used.infrastructure_retries) == (0, 0, 0)
    assert used.uncounted_restarts == 1


def test_the_pauses_of_a_job_without_room_grow_and_it_never_ends() -> None:
    seen, pauses, seconds = without_room(), [], 0.0
    for number in range(1, 13):
        ended = inputs.decide(seen, inputs.at(seconds))
        assert ended.status.result is None
        assert counters(ended.status).uncounted_restarts == number
        pauses.append(pause_seconds(ended.status, seconds))
        seconds += pauses[-1]
        started = inputs.decide(inputs.observed(ended.status), inputs.at(seconds))
        newest = started.status.attempts[-1]
        assert (newest.number, newest.cluster) == (number + 1, "example-1"), "one Secret for all attempts"
        create = inputs.decide(inputs.observed(started.status), inputs.at(seconds))
        assert create.effects == (CreateCluster(1, "example-1"),)
        created = inputs.observed(started.status, inputs.cluster(uid=f"c{number + 1}"), without_room().pods)
        created = inputs.with_status_written(created, inputs.decide(created, inputs.at(seconds)))
        seen, seconds = created, seconds + DEADLINE
    assert all(8 * 2**index <= pause <= 12 * 2**index for index, pause in enumerate(pauses[:6]))
    assert all(480 <= pause <= 720 for pause in pauses[7:])


def test_each_wait_for_room_counts_only_for_its_own_time() -> None:
    """After a wait of 20 hours, a pod is replaced and waits for ten seconds."""
    policy = {"runPolicy": {"activeDeadlineSeconds": 7200, "provisioningDeadlineSeconds": 3600}}
    seen = without_room(seconds_ago=72_000)
    seen = replace(seen, job=replace(seen.job, spec=inputs.spec(policy), status=having_waited(seen.job.status, 72_000)))
    starting = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", ready=False))
    waiting, moments = seen.pods, []
    for second, pods in ((0, starting), (1200, waiting), (1210, starting), (1220, starting)):
        now = replace(seen, pods=pods)
        decision = inputs.decide(now, inputs.at(second))
        assert decision.status.attempts[-1].ended is None
        moments.append(decision.status.attempts[-1].scheduled_at)
        seen = inputs.with_status_written(now, decision)
    assert moments == [timestamp(inputs.at(each)) for each in (0, 0, 10, 10)]
    assert inputs.decide(seen, inputs.at(3609)).status.attempts[-1].ended is None
    assert inputs.decide(seen, inputs.at(3610)).status.attempts[-1].reason == R.INFRASTRUCTURE_ERROR


def test_a_wait_of_a_running_attempt_changes_none_of_its_times() -> None:
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state())
    lost = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", problem=PodProblem(R.UNSCHEDULABLE, "no node")))
    waits = inputs.decide(replace(seen, pods=lost))
    again = inputs.decide(inputs.with_status_written(seen, waits), inputs.at(60)).status
    assert (waits.status.waiting_since, again.waiting_since) == (timestamp(inputs.NOW), None)
    assert again.attempts[-1].scheduled_at is None


def test_a_job_that_was_admitted_does_not_wait_while_its_pods_cannot_be_created() -> None:
    seen = in_queue(suspended=False)
    status = having_waited(seen.job.status, 600)
    there = replace(seen.clusters[0], pod_creation_error="a webhook denied the request")
    denied = replace(seen, job=replace(seen.job, status=status), clusters=(there,))
    assert inputs.decide(denied).status.waiting_since is None


@pytest.mark.parametrize(("min_nodes", "reason"), [(3, R.QUOTA_EXCEEDED), (4, R.POD_CREATION_FAILED)])
def test_an_elastic_job_waits_for_a_quota_that_is_enough_for_its_fewest_pods(min_nodes: int, reason: Reason) -> None:
    edits: dict[str, object] = {
        "pools[0].nodes": 4, "training.batchSize": 12, "training.rollout.groupSize": 4,
        "runPolicy.elastic": {"minNodes": min_nodes, "waitSeconds": 60},
    }  # fmt: skip
    message = QUOTA.replace("used: requests.nvidia.com/gpu=8", "used: requests.nvidia.com/gpu=6").replace(
        "limited: requests.nvidia.com/gpu=8", "limited: requests.nvidia.com/gpu=6"
    )
    found = readiness_problem(inputs.spec(edits), (), message)
    assert found is not None
    assert found.reason == reason


def test_a_name_is_not_used_again_while_a_lost_pod_has_it_or_after_a_trainer_was_submitted() -> None:
    ended = inputs.decide(without_room()).status
    lost = inputs.pod("w", overdue=True)
    with_lost_pod = inputs.decide(inputs.observed(ended, pods=(lost,)), inputs.at(3600)).status
    assert with_lost_pod.attempts[-1].cluster == "example-2"
    submitted = ended.attempts[-1].model_copy(update={"submissions": 1})
    after_submission = ended.model_copy(update={"attempts": (submitted,)})
    assert inputs.decide(inputs.observed(after_submission), inputs.at(3600)).status.attempts[-1].cluster == "example-2"


def test_the_time_without_room_does_not_count_toward_the_active_deadline() -> None:
    seen = without_room(seconds_ago=1000)
    seen = replace(seen, job=replace(seen.job, spec=inputs.spec({"runPolicy.activeDeadlineSeconds": 600})))
    waiting = inputs.decide(seen)
    assert waiting.status.attempts[-1].ended is None
    pods = (inputs.pod("h", HEAD_GROUP), inputs.pod("w", ready=False))
    with_nodes = replace(inputs.with_status_written(seen, waiting), pods=pods)
    placed = inputs.with_status_written(with_nodes, inputs.decide(with_nodes, inputs.at(1)))
    assert inputs.decide(placed, inputs.at(600)).status.attempts[-1].ended is None
    ended = inputs.decide(placed, inputs.at(601)).status
    assert ended.attempts[-1].reason == R.ACTIVE_DEADLINE_EXCEEDED
    assert counters(ended).active_seconds == 600


@pytest.mark.parametrize("reason", NO_ROOM)
def test_a_job_that_starts_no_longer_waits(reason: Reason) -> None:
    waiting = inputs.with_status_written(without_room(reason, 60), inputs.decide(without_room(reason, 60)))
    assert waiting.job.status.waiting_since is not None
    ready = replace(waiting, clusters=(inputs.cluster(),), pods=inputs.ready_pods(), ray=inputs.ray())
    assert inputs.decide(ready).status.waiting_since is None


@pytest.mark.parametrize(
    "reason", [R.IMAGE_PULL_FAILED, R.CONTAINER_CONFIG_ERROR, R.VOLUME_MOUNT_FAILED, R.CONTAINER_CRASHING]
)
def test_a_new_job_that_can_never_start_ends_at_its_deadline(reason: Reason) -> None:
    assert inputs.decide(with_problem(reason, DEADLINE - 1)).status.attempts[-1].ended is None
    result = inputs.decide(with_problem(reason)).status.result
    assert result is not None
    assert result.reason == R.PROVISIONING_DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "seen",
    [
        after_progress(with_problem(R.IMAGE_PULL_FAILED)),
        with_problem(R.INFRASTRUCTURE_ERROR),
        inputs.observed(inputs.provisioning(seconds_ago=DEADLINE), inputs.cluster()),
    ],
    ids=["it has run before", "failing node", "slow pods"],
)
def test_a_job_that_is_not_at_fault_is_retried_after_its_deadline(seen: Observed) -> None:
    status = inputs.decide(seen).status
    assert status.result is None
    assert (status.attempts[-1].reason, status.attempts[-1].failure_class) == ("InfrastructureError", "Infrastructure")
    assert counters(status).infrastructure_retries == 1
    assert inputs.decide(inputs.without_retries(seen)).status.result is not None


def test_a_job_that_has_run_before_may_also_be_submitted_late() -> None:
    seen = after_progress(with_problem(R.IMAGE_PULL_FAILED, 4000))
    ready = replace(seen, pods=inputs.ready_pods(), ray=inputs.ray())
    decision = inputs.decide(ready)
    assert [type(effect) for effect in decision.effects] == [SubmitRayJob]
    assert decision.status.attempts[-1].ended is None


def test_an_operator_that_has_just_started_tries_the_creation_before_the_deadline_ends_it() -> None:
    """It does not know yet why the cluster could not be created."""
    seen = inputs.observed(inputs.provisioning(seen=False, seconds_ago=2 * DEADLINE))
    decision = inputs.decide(seen)
    assert decision.effects == (CreateCluster(1, "example-1"),)
    assert decision.status.attempts[-1].ended is None
    refused = EffectFailure(EffectKind.CREATE_CLUSTER, R.CREATION_REJECTED, "forbidden")
    result = inputs.decide(replace(seen, failure=refused)).status.result
    assert result is not None
    assert result.reason == R.PROVISIONING_DEADLINE_EXCEEDED
    waits = replace(seen, job=replace(seen.job, status=having_waited(seen.job.status, DEADLINE)))
    full = inputs.decide(replace(waits, failure=replace(refused, message=QUOTA))).status
    assert (full.result, full.attempts[-1].reason) == (None, "QuotaExceeded")
    left = replace(seen, pods=(inputs.pod("old", cluster="example-0"),))
    assert inputs.decide(left).status.attempts[-1].reason == R.INFRASTRUCTURE_ERROR


TWO_RESOURCES = (
    'pods "w" is forbidden: exceeded quota: team, requested: limits.memory=16Gi,requests.nvidia.com/gpu=2, used:'
    " limits.memory=60Gi,requests.nvidia.com/gpu=0, limited: limits.memory=64Gi,requests.nvidia.com/gpu=8"
)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (QUOTA, R.QUOTA_EXCEEDED),
        (f"FailedCreateWorkerPod: {QUOTA}", R.QUOTA_EXCEEDED),
        (TWO_RESOURCES, R.QUOTA_EXCEEDED),
        (TWO_RESOURCES.replace("memory=16Gi", "memory=65Gi"), R.POD_CREATION_FAILED),
        (TWO_RESOURCES.replace("memory=16Gi", "memory=65536M"), R.QUOTA_EXCEEDED),
        (QUOTA_TOO_SMALL, R.POD_CREATION_FAILED),
        ('pods "w" is forbidden: failed quota: team: must specify limits.memory', R.POD_CREATION_FAILED),
        ("exceeded quota: gpus", R.POD_CREATION_FAILED),
        ('admission webhook "policy" denied the request', R.POD_CREATION_FAILED),
    ],
)
def test_a_quota_that_others_use_up_is_told_from_one_that_is_too_small(message: str, reason: Reason) -> None:
    problem = readiness_problem(inputs.spec(), (inputs.pod("h", HEAD_GROUP),), message)
    assert problem is not None
    assert problem.reason is reason
    assert message in problem.message


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        ("requested: requests.nvidia.com/gpu=2, used: _, limited: requests.nvidia.com/gpu=5", R.POD_CREATION_FAILED),
        ("requested: requests.nvidia.com/gpu=2, used: _, limited: requests.nvidia.com/gpu=6", R.QUOTA_EXCEEDED),
        ("requested: pods=1, used: pods=3, limited: pods=3", R.POD_CREATION_FAILED),
        ("requested: pods=1, used: pods=4, limited: pods=4", R.QUOTA_EXCEEDED),
        ("requested: memory=8Gi, used: memory=16Gi, limited: memory=23Gi", R.POD_CREATION_FAILED),
        ("requested: limits.memory=8Gi, used: limits.memory=28Gi, limited: limits.memory=28Gi", R.QUOTA_EXCEEDED),
    ],
)
def test_a_quota_that_is_too_small_for_all_pods_of_the_job_is_not_waited_for(quota: str, reason: Reason) -> None:
    """Three worker pods with two GPUs each, and the head."""
    worker = {"limits": {"memory": "8Gi"}}
    job_spec = inputs.spec({"pools[0].nodes": 3, "pools[0].resources": worker, "training.batchSize": 6})
    problem = readiness_problem(job_spec, (), f'pods "w" is forbidden: exceeded quota: team, {quota}')
    assert problem is not None
    assert problem.reason is reason
