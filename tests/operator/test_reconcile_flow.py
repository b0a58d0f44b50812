"""A job's way through the operator, pass by pass: intents before effects, conditions, phases, the end and
afterwards."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, Counters, JobResult, PoolStatus
from rljob_operator.reconcile.decision import CreateCluster, Decision, DeleteCluster, SubmitRayJob
from rljob_operator.reconcile.observed import (
    EffectFailure,
    EffectKind,
    Observed,
    ObservedRay,
    PodProblem,
    RayJobStatus,
    Reachability,
)
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C = ConditionType
SUCCEEDED = JobResult(outcome="Succeeded", reason="Succeeded", at=timestamp(inputs.NOW))
COMPLETE = inputs.running(60).model_copy(update={"attempts": (inputs.completed_attempt(),), "result": SUCCEEDED})


def test_the_intent_is_written_before_the_cluster_is_created() -> None:
    seen = inputs.observed()
    first = inputs.decide(seen)
    assert first.status.attempts == (
        Attempt(number=1, cluster="example-1", started="2026-03-01T12:00:00Z", submissions=0),
    )
    assert first.status.counters == Counters(attempts=1)
    assert first.effects == ()
    assert first.requeue_after_seconds == 0
    second = inputs.decide(inputs.with_status_written(seen, first), inputs.at(1))
    assert second.effects == (CreateCluster(1, "example-1"),)
    assert second.status == first.status


def test_creation_of_a_cluster_is_repeated_until_the_cluster_exists() -> None:
    seen = inputs.observed(inputs.provisioning(seen=False))
    assert inputs.decide(seen).effects == (CreateCluster(1, "example-1"),)
    there = inputs.decide(replace(seen, clusters=(inputs.cluster(),)))
    assert there.effects == ()
    assert there.status.attempts[0].cluster_uid == inputs.CLUSTER_UID


def test_without_kuberay_no_object_is_created() -> None:
    decision = inputs.decide(replace(inputs.observed(inputs.provisioning(seen=False)), kuberay_installed=False))
    assert decision.effects == ()
    assert decision.requeue_after_seconds == 10


def test_a_ready_cluster_gets_the_job_with_a_growing_start_number() -> None:
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.ray())
    first = inputs.decide(seen)
    # Created 100 s before NOW, which is 1772366400 s after 1970, and the first submission.
    assert first.effects == (SubmitRayJob("example-1-1", attempt=1, start_number=1772366301),)
    assert first.status.attempts[0].submissions == 1
    again = inputs.decide(inputs.with_status_written(seen, first), inputs.at(4))
    assert again.effects == first.effects
    assert again.status == first.status
    known = inputs.decide(
        replace(inputs.with_status_written(seen, first), ray=inputs.ray(inputs.ray_job(RayJobStatus.PENDING))),
        inputs.at(8),
    )
    assert known.effects == ()
    assert inputs.condition_of(known.status, C.JOB_SUBMITTED) == ("True", "Submitted", "Ray job example-1-1")


def test_a_job_of_the_year_2038_is_started_too() -> None:
    """The seconds of its creation exceed the range of a start number."""
    seen = inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.ray())
    late = replace(seen, job=replace(seen.job, created=datetime.fromtimestamp(2**31, UTC)))
    decision = inputs.decide(late)
    assert decision.effects == (SubmitRayJob("example-1-1", attempt=1, start_number=2**31 + 1),)
    assert decision.status.attempts[0].start_number == 2**31 + 1


@pytest.mark.parametrize(
    "seen",
    [
        inputs.ray(gpus=(1,)),
        inputs.ray(gpus=()),
        inputs.silent_ray(),
        inputs.silent_ray(Reachability.REJECTED),
        ObservedRay(Reachability.NOT_ASKED),
    ],
    ids=["a GPU is missing", "a node is missing", "unreachable", "rejected", "not asked"],
)
def test_a_trainer_is_not_submitted_before_pods_and_nodes_are_ready(seen: ObservedRay) -> None:
    decision = inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), seen))
    assert not any(isinstance(effect, SubmitRayJob) for effect in decision.effects)
    assert decision.status.attempts[0].submissions == 0


def test_a_dashboard_without_authentication_ends_the_job_before_anything_is_submitted() -> None:
    seen = inputs.silent_ray(Reachability.OPEN, 0, "GET /api/jobs/ without a token: HTTP 200")
    decision = inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), seen))
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)
    assert inputs.condition_of(decision.status, C.FAILED) == (
        "True",
        "AuthenticationMissing",
        Mentions("authentication is off: GET /api/jobs/ without a token: HTTP 200"),
    )


def test_gpus_are_counted_node_by_node() -> None:
    two_nodes = inputs.spec({"pools[0].nodes": 2})
    decision = inputs.decide(
        inputs.observed(
            inputs.provisioning(), inputs.cluster(), inputs.ready_pods(2), inputs.ray(gpus=(3, 1)), two_nodes
        )
    )
    assert inputs.condition_of(decision.status, C.PLACEMENT_FEASIBLE) == (
        "False",
        "InsufficientGPUs",
        Mentions("Ray has 4 of 4 GPUs", "worker pod", "has 1"),
    )


def test_pools_count_only_usable_pods() -> None:
    two_nodes = inputs.spec({"pools[0].nodes": 2})
    pods = (
        inputs.pod("h", HEAD_GROUP),
        inputs.pod("a"),
        inputs.pod("b", deleting=True),
        inputs.pod("c", ended=True),
        inputs.pod("d", ready=False),
    )
    decision = inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster(), pods, job_spec=two_nodes))
    assert decision.status.pools == (PoolStatus(name="main", desired=2, ready=1),)


def test_the_most_specific_problem_is_named() -> None:
    pods = (
        inputs.pod("h", HEAD_GROUP, problem=PodProblem(Reason.UNSCHEDULABLE, "no node")),
        inputs.pod("a", problem=PodProblem(Reason.IMAGE_PULL_FAILED, "not found")),
    )
    decision = inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster(), pods))
    message = "0 of 2 pods ready; 1 of 1 pods of pool main: not found (pod a)"
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("False", "ImagePullFailed", message)


def test_transition_times_change_only_with_the_status() -> None:
    waiting = inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster()))
    (before,) = [each for each in waiting.status.conditions if each.type == C.CLUSTER_READY]
    broken = (inputs.pod("h", HEAD_GROUP, problem=PodProblem(Reason.IMAGE_PULL_FAILED, "not found")),)
    other = inputs.decide(inputs.observed(waiting.status, inputs.cluster(), broken), inputs.at(10))
    (changed,) = [each for each in other.status.conditions if each.type == C.CLUSTER_READY]
    assert (before.reason, changed.reason) == ("PodsPending", "ImagePullFailed")
    assert changed.last_transition_time == before.last_transition_time == "2026-03-01T12:00:00Z"
    ready = inputs.decide(
        inputs.observed(other.status, inputs.cluster(), inputs.ready_pods(), inputs.ray()), inputs.at(20)
    )
    (last,) = [each for each in ready.status.conditions if each.type == C.CLUSTER_READY]
    assert last.last_transition_time == "2026-03-01T12:00:20Z"


def test_conditions_are_ordered_by_progress_and_name_their_generation() -> None:
    status = inputs.decide(
        inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE))
    ).status
    assert [each.type for each in status.conditions] == [
        *("SpecValid", "ClusterReady", "PlacementFeasible", "JobSubmitted", "Progressing", "Checkpointed"),
        *("TrainingHealthy", "Finished", "Complete"),
    ]
    assert {each.observed_generation for each in status.conditions} == {3}
    assert status.observed_generation == 3


STARTED = inputs.running(60, inputs.condition(C.PROGRESSING, reason=Reason.TRAINING))


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (inputs.observed(job_spec=inputs.spec({"checkpoint": {}})), "Failed"),
        (inputs.observed(inputs.waiting_for_retry()), "Retrying"),
        (inputs.observed(job_spec=inputs.spec({"suspend": True})), "Suspended"),
        (
            inputs.observed(
                inputs.running(), inputs.cluster(), inputs.ready_pods(), job_spec=inputs.spec({"suspend": True})
            ),
            "Stopping",
        ),
        (inputs.observed(), "Provisioning"),
        (inputs.observed(inputs.provisioning(), inputs.cluster()), "Provisioning"),
        (
            inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.ray()),
            "Provisioning",
        ),
        (inputs.healthy(status=inputs.running(60, record={"state": "Starting"})), "Starting"),
        (inputs.healthy(state=inputs.run_state()), "Running"),
        (replace(inputs.healthy(status=STARTED), ray=inputs.silent_ray()), "Running"),
        (inputs.healthy(state=inputs.run_state(RunPhase.STOPPING)), "Stopping"),
        (
            inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE)),
            "Complete",
        ),
        (inputs.observed(COMPLETE), "Complete"),
        (inputs.without_retries(inputs.observed(inputs.running())), "Failed"),
        (inputs.observed(inputs.running()), "Retrying"),
    ],
)
def test_the_phase_is_one_word_for_people(seen: Observed, phase: str) -> None:
    assert inputs.decide(seen).status.phase == phase


def test_a_running_job_with_an_unreadable_spec_is_not_changed() -> None:
    seen = inputs.healthy(state=inputs.run_state())
    known = inputs.decide(seen).status
    unread = replace(seen, job=replace(seen.job, spec=None, spec_error="later: is not a known field", status=known))
    decision = inputs.decide(unread)
    assert decision.effects == ()
    assert inputs.condition_of(decision.status, C.SPEC_VALID) == ("False", "InvalidSpec", "later: is not a known field")
    assert inputs.condition_of(decision.status, C.FAILED) is None
    assert decision.status.attempts == known.attempts
    assert decision.requeue_after_seconds == 4


def unread(seen: Observed) -> Observed:
    """The same, but with a spec that this operator cannot read."""
    return replace(seen, job=replace(seen.job, spec=None, spec_error="later: is not a known field"))


@pytest.mark.parametrize(
    ("seen", "kind", "reason"),
    [
        (
            inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE)),
            C.COMPLETE,
            "Succeeded",
        ),
        (inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 2)), C.FAILED, "ConfigurationError"),
    ],
)
def test_the_end_of_a_job_with_an_unreadable_spec_is_noticed(seen: Observed, kind: ConditionType, reason: str) -> None:
    decision = inputs.decide(unread(seen))
    expected = inputs.condition_of(decision.status, kind)
    assert expected is not None
    assert expected[:2] == ("True", reason)
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)
    assert decision.requeue_after_seconds is None


def test_a_job_with_an_unreadable_spec_waits_with_its_next_attempt() -> None:
    lost = unread(inputs.observed(inputs.running(), inputs.cluster(), ()))
    decision = inputs.decide(lost)
    assert decision.status.attempts[0].reason == "HeadLost"
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)
    deleted = replace(inputs.with_status_written(lost, decision), clusters=())
    assert inputs.decide(deleted, inputs.at(90_000)).status.phase == "Retrying"
    assert inputs.decide(deleted, inputs.at(90_000)).requeue_after_seconds == 10
    readable = replace(deleted, job=replace(deleted.job, spec=inputs.spec(), spec_error=None))
    assert inputs.decide(readable, inputs.at(90_000)).status.counters == Counters(
        attempts=2,
        start_number=inputs.START_NUMBER,
        infrastructure_retries=1,
        failed_attempts=1,
        active_seconds=60,
    )


def test_known_addresses_of_a_job_with_an_unreadable_spec_stay() -> None:
    known = inputs.decide(inputs.healthy(state=inputs.run_state(checkpoint_step=4))).status
    decision = inputs.decide(
        unread(inputs.healthy(state=inputs.run_state(step=8, checkpoint_step=8), status=known)),
        inputs.at(60),
    )
    assert decision.status.checkpoint == known.checkpoint
    assert decision.status.progress is not None
    assert decision.status.progress.step == 8


def test_a_kept_cluster_stays_when_the_spec_becomes_unreadable() -> None:
    keep = inputs.observed(
        COMPLETE, inputs.cluster(), inputs.ready_pods(), job_spec=inputs.spec({"runPolicy.cleanup": "KeepCluster"})
    )
    assert inputs.decide(unread(inputs.with_status_written(keep, inputs.decide(keep)))).effects == ()


def test_a_running_job_needs_no_default_image() -> None:
    without = replace(inputs.DEFAULTS, trainer_image=None)
    assert inputs.condition_of(reconcile(inputs.observed(), inputs.NOW, without).status, C.FAILED) is not None
    assert inputs.condition_of(reconcile(inputs.healthy(), inputs.NOW, without).status, C.FAILED) is None


def test_a_job_being_deleted_is_left_to_the_garbage_collector() -> None:
    seen = inputs.healthy()
    decision = inputs.decide(replace(seen, job=replace(seen.job, deleting=True)))
    assert decision == Decision(status=seen.job.status)


def test_while_the_trainer_runs_an_unreachable_dashboard_affects_neither_cluster_nor_job() -> None:
    silent = replace(inputs.healthy(status=STARTED), ray=inputs.silent_ray())
    decision = inputs.decide(silent)
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("True", "Ready", "2 of 2 pods ready and in Ray")
    assert inputs.condition_of(decision.status, C.JOB_SUBMITTED) is not None
    assert inputs.condition_of(decision.status, C.FAILED) is None
    assert decision.requeue_after_seconds == 4


def test_a_job_of_another_submission_is_not_taken_for_this_one() -> None:
    other = replace(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), submission_id="example-1-2")
    decision = inputs.decide(replace(inputs.healthy(), ray=inputs.ray(other, inputs.run_state(RunPhase.COMPLETE))))
    assert inputs.condition_of(decision.status, C.COMPLETE) is None


@pytest.mark.parametrize(
    "outside",
    [
        inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1)),
        inputs.observed(there=inputs.cluster(), pods=inputs.ready_pods()),
        replace(inputs.observed(), kuberay_installed=False),
    ],
)
@pytest.mark.parametrize("outcome", ["Succeeded", "Failed"])
def test_a_result_is_final(outside: Observed, outcome: str) -> None:
    result = SUCCEEDED.model_copy(update={"outcome": outcome})
    status = COMPLETE.model_copy(update={"result": result})
    decision = inputs.decide(replace(outside, job=replace(outside.job, status=status)))
    assert decision.status.result is not None
    assert decision.status.result.model_copy(update={"cleaned_up_at": None}) == result
    assert decision.status.attempts == status.attempts
    assert all(isinstance(effect, DeleteCluster) for effect in decision.effects)


def test_a_deleted_cluster_is_reported_as_removed_when_it_no_longer_exists() -> None:
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE))
    end = inputs.decide(seen)
    assert end.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)
    assert end.status.attempts[0].outcome == AttemptOutcome.SUCCEEDED
    assert end.status.attempts[0].ended == "2026-03-01T12:00:00Z"
    assert end.requeue_after_seconds is None
    expected = ("False", "Deleting", Mentions("cluster is being deleted"))
    assert inputs.condition_of(end.status, C.CLUSTER_READY) == expected
    going = replace(inputs.with_status_written(seen, end), clusters=(inputs.cluster(deleting=True),))
    assert inputs.decide(going).effects == ()
    assert inputs.decide(going).status == end.status
    pods_left = replace(going, clusters=())
    assert inputs.decide(pods_left).status == end.status
    deleted = inputs.decide(replace(pods_left, pods=()), inputs.at(60))
    assert inputs.condition_of(deleted.status, C.CLUSTER_READY) == (
        "False",
        "Removed",
        Mentions("cluster was deleted"),
    )
    assert deleted.status.pools == (PoolStatus(name="main", desired=1, ready=0),)


def test_a_cluster_that_cannot_be_removed_is_reported_with_the_cause() -> None:
    seen = inputs.observed(COMPLETE, inputs.cluster(), inputs.ready_pods())
    rejected = EffectFailure(EffectKind.DELETE_CLUSTER, Reason.CREATION_REJECTED, "403: rayclusters is forbidden")
    decision = inputs.decide(replace(seen, failure=rejected))
    assert decision.effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)
    message = Mentions("cluster cannot be deleted: 403: rayclusters is forbidden")
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("False", "CreationRejected", message)
    assert inputs.condition_of(inputs.decide(inputs.with_status_written(seen, decision)).status, C.CLUSTER_READY) == (
        "False",
        "Deleting",
        Mentions("cluster is being deleted"),
    )


def test_a_kept_cluster_is_removed_when_the_job_says_so_later() -> None:
    keep = inputs.observed(
        COMPLETE, inputs.cluster(), inputs.ready_pods(), job_spec=inputs.spec({"runPolicy.cleanup": "KeepCluster"})
    )
    kept = inputs.decide(keep)
    assert kept.effects == ()
    remove = inputs.observed(kept.status, inputs.cluster(), inputs.ready_pods(), job_spec=inputs.spec())
    assert inputs.decide(remove).effects == (DeleteCluster("example-1", inputs.CLUSTER_UID),)


def test_a_cluster_that_starts_after_the_end_is_removed_too() -> None:
    failed = SUCCEEDED.model_copy(update={"outcome": "Failed", "cleaned_up_at": timestamp(inputs.NOW)})
    never_seen = COMPLETE.model_copy(update={"attempts": (inputs.attempt(seen=False),), "result": failed})
    assert inputs.decide(inputs.observed(never_seen, inputs.cluster(uid="late"))).effects == (
        DeleteCluster("example-1", "late"),
    )


def test_the_same_observation_gives_the_same_plan() -> None:
    assert inputs.decide(inputs.healthy(state=inputs.run_state()), inputs.NOW) == inputs.decide(
        inputs.healthy(state=inputs.run_state()), inputs.NOW
    )
