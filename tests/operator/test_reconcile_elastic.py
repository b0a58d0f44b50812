"""Elastic restart: fewer nodes if nodes stay away, and all of them again when they are back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.elastic import largest_valid_nodes, with_nodes
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import Attempt, Counters, FailureClass, PoolNodes, RLJobStatus
from rljob_operator.reconcile.decision import DeleteCluster, StopRayJob, SubmitRayJob
from rljob_operator.reconcile.observed import EffectFailure, EffectKind, Observed, RayJobStatus
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C = ConditionType
# 8 prompts x 4 responses over 4 nodes x 2 GPUs; on 3 nodes they would not divide.
FOUR = {"pools[0].nodes": 4, "pools[0].gpusPerNode": 2, "training.batchSize": 8, "training.rollout.groupSize": 4}
ELASTIC = inputs.spec({**FOUR, "runPolicy": {"elastic": {"minNodes": 1, "waitSeconds": 100, "growAfterSeconds": 60}}})
RIGID = inputs.spec(FOUR)
ON_TWO = (PoolNodes(name="main", nodes=2),)


def pods(num_ready: int) -> tuple[object, ...]:
    """A head and four workers, of which this many are ready."""
    return (inputs.pod("h", HEAD_GROUP), *(inputs.pod(f"w{number}", ready=number < num_ready) for number in range(4)))


def starting(num_ready: int, seconds_ago: float = 100, job_spec: object = ELASTIC) -> Observed:
    seen = inputs.observed(
        inputs.provisioning(seconds_ago=seconds_ago),
        inputs.cluster(),
        seen=inputs.ray(gpus=(2,) * num_ready),
        job_spec=job_spec,
    )
    return replace(seen, pods=pods(num_ready))


def small(num_ready: int, **record: object) -> Observed:
    """An attempt that trains on two of four nodes."""
    status = inputs.running(600, record={"nodes": ON_TWO, **record})
    seen = inputs.healthy(inputs.ray_job(), inputs.run_state(), status, job_spec=ELASTIC)
    return replace(seen, pods=pods(num_ready))


def newest(status: RLJobStatus) -> Attempt:
    return status.attempts[-1]


@pytest.mark.parametrize(("num_ready", "nodes"), [(3, 2), (2, 2), (1, 1)])
def test_after_its_wait_an_attempt_begins_on_the_most_nodes_that_divide_its_batch(num_ready: int, nodes: int) -> None:
    decision = inputs.decide(starting(num_ready))
    assert decision.effects == (SubmitRayJob("example-1-1", 1, inputs.START_NUMBER, (("main", nodes),)),)
    assert newest(decision.status).nodes == (PoolNodes(name="main", nodes=nodes),)
    message = Mentions(f"{1 + nodes} of {1 + nodes} pods ready", f"{nodes} of pool main (runPolicy.elastic)")
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("True", "Ready", message)
    assert (decision.status.gpus, decision.status.pools[0].desired) == (8, 4)


def test_before_that_it_waits_and_with_all_nodes_it_uses_all() -> None:
    assert inputs.decide(starting(3, seconds_ago=99)).effects == ()
    assert inputs.decide(starting(3, seconds_ago=99)).requeue_after_seconds == 1
    assert inputs.decide(starting(4)).effects == (SubmitRayJob("example-1-1", 1, inputs.START_NUMBER),)
    assert newest(inputs.decide(starting(4)).status).nodes == ()


def about_to_submit(num_ready: int, nodes: tuple[PoolNodes, ...]) -> Observed:
    """A submission on this many nodes is recorded, but was not made, because the dashboard did not accept it."""
    seen = starting(num_ready, seconds_ago=200)
    record = {
        "submissions": 1,
        "start_number": inputs.START_NUMBER,
        "ready_at": "2026-03-01T11:59:00Z",
        "nodes": nodes,
    }
    status = inputs.provisioning(seconds_ago=200, record=record)
    counters = Counters(attempts=1, start_number=inputs.START_NUMBER)
    return replace(seen, job=replace(seen.job, status=status.model_copy(update={"counters": counters})))


@pytest.mark.parametrize("nodes", [(), ON_TWO], ids=["all nodes", "two nodes"])
def test_a_node_lost_before_the_submission_is_not_waited_for(nodes: tuple[PoolNodes, ...]) -> None:
    decision = inputs.decide(about_to_submit(1, nodes))
    assert decision.effects == (SubmitRayJob("example-1-1", 1, inputs.START_NUMBER, (("main", 1),)),)
    assert newest(decision.status).nodes == (PoolNodes(name="main", nodes=1),)


def test_a_possible_submission_keeps_its_number_of_nodes() -> None:
    seen = about_to_submit(1, ON_TWO)
    for ray in (inputs.silent_ray(), replace(seen.ray, job=inputs.ray_job())):
        assert newest(inputs.decide(replace(seen, ray=ray)).status).nodes == ON_TWO


@pytest.mark.parametrize("silent", [False, True], ids=["a new operator", "no response"])
def test_nodes_that_come_after_a_submission_without_response_do_not_change_it(silent: bool) -> None:
    """Ray may have accepted it: the record would show all nodes, and the job would train on two to its end."""
    seen = about_to_submit(4, ON_TWO)
    failure = EffectFailure(EffectKind.SUBMIT_JOB, Reason.DASHBOARD_UNREACHABLE, "no answer within 60 s")
    decision = inputs.decide(replace(seen, failure=failure if silent else None))
    assert newest(decision.status).nodes == ON_TWO
    assert decision.effects == (SubmitRayJob("example-1-1", 1, inputs.START_NUMBER, (("main", 2),)),)
    # So the job is stopped for all nodes as usual, once Ray is seen to have it.
    with_job = replace(
        inputs.with_status_written(seen, decision), ray=inputs.ray(inputs.ray_job(), inputs.run_state(), gpus=(2,) * 4)
    )
    begun = inputs.decide(with_job)
    assert newest(begun.status).nodes == ON_TWO
    recorded = inputs.decide(inputs.with_status_written(with_job, begun))
    assert inputs.decide(inputs.with_status_written(with_job, recorded), inputs.at(60)).effects == (
        StopRayJob("example-1-1"),
    )


def test_a_submission_that_ray_rejected_uses_the_nodes_available_by_then() -> None:
    rejection = EffectFailure(EffectKind.SUBMIT_JOB, Reason.SUBMISSION_FAILED, "no agent is there")
    decision = inputs.decide(replace(about_to_submit(4, ON_TWO), failure=rejection))
    assert decision.effects == (SubmitRayJob("example-1-1", 1, inputs.START_NUMBER),)


@pytest.mark.parametrize("num_ready", [0, 1], ids=["no node", "no longer elastic"])
def test_a_possible_submission_is_not_forgotten_without_enough_nodes(num_ready: int) -> None:
    seen = about_to_submit(num_ready, ON_TWO)
    if num_ready:
        seen = replace(seen, job=replace(seen.job, spec=RIGID))
    assert newest(inputs.decide(seen).status).nodes == ON_TWO


@pytest.mark.parametrize("seen", [starting(0), starting(3, job_spec=RIGID)], ids=["no node", "not elastic"])
def test_too_few_nodes_and_jobs_without_elastic_restart_keep_waiting(seen: Observed) -> None:
    assert inputs.decide(seen).effects == ()
    assert newest(inputs.decide(seen).status).nodes == ()


def test_a_submission_on_fewer_nodes_stays_while_nodes_are_missing() -> None:
    decision = inputs.decide(small(2))
    assert decision.effects == ()
    assert newest(decision.status).all_nodes_since is None
    assert inputs.condition_of(decision.status, C.PROGRESSING) == ("True", "Training", Mentions("10 steps"))


def test_it_is_stopped_with_a_checkpoint_after_all_nodes_were_there_for_a_minute() -> None:
    seen = small(4)
    decision = inputs.decide(seen)
    assert decision.effects == ()
    assert newest(decision.status).all_nodes_since == "2026-03-01T12:00:00Z"
    whole = inputs.with_status_written(seen, decision)
    assert inputs.decide(whole, inputs.at(59)).effects == ()
    assert inputs.decide(replace(whole, pods=pods(3)), inputs.at(59)).status.attempts[-1].all_nodes_since is None
    unread = replace(whole, job=replace(whole.job, spec=None, spec_error="it is of a newer version"))
    assert inputs.decide(unread, inputs.at(60)).effects == (), "another attempt would have to wait"
    stopped = inputs.decide(whole, inputs.at(60))
    assert stopped.effects == (StopRayJob("example-1-1"),)
    saved = inputs.ray(inputs.ray_job(RayJobStatus.STOPPED), inputs.run_state(RunPhase.STOPPED, checkpoint_step=9))
    done = replace(inputs.with_status_written(whole, stopped), ray=saved)
    ended = inputs.decide(done, inputs.at(70))
    assert ended.effects == ()
    attempts = ended.status.attempts
    assert (attempts[0].reason, attempts[0].failure_class) == ("Resized", "Resumable")
    # The next attempt begins at once, on the same cluster, and uses no retry.
    assert (attempts[1].cluster, attempts[1].nodes) == ("example-1", ())
    assert ended.status.counters is not None
    assert (ended.status.counters.failed_attempts, ended.status.counters.infrastructure_retries) == (0, 0)
    grown = replace(inputs.with_status_written(done, ended), ray=inputs.ray(gpus=(2,) * 4))
    assert inputs.decide(grown, inputs.at(71)).effects == (SubmitRayJob("example-2-1", 2, inputs.START_NUMBER + 1),)


@pytest.mark.parametrize(("growths", "seconds"), [(0, 60), (1, 120), (2, 240), (6, 3840), (9, 3840)])
def test_growth_waits_longer_each_time_it_did_not_last(growths: int, seconds: int) -> None:
    seen = small(4, all_nodes_since="2026-03-01T12:00:00Z")
    counters = Counters(attempts=1, start_number=inputs.START_NUMBER, short_growths=growths)
    status = seen.job.status.model_copy(update={"counters": counters})
    seen = replace(seen, job=replace(seen.job, status=status))
    state = inputs.run_state(seconds_ago=1 - seconds)
    seen = replace(seen, ray=inputs.ray(inputs.ray_job(), state))
    assert inputs.decide(seen, inputs.at(seconds - 1)).effects == ()
    assert inputs.decide(seen, inputs.at(seconds)).effects == (StopRayJob("example-1-1"),)


@pytest.mark.parametrize(
    ("code", "saved", "stopped", "growths"),
    [(75, None, None, 3), (1, None, None, 3), (75, 9, None, 0), (None, None, "now", 2)],
    ids=["lost", "failed", "saved a checkpoint", "stopped by its user"],
)
def test_an_attempt_on_all_nodes_that_fails_before_its_first_checkpoint_counts(
    code: int | None, saved: int | None, stopped: str | None, growths: int
) -> None:
    former = inputs.ended_attempt(Reason.RESIZED, FailureClass.RESUMABLE)
    record = {"cluster": "example-1", "cluster_uid": "c1", "number": 2}
    status = inputs.running(record=record).model_copy(
        update={"counters": Counters(attempts=2, start_number=inputs.START_NUMBER, short_growths=2)}
    )
    status = status.model_copy(update={"attempts": (former, *status.attempts)})
    job = replace(
        inputs.ray_job(RayJobStatus.FAILED if code else RayJobStatus.STOPPED, code), submission_id="example-2-1"
    )
    ended = inputs.healthy(job, inputs.run_state(RunPhase.FAILED, checkpoint_step=saved), status, job_spec=ELASTIC)
    found = inputs.decide(replace(ended, job=replace(ended.job, stop_request=stopped))).status.counters
    assert found is not None
    assert found.short_growths == growths


def test_after_a_failure_on_fewer_nodes_the_next_attempt_does_not_wait_again() -> None:
    failed = replace(small(2), ray=inputs.ray(inputs.ray_job(RayJobStatus.FAILED, 1)))
    decision = inputs.decide(failed)
    assert decision.status.next_attempt is not None
    assert decision.status.next_attempt.same_cluster
    later = replace(inputs.with_status_written(failed, decision), ray=inputs.ray(gpus=(2, 2)))
    started = inputs.decide(later, inputs.at(30))
    again = inputs.decide(inputs.with_status_written(later, started), inputs.at(31))
    assert again.effects == (SubmitRayJob("example-2-1", 2, inputs.START_NUMBER + 1, (("main", 2),)),)


def test_a_lost_node_ends_the_attempt_and_its_cluster() -> None:
    """KubeRay replaces the pod only when Kubernetes gives up the node, after minutes."""
    gone = inputs.pod("w1", node_silent_seconds=30)
    lost = replace(small(1), pods=(*pods(1), gone), ray=inputs.ray(inputs.ray_job(RayJobStatus.FAILED, 75)))
    decision = inputs.decide(lost)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert decision.status.counters == Counters(
        attempts=1,
        start_number=inputs.START_NUMBER,
        infrastructure_retries=1,
        failed_attempts=1,
        active_seconds=600,
    )


def test_the_most_gpus_win_and_every_rule_holds() -> None:
    two_pools = inputs.spec(
        {
            **FOUR,
            "pools[0].nodes": 2,
            "pools[1]": {"name": "value", "nodes": 2, "gpusPerNode": 8},
            "roles.ref.pool": "value",
            "training.algorithm.kl.coefficient": 0.1,
            "training.batchSize": 32,
            "runPolicy": {"elastic": {"minNodes": 1}},
        }
    )
    assert largest_valid_nodes(two_pools, {"main": 2, "value": 1}) == {"main": 2, "value": 1}
    assert largest_valid_nodes(two_pools, {"main": 1, "value": 2}) == {"main": 1, "value": 2}
    assert largest_valid_nodes(two_pools, {"main": 2}) is None
    assert [pool.nodes for pool in with_nodes(two_pools, {"value": 1}).pools] == [2, 1]
