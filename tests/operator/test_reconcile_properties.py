"""Properties of every decision, whatever the operator sees; those about time are in
`test_reconcile_properties_time`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import get_args

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.conditions import FAILURE_CLASSES, REASONS, ConditionType, Reason
from rljob_api.crdgen.structural import root_schema
from rljob_api.v1alpha1.run_policy import Cleanup, Elastic
from rljob_api.v1alpha1.status import Attempt, AttemptOutcome, AttemptState, FailureClass, RLJobStatus
from rljob_operator.kube.allowed_calls import without_nulls
from rljob_operator.reconcile.decision import (
    ApplyNetworkPolicy,
    CreateCluster,
    Decision,
    DeleteCluster,
    DeleteJob,
    Effect,
    StopRayJob,
    SubmitRayJob,
)
from rljob_operator.reconcile.observed import Observed, ObservedPod, RayJobStatus, Reachability
from rljob_operator.reconcile.status_draft import seconds_since
from rljob_testing.operator import any_observed, inputs

C, R = ConditionType, Reason
ANY_MOMENT = settings(max_examples=200)
EVERYTHING = settings(max_examples=4000)

ENDED_BEFORE_AN_ATTEMPT = (R.INVALID_SPEC, R.STORAGE_MISSING)

RARELY_REACHED = {
    (C.CLUSTER_READY, R.KUBERAY_TOO_OLD),
    (C.RETRYING, R.PROVISIONING_DEADLINE_EXCEEDED),
    (C.RETRYING, R.RUN_STATE_UNREADABLE),
}
"""Reasons that few of thousands of examples reach: those of a job that became unreadable at one particular time.
They are worked out by hand in `test_reconcile_unread_spec`."""


def test_every_effect_reason_and_result_is_reached() -> None:
    reached: Counter[object] = Counter()

    @EVERYTHING
    @given(any_observed.observations())
    def collect(seen: Observed) -> None:
        reached.update(observed_outcomes(seen, inputs.decide(seen)))

    collect()
    conditions = {(kind, reason) for kind, reasons in REASONS.items() for reason in reasons}
    effects = set(get_args(Effect))
    endings = {("attempt", reason) for reason in (R.SUCCEEDED, *FAILURE_CLASSES)} - {
        ("attempt", reason) for reason in ENDED_BEFORE_AN_ATTEMPT
    }
    wanted: set[object] = conditions | effects | endings | set(AttemptState) | set(FailureClass) | set(AttemptOutcome)
    wanted |= {"on the same cluster", "with lost pods", "reopened", "budget reset", "resumed", "on fewer nodes"}
    assert wanted - set(reached) <= RARELY_REACHED
    seen_reasons = {each for each in reached if isinstance(each, tuple) and isinstance(each[0], ConditionType)}
    assert seen_reasons <= conditions, "a reason that is missing in the contract"


def observed_outcomes(seen: Observed, decision: Decision) -> list[object]:
    """What this decision shows; of the conditions, those that it changed."""
    before, status = seen.job.status, decision.status
    outcomes: list[object] = [type(effect) for effect in decision.effects]
    known = {condition.type: (condition.status, condition.reason) for condition in before.conditions}
    outcomes += [
        (C(condition.type), R(condition.reason))
        for condition in status.conditions
        if known.get(condition.type) != (condition.status, condition.reason)
    ]
    outcomes += ["with lost pods" for effect in decision.effects if isinstance(effect, CreateCluster) and seen.pods]
    outcomes += ["on fewer nodes" for effect in decision.effects if isinstance(effect, SubmitRayJob) and effect.nodes]
    outcomes += ["reopened"] if before.result is not None and status.result is None else []
    outcomes += ["resumed"] if before.suspended_at is not None and under_way(status) is not None else []
    used = [counters.infrastructure_retries for counters in (before.counters, status.counters) if counters is not None]
    outcomes += ["budget reset"] if used != sorted(used) else []
    if not status.attempts or before.attempts[-1:] == status.attempts[-1:]:
        return outcomes
    newest = status.attempts[-1]
    outcomes += [AttemptState(newest.state)] if newest.state in set(AttemptState) else []
    if newest.ended is not None:
        outcomes += [("attempt", R(newest.reason or "")), AttemptOutcome(newest.outcome)]
        outcomes += [FailureClass(newest.failure_class)] if newest.failure_class is not None else []
    elif len(status.attempts) > 1 and newest.cluster == status.attempts[-2].cluster:
        outcomes += ["on the same cluster"]
    return [*outcomes, AttemptOutcome(newest.outcome)] if newest.ended is None else outcomes


def under_way(status: RLJobStatus) -> Attempt | None:
    return status.attempts[-1] if status.attempts and status.attempts[-1].ended is None else None


@ANY_MOMENT
@given(any_observed.observations())
def test_reconciling_again_without_outside_changes_changes_nothing(seen: Observed) -> None:
    first = inputs.decide(seen)
    # An attempt ends, the next one begins, and may have to end at once: each is a pass of its own.
    for _ in range(3):
        if attempt_and_result(first.status) == attempt_and_result(seen.job.status):
            break
        seen, first = inputs.with_status_written(seen, first), inputs.decide(inputs.with_status_written(seen, first))
    second = inputs.decide(inputs.with_status_written(seen, first))
    assert second.status == first.status
    assert second.events == ()
    assert inputs.decide(inputs.with_status_written(seen, second)) == second


def attempt_and_result(status: RLJobStatus) -> object:
    newest = status.attempts[-1] if status.attempts else None
    where = (newest.number, newest.running_since, newest.ended) if newest is not None else None
    return where, status.result is None


@ANY_MOMENT
@given(any_observed.observations())
def test_a_result_is_final_except_for_a_new_request(seen: Observed) -> None:
    before, decision = seen.job.status, inputs.decide(seen)
    if before.result is None:
        return
    handled = before.handled_requests.retry if before.handled_requests is not None else None
    is_retry_requested = seen.job.retry_request is not None and seen.job.retry_request != handled
    if is_retry_requested and before.result.outcome != AttemptOutcome.SUCCEEDED and not seen.job.deleting:
        handled = decision.status.handled_requests.retry if decision.status.handled_requests is not None else None
        assert handled is not None
        return
    assert decision.status.result is not None
    assert decision.status.result.model_copy(update={"cleaned_up_at": None}) == before.result.model_copy(
        update={"cleaned_up_at": None}
    )
    assert decision.status.attempts == before.attempts
    assert (decision.status.counters, decision.status.progress) == (before.counters, before.progress)
    assert (decision.status.checkpoint, decision.status.suspended_at) == (before.checkpoint, None)
    assert all(isinstance(effect, DeleteCluster | DeleteJob) for effect in decision.effects)


@ANY_MOMENT
@given(any_observed.observations())
def test_conditions_report_the_result_once(seen: Observed) -> None:
    status = inputs.decide(replace(seen, job=replace(seen.job, deleting=False))).status
    ends = {kind: inputs.condition_of(status, kind) for kind in (C.COMPLETE, C.FAILED, C.FINISHED)}
    reported = {kind for kind, condition in ends.items() if condition is not None}
    if seen.job.status.result is None:
        succeeded = status.result is not None and status.result.outcome == AttemptOutcome.SUCCEEDED
        last = {C.FINISHED, C.COMPLETE if succeeded else C.FAILED}
        assert reported == (last if status.result is not None else set())


@pytest.fixture(scope="module")
def status_schema() -> jsonschema.Draft202012Validator:
    """The schema by which the API server checks a status, except for the formats of times."""
    schema = root_schema()["properties"]
    assert isinstance(schema, dict)
    return jsonschema.Draft202012Validator(schema["status"])


@ANY_MOMENT
@given(any_observed.observations())
def test_the_server_accepts_the_status(status_schema: jsonschema.Draft202012Validator, seen: Observed) -> None:
    decision = inputs.decide(seen)
    wire = without_nulls(decision.status.to_wire())
    status_schema.validate(wire)
    assert RLJobStatus.from_wire(wire) == decision.status
    status = decision.status
    texts = [condition.message for condition in status.conditions]
    texts += [attempt.message or "" for attempt in status.attempts]
    texts += [each.message for each in (status.next_attempt, status.result) if each is not None]
    for text in texts:
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    kinds = [condition.type for condition in status.conditions]
    assert kinds == [kind.value for kind in ConditionType if kind.value in kinds]
    for event in decision.events:
        assert 0 < len(event.message.encode()) <= 1024


@ANY_MOMENT
@given(any_observed.observations())
def test_counters_grow_and_history_is_bounded(seen: Observed) -> None:
    before, decision = seen.job.status, inputs.decide(seen)
    after = decision.status
    assert len(after.attempts) <= 10
    numbers = [attempt.number for attempt in after.attempts]
    assert numbers == sorted(set(numbers))
    starts = [attempt.start_number for attempt in after.attempts if attempt.start_number is not None]
    assert starts == sorted(set(starts))
    if seen.job.deleting:
        return
    assert after.counters is not None
    assert after.counters.attempts == (numbers[-1] if numbers else 0)
    assert after.counters.start_number == max([after.counters.start_number, *starts])
    if before.counters is None:
        return
    for name in ("attempts", "start_number", "failed_attempts", "active_seconds"):
        assert getattr(after.counters, name) >= getattr(before.counters, name), name
    assert (after.counters.checkpoint_step or 0) >= (before.counters.checkpoint_step or 0)
    is_reset = after.handled_requests != before.handled_requests or (
        after.counters.checkpoint_step != before.counters.checkpoint_step
    )
    for name in ("application_retries", "infrastructure_retries"):
        assert is_reset or getattr(after.counters, name) >= getattr(before.counters, name), name


@ANY_MOMENT
@given(any_observed.observations())
def test_an_attempt_starts_only_when_no_other_runs(seen: Observed) -> None:
    before, status = seen.job.status, inputs.decide(seen).status
    if status.attempts[-1:] == before.attempts[-1:] or under_way(status) is None or under_way(before) is not None:
        return
    newest = status.attempts[-1]
    assert (
        before.next_attempt is None or seconds_since(before.next_attempt.not_before, inputs.NOW) >= 0 or is_asked(seen)
    )
    assert seen.job.spec is not None
    assert not seen.job.spec.suspend
    if newest.cluster_uid is None:
        assert seen.clusters == ()
        assert all(lost(pod) for pod in seen.pods)
        assert newest.cluster == f"example-{newest.number}"
    else:
        assert before.next_attempt is not None
        assert before.next_attempt.same_cluster
        assert (newest.cluster, newest.cluster_uid) in {(each.name, each.uid) for each in seen.clusters}


@ANY_MOMENT
@given(any_observed.observations())
def test_a_job_is_suspended_only_when_nothing_of_it_runs(seen: Observed) -> None:
    before, status = seen.job.status, inputs.decide(seen).status
    if status.suspended_at is None or before.suspended_at is not None:
        return
    assert seen.job.spec is not None
    assert seen.job.spec.suspend
    assert (under_way(status), status.next_attempt) == (None, None)
    assert (seen.forbidden, seen.clusters) == (None, ())
    assert all(lost(pod) for pod in seen.pods)


def is_asked(seen: Observed) -> bool:
    handled = seen.job.status.handled_requests
    return seen.job.retry_request is not None and (handled is None or handled.retry != seen.job.retry_request)


def lost(pod: ObservedPod) -> bool:
    return pod.overdue or pod.node_silent_seconds >= 60


@settings(max_examples=800)
@given(any_observed.observations())
def test_every_effect_is_allowed(seen: Observed) -> None:
    decision = inputs.decide(seen)
    assert len(set(decision.effects)) == len(decision.effects)
    assert not (seen.job.deleting and decision.effects)
    for effect in decision.effects:
        check_effect(seen, decision.status, effect)


def check_effect(seen: Observed, status: RLJobStatus, effect: Effect) -> None:
    newest = under_way(status)
    if isinstance(effect, DeleteCluster):
        check_deletion(seen, status, effect)
    elif isinstance(effect, DeleteJob):
        assert effect.uid == inputs.IDENTITY.uid
        assert status.result is not None
        assert seen.job.spec is not None
        ttl = seen.job.spec.run_policy.ttl_seconds_after_finished
        assert ttl is not None
        assert seconds_since(status.result.at, inputs.NOW) >= ttl
    elif isinstance(effect, ApplyNetworkPolicy):
        assert newest is not None
        assert newest.cluster == effect.cluster
        assert seen.ray.reachability is Reachability.UNREACHABLE
        assert seen.ray.silent_seconds >= 20
    elif isinstance(effect, CreateCluster):
        assert newest is not None
        check_creation(seen, newest, effect)
    elif isinstance(effect, SubmitRayJob):
        assert newest is not None
        check_submission(seen, status, newest, effect)
    else:
        assert newest is not None
        check_stop(seen, newest, effect)


def check_creation(seen: Observed, newest: Attempt, effect: CreateCluster) -> None:
    written = seen.job.status.attempts[-1]
    assert (written.number, written.cluster, written.cluster_uid) == (effect.attempt, effect.cluster, None)
    assert (written.ended, newest.submissions, newest.stop) == (None, 0, None)
    assert seen.clusters == ()
    assert seen.kuberay_installed
    assert seen.forbidden is None
    assert seen.job.spec is not None
    assert not seen.job.spec.suspend
    assert all(lost(pod) for pod in seen.pods)


def check_submission(seen: Observed, status: RLJobStatus, newest: Attempt, effect: SubmitRayJob) -> None:
    assert status.counters is not None
    start_number = status.counters.start_number
    nodes = tuple((pool.name, pool.nodes) for pool in newest.nodes)
    assert effect == SubmitRayJob(f"example-{newest.number}-1", newest.number, start_number, nodes)
    assert (newest.submissions, newest.start_number) == (1, effect.start_number)
    assert (newest.running_since, newest.stop) == (None, None)
    ray, spec = seen.ray, seen.job.spec
    assert ray.reachability is Reachability.OK
    assert ray.infeasible_groups == ()
    assert ray.job is None or ray.job.submission_id != effect.submission_id
    assert spec is not None
    assert not spec.suspend
    assert (newest.cluster, newest.cluster_uid, False, True) in {
        (each.name, each.uid, each.deleting, each.asks_for_token) for each in seen.clusters
    }
    ready = Counter(pod.group for pod in seen.pods if pod.cluster == newest.cluster and is_at_work(pod))
    assert ready["head"] >= 1
    num_nodes = newest.nodes[0].nodes if newest.nodes else spec.pools[0].nodes
    assert ready["main"] >= num_nodes
    workers = [node.num_gpus for node in ray.nodes if not node.is_head]
    assert sum(gpus >= spec.pools[0].gpus_per_node for gpus in workers) >= num_nodes
    if newest.nodes:
        check_fewer_nodes(status, newest, spec.run_policy.elastic)


def check_fewer_nodes(status: RLJobStatus, newest: Attempt, elastic: Elastic | None) -> None:
    assert elastic is not None
    assert newest.active_since is not None
    assert newest.nodes[0].nodes >= elastic.min_nodes
    continues = any(each.cluster_uid == newest.cluster_uid and each.nodes for each in status.attempts[:-1])
    assert continues or seconds_since(newest.active_since, inputs.NOW) >= elastic.wait_seconds


def is_at_work(pod: ObservedPod) -> bool:
    return pod.ready and not pod.deleting and not pod.ended


def check_stop(seen: Observed, newest: Attempt, effect: StopRayJob) -> None:
    job, spec = seen.ray.job, seen.job.spec
    assert seen.ray.reachability is Reachability.OK
    assert job is not None
    assert job.submission_id == effect.submission_id == f"example-{newest.number}-1"
    assert job.status in (RayJobStatus.PENDING, RayJobStatus.RUNNING)
    policy = spec.run_policy if spec is not None else seen.job.readable_policy
    grace = policy.grace_period_seconds
    end_reported_at = newest.end_reported_at
    assert newest.stop is not None or (
        end_reported_at is not None and seconds_since(end_reported_at, inputs.NOW) >= grace
    )


def check_deletion(seen: Observed, status: RLJobStatus, effect: DeleteCluster) -> None:
    assert (effect.name, effect.uid, False) in {(each.name, each.uid, each.deleting) for each in seen.clusters}
    if not status.attempts:
        return
    newest, spec = status.attempts[-1], seen.job.spec
    is_newest = effect.name == newest.cluster and newest.cluster_uid in (None, effect.uid)
    assert not (is_newest and newest.ended is None)
    assert not (is_newest and status.next_attempt is not None and status.next_attempt.same_cluster)
    keeps = spec is not None and spec.run_policy.cleanup is Cleanup.KEEP_CLUSTER
    if is_newest and status.result is not None and keeps:
        is_in_queue = seen.job.queue_labels or any(each.queue or each.suspended for each in seen.clusters)
        assert newest.trainer_may_run or is_in_queue


@ANY_MOMENT
@given(any_observed.observations(), st.randoms(use_true_random=True))
def test_conditions_are_never_read(seen: Observed, pick: Random) -> None:
    decision = inputs.decide(seen)
    for conditions in ((), any_observed.any_conditions(pick)):
        changed = seen.job.status.model_copy(update={"conditions": conditions})
        other = inputs.decide(replace(seen, job=replace(seen.job, status=changed)))
        assert records(other.status) == records(decision.status)
        assert (other.effects, other.requeue_after_seconds) == (decision.effects, decision.requeue_after_seconds)


def records(status: RLJobStatus) -> RLJobStatus:
    """The status without what is only for people."""
    return status.model_copy(update={"conditions": (), "reason": None})


@ANY_MOMENT
@given(any_observed.observations())
def test_a_job_that_is_being_deleted_is_not_changed(seen: Observed) -> None:
    assert inputs.decide(replace(seen, job=replace(seen.job, deleting=True))) == Decision(seen.job.status)


@ANY_MOMENT
@given(any_observed.observations())
def test_a_job_of_another_controller_is_not_changed(seen: Observed) -> None:
    assert inputs.decide(replace(seen, job=replace(seen.job, is_managed=False))) == Decision(seen.job.status)
