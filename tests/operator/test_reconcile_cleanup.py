"""What is kept of a finished job: its cluster if the job says so, but never a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.run_policy import Cleanup, RunPolicy
from rljob_operator.reconcile.decision import DeleteCluster, DeleteJob
from rljob_operator.reconcile.observed import Observed, ObservedRay, PodProblem, RayJobStatus, Reachability
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C = ConditionType
KEEP = inputs.spec(
    {
        "runPolicy": {
            "cleanup": "KeepCluster",
            "activeDeadlineSeconds": 1000,
            "stallDeadlineSeconds": 600,
            "provisioningDeadlineSeconds": 300,
            "gracePeriodSeconds": 50,
            "maxAppRetries": 0,
            "maxInfraRetries": 0,
        }
    }
)
REMOVED = (DeleteCluster("example-1", inputs.CLUSTER_UID),)
DELETED_ANYWAY = Mentions("deleted", "KeepCluster", "trainer", "might still be running")


def late(run: RayJobStatus) -> Observed:
    """A trainer that was asked to stop by the active deadline, 50 s ago."""
    seen = inputs.healthy(state=inputs.run_state(), status=inputs.running(1000), job_spec=KEEP)
    return replace(
        inputs.with_status_written(seen, inputs.decide(seen)),
        ray=inputs.ray(inputs.ray_job(run), inputs.run_state(RunPhase.STOPPING)),
    )


def silent() -> Observed:
    """A trainer that was unreachable for as long as the operator waits."""
    status = inputs.running(
        1000, record={"state_unknown_since": "2026-03-01T11:50:00Z", "progressed_at": "2026-03-01T11:59:59Z"}
    )
    job_spec = KEEP.model_copy(
        update={"run_policy": KEEP.run_policy.model_copy(update={"active_deadline_seconds": None})}
    )
    return inputs.observed(status, inputs.cluster(), inputs.ready_pods(), inputs.silent_ray(seconds=600), job_spec)


def half_submitted(seen: ObservedRay) -> Observed:
    """A submission that was recorded, and that Ray has not reported for as long as that may take."""
    status = inputs.provisioning(seconds_ago=300, record={"submissions": 1, "ready_at": "2026-03-01T11:56:00Z"})
    return inputs.observed(status, inputs.cluster(), inputs.ready_pods(), seen, KEEP)


def unlisted() -> Observed:
    """A trainer whose pods the operator may not list, for as long as it waits for that."""
    seen = silent()
    return replace(seen, pods=(), ray=ObservedRay(Reachability.NOT_ASKED), forbidden="pods is forbidden")


def with_reported_end() -> Observed:
    """A trainer that has reported its end, and whose process still exists after twice its grace period."""
    status = inputs.running(200, record={"end_reported_at": "2026-03-01T11:59:10Z"})
    return inputs.healthy(inputs.ray_job(), inputs.run_state(RunPhase.COMPLETE, step=10), status, job_spec=KEEP)


@pytest.mark.parametrize(
    "seen",
    [
        late(RayJobStatus.RUNNING),
        silent(),
        half_submitted(inputs.ray()),
        half_submitted(inputs.silent_ray()),
        with_reported_end(),
    ],
    ids=["does not stop", "silent", "unknown to Ray", "unobserved", "reported its end"],
)
def test_no_cluster_is_kept_whose_trainer_was_not_seen_to_end(seen: Observed) -> None:
    decision = inputs.decide(seen, inputs.at(50))
    assert decision.status.result is not None
    assert decision.effects == REMOVED
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("False", "Deleting", DELETED_ANYWAY)
    deleted = inputs.observed(decision.status, job_spec=KEEP)
    assert inputs.condition_of(inputs.decide(deleted, inputs.at(60)).status, C.CLUSTER_READY) == (
        "False",
        "Removed",
        DELETED_ANYWAY,
    )


@pytest.mark.parametrize("run", [RayJobStatus.STOPPED, RayJobStatus.FAILED, RayJobStatus.SUCCEEDED])
def test_a_cluster_whose_trainer_ended_in_time_is_kept(run: RayJobStatus) -> None:
    seen = late(run)
    state = inputs.run_state(RunPhase.COMPLETE if run is RayJobStatus.SUCCEEDED else RunPhase.STOPPED)
    decision = inputs.decide(replace(seen, ray=inputs.ray(inputs.ray_job(run), state)), inputs.at(49))
    assert decision.status.result is not None
    assert decision.effects == ()
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("True", "Kept", Mentions("cluster is kept"))


def test_a_trainer_whose_pods_cannot_be_listed_may_still_run() -> None:
    ended = inputs.decide(unlisted(), inputs.at(50)).status.attempts[0]
    assert (ended.reason, ended.trainer_may_run) == ("ReadForbidden", True)


def test_a_finished_job_whose_kept_cluster_was_deleted_holds_no_gpus() -> None:
    seen = late(RayJobStatus.STOPPED)
    decision = inputs.decide(replace(seen, ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED))), inputs.at(49))
    assert decision.status.gpus == 2
    deleted = inputs.decide(inputs.observed(decision.status, job_spec=KEEP), inputs.at(60)).status
    assert deleted.gpus == 0
    assert inputs.condition_of(deleted, C.CLUSTER_READY) == ("False", "Removed", Mentions("cluster was deleted"))


@pytest.mark.parametrize("head_is_there", [True, False], ids=["ended", "deleted"])
def test_a_trainer_ends_with_its_head(head_is_there: bool) -> None:
    head, *others = inputs.ready_pods()
    heads = (replace(head, ready=False, ended=True),) if head_is_there else ()
    not_asked = ObservedRay(Reachability.NOT_ASKED)
    decision = inputs.decide(
        inputs.observed(inputs.running(), inputs.cluster(provisioned=True), (*heads, *others), not_asked, KEEP)
    )
    assert decision.status.attempts[0].reason == "HeadLost"
    assert decision.effects == ()


def test_a_kept_cluster_stays_when_another_is_removed_under_an_unreadable_spec() -> None:
    seen = late(RayJobStatus.SUCCEEDED)
    seen = replace(seen, ray=inputs.ray(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE)))
    kept = inputs.with_status_written(seen, inputs.decide(seen))
    other = replace(inputs.cluster(), name="example-7", uid="c7")
    unread = replace(kept, job=replace(kept.job, spec=None), clusters=(*kept.clusters, other))
    decision = inputs.decide(unread)
    assert decision.effects == (DeleteCluster("example-7", "c7"),)
    assert inputs.decide(inputs.with_status_written(unread, decision), inputs.at(1)).effects == decision.effects


def test_a_cluster_on_which_nothing_was_started_is_kept() -> None:
    pods = (inputs.pod("head", "head"), inputs.pod("w", problem=PodProblem(Reason.IMAGE_PULL_FAILED, "not found")))
    decision = inputs.decide(
        inputs.observed(inputs.provisioning(seconds_ago=300), inputs.cluster(), pods, job_spec=KEEP)
    )
    assert decision.status.attempts[0].reason == "ProvisioningDeadlineExceeded"
    assert decision.effects == ()
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("True", "Kept", Mentions("cluster is kept"))


def kept_for(policy: Mapping[str, object]) -> Observed:
    """A job that finished at `inputs.NOW`, whose cluster is kept."""
    spec = inputs.spec({"runPolicy": {"cleanup": "KeepCluster", **policy}})
    done = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE), job_spec=spec)
    kept = inputs.with_status_written(done, inputs.decide(done))
    assert inputs.condition_of(kept.job.status, C.CLUSTER_READY)[1] == "Kept"
    return replace(kept, ray=ObservedRay(Reachability.NOT_ASKED))


@pytest.mark.parametrize(("policy", "seconds"), [({}, 86_400), ({"keepClusterSeconds": 600}, 600)])
def test_a_kept_cluster_is_deleted_when_its_time_is_over(policy: Mapping[str, object], seconds: int) -> None:
    kept = kept_for(policy)
    assert f"kept for {seconds} s" in str(inputs.condition_of(kept.job.status, C.CLUSTER_READY)[2])
    before = inputs.decide(kept, inputs.at(seconds - 20))
    assert (before.effects, before.requeue_after_seconds) == ((), 20)
    end = inputs.decide(kept, inputs.at(seconds))
    assert end.effects == REMOVED
    (effect,) = end.effects
    assert isinstance(effect, DeleteCluster)
    assert f"keepClusterSeconds ({seconds} s)" in effect.event
    assert end.status.result is not None
    assert end.status.result.cleaned_up_at is None
    deleted = replace(inputs.with_status_written(kept, end), clusters=(), pods=())
    decision = inputs.decide(deleted, inputs.at(seconds + 5))
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == (
        "False",
        "Removed",
        "the job has finished; its cluster was deleted",
    )
    assert [event.reason for event in decision.events] == ["Removed"]
    assert (decision.status.gpus, decision.requeue_after_seconds) == (0, None)


def test_a_job_may_be_deleted_before_and_after_the_time_of_its_kept_cluster_is_over() -> None:
    early = inputs.decide(kept_for({"ttlSecondsAfterFinished": 60}), inputs.at(30))
    assert (early.effects, early.requeue_after_seconds) == ((), 30)
    job = kept_for({"ttlSecondsAfterFinished": 60})
    assert inputs.decide(job, inputs.at(60)).effects == (DeleteJob(job.job.uid),)
    late_end = kept_for({"ttlSecondsAfterFinished": 900, "keepClusterSeconds": 600})
    assert inputs.decide(late_end, inputs.at(600)).effects == REMOVED


def test_a_longer_time_keeps_a_cluster_that_is_still_there() -> None:
    kept = kept_for({"keepClusterSeconds": 600})
    longer = inputs.spec({"runPolicy": {"cleanup": "KeepCluster", "keepClusterSeconds": 7200}})
    decision = inputs.decide(replace(kept, job=replace(kept.job, spec=longer)), inputs.at(600))
    assert (decision.effects, decision.requeue_after_seconds) == ((), 6600)


def test_a_kept_cluster_stays_as_long_under_a_spec_that_cannot_be_read() -> None:
    kept = kept_for({"keepClusterSeconds": 600})
    policy = RunPolicy(cleanup=Cleanup.KEEP_CLUSTER, keep_cluster_seconds=600)
    unread = replace(kept, job=replace(kept.job, spec=None, spec_error="spec.pools: wrong", readable_policy=policy))
    early = inputs.decide(unread, inputs.at(599))
    assert (early.effects, early.requeue_after_seconds) == ((), 1)
    decision = inputs.decide(unread, inputs.at(600))
    assert decision.effects == REMOVED
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("False", "Deleting", Mentions("being deleted"))
    # Nothing of the policy can be read: the default of keepClusterSeconds counts.
    unknown = replace(unread, job=replace(unread.job, readable_policy=RunPolicy()))
    assert inputs.decide(unknown, inputs.at(86_399)).effects == ()
    assert inputs.decide(unknown, inputs.at(86_400)).effects == REMOVED
