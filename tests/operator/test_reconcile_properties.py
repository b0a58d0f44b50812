"""What holds of every decision, whatever the operator sees."""

from __future__ import annotations

from dataclasses import replace

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.conditions import ConditionType
from rljob_api.crdgen.structural import root_schema
from rljob_api.v1alpha1.status import Attempt, RLJobStatus
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.plan_types import CreateCluster, DeleteCluster, Plan, StopJob, SubmitJob
from rljob_operator.reconcile.timestamps import seconds_since
from rljob_testing.operator_jobs import IDENTITY
from rljob_testing.operator_observed import NOW, after, at, decide, found
from rljob_testing.operator_observed_any import observations

C = ConditionType
ANY_MOMENT = settings(max_examples=60, deadline=None, derandomize=True)


def holds(status: RLJobStatus, kind: ConditionType) -> bool:
    told = found(status, kind)
    return told is not None and told[0] == "True"


def ended(status: RLJobStatus) -> bool:
    return holds(status, C.COMPLETE) or holds(status, C.FAILED)


@ANY_MOMENT
@given(observations())
def test_a_decision_that_nothing_follows_from_is_the_last(seen: Observed) -> None:
    first = decide(seen)
    second = decide(after(seen, first))
    assert second.status == first.status
    assert second.events == ()
    third = decide(after(seen, second))
    assert (third.status, third.effects) == (second.status, second.effects)


@ANY_MOMENT
@given(observations())
def test_an_ending_is_for_good_and_there_is_one(seen: Observed) -> None:
    before, plan = seen.job.status, decide(seen)
    assert not (holds(plan.status, C.COMPLETE) and holds(plan.status, C.FAILED))
    for kind in (C.COMPLETE, C.FAILED):
        if holds(before, kind):
            assert found(plan.status, kind) == found(before, kind)
            assert plan.status.attempts == before.attempts
            assert plan.status.progress == before.progress
            assert plan.requeue_after_seconds is None
    if ended(plan.status):
        assert all(isinstance(effect, DeleteCluster) for effect in plan.effects)


@pytest.fixture(scope="module")
def status_schema() -> jsonschema.Draft202012Validator:
    """As the API server checks a status, but for the formats of times."""
    schema = root_schema()["properties"]
    assert isinstance(schema, dict)
    return jsonschema.Draft202012Validator(schema["status"])


@ANY_MOMENT
@given(observations())
def test_the_status_is_one_that_the_server_takes(
    status_schema: jsonschema.Draft202012Validator, seen: Observed
) -> None:
    plan = decide(seen)
    wire = plan.status.to_wire()
    status_schema.validate(wire)
    assert RLJobStatus.from_wire(wire) == plan.status
    for condition in plan.status.conditions:
        assert all(letter.isprintable() or letter == "\n" for letter in condition.message)
    kinds = [condition.type for condition in plan.status.conditions]
    assert kinds == [kind.value for kind in ConditionType if kind.value in kinds]
    for event in plan.events:
        assert 0 < len(event.message.encode()) <= 1024


@ANY_MOMENT
@given(observations())
def test_every_effect_has_its_intent_in_the_status(seen: Observed) -> None:
    plan = decide(seen)
    assert len(plan.effects) <= 1
    for effect in plan.effects:
        last = plan.status.attempts[-1]
        if isinstance(effect, CreateCluster):
            assert seen.cluster is None
            assert seen.kuberay_installed
            written = seen.job.status.attempts[-1]
            assert (written.number, written.cluster_uid) == (effect.attempt, None)
        elif isinstance(effect, SubmitJob):
            check_submission(seen, plan, effect, last)
        elif isinstance(effect, StopJob):
            state = seen.ray.run_state
            hangs = state is not None and state.phase in ("Complete", "Failed", "Stopped")
            assert last.reason == "ActiveDeadlineExceeded" or hangs
            assert holds(plan.status, C.JOB_SUBMITTED)
        else:
            assert seen.cluster is not None
            assert seen.cluster.owner_uid == IDENTITY.uid
            assert (effect.name, effect.uid) == (seen.cluster.name, seen.cluster.uid)
            assert ended(plan.status)


def check_submission(seen: Observed, plan: Plan, effect: SubmitJob, last: Attempt) -> None:
    assert last.submissions == 1
    assert effect.submission_id == "example-1-1"
    assert holds(plan.status, C.CLUSTER_READY)
    assert holds(plan.status, C.PLACEMENT_FEASIBLE)
    assert seen.ray.job is None or seen.ray.job.submission_id != effect.submission_id
    assert not holds(seen.job.status, C.JOB_SUBMITTED)


def crosses_a_deadline(seen: Observed, seconds: float) -> bool:
    """Whether one of the limits in time lies between the moment and so many seconds later; counted apart from the
    operator's own reckoning."""
    if seen.job.spec is None or not seen.job.status.attempts:
        return True
    policy, started = seen.job.spec.run_policy, seen.job.status.attempts[0].started
    limits = [policy.provisioning_deadline_seconds - seconds_since(started, NOW), 60 - seconds_since(started, NOW)]
    if policy.active_deadline_seconds is not None:
        activity = policy.active_deadline_seconds - seconds_since(started, NOW)
        limits.extend((activity, activity + policy.grace_period_seconds))
    if seen.ray.run_state is not None:
        grace, since = policy.grace_period_seconds, seconds_since(seen.ray.run_state.written_at, NOW)
        limits.extend((grace - since, 2 * grace - since))
    for condition in seen.job.status.conditions:
        since = seconds_since(condition.last_transition_time, NOW)
        limits.extend((policy.grace_period_seconds - since, 30 - since))
    return any(0 < limit <= seconds for limit in limits)


@ANY_MOMENT
@given(observations(), st.sampled_from([1, 20, 3600, 10_000_000]))
def test_time_alone_changes_nothing_but_at_a_deadline(seen: Observed, seconds: int) -> None:
    settled = after(seen, decide(seen))
    # Progress that came too soon after the last is written a little later.
    settled = after(settled, decide(settled, at(20)))
    if crosses_a_deadline(settled, 20) or crosses_a_deadline(settled, 20 + seconds):
        return
    assert decide(settled, at(20 + seconds)).status == settled.job.status


@ANY_MOMENT
@given(observations())
def test_the_operator_looks_again_as_long_as_the_job_has_not_ended(seen: Observed) -> None:
    plan = decide(seen)
    if ended(plan.status):
        assert plan.requeue_after_seconds is None
    else:
        assert plan.requeue_after_seconds is not None
        assert 0 <= plan.requeue_after_seconds <= 10


@ANY_MOMENT
@given(observations())
def test_a_job_that_is_deleted_is_left_alone(seen: Observed) -> None:
    plan = decide(replace(seen, job=replace(seen.job, deleting=True)))
    assert plan == Plan(seen.job.status)
