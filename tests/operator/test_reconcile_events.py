"""Events: one for each change that people want to read, and none for what an earlier event reported."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import Condition, ConditionStatus, RLJobStatus
from rljob_operator.reconcile.decision import EventRecord, EventType, events_between
from rljob_operator.reconcile.observed import Observed, PodProblem, RayJobStatus
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs


def reasons(seen: Observed) -> list[str]:
    return [event.reason for event in inputs.decide(seen).events]


def test_the_events_of_a_successful_job_are_complete() -> None:
    outside = [
        inputs.observed(),
        inputs.observed(there=inputs.cluster()),
        inputs.observed(there=inputs.cluster(), pods=inputs.ready_pods(), seen=inputs.ray()),
        inputs.healthy(),
        inputs.healthy(state=inputs.run_state()),
        inputs.healthy(state=inputs.run_state(checkpoint_step=4)),
        inputs.healthy(state=inputs.run_state(step=8, checkpoint_step=8)),
        inputs.healthy(
            inputs.ray_job(RayJobStatus.SUCCEEDED, 0),
            inputs.run_state(RunPhase.COMPLETE, step=10, checkpoint_step=10),
        ),
        inputs.observed(),
    ]
    sent, status = [], inputs.observed().job.status
    for number, seen in enumerate(outside):
        decision = inputs.decide(replace(seen, job=replace(seen.job, status=status)), inputs.at(10 * number))
        sent.append([event.reason for event in decision.events])
        status = decision.status
    assert sent == [
        ["Creating"],
        [],
        ["Ready"],
        ["Submitted", "Starting"],
        ["Training"],
        ["Saved"],
        [],
        ["Succeeded"],
        ["Removed"],
    ]


def test_a_reason_that_this_operator_does_not_know_gets_an_event() -> None:
    status = inputs.observed().job.status
    since = timestamp(inputs.NOW)

    def with_cost(status_of_it: ConditionStatus, reason: str) -> RLJobStatus:
        cost = Condition(type="WithinBudget", status=status_of_it, reason=reason, last_transition_time=since)
        return status.model_copy(update={"conditions": (cost,)})

    bad = with_cost(ConditionStatus.FALSE, "BudgetExceeded")
    good = with_cost(ConditionStatus.TRUE, "A" * 253)
    assert events_between(status, bad) == (EventRecord(EventType.WARNING, "BudgetExceeded", "WithinBudget"),)
    assert events_between(bad, good) == (EventRecord(EventType.NORMAL, "A" * 128, "WithinBudget"),)
    assert events_between(bad, bad) == ()


def test_an_event_is_sent_only_when_the_reason_changes() -> None:
    def head(reason: Reason, message: str) -> Observed:
        return inputs.observed(
            inputs.provisioning(),
            inputs.cluster(),
            (inputs.pod("h", HEAD_GROUP, problem=PodProblem(reason, message)), inputs.pod("w")),
        )

    first = head(Reason.UNSCHEDULABLE, "0/3 nodes")
    decision = inputs.decide(first)
    assert decision.events == (
        EventRecord(EventType.WARNING, Reason.UNSCHEDULABLE, "1 of 2 pods ready; the head pod h: 0/3 nodes"),
    )
    same = replace(head(Reason.UNSCHEDULABLE, "0/4 nodes"), job=inputs.with_status_written(first, decision).job)
    assert inputs.decide(same).events == ()
    other = replace(head(Reason.IMAGE_PULL_FAILED, "not found"), job=inputs.with_status_written(first, decision).job)
    assert [event.reason for event in inputs.decide(other).events] == [Reason.IMAGE_PULL_FAILED]


def test_one_loss_gets_one_event() -> None:
    assert reasons(inputs.without_retries(inputs.observed(inputs.running()))) == ["ClusterLost"]
    assert reasons(inputs.without_retries(replace(inputs.healthy(), ray=inputs.ray()))) == ["DriverLost"]


def test_an_invalid_job_gets_one_warning_event() -> None:
    seen = inputs.observed()
    seen = replace(seen, job=replace(seen.job, spec=None, spec_error="spec.pools: wrong"))
    assert inputs.decide(seen).events == (EventRecord(EventType.WARNING, Reason.INVALID_SPEC, "spec.pools: wrong"),)


def test_a_long_text_of_multibyte_characters_fits_into_an_event() -> None:
    state = inputs.run_state(RunPhase.FAILED, error=RunError(kind="E", message="é" * 2000))
    decision = inputs.decide(inputs.without_retries(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), state)))
    (failed,) = [event for event in decision.events if event.reason == Reason.APPLICATION_ERROR]
    assert len(failed.message.encode()) in (1023, 1024)
    (condition,) = [each for each in decision.status.conditions if each.type == ConditionType.FAILED]
    assert len(condition.message) <= 1024


def test_a_service_account_that_the_installation_does_not_allow_ends_the_job_before_it_has_a_cluster() -> None:
    seen = inputs.observed(job_spec=inputs.spec({"serviceAccountName": "s3-reader"}))
    refused = inputs.decide(seen)
    assert refused.effects == ()
    assert (refused.status.phase, refused.status.reason) == ("Failed", "InvalidSpec")
    (event,) = refused.events
    assert event.message == Mentions("spec.serviceAccountName: jobs may not use", "s3-reader", "ask the administrator")
    allowed = reconcile(seen, inputs.NOW, replace(inputs.DEFAULTS, service_account_names=("s3-reader",)))
    assert allowed.status.phase == "Provisioning"
