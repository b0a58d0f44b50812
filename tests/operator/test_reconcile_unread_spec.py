"""A running attempt whose spec this operator cannot read, for example after a rollback: the attempt ends at its
deadlines, the job does not, and no resources are held while it waits for an operator that can read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_operator.reconcile.decision import DeleteCluster, DumpStacks, Effect, StopRayJob
from rljob_operator.reconcile.observed import Observed, RayJobStatus, Reachability
from rljob_operator.reconcile.status_draft import timestamp
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

GONE = (DeleteCluster("example-1", "c1"),)
HOUR = 3600


def unread(seen: Observed, policy: RunPolicy | None = None) -> Observed:
    """`policy`: the readable part of it; by default nothing."""
    job = replace(seen.job, spec=None, spec_error="pools[0].topology: is new", readable_policy=policy or RunPolicy())
    return replace(seen, job=job)


def begun(seconds_ago: float) -> Observed:
    """Everything is ready, and nobody can submit."""
    return inputs.observed(
        inputs.provisioning(seconds_ago=seconds_ago), inputs.cluster(), inputs.ready_pods(), inputs.ray()
    )


def assert_waits_for_another_operator(seen: Observed, status: RLJobStatus, reason: str) -> None:
    assert (status.result, status.phase, status.reason) == (None, "Retrying", reason)
    counters = status.counters
    assert counters is not None
    assert (counters.failed_attempts, counters.application_retries, counters.infrastructure_retries) == (0, 0, 0)
    free = replace(seen, job=replace(seen.job, status=status), clusters=(), pods=())
    assert inputs.decide(free, inputs.at(10 * HOUR)).status.phase == "Retrying"
    readable = replace(free, job=replace(free.job, spec=inputs.spec(), spec_error=None))
    assert inputs.decide(readable, inputs.at(10 * HOUR)).status.attempts[-1].number == 2


@pytest.mark.parametrize(("policy", "limit"), [(None, 1800), (RunPolicy(provisioning_deadline_seconds=300), 300)])
def test_an_attempt_without_a_trainer_ends_at_its_deadline(policy: RunPolicy | None, limit: int) -> None:
    before = inputs.decide(unread(begun(limit - 1), policy))
    assert (before.effects, before.status.attempts[0].ended, before.requeue_after_seconds) == ((), None, 1)
    seen = unread(begun(limit), policy)
    decision = inputs.decide(seen)
    assert decision.effects == GONE
    attempt = decision.status.attempts[0]
    assert (attempt.reason, attempt.failure_class) == ("ProvisioningDeadlineExceeded", "Resumable")
    assert attempt.message == Mentions(f"within {limit} s", "spec (pools[0].topology: is new)")
    assert_waits_for_another_operator(seen, decision.status, "ProvisioningDeadlineExceeded")


def test_an_attempt_without_a_cluster_ends_too() -> None:
    seen = unread(inputs.observed(inputs.provisioning(seen=False, seconds_ago=1800)))
    assert (
        inputs.decide(unread(inputs.observed(inputs.provisioning(seen=False, seconds_ago=1799))))
        .status.attempts[0]
        .ended
        is None
    )
    assert_waits_for_another_operator(seen, inputs.decide(seen).status, "ProvisioningDeadlineExceeded")


@pytest.mark.parametrize(("policy", "limit"), [(None, HOUR), (RunPolicy(stall_deadline_seconds=600), 600)])
def test_a_hanging_trainer_is_stopped(policy: RunPolicy | None, limit: int) -> None:
    seen = unread(inputs.healthy(state=inputs.run_state()), policy)
    seen = inputs.with_status_written(seen, inputs.decide(seen))
    assert inputs.decide(seen, inputs.at(limit - 1)).effects == ()
    stalled = inputs.decide(seen, inputs.at(limit))
    assert effects_until_the_end(inputs.with_status_written(seen, stalled), limit) == [
        (DumpStacks("example-1-1", 1),),
        (StopRayJob("example-1-1"),),
        GONE,
    ]


def effects_until_the_end(seen: Observed, since: int) -> list[tuple[Effect, ...]]:
    """The effects of three passes: the stacks are written in 30 s, and stopping may take 120 s."""
    decisions = [inputs.decide(seen, inputs.at(since + seconds)) for seconds in (0, 30, 150)]
    ended = decisions[-1].status
    assert (ended.attempts[0].reason, ended.phase) == ("Stalled", "Retrying")
    return [decision.effects for decision in decisions]


def test_an_unreachable_dashboard_is_not_waited_for_longer() -> None:
    seen = unread(
        replace(
            inputs.healthy(status=inputs.running(9000)),
            ray=inputs.silent_ray(Reachability.UNREACHABLE),
        )
    )
    seen = inputs.with_status_written(seen, inputs.decide(seen))
    assert inputs.decide(seen, inputs.at(HOUR - 1)).status.attempts[0].ended is None
    ended = inputs.decide(seen, inputs.at(HOUR))
    assert (ended.effects, ended.status.attempts[0].reason) == (GONE, "DashboardUnreachable")
    assert ended.status.phase == "Retrying"


def test_an_unreadable_run_state_does_not_end_the_job_either() -> None:
    newer = replace(inputs.ray(inputs.ray_job()), run_state_error="phase: is new")
    seen = unread(replace(inputs.healthy(), ray=newer))
    seen = inputs.with_status_written(seen, inputs.decide(seen))
    assert inputs.decide(seen, inputs.at(60)).effects == (), "its dashboard answers, so its policy is right"
    decision = inputs.decide(seen, inputs.at(HOUR))
    assert decision.effects == GONE
    assert_waits_for_another_operator(seen, decision.status, "RunStateUnreadable")


TOO_OLD = Mentions("RayCluster example-1", "authOptions", "KubeRay 1.6")
NEWER_STATE = replace(inputs.ray(inputs.ray_job()), run_state_error="phase: is new")


@pytest.mark.parametrize(
    ("seen", "kind", "reason", "status", "message"),
    [
        # Its trainer has failed at the same time, so the run state does not end the attempt.
        (
            replace(
                inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 75)),
                clusters=(inputs.cluster(asks_for_token=False),),
            ),
            *(ConditionType.CLUSTER_READY, Reason.KUBERAY_TOO_OLD, "False", TOO_OLD),
        ),
        (
            begun(1800),
            *(ConditionType.RETRYING, Reason.PROVISIONING_DEADLINE_EXCEEDED, "True"),
            Mentions("within 1800 s", "spec (pools[0].topology: is new)"),
        ),
        (
            replace(
                inputs.healthy(
                    status=inputs.running(9000, record={"state_unknown_since": timestamp(inputs.at(-HOUR))})
                ),
                ray=NEWER_STATE,
            ),
            *(ConditionType.RETRYING, Reason.RUN_STATE_UNREADABLE, "True"),
            Mentions("3600 s: phase: is new"),
        ),
    ],
    ids=["too old", "too late", "run state"],
)
def test_reasons_that_only_such_a_job_has_are_reported(
    seen: Observed, kind: ConditionType, reason: Reason, status: str, message: Mentions
) -> None:
    assert inputs.condition_of(inputs.decide(unread(seen)).status, kind) == (status, reason, message)


def test_a_readable_active_deadline_ends_the_job_as_usual() -> None:
    seen = unread(inputs.healthy(state=inputs.run_state()), RunPolicy(active_deadline_seconds=60))
    decision = inputs.decide(seen)
    assert decision.effects == (StopRayJob("example-1-1"),)
    assert decision.status.attempts[0].stop is not None
    assert decision.status.attempts[0].stop.reason == "ActiveDeadlineExceeded"
