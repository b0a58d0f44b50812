"""Properties of every decision about time: what time changes, what it does not, and that every wait has an end."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.constants import STACKS_SECONDS
from rljob_api.run_state import RunState
from rljob_api.v1alpha1.run_policy import RunPolicy
from rljob_api.v1alpha1.status import Attempt, AttemptState, RLJobStatus
from rljob_operator.reconcile.decision import CreateCluster, DeleteCluster, Effect
from rljob_operator.reconcile.observed import Observed, ObservedRay, Reachability
from rljob_operator.reconcile.reconcile import SUBMISSION_SECONDS
from rljob_operator.reconcile.status_draft import moment, seconds_since, timestamp
from rljob_testing.operator import any_observed, inputs

ANY_MOMENT = settings(max_examples=200)
FOR_EVER_SECONDS = 10_000_000
LONGEST_PAUSE_SECONDS = 720
"""Between two attempts: ten minutes, and a fifth more."""

SECONDS_TO_SPARE = 120
"""For polls every half minute, and for the passes between two states."""

JUMPS = st.sampled_from([-86_400 * 400, -3600, -1, 1, 3600, 86_400 * 400])
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def test_time_alone_changes_nothing_between_deadlines() -> None:
    num_checked, num_seen = 0, 0

    @ANY_MOMENT
    @given(any_observed.observations(), st.sampled_from([0.1, 0.5, 0.9, 0.99]))
    def check(seen: Observed, fraction: float) -> None:
        nonlocal num_checked, num_seen
        seen = final_status(seen)
        seconds = fraction * min(seconds_to_deadlines(seen), default=FOR_EVER_SECONDS)
        now, later = inputs.decide(seen), inputs.decide(seen, inputs.at(seconds))
        assert later.status == seen.job.status
        assert (later.effects, later.events) == (now.effects, ())
        num_seen += 1
        num_checked += seconds >= 0.1 and not seen.job.deleting

    check()
    assert num_checked >= 0.8 * num_seen


def final_status(seen: Observed) -> Observed:
    """The status after all immediate passes. The first pass submits the program that writes stacks, so later it exists:
    until then the time for writing stacks starts again at each pass."""
    for _ in range(5):
        written = inputs.with_status_written(seen, inputs.decide(seen))
        after = replace(written, ray=replace(written.ray, stacks_missing=False))
        if after == seen:
            return seen
        seen = after
    raise AssertionError(f"not settled after 5 passes: {seen!r}")


def seconds_to_deadlines(seen: Observed) -> list[float]:
    """Seconds from `NOW` to all times at which time alone may change something, computed independently of the
    operator."""
    status, spec = seen.job.status, seen.job.spec
    due: list[float] = []
    if status.next_attempt is not None:
        due.append(seconds_to(status.next_attempt.not_before))
    if status.result is not None and spec is not None and spec.run_policy.ttl_seconds_after_finished is not None:
        due.append(seconds_to(status.result.at, spec.run_policy.ttl_seconds_after_finished))
    if status.result is not None:
        policy = spec.run_policy if spec is not None else seen.job.readable_policy
        due.append(seconds_to(status.result.at, policy.keep_cluster_seconds))
    if status.attempts and status.attempts[-1].ended is None:
        policy = spec.run_policy if spec is not None else seen.job.readable_policy
        due += seconds_to_deadlines_of_attempt(status.attempts[-1], policy)
        waits_since = [each for each in (status.waiting_since, status.attempts[-1].active_since) if each is not None]
        if waits_since:
            due.append(seconds_to(max(waits_since), policy.provisioning_deadline_seconds))
        active = policy.active_deadline_seconds
        for since in (status.attempts[-1].active_since, status.attempts[-1].scheduled_at):
            if active is not None and status.counters is not None and since is not None:
                due.append(seconds_to(since, active - status.counters.active_seconds))
    return [seconds for seconds in due if seconds > 0]


def seconds_to_deadlines_of_attempt(attempt: Attempt, policy: RunPolicy) -> list[float]:
    grace, stall = policy.grace_period_seconds, policy.stall_deadline_seconds
    # A name conflict; the trainer's final report; the time that a running trainer may take.
    due = [seconds_to(attempt.name_taken_since or attempt.started, 60)]
    due.append(seconds_to(attempt.active_since or attempt.started, policy.provisioning_deadline_seconds))
    if attempt.scheduled_at is not None:
        due.append(seconds_to(attempt.scheduled_at, policy.provisioning_deadline_seconds))
    if attempt.ready_at is not None:
        due.append(seconds_to(attempt.ready_at, SUBMISSION_SECONDS))
    # Fewer nodes than all: until they are used, and until they are given up for all.
    due.append(seconds_to(attempt.active_since or attempt.started, any_observed.ELASTIC_WAIT_SECONDS))
    if attempt.all_nodes_since is not None:
        due += [seconds_to(attempt.all_nodes_since, any_observed.GROW_AFTER_SECONDS * 2**power) for power in range(7)]
    if attempt.stop is not None:
        requested_at = attempt.stop.sent_at or attempt.stop.requested_at
        due += [seconds_to(requested_at, seconds) for seconds in (STACKS_SECONDS, grace, grace + STACKS_SECONDS)]
    if attempt.end_reported_at is not None:
        due += [seconds_to(attempt.end_reported_at, seconds) for seconds in (30, grace, 2 * grace)]
    if attempt.progressed_at is not None:
        due += [seconds_to(attempt.progressed_at, seconds) for seconds in (60, stall)]
    if attempt.state_unknown_since is not None:
        due.append(seconds_to(attempt.state_unknown_since, stall))
    return due


def seconds_to(since: str, seconds: float = 0) -> float:
    return seconds - seconds_since(since, inputs.NOW)


@ANY_MOMENT
@given(any_observed.observations(), JUMPS)
def test_a_shift_of_all_clocks_changes_nothing(seen: Observed, seconds: int) -> None:
    decision = inputs.decide(seen)
    job = replace(seen.job, status=shifted_status(seen.job.status, seconds))
    elsewhere = replace(seen, job=job, ray=shifted_ray(seen.ray, seconds))
    other = inputs.decide(elsewhere, inputs.at(seconds))
    assert other.status == shifted_status(decision.status, seconds)
    assert (other.effects, other.events, other.requeue_after_seconds) == (
        decision.effects,
        tuple(replace(each, message=shifted_text(each.message, seconds)) for each in decision.events),
        decision.requeue_after_seconds,
    )


@ANY_MOMENT
@given(any_observed.observations(), JUMPS)
def test_decisions_do_not_depend_on_the_trainer_clock(seen: Observed, seconds: int) -> None:
    decision = inputs.decide(seen)
    job = replace(seen.job, status=with_clock_of_trainer(seen.job.status, seconds))
    other = inputs.decide(replace(seen, job=job, ray=shifted_ray(seen.ray, seconds)))
    # The clock affects how often progress is written, not whether it is written.
    expected, written = with_clock_of_trainer(decision.status, seconds), other.status
    assert written.model_copy(update={"progress": None}) == expected.model_copy(update={"progress": None})
    assert (other.effects, other.events, other.requeue_after_seconds) == (
        decision.effects,
        decision.events,
        decision.requeue_after_seconds,
    )


def test_a_changed_trainer_clock_does_not_hide_progress() -> None:
    """Also if the clock was wrong before."""
    num_reported = 0

    @ANY_MOMENT
    @given(any_observed.observations(), JUMPS, JUMPS)
    def check(seen: Observed, seconds_before: int, seconds_now: int) -> None:
        nonlocal num_reported
        job = replace(seen.job, status=with_clock_of_trainer(seen.job.status, seconds_before))
        seen = replace(seen, job=job, ray=shifted_ray(seen.ray, seconds_now))
        seen = inputs.with_status_written(seen, inputs.decide(seen))
        unknown = replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"progress": None})))
        expected = inputs.decide(unknown, inputs.at(9)).status.progress
        if expected is not None:
            assert inputs.decide(seen, inputs.at(9)).status.progress == expected
            num_reported += 1

    check()
    assert num_reported >= 5


def with_clock_of_trainer(status: RLJobStatus, seconds: float) -> RLJobStatus:
    """The trainer's report with another clock."""
    progress, checkpoint = status.progress, status.checkpoint
    if progress is not None:
        progress = progress.model_copy(update={"updated_at": shifted_time(progress.updated_at, seconds)})
    if checkpoint is not None:
        checkpoint = checkpoint.model_copy(update={"saved_at": shifted_time(checkpoint.saved_at, seconds)})
    attempts = tuple(
        each.model_copy(update={"run_state_at": shifted_time(each.run_state_at, seconds)})
        if each.run_state_at
        else each
        for each in status.attempts
    )
    return status.model_copy(update={"progress": progress, "checkpoint": checkpoint, "attempts": attempts})


