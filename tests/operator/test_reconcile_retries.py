"""What follows the end of an attempt: backoff, retry budgets, the cluster of the next attempt, and the end of the
job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.status import Counters, FailureClass, JobPods, RLJobStatus
from rljob_operator.reconcile.decision import CreateCluster, DeleteCluster, SubmitRayJob
from rljob_operator.reconcile.observed import Observed, RayJobStatus
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_draft import moment
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C, R = ConditionType, Reason
BUDGETS = inputs.spec({"runPolicy": {"maxAppRetries": 2, "maxInfraRetries": 3}})
APPLICATION, INFRASTRUCTURE = 1, 75
"""Exit codes of the trainer."""


def failing(code: int = APPLICATION, counters: Counters | None = None, checkpoint_step: int | None = None) -> Observed:
    """A trainer that has exited with this code on a healthy cluster."""
    status = inputs.running().model_copy(
        update={"counters": counters or Counters(attempts=1, start_number=inputs.START_NUMBER)}
    )
    state = inputs.run_state(RunPhase.FAILED, checkpoint_step=checkpoint_step)
    return inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, code), state, status, job_spec=BUDGETS)


def pause_seconds(status: RLJobStatus) -> float:
    assert status.next_attempt is not None
    return (moment(status.next_attempt.not_before) - inputs.NOW).total_seconds()


def test_an_application_failure_reuses_the_cluster() -> None:
    decision = inputs.decide(failing())
    assert decision.effects == ()
    assert decision.status.result is None
    assert decision.status.phase == "Retrying"
    waits = decision.status.next_attempt
    assert waits is not None
    assert (waits.reason, waits.failure_class, waits.same_cluster) == ("ApplicationError", "Application", True)
    counters = decision.status.counters
    assert counters is not None
    assert (counters.application_retries, counters.infrastructure_retries, counters.failed_attempts) == (1, 0, 1)
    condition = inputs.condition_of(decision.status, C.RETRYING)
    assert condition is not None
    assert condition[:2] == ("True", "ApplicationError")
    assert condition[2].startswith("retry 1 of 2 (runPolicy.maxAppRetries) at 2026-03-01T12:00:")
    assert condition[2] == Mentions("after: the trainer", "code 1: Ray's message")


def test_the_next_attempt_is_submitted_to_that_cluster_with_its_own_number() -> None:
    first = inputs.decide(failing())
    later = replace(inputs.with_status_written(failing(), first), ray=inputs.ray())
    assert inputs.decide(later, inputs.at(7)).status == first.status
    started = inputs.decide(later, inputs.at(13))
    newest = started.status.attempts[-1]
    assert (newest.number, newest.cluster, newest.cluster_uid, newest.submissions) == (2, "example-1", "c1", 0)
    assert started.effects == ()
    assert started.requeue_after_seconds == 0
    assert started.status.next_attempt is None
    submitted = inputs.decide(inputs.with_status_written(later, started), inputs.at(14))
    assert submitted.effects == (SubmitRayJob("example-2-1", attempt=2, start_number=inputs.START_NUMBER + 1),)
    assert submitted.status.attempts[-1].start_number == inputs.START_NUMBER + 1


@pytest.mark.parametrize(
    "pods",
    [
        (inputs.pod("h", "head"), inputs.pod("w", ready=False)),
        (inputs.pod("h", "head"),),
        (inputs.pod("h", "head"), inputs.pod("w", deleting=True)),
    ],
    ids=["not ready", "missing", "terminating"],
)
def test_an_application_failure_on_a_broken_cluster_gets_a_new_one(pods: tuple[object, ...]) -> None:
    decision = inputs.decide(replace(failing(), pods=pods))
    assert decision.status.next_attempt is not None
    assert not decision.status.next_attempt.same_cluster
    assert decision.effects == (DeleteCluster("example-1", "c1"),)


def test_a_cluster_that_breaks_during_the_backoff_is_not_reused() -> None:
    seen = inputs.observed(
        inputs.waiting_for_retry(same_cluster=True), inputs.cluster(), (inputs.pod("h", "head"),), job_spec=BUDGETS
    )
    decision = inputs.decide(seen)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert decision.status.next_attempt is not None
    assert not decision.status.next_attempt.same_cluster
    well = replace(seen, pods=inputs.ready_pods())
    assert inputs.decide(well).effects == ()


def test_an_infrastructure_failure_gets_a_new_cluster_when_nothing_of_the_former_is_left() -> None:
    silent = inputs.pod("worker-0", node_silent_seconds=5)
    seen = replace(failing(INFRASTRUCTURE), pods=(inputs.pod("head", "head"), silent))
    decision = inputs.decide(seen)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert decision.status.next_attempt is not None
    assert (decision.status.next_attempt.failure_class, decision.status.next_attempt.same_cluster) == (
        "Infrastructure",
        False,
    )
    going = replace(inputs.with_status_written(seen, decision), clusters=(inputs.cluster(deleting=True),))
    assert inputs.decide(going, inputs.at(60)).status.attempts[-1].number == 1
    pods_left = replace(going, clusters=())
    assert inputs.decide(pods_left, inputs.at(60)).status.attempts[-1].number == 1
    assert inputs.condition_of(inputs.decide(pods_left, inputs.at(60)).status, C.CLUSTER_READY) == (
        "False",
        "WaitingForNextAttempt",
        Mentions("waiting for the next attempt", "pods: 2"),
    )
    deleted = replace(pods_left, pods=())
    assert inputs.decide(deleted, inputs.at(7)).status.attempts[-1].number == 1
    started = inputs.decide(deleted, inputs.at(60))
    assert started.status.attempts[-1].cluster == "example-2"
    assert inputs.condition_of(started.status, C.RETRYING) == ("False", "NextAttemptStarted", Mentions("attempt 2"))
    assert inputs.decide(inputs.with_status_written(deleted, started), inputs.at(61)).effects == (
        CreateCluster(2, "example-2"),
    )


@pytest.mark.parametrize(
    "lost", [inputs.pod("w", overdue=True, deleting=True), inputs.pod("w", node_silent_seconds=60)]
)
def test_pods_of_a_lost_node_are_not_waited_for(lost: object) -> None:
    seen = replace(inputs.observed(inputs.waiting_for_retry(0)), pods=(lost,))
    started = inputs.decide(seen)
    assert started.status.attempts[-1].number == 2
    assert inputs.decide(inputs.with_status_written(seen, started)).effects == (CreateCluster(2, "example-2"),)


def test_no_attempt_starts_while_the_pods_of_the_former_one_cannot_be_listed() -> None:
    seen = replace(inputs.observed(inputs.waiting_for_retry(0)), forbidden="pods is forbidden")
    decision = inputs.decide(seen, inputs.at(9000))
    assert decision.status.attempts[-1].number == 1
    assert inputs.condition_of(decision.status, C.CLUSTER_READY) == ("Unknown", "ReadForbidden", "pods is forbidden")
    assert inputs.decide(replace(seen, forbidden=None), inputs.at(9000)).status.attempts[-1].number == 2


@pytest.mark.parametrize(
    ("code", "counters", "text"),
    [
        (APPLICATION, {"application_retries": 2}, "2 of 2 retries (runPolicy.maxAppRetries): the trainer"),
        (INFRASTRUCTURE, {"infrastructure_retries": 3}, "3 of 3 retries (runPolicy.maxInfraRetries): the trainer"),
    ],
)
def test_a_used_up_retry_budget_ends_the_job(code: int, counters: dict[str, int], text: str) -> None:
    decision = inputs.decide(failing(code, Counters(attempts=3, **counters)))
    condition = inputs.condition_of(decision.status, C.FAILED)
    assert condition is not None
    assert text in condition[2]
    assert decision.status.next_attempt is None
    other = {"application_retries": 2, "infrastructure_retries": 3}.keys() - counters.keys()
    still = inputs.decide(failing(code, Counters(attempts=3, **dict.fromkeys(other, 9))))
    assert still.status.result is None


def test_the_retry_budget_is_reset_only_after_progress() -> None:
    used = Counters(attempts=3, application_retries=2, infrastructure_retries=1, checkpoint_step=4)
    same = inputs.decide(failing(APPLICATION, used, checkpoint_step=4)).status
    assert same.result is not None
    further = inputs.decide(failing(APPLICATION, used, checkpoint_step=6)).status
    assert further.counters is not None
    assert (further.counters.application_retries, further.counters.infrastructure_retries) == (1, 0)
    assert further.counters.checkpoint_step == 6
    assert further.counters.failed_attempts == 1


def test_backoff_doubles_up_to_ten_minutes_and_differs_between_jobs() -> None:
    pauses = [
        pause_seconds(inputs.decide(failing(INFRASTRUCTURE, Counters(attempts=1, application_retries=used))).status)
        for used in range(12)
    ]
    for number, seconds in enumerate(pauses):
        plain = min(600, 10 * 2**number)
        assert 0.8 * plain - 1 <= seconds <= 1.2 * plain + 1
    other = failing(INFRASTRUCTURE, Counters(attempts=1, application_retries=6))
    there = {
        pause_seconds(inputs.decide(replace(other, job=replace(other.job, uid=f"uid-{number}"))).status)
        for number in range(20)
    }
    assert len(there) > 5


@pytest.mark.parametrize("code", [2, 130])
def test_a_failure_that_a_retry_cannot_fix_ends_the_job(code: int) -> None:
    decision = inputs.decide(failing(code))
    assert decision.status.result is not None
    assert decision.effects == (DeleteCluster("example-1", "c1"),)


def test_a_cluster_without_authentication_is_not_reused() -> None:
    open_to_all = replace(failing(APPLICATION), clusters=(inputs.cluster(asks_for_token=False),))
    decision = inputs.decide(open_to_all)
    assert decision.status.next_attempt is not None
    assert not decision.status.next_attempt.same_cluster
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    unread = replace(open_to_all, job=replace(open_to_all.job, spec=None, spec_error="spec.new: not known here"))
    condition = inputs.condition_of(inputs.decide(unread).status, C.CLUSTER_READY)
    assert condition is not None
    assert condition[1] == "KubeRayTooOld"


def test_the_history_is_bounded_and_the_numbers_continue() -> None:
    attempts = tuple(inputs.ended_attempt(number=number) for number in range(95, 105))
    status = inputs.waiting_for_retry(0, attempts=attempts).model_copy(
        update={"counters": Counters(attempts=104, start_number=2**31)}
    )
    started = inputs.decide(inputs.observed(status)).status
    assert [each.number for each in started.attempts] == list(range(96, 106))
    assert started.counters is not None
    assert started.counters.attempts == 105
    far = inputs.decide(inputs.observed(status.model_copy(update={"counters": Counters(attempts=1233)}))).status
    assert far.attempts[-1].number == 1234
    # KubeRay truncates longer names; the 234th attempt is long gone.
    assert far.attempts[-1].cluster == "example-234"


def test_start_numbers_grow_whatever_clocks_and_history_are() -> None:
    status = inputs.provisioning().model_copy(
        update={"counters": Counters(attempts=7, start_number=inputs.START_NUMBER + 500)}
    )
    decision = inputs.decide(inputs.observed(status, inputs.cluster(), inputs.ready_pods(), inputs.ray()))
    assert decision.effects == (SubmitRayJob("example-1-1", attempt=1, start_number=inputs.START_NUMBER + 501),)
    again = replace(inputs.observed(status, inputs.cluster(), inputs.ready_pods(), inputs.ray()))
    early = replace(again, job=replace(again.job, created=datetime(1999, 1, 1, tzinfo=UTC)))
    assert inputs.decide(early).effects == decision.effects


def test_clusters_that_no_attempt_owns_are_removed() -> None:
    former = inputs.cluster(name="example-1", uid="c1")
    ours = inputs.cluster(name="example-2", uid="c2")
    status = RLJobStatus(attempts=(inputs.ended_attempt(), inputs.attempt(number=2)), counters=Counters(attempts=2))
    seen = replace(inputs.observed(status), clusters=(former, ours))
    assert inputs.decide(seen).effects == (DeleteCluster("example-1", "c1"),)
    # One with the right name and another UID: a leader that was paused created it.
    twin = replace(seen, clusters=(inputs.cluster(name="example-2", uid="late"),))
    decision = inputs.decide(twin)
    assert decision.effects == (DeleteCluster("example-2", "late"),)
    assert decision.status.attempts[-1].reason == "ClusterLost"


def test_an_attempt_counts_active_seconds_without_waiting() -> None:
    policy = {"runPolicy": {"activeDeadlineSeconds": 1000}}
    decision = inputs.decide(
        inputs.healthy(
            inputs.ray_job(RayJobStatus.FAILED, 75), status=inputs.running(400), job_spec=inputs.spec(policy)
        )
    )
    assert decision.status.counters is not None
    assert decision.status.counters.active_seconds == 400
    used = Counters(attempts=2, active_seconds=400)
    long_ago = inputs.attempt(submissions=1, seconds_ago=599, number=2)
    status = RLJobStatus(attempts=(inputs.ended_attempt(), long_ago), counters=used)
    second = replace(inputs.ray_job(), submission_id="example-2-1")
    pods = tuple(replace(each, cluster="example-2") for each in inputs.ready_pods())
    seen = inputs.observed(
        status,
        inputs.cluster(name="example-2", uid="c2"),
        pods,
        inputs.ray(second, inputs.run_state()),
        inputs.spec(policy),
    )
    assert inputs.decide(seen).status.attempts[-1].stop is None
    stop = inputs.decide(seen, inputs.at(1)).status.attempts[-1].stop
    assert stop is not None
    assert stop.reason == "ActiveDeadlineExceeded"


def repeated(seen: Observed, **former: object) -> Observed:
    """The same failure, after an attempt on the same cluster that failed, too."""
    newest = seen.job.status.attempts[-1]
    attempt = inputs.ended_attempt(Reason.INFRASTRUCTURE_ERROR, FailureClass.INFRASTRUCTURE)
    attempt = attempt.model_copy(update={"cluster": "example-1", "cluster_uid": "c1", **former})
    status = seen.job.status.model_copy(update={"attempts": (attempt, newest)})
    return replace(seen, job=replace(seen.job, status=status))


def test_an_infrastructure_failure_keeps_the_cluster_while_its_head_and_nodes_respond() -> None:
    """KubeRay replaces lost worker pods, and the job keeps its place in a queue."""
    seen = replace(failing(INFRASTRUCTURE), pods=(inputs.pod("h", "head"), inputs.pod("w", ready=False)))
    for kept in (seen, repeated(seen, cluster_uid="c0"), repeated(seen, failure_class="Application")):
        decision = inputs.decide(kept)
        assert decision.effects == ()
        assert decision.status.next_attempt is not None
        assert decision.status.next_attempt.same_cluster
        assert decision.status.counters is not None
        assert decision.status.counters.infrastructure_retries == 1
    saved = repeated(replace(failing(INFRASTRUCTURE, checkpoint_step=4), pods=seen.pods))
    assert inputs.decide(saved).effects == ()


@pytest.mark.parametrize(
    "seen",
    [
        replace(failing(INFRASTRUCTURE), pods=(inputs.pod("h", "head", ready=False),)),
        replace(failing(INFRASTRUCTURE), pods=(inputs.pod("h", "head", deleting=True),)),
        replace(failing(INFRASTRUCTURE), pods=(inputs.pod("h", "head"), inputs.pod("w", node_silent_seconds=1))),
        replace(failing(INFRASTRUCTURE), pods=(inputs.pod("h", "head"), inputs.pod("w", overdue=True))),
        repeated(failing(INFRASTRUCTURE)),
    ],
    ids=["head not ready", "head deleted", "silent node", "overdue pod", "failed on it twice"],
)
def test_a_cluster_that_may_be_broken_is_not_kept_after_an_infrastructure_failure(seen: Observed) -> None:
    assert inputs.decide(seen).effects == (DeleteCluster("example-1", "c1"),)


def test_image_and_user_of_the_pods_are_recorded_when_an_attempt_starts_a_cluster() -> None:
    """`rljob get-results` starts a pod with them."""
    of_operator = JobPods(image="example/trainer:1", image_pull_policy="IfNotPresent", run_as_user=1000)
    assert inputs.decide(inputs.observed()).status.pods == of_operator
    of_job = inputs.spec({"image": "example/other:2"})
    seen = inputs.observed(inputs.waiting_for_retry(0).model_copy(update={"pods": of_operator}), job_spec=of_job)
    assert inputs.decide(seen).status.pods == of_operator.model_copy(update={"image": "example/other:2"})
    defaults = replace(inputs.DEFAULTS, run_as_user=None)
    chosen_by_cluster = reconcile(inputs.observed(), inputs.NOW, defaults).status.pods
    assert chosen_by_cluster == of_operator.model_copy(update={"run_as_user": None})
