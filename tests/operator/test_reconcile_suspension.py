"""Suspension and user requests: stop for good, and retry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Counters, RLJobStatus
from rljob_operator.reconcile.decision import CreateCluster, DeleteCluster, DeleteJob, DumpStacks, StopRayJob
from rljob_operator.reconcile.observed import Observed, RayJobStatus
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs
from rljob_testing.operator.inputs import condition_of, decide

C, R = ConditionType, Reason
SUSPENDED = inputs.spec({"suspend": True})
EARLIER, LATER = "2026-03-01T11:59:00.5Z", "2026-03-01T12:59:30+01:00"
"""Times of a stop and a retry that are both new to an operator which was away: the later one counts."""


def with_requests(seen: Observed, stop: str | None = None, retry: str | None = None) -> Observed:
    """A job with annotations that request something."""
    return replace(seen, job=replace(seen.job, stop_request=stop, retry_request=retry))


def resumed(seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, spec=inputs.spec()))


def test_a_job_may_be_created_suspended() -> None:
    decision = decide(inputs.observed(job_spec=SUSPENDED))
    assert decision.effects == ()
    assert decision.requeue_after_seconds is None
    assert decision.status.suspended_at == "2026-03-01T12:00:00Z"
    assert (decision.status.phase, decision.status.reason, decision.status.attempts) == ("Suspended", "Suspended", ())
    started = decide(
        resumed(inputs.with_status_written(inputs.observed(job_spec=SUSPENDED), decision)), inputs.at(9000)
    )
    assert started.status.suspended_at is None
    assert [each.number for each in started.status.attempts] == [1]


def test_a_running_trainer_saves_first_and_its_cluster_is_removed() -> None:
    seen = inputs.healthy(state=inputs.run_state(checkpoint_step=4), job_spec=SUSPENDED)
    decision = decide(seen)
    assert decision.effects == (StopRayJob("example-1-1"),)
    assert decision.status.attempts[0].stop is not None
    assert decision.status.attempts[0].stop.reason == "Suspended"
    assert condition_of(decision.status, C.PROGRESSING) == (
        "False",
        "Stopping",
        Mentions("asked to stop (Suspended)"),
    )
    assert condition_of(decision.status, C.SUSPENDED) == ("False", "Suspending", Mentions("save a checkpoint"))
    stopped = inputs.ray(
        inputs.ray_job(RayJobStatus.STOPPED), inputs.run_state(RunPhase.STOPPED, step=7, checkpoint_step=7)
    )
    saved = replace(inputs.with_status_written(seen, decision), ray=stopped)
    ended = decide(saved, inputs.at(10))
    assert ended.effects == (DeleteCluster("example-1", "c1"),)
    attempt = ended.status.attempts[0]
    assert (attempt.outcome, attempt.reason, attempt.failure_class) == ("Stopped", "Suspended", "Resumable")
    assert (ended.status.result, ended.status.next_attempt, ended.status.suspended_at) == (None, None, None)
    pods_left = replace(inputs.with_status_written(saved, ended), clusters=(), ray=inputs.healthy().ray)
    assert decide(pods_left, inputs.at(20)).status.suspended_at is None
    deleted = replace(pods_left, pods=())
    rest = decide(deleted, inputs.at(30))
    assert rest.status.suspended_at == "2026-03-01T12:00:30Z"
    text = Mentions("has no pods", "resume from the checkpoint of step 7")
    assert condition_of(rest.status, C.SUSPENDED) == ("True", "Suspended", text)
    assert (rest.status.gpus, rest.requeue_after_seconds) == (0, None)
    assert rest.status.counters == Counters(
        attempts=1, start_number=rest.status.attempts[0].start_number, active_seconds=70
    )
    again = decide(resumed(inputs.with_status_written(deleted, rest)), inputs.at(90_000))
    assert again.status.attempts[-1].cluster == "example-2"
    assert condition_of(again.status, C.SUSPENDED) == ("False", "Resumed", Mentions("attempt 2"))
    assert decide(resumed(inputs.with_status_written(deleted, again)), inputs.at(90_001)).effects == (
        CreateCluster(2, "example-2"),
    )


def test_a_trainer_that_does_not_end_in_time_is_not_waited_for() -> None:
    seen = inputs.healthy(state=inputs.run_state(), job_spec=SUSPENDED)
    first = inputs.with_status_written(seen, decide(seen))
    assert decide(first, inputs.at(119)).effects == (StopRayJob("example-1-1"),)
    assert decide(first, inputs.at(120)).effects == (DeleteCluster("example-1", "c1"),)


def test_the_time_to_stop_begins_when_the_trainer_could_be_asked() -> None:
    """The operator was away for longer than that time after it had recorded the request."""
    seen = inputs.healthy(state=inputs.run_state(), job_spec=SUSPENDED)
    silent = replace(seen, ray=inputs.silent_ray(seconds=0))
    requested = inputs.with_status_written(silent, decide(silent))
    asked_now = decide(replace(requested, ray=seen.ray), inputs.at(160))
    assert asked_now.effects == (StopRayJob("example-1-1"),)
    later = replace(inputs.with_status_written(requested, asked_now), ray=seen.ray)
    assert decide(later, inputs.at(160 + 119)).status.attempts[0].ended is None
    assert decide(later, inputs.at(160 + 120)).status.attempts[0].reason == "Suspended"
    # Nor is the time over if nobody has asked for long.
    assert decide(requested, inputs.at(160)).status.attempts[0].ended is None
    ended = decide(replace(requested, ray=inputs.silent_ray(seconds=20)), inputs.at(160)).status.attempts[0]
    text = Mentions("120 s", "could not be asked to stop", "dashboard")
    assert (ended.reason, ended.message) == ("Suspended", text)


@pytest.mark.parametrize("job_spec", [SUSPENDED, inputs.spec({"runPolicy.activeDeadlineSeconds": 1}), inputs.spec()])
def test_a_trainer_that_has_ended_by_itself_keeps_its_own_reason(job_spec: RLJobSpec) -> None:
    seen = with_requests(
        inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 2), inputs.run_state(RunPhase.FAILED), job_spec=job_spec)
    )
    if job_spec == inputs.spec():
        seen = with_requests(seen, stop="now")
    decision = decide(seen)
    attempt = decision.status.attempts[0]
    assert (attempt.reason, attempt.stop, decision.status.phase) == ("ConfigurationError", None, "Failed")
    old = inputs.healthy(
        inputs.ray_job(RayJobStatus.FAILED, 1), inputs.run_state(), status=inputs.running(90_000), job_spec=job_spec
    )
    assert decide(old).status.attempts[0].reason == "ApplicationError"


def test_starting_pods_are_removed_at_once() -> None:
    decision = decide(inputs.observed(inputs.provisioning(), inputs.cluster(), job_spec=SUSPENDED))
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert decision.status.attempts[0].reason == "Suspended"
    assert decision.status.counters is not None
    assert decision.status.counters.failed_attempts == 0


def test_a_job_waiting_for_its_next_attempt_is_suspended_at_once() -> None:
    decision = decide(inputs.observed(inputs.waiting_for_retry(300), job_spec=SUSPENDED))
    assert (decision.status.next_attempt, decision.status.phase) == (None, "Suspended")
    kept = decide(
        inputs.observed(
            inputs.waiting_for_retry(300, same_cluster=True),
            inputs.cluster(),
            inputs.ready_pods(),
            job_spec=SUSPENDED,
        )
    )
    assert kept.effects == (DeleteCluster("example-1", "c1"),)


def test_a_job_that_completes_while_it_is_suspended_is_complete() -> None:
    done = inputs.healthy(
        inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE), job_spec=SUSPENDED
    )
    assert decide(done).status.phase == "Complete"


def test_a_suspended_job_that_never_resumes_says_that_its_next_attempt_will_fail() -> None:
    never = inputs.spec({"suspend": True, "checkpoint.resume": "Never"})
    seen = inputs.healthy(state=inputs.run_state(checkpoint_step=4), job_spec=never)
    stopped = inputs.ray(inputs.ray_job(RayJobStatus.STOPPED), inputs.run_state(RunPhase.STOPPED, checkpoint_step=4))
    saved = replace(inputs.with_status_written(seen, decide(seen)), ray=stopped)
    deleted = replace(inputs.with_status_written(saved, decide(saved, inputs.at(10))), clusters=(), pods=())
    text = Mentions("step 4", "checkpoint.resume is Never", "next attempt will fail")
    assert condition_of(decide(deleted, inputs.at(20)).status, C.SUSPENDED) == ("True", "Suspended", text)


def test_a_stop_request_ends_the_job_with_a_checkpoint() -> None:
    seen = with_requests(inputs.healthy(state=inputs.run_state()), stop="2026-03-01T11:59:59Z")
    decision = decide(seen)
    assert decision.effects == (StopRayJob("example-1-1"),)
    assert decision.status.handled_requests is not None
    assert decision.status.handled_requests.stop == "2026-03-01T11:59:59Z"
    stopped = replace(
        inputs.with_status_written(seen, decision),
        ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED), inputs.run_state(checkpoint_step=6)),
    )
    ended = decide(stopped, inputs.at(10))
    text = Mentions("stopped as requested", "checkpoint", "step 6")
    assert condition_of(ended.status, C.FAILED) == ("True", "StoppedByUser", text)
    assert ended.status.attempts[0].outcome == "Stopped"


@pytest.mark.parametrize(
    "status",
    [inputs.waiting_for_retry(300), decide(inputs.observed(job_spec=SUSPENDED)).status, RLJobStatus()],
    ids=["waits", "suspended", "new"],
)
def test_a_job_of_which_nothing_runs_is_stopped_at_once(status: RLJobStatus) -> None:
    decision = decide(with_requests(inputs.observed(status, job_spec=SUSPENDED), stop="now"))
    assert condition_of(decision.status, C.FAILED) == (
        "True",
        "StoppedByUser",
        Mentions("user", "no attempt was running"),
    )
    assert (decision.status.suspended_at, decision.status.next_attempt) == (None, None)


def test_a_failed_job_continues_after_a_retry_request() -> None:
    seen = inputs.without_retries(
        inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), inputs.run_state(RunPhase.FAILED, checkpoint_step=6))
    )
    failed = inputs.with_status_written(seen, decide(seen))
    assert failed.job.status.phase == "Failed"
    nothing_left = replace(failed, clusters=(), pods=())
    decision = decide(with_requests(nothing_left, retry="first"), inputs.at(100))
    assert decision.status.result is None
    assert (condition_of(decision.status, C.FAILED), condition_of(decision.status, C.FINISHED)) == (None, None)
    assert decision.status.attempts[-1].number == 2
    assert decision.status.checkpoint == failed.job.status.checkpoint
    assert decision.status.handled_requests is not None
    assert decision.status.handled_requests.retry == "first"
    # The same request is handled once.
    again = inputs.without_retries(replace(seen, job=replace(failed.job, retry_request=None)))
    assert decide(with_requests(inputs.with_status_written(again, decide(again)), retry=None)).status.phase == "Failed"
    handled = replace(nothing_left, job=replace(nothing_left.job, status=decision.status, retry_request="first"))
    assert decide(handled, inputs.at(101)).status.attempts[-1].number == 2


def test_a_retry_waits_until_nothing_is_left_of_the_failed_attempt() -> None:
    seen = inputs.without_retries(inputs.observed(inputs.running(), inputs.cluster(), (inputs.pod("w"),)))
    failed = with_requests(inputs.with_status_written(seen, decide(seen)), retry="now")
    decision = decide(failed)
    assert decision.effects == (DeleteCluster("example-1", "c1"),)
    assert len(decision.status.attempts) == 1
    assert decision.requeue_after_seconds == 10


def test_a_retry_ends_the_backoff_and_resets_the_retry_budget() -> None:
    decision = decide(with_requests(inputs.observed(inputs.waiting_for_retry(300)), retry="now"))
    assert decision.status.attempts[-1].number == 2
    assert decision.status.counters is not None
    assert decision.status.counters.application_retries == 0


def test_an_old_stop_request_is_ignored_after_a_retry() -> None:
    stopped = with_requests(inputs.observed(inputs.waiting_for_retry(300)), stop="a")
    failed = inputs.with_status_written(stopped, decide(stopped))
    decision = decide(with_requests(failed, stop="a", retry="b"))
    assert decision.status.attempts[-1].number == 2
    assert (
        decide(with_requests(inputs.with_status_written(failed, decision), stop="a", retry="b"), inputs.at(1))
        .status.attempts[-1]
        .stop
        is None
    )


def test_a_complete_job_is_not_restarted() -> None:
    done = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE))
    complete = inputs.with_status_written(done, decide(done))
    decision = decide(with_requests(complete, retry="now"))
    assert decision.status.phase == "Complete"
    assert decision.status.handled_requests is not None


def test_a_trainer_without_progress_is_stalled_by_the_operators_own_clock() -> None:
    limits = inputs.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    state = inputs.run_state(seconds_ago=-7200).model_copy(update={"activity": "evaluates"})
    seen = inputs.healthy(state=state, job_spec=limits)
    seen = inputs.with_status_written(seen, decide(seen))
    assert decide(seen, inputs.at(599)).effects == ()
    stalled = decide(seen, inputs.at(600))
    # First its processes write their stacks.
    assert stalled.effects == (DumpStacks("example-1-1", 1),)
    assert stalled.status.attempts[0].stop is not None
    assert stalled.status.attempts[0].stop.reason == "Stalled"
    stopping = inputs.with_status_written(seen, stalled)
    assert decide(stopping, inputs.at(629)).effects == (DumpStacks("example-1-1", 1),)
    assert decide(stopping, inputs.at(630)).effects == (StopRayJob("example-1-1"),)
    assert decide(stopping, inputs.at(679)).status.attempts[0].ended is None
    ended = decide(stopping, inputs.at(680)).status
    assert (ended.attempts[0].reason, ended.attempts[0].failure_class) == ("Stalled", "Infrastructure")
    assert ended.attempts[0].message == Mentions(
        *("no progress for 600 s", "step 4 of 10 (evaluates)", "pvc://ckpt/example/run/logs/attempt-1", "within 80 s")
    )
    assert ended.next_attempt is not None
    # An operator that was away since the request was recorded has the stacks written, too.
    unasked = stalled.status.attempts[0].model_copy(
        update={"stop": stalled.status.attempts[0].stop.model_copy(update={"sent_at": None})}
    )
    not_yet_asked = replace(
        stopping, job=replace(stopping.job, status=stopping.job.status.model_copy(update={"attempts": (unasked,)}))
    )
    late = decide(not_yet_asked, inputs.at(9000))
    assert (late.effects, late.status.attempts[0].ended) == ((DumpStacks("example-1-1", 1),), None)
    moved = replace(seen, ray=inputs.ray(inputs.ray_job(), inputs.run_state(seconds_ago=7200)))
    assert decide(moved, inputs.at(600)).effects == ()


@pytest.mark.parametrize("seconds_away", [4, 29, 30, 79, 80, 9000])
def test_stacks_are_requested_late_after_an_operator_outage(seconds_away: int) -> None:
    """The intent to ask Ray was recorded, and nobody asked."""
    limits = inputs.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    seen = inputs.healthy(state=inputs.run_state(), job_spec=limits)
    seen = inputs.with_status_written(seen, decide(seen))
    stopping = inputs.with_status_written(seen, decide(seen, inputs.at(600)))
    back = 600 + seconds_away
    without_stacks = replace(stopping, ray=replace(stopping.ray, stacks_missing=True))
    late = decide(without_stacks, inputs.at(back))
    assert (late.effects, late.status.attempts[0].ended) == ((DumpStacks("example-1-1", 1),), None)
    with_requests = inputs.with_status_written(stopping, late)
    assert decide(with_requests, inputs.at(back + 29)).effects == (DumpStacks("example-1-1", 1),)
    assert decide(with_requests, inputs.at(back + 30)).effects == (StopRayJob("example-1-1"),)


def test_if_ray_accepts_no_stack_program_a_trainer_is_stopped_without_stacks() -> None:
    """Within twice the time for the stacks."""
    limits = inputs.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    seen = inputs.healthy(state=inputs.run_state(), job_spec=limits)
    seen = inputs.with_status_written(seen, decide(seen))
    stopping = inputs.with_status_written(seen, decide(seen, inputs.at(600)))
    rejecting = replace(stopping, ray=replace(stopping.ray, stacks_missing=True))
    second, ended_second = 600, None
    stopped_second = None
    while ended_second is None:
        second += 4
        decision = decide(rejecting, inputs.at(second))
        if stopped_second is None and decision.effects == (StopRayJob("example-1-1"),):
            stopped_second = second
        rejecting = inputs.with_status_written(rejecting, decision)
        ended_second = second if decision.status.attempts[0].ended is not None else None
    assert stopped_second is not None
    assert 630 <= stopped_second <= 664
    assert 680 <= ended_second <= 714


def test_a_short_silence_is_not_reported() -> None:
    seen = inputs.healthy(state=inputs.run_state())
    known = inputs.with_status_written(seen, decide(seen))
    short = decide(replace(known, ray=inputs.silent_ray(seconds=19)), inputs.at(19))
    assert short.status == known.job.status
    long = replace(known, ray=inputs.silent_ray(seconds=20))
    reported = decide(long, inputs.at(20))
    assert condition_of(reported.status, C.PROGRESSING) == ("Unknown", "DashboardUnreachable", "timeout")
    assert reported.status.attempts[0].state_unknown_since == "2026-03-01T12:00:20Z"
    recovered = decide(replace(inputs.with_status_written(long, reported), ray=seen.ray), inputs.at(30))
    assert recovered.status.attempts[0].state_unknown_since is None


def test_a_finished_job_is_deleted_when_its_ttl_expires() -> None:
    ttl = inputs.spec({"runPolicy": {"ttlSecondsAfterFinished": 300}})
    done = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE), job_spec=ttl)
    end = decide(done)
    deleted = replace(inputs.with_status_written(done, end), clusters=(), pods=())
    clean = decide(deleted, inputs.at(10))
    assert clean.requeue_after_seconds == 290
    assert clean.status.result is not None
    assert clean.status.result.cleaned_up_at == "2026-03-01T12:00:10Z"
    last = inputs.with_status_written(deleted, clean)
    assert decide(last, inputs.at(299)).effects == ()
    assert decide(last, inputs.at(300)).effects == (DeleteJob(done.job.uid),)


def over() -> Observed:
    """A finished job of which nothing is left."""
    seen = inputs.without_retries(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1)))
    return replace(inputs.with_status_written(seen, decide(seen)), clusters=(), pods=())


def test_a_stop_requested_after_the_retry_stops_the_job() -> None:
    seen = with_requests(over(), stop=LATER, retry=EARLIER)
    decision = decide(seen, inputs.at(10))
    assert (decision.status.phase, decision.effects, len(decision.status.attempts)) == ("Failed", (), 1)
    condition = condition_of(decision.status, C.FAILED)
    assert condition is not None
    assert condition[1] == "StoppedByUser"
    handled = decision.status.handled_requests
    assert handled is not None
    assert (handled.stop, handled.retry) == (LATER, EARLIER)
    # Both are handled once.
    assert decide(inputs.with_status_written(seen, decision), inputs.at(20)).status == decision.status


@pytest.mark.parametrize(
    ("stop", "retry"),
    [(EARLIER, LATER), (EARLIER, EARLIER), ("b", "a"), (LATER, "a"), ("b", EARLIER)],
    ids=["before it", "at its time", "no times", "a retry without a time", "a stop without a time"],
)
def test_any_other_stop_is_withdrawn_by_the_retry(stop: str, retry: str) -> None:
    seen = with_requests(over(), stop=stop, retry=retry)
    decision = decide(seen, inputs.at(10))
    assert decision.status.attempts[-1].number == 2
    assert decide(inputs.with_status_written(seen, decision), inputs.at(11)).status.attempts[-1].stop is None


def test_between_two_attempts_a_stop_counts_whatever_its_time() -> None:
    for stop, retry in ((EARLIER, LATER), (LATER, EARLIER)):
        assert (
            decide(with_requests(inputs.observed(inputs.waiting_for_retry(300)), stop=stop, retry=retry)).status.phase
            == "Failed"
        )