def shifted_status(status: RLJobStatus, seconds: float) -> RLJobStatus:
    """The status with all its times shifted."""
    return RLJobStatus.from_wire(shifted(status.to_wire(), seconds))


def shifted_ray(ray: ObservedRay, seconds: float) -> ObservedRay:
    """The observation with the times of the run state shifted."""
    if ray.run_state is None:
        return ray
    return replace(ray, run_state=RunState.from_wire(shifted(ray.run_state.to_wire(), seconds)))


def shifted(value: object, seconds: float) -> object:
    if isinstance(value, dict):
        return {key: shifted(item, seconds) for key, item in value.items()}
    if isinstance(value, list):
        return [shifted(item, seconds) for item in value]
    return shifted_text(value, seconds) if isinstance(value, str) else value


def shifted_text(text: str, seconds: float) -> str:
    return _TIME.sub(lambda found: shifted_time(found[0], seconds), text)


def shifted_time(text: str, seconds: float) -> str:
    return timestamp(moment(text) + (inputs.at(seconds) - inputs.NOW))


@ANY_MOMENT
@given(any_observed.observations())
def test_a_pending_job_is_always_requeued(seen: Observed) -> None:
    decision = inputs.decide(seen)
    status, spec = decision.status, seen.job.spec
    if seen.job.deleting:
        assert decision.requeue_after_seconds is None
    elif status.result is not None:
        times = []
        if spec is not None and spec.run_policy.ttl_seconds_after_finished is not None:
            times.append(spec.run_policy.ttl_seconds_after_finished)
        deleted = {effect.uid for effect in decision.effects if isinstance(effect, DeleteCluster)}
        if any(not each.deleting and each.uid not in deleted for each in seen.clusters):
            policy = seen.job.readable_policy if spec is None else spec.run_policy
            times.append(policy.keep_cluster_seconds)
        left = max(0.0, seconds_to(status.result.at, min(times))) if times else None
        assert decision.requeue_after_seconds == left
    elif status.suspended_at is not None and (not has_fitting_spec(seen) or (spec is not None and spec.suspend)):
        assert decision.requeue_after_seconds is None
    elif status.attempts and status.attempts[-1].state == AttemptState.QUEUED:
        # Kueue changes the cluster when it admits it. An attempt that has just started is looked at again at once.
        before = seen.job.status.attempts
        assert decision.requeue_after_seconds == (
            None if before and before[-1].number == status.attempts[-1].number else 0
        )
    else:
        assert decision.requeue_after_seconds is not None
        assert 0 <= decision.requeue_after_seconds <= 10


@settings(max_examples=100)
@given(any_observed.observations(), st.sampled_from([each for each in Reachability if each is not Reachability.OK]))
def test_every_wait_has_an_end(seen: Observed, silence: Reachability) -> None:
    """The job ends, or its attempts end one after the other. Only in a queue, where it holds no pods, a job waits for
    as long as it takes."""
    # A spec that cannot be run or read waits for one that can.
    if seen.job.deleting or not has_fitting_spec(seen):
        return
    seen, seconds = replace(seen, ray=ObservedRay(silence, "timeout", silent_seconds=3600)), 0
    limit = (
        any_observed.STALL_SECONDS
        + 2 * any_observed.GRACE_SECONDS
        + LONGEST_PAUSE_SECONDS
        + any_observed.PROVISIONING_SECONDS
        + SECONDS_TO_SPARE
    )
    begins, last = {num_attempts(seen): 0}, num_attempts(seen) + 2
    while seen.job.status.result is None and seen.job.status.suspended_at is None and num_attempts(seen) < last:
        assert seconds - begins.setdefault(num_attempts(seen), seconds) <= limit
        decision = inputs.decide(seen, inputs.at(seconds))
        seen = inputs.with_status_written(seen, decision)
        newest = decision.status.attempts[-1] if decision.status.attempts else None
        if newest is not None and newest.state == AttemptState.QUEUED:
            assert all(pod.overdue or pod.node_silent_seconds >= 60 for pod in seen.pods_of(newest.cluster))
            return
        for effect in decision.effects:
            seen = done(seen, effect)
        seen, seconds = after_deletions(seen), seconds + 30
        if not seen.job.status.attempts or seen.job.status.attempts[-1].ended is not None:
            # Between attempts, the wait for a readable spec has no end.
            seen = replace(seen, forbidden=None)


@settings(max_examples=100)
@given(any_observed.observations(), st.sampled_from([each for each in Reachability if each is not Reachability.OK]))
def test_an_attempt_with_an_unreadable_spec_ends(seen: Observed, silence: Reachability) -> None:
    if seen.job.deleting:
        return
    policy = RunPolicy(
        provisioning_deadline_seconds=any_observed.PROVISIONING_SECONDS,
        stall_deadline_seconds=any_observed.STALL_SECONDS,
        grace_period_seconds=any_observed.GRACE_SECONDS,
    )
    job = replace(seen.job, spec=None, spec_error="is new", readable_policy=policy)
    seen, seconds = replace(seen, job=job, ray=ObservedRay(silence, "timeout", silent_seconds=3600)), 0
    while seen.job.status.attempts and seen.job.status.attempts[-1].state not in (
        AttemptState.ENDED,
        AttemptState.QUEUED,
    ):
        assert (
            seconds
            <= any_observed.STALL_SECONDS
            + 2 * any_observed.GRACE_SECONDS
            + any_observed.PROVISIONING_SECONDS
            + SECONDS_TO_SPARE
        )
        seen, seconds = inputs.with_status_written(seen, inputs.decide(seen, inputs.at(seconds))), seconds + 30


def has_fitting_spec(seen: Observed) -> bool:
    spec = seen.job.spec
    is_elastic_in_queue = spec is not None and spec.run_policy.elastic is not None and bool(seen.job.queue_labels)
    return spec is not None and spec.checkpoint.storage is not None and not is_elastic_in_queue


def num_attempts(seen: Observed) -> int:
    return seen.job.status.attempts[-1].number if seen.job.status.attempts else 0


def done(seen: Observed, effect: Effect) -> Observed:
    """What Kubernetes does after the effects, if no node ever has room for a pod and Ray is unreachable."""
    if isinstance(effect, CreateCluster):
        return replace(
            seen, clusters=(*seen.clusters, inputs.cluster(name=effect.cluster, uid=f"uid-of-{effect.cluster}"))
        )
    if isinstance(effect, DeleteCluster):
        return replace(seen, clusters=tuple(each for each in seen.clusters if each.uid != effect.uid))
    return seen


def after_deletions(seen: Observed) -> Observed:
    """Removes clusters that are being deleted, and pods without a cluster or with a suspended one; except for those
    whose node removes nothing."""
    clusters = tuple(replace(each, suspending=False) for each in seen.clusters if not each.deleting)
    names = {each.name for each in seen.clusters if not (each.deleting or each.is_suspended)}
    return replace(seen, clusters=clusters, pods=tuple(pod for pod in seen.pods if pod.cluster in names or pod.overdue))
