"""Suspension, and what people ask for: stopping for good, and another attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_api.v1alpha1.status import Counters, RLJobStatus
from rljob_operator.reconcile.observed import Observed, RayJobStatus
from rljob_operator.reconcile.plan_types import CreateCluster, DeleteCluster, DeleteJob, DumpStacks, StopJob
from rljob_testing.messages import Mentions
from rljob_testing.operator import samples
from rljob_testing.operator.samples import condition_of, decide

C, R = ConditionType, Reason
SUSPENDED = samples.spec({"suspend": True})
EARLIER, LATER = "2026-03-01T11:59:00.5Z", "2026-03-01T12:59:30+01:00"
"""Of a stop and a retry that are both new to an operator which was away: the later one counts."""


def asked(seen: Observed, stop: str | None = None, retry: str | None = None) -> Observed:
    """With the annotations of somebody who wants something."""
    return replace(seen, job=replace(seen.job, stop_request=stop, retry_request=retry))


def resumed(seen: Observed) -> Observed:
    return replace(seen, job=replace(seen.job, spec=samples.spec()))


def test_a_job_may_be_created_suspended() -> None:
    plan = decide(samples.moment(job_spec=SUSPENDED))
    assert plan.effects == ()
    assert plan.requeue_after_seconds is None
    assert plan.status.suspended_at == "2026-03-01T12:00:00Z"
    assert (plan.status.phase, plan.status.reason, plan.status.attempts) == ("Suspended", "Suspended", ())
    started = decide(resumed(samples.with_status_written(samples.moment(job_spec=SUSPENDED), plan)), samples.at(9000))
    assert started.status.suspended_at is None
    assert [each.number for each in started.status.attempts] == [1]


def test_a_trainer_that_runs_saves_first_and_its_cluster_goes() -> None:
    seen = samples.healthy(state=samples.run_state(checkpoint_step=4), job_spec=SUSPENDED)
    plan = decide(seen)
    assert plan.effects == (StopJob("example-1-1"),)
    assert plan.status.attempts[0].stop is not None
    assert plan.status.attempts[0].stop.reason == "Suspended"
    assert condition_of(plan.status, C.PROGRESSING) == (
        "False",
        "Stopping",
        Mentions("asked to stop (Suspended)"),
    )
    assert condition_of(plan.status, C.SUSPENDED) == ("False", "Suspending", Mentions("saving a checkpoint"))
    stopped = samples.ray(
        samples.ray_job(RayJobStatus.STOPPED), samples.run_state(RunPhase.STOPPED, step=7, checkpoint_step=7)
    )
    saved = replace(samples.with_status_written(seen, plan), ray=stopped)
    ended = decide(saved, samples.at(10))
    assert ended.effects == (DeleteCluster("example-1", "c1"),)
    attempt = ended.status.attempts[0]
    assert (attempt.outcome, attempt.reason, attempt.failure_class) == ("Stopped", "Suspended", "Free")
    assert (ended.status.result, ended.status.next_attempt, ended.status.suspended_at) == (None, None, None)
    pods_left = replace(samples.with_status_written(saved, ended), clusters=(), ray=samples.healthy().ray)
    assert decide(pods_left, samples.at(20)).status.suspended_at is None
    gone = replace(pods_left, pods=())
    rest = decide(gone, samples.at(30))
    assert rest.status.suspended_at == "2026-03-01T12:00:30Z"
    text = Mentions("holds no nodes", "resume from the checkpoint of step 7")
    assert condition_of(rest.status, C.SUSPENDED) == ("True", "Suspended", text)
    assert (rest.status.gpus, rest.requeue_after_seconds) == (0, None)
    assert rest.status.counters == Counters(
        attempts=1, start_number=rest.status.attempts[0].start_number, active_seconds=70
    )
    again = decide(resumed(samples.with_status_written(gone, rest)), samples.at(90_000))
    assert again.status.attempts[-1].cluster == "example-2"
    assert condition_of(again.status, C.SUSPENDED) == ("False", "Resumed", Mentions("attempt 2"))
    assert decide(resumed(samples.with_status_written(gone, again)), samples.at(90_001)).effects == (
        CreateCluster(2, "example-2"),
    )


def test_a_trainer_that_does_not_end_in_time_is_not_waited_for() -> None:
    seen = samples.healthy(state=samples.run_state(), job_spec=SUSPENDED)
    first = samples.with_status_written(seen, decide(seen))
    assert decide(first, samples.at(119)).effects == (StopJob("example-1-1"),)
    assert decide(first, samples.at(120)).effects == (DeleteCluster("example-1", "c1"),)


def test_the_time_to_stop_begins_when_the_trainer_could_be_asked() -> None:
    """The operator was away, and longer than that, since it had written the request down."""
    seen = samples.healthy(state=samples.run_state(), job_spec=SUSPENDED)
    silent = replace(seen, ray=samples.silent_ray(seconds=0))
    requested = samples.with_status_written(silent, decide(silent))
    asked_now = decide(replace(requested, ray=seen.ray), samples.at(160))
    assert asked_now.effects == (StopJob("example-1-1"),)
    later = replace(samples.with_status_written(requested, asked_now), ray=seen.ray)
    assert decide(later, samples.at(160 + 119)).status.attempts[0].ended is None
    assert decide(later, samples.at(160 + 120)).status.attempts[0].reason == "Suspended"
    # Nor is it over when nobody has been asking for long.
    assert decide(requested, samples.at(160)).status.attempts[0].ended is None
    ended = decide(replace(requested, ray=samples.silent_ray(seconds=20)), samples.at(160)).status.attempts[0]
    text = Mentions("could not be asked to stop for 120 s", "dashboard")
    assert (ended.reason, ended.message) == ("Suspended", text)


@pytest.mark.parametrize("job_spec", [SUSPENDED, samples.spec({"runPolicy.activeDeadlineSeconds": 1}), samples.spec()])
def test_a_trainer_that_has_ended_by_itself_ended_for_its_own_reason(job_spec: RLJobSpec) -> None:
    seen = asked(
        samples.healthy(samples.ray_job(RayJobStatus.FAILED, 2), samples.run_state(RunPhase.FAILED), job_spec=job_spec)
    )
    if job_spec == samples.spec():
        seen = asked(seen, stop="now")
    plan = decide(seen)
    attempt = plan.status.attempts[0]
    assert (attempt.reason, attempt.stop, plan.status.phase) == ("ConfigurationError", None, "Failed")
    old = samples.healthy(
        samples.ray_job(RayJobStatus.FAILED, 1), samples.run_state(), status=samples.running(90_000), job_spec=job_spec
    )
    assert decide(old).status.attempts[0].reason == "ApplicationError"


def test_pods_that_only_start_go_at_once() -> None:
    plan = decide(samples.moment(samples.provisioning(), samples.cluster(), job_spec=SUSPENDED))
    assert plan.effects == (DeleteCluster("example-1", "c1"),)
    assert plan.status.attempts[0].reason == "Suspended"
    assert plan.status.counters is not None
    assert plan.status.counters.failed_attempts == 0


def test_a_job_that_waits_for_its_next_attempt_waits_no_longer() -> None:
    plan = decide(samples.moment(samples.waiting_for_retry(300), job_spec=SUSPENDED))
    assert (plan.status.next_attempt, plan.status.phase) == (None, "Suspended")
    kept = decide(
        samples.moment(
            samples.waiting_for_retry(300, same_cluster=True),
            samples.cluster(),
            samples.ready_pods(),
            job_spec=SUSPENDED,
        )
    )
    assert kept.effects == (DeleteCluster("example-1", "c1"),)


def test_a_job_that_completes_while_it_is_suspended_is_complete() -> None:
    done = samples.healthy(
        samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE), job_spec=SUSPENDED
    )
    assert decide(done).status.phase == "Complete"


def test_a_request_to_stop_ends_the_job_with_a_checkpoint() -> None:
    seen = asked(samples.healthy(state=samples.run_state()), stop="2026-03-01T11:59:59Z")
    plan = decide(seen)
    assert plan.effects == (StopJob("example-1-1"),)
    assert plan.status.handled_requests is not None
    assert plan.status.handled_requests.stop == "2026-03-01T11:59:59Z"
    stopped = replace(
        samples.with_status_written(seen, plan),
        ray=samples.ray(samples.ray_job(RayJobStatus.STOPPED), samples.run_state(checkpoint_step=6)),
    )
    ended = decide(stopped, samples.at(10))
    text = Mentions("stopped as requested", "checkpoint", "step 6")
    assert condition_of(ended.status, C.FAILED) == ("True", "StoppedByUser", text)
    assert ended.status.attempts[0].outcome == "Stopped"


@pytest.mark.parametrize(
    "status",
    [samples.waiting_for_retry(300), decide(samples.moment(job_spec=SUSPENDED)).status, RLJobStatus()],
    ids=["waits", "suspended", "new"],
)
def test_a_job_of_which_nothing_runs_is_stopped_at_once(status: RLJobStatus) -> None:
    plan = decide(asked(samples.moment(status, job_spec=SUSPENDED), stop="now"))
    assert condition_of(plan.status, C.FAILED) == (
        "True",
        "StoppedByUser",
        Mentions("user", "no attempt was running"),
    )
    assert (plan.status.suspended_at, plan.status.next_attempt) == (None, None)


def test_a_failed_job_goes_on_when_somebody_asks_for_it() -> None:
    seen = samples.without_retries(
        samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1), samples.run_state(RunPhase.FAILED, checkpoint_step=6))
    )
    failed = samples.with_status_written(seen, decide(seen))
    assert failed.job.status.phase == "Failed"
    nothing_left = replace(failed, clusters=(), pods=())
    plan = decide(asked(nothing_left, retry="first"), samples.at(100))
    assert plan.status.result is None
    assert (condition_of(plan.status, C.FAILED), condition_of(plan.status, C.FINISHED)) == (None, None)
    assert plan.status.attempts[-1].number == 2
    assert plan.status.checkpoint == failed.job.status.checkpoint
    assert plan.status.handled_requests is not None
    assert plan.status.handled_requests.retry == "first"
    # The same request is seen to once.
    again = samples.without_retries(replace(seen, job=replace(failed.job, retry_request=None)))
    assert decide(asked(samples.with_status_written(again, decide(again)), retry=None)).status.phase == "Failed"
    handled = replace(nothing_left, job=replace(nothing_left.job, status=plan.status, retry_request="first"))
    assert decide(handled, samples.at(101)).status.attempts[-1].number == 2


def test_a_retry_waits_until_nothing_is_left_of_the_failed_one() -> None:
    seen = samples.without_retries(samples.moment(samples.running(), samples.cluster(), (samples.pod("w"),)))
    failed = asked(samples.with_status_written(seen, decide(seen)), retry="now")
    plan = decide(failed)
    assert plan.effects == (DeleteCluster("example-1", "c1"),)
    assert len(plan.status.attempts) == 1
    assert plan.requeue_after_seconds == 10


def test_a_retry_ends_the_pause_and_gives_tries_back() -> None:
    plan = decide(asked(samples.moment(samples.waiting_for_retry(300)), retry="now"))
    assert plan.status.attempts[-1].number == 2
    assert plan.status.counters is not None
    assert plan.status.counters.application_retries == 0


def test_what_stopped_the_job_is_not_heeded_again_after_a_retry() -> None:
    stopped = asked(samples.moment(samples.waiting_for_retry(300)), stop="a")
    failed = samples.with_status_written(stopped, decide(stopped))
    plan = decide(asked(failed, stop="a", retry="b"))
    assert plan.status.attempts[-1].number == 2
    assert (
        decide(asked(samples.with_status_written(failed, plan), stop="a", retry="b"), samples.at(1))
        .status.attempts[-1]
        .stop
        is None
    )


def test_a_complete_job_is_not_taken_up_again() -> None:
    done = samples.healthy(samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE))
    complete = samples.with_status_written(done, decide(done))
    plan = decide(asked(complete, retry="now"))
    assert plan.status.phase == "Complete"
    assert plan.status.handled_requests is not None


def test_a_trainer_without_progress_is_stalled_by_the_operators_own_clock() -> None:
    limits = samples.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    state = samples.run_state(seconds_ago=-7200).model_copy(update={"activity": "evaluates"})
    seen = samples.healthy(state=state, job_spec=limits)
    seen = samples.with_status_written(seen, decide(seen))
    assert decide(seen, samples.at(599)).effects == ()
    stalled = decide(seen, samples.at(600))
    # First its processes tell where they stand.
    assert stalled.effects == (DumpStacks("example-1-1", 1),)
    assert stalled.status.attempts[0].stop is not None
    assert stalled.status.attempts[0].stop.reason == "Stalled"
    told = samples.with_status_written(seen, stalled)
    assert decide(told, samples.at(629)).effects == (DumpStacks("example-1-1", 1),)
    assert decide(told, samples.at(630)).effects == (StopJob("example-1-1"),)
    assert decide(told, samples.at(679)).status.attempts[0].ended is None
    ended = decide(told, samples.at(680)).status
    assert (ended.attempts[0].reason, ended.attempts[0].failure_class) == ("Stalled", "Infrastructure")
    assert ended.attempts[0].message == Mentions(
        *("no progress for 600 s", "step 4 of 10 (evaluates)", "pvc://ckpt/example/run/logs/attempt-1", "within 80 s")
    )
    assert ended.next_attempt is not None
    # Who was away since the request was written down has its stacks written, too.
    unasked = stalled.status.attempts[0].model_copy(
        update={"stop": stalled.status.attempts[0].stop.model_copy(update={"told_at": None})}
    )
    untold = replace(told, job=replace(told.job, status=told.job.status.model_copy(update={"attempts": (unasked,)})))
    late = decide(untold, samples.at(9000))
    assert (late.effects, late.status.attempts[0].ended) == ((DumpStacks("example-1-1", 1),), None)
    moved = replace(seen, ray=samples.ray(samples.ray_job(), samples.run_state(seconds_ago=7200)))
    assert decide(moved, samples.at(600)).effects == ()


@pytest.mark.parametrize("seconds_away", [4, 29, 30, 79, 80, 9000])
def test_who_was_away_before_asking_for_stacks_has_them_written_late(seconds_away: int) -> None:
    """It was written down that Ray is asked, and nobody did."""
    limits = samples.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    seen = samples.healthy(state=samples.run_state(), job_spec=limits)
    seen = samples.with_status_written(seen, decide(seen))
    told = samples.with_status_written(seen, decide(seen, samples.at(600)))
    back = 600 + seconds_away
    unasked = replace(told, ray=replace(told.ray, stacks_missing=True))
    late = decide(unasked, samples.at(back))
    assert (late.effects, late.status.attempts[0].ended) == ((DumpStacks("example-1-1", 1),), None)
    asked = samples.with_status_written(told, late)
    assert decide(asked, samples.at(back + 29)).effects == (DumpStacks("example-1-1", 1),)
    assert decide(asked, samples.at(back + 30)).effects == (StopJob("example-1-1"),)


def test_where_ray_takes_no_program_for_stacks_a_trainer_is_stopped_without() -> None:
    """Within twice the time for them."""
    limits = samples.spec({"runPolicy": {"stallDeadlineSeconds": 600, "gracePeriodSeconds": 50}})
    seen = samples.healthy(state=samples.run_state(), job_spec=limits)
    seen = samples.with_status_written(seen, decide(seen))
    told = samples.with_status_written(seen, decide(seen, samples.at(600)))
    refusing = replace(told, ray=replace(told.ray, stacks_missing=True))
    second, ended_second = 600, None
    stopped_second = None
    while ended_second is None:
        second += 4
        plan = decide(refusing, samples.at(second))
        if stopped_second is None and plan.effects == (StopJob("example-1-1"),):
            stopped_second = second
        refusing = samples.with_status_written(refusing, plan)
        ended_second = second if plan.status.attempts[0].ended is not None else None
    assert stopped_second is not None
    assert 630 <= stopped_second <= 664
    assert 680 <= ended_second <= 714


def test_a_moment_of_silence_is_not_worth_a_word() -> None:
    seen = samples.healthy(state=samples.run_state())
    known = samples.with_status_written(seen, decide(seen))
    short = decide(replace(known, ray=samples.silent_ray(seconds=19)), samples.at(19))
    assert short.status == known.job.status
    long = replace(known, ray=samples.silent_ray(seconds=20))
    told = decide(long, samples.at(20))
    assert condition_of(told.status, C.PROGRESSING) == ("Unknown", "DashboardUnreachable", "timeout")
    assert told.status.attempts[0].silent_since == "2026-03-01T12:00:20Z"
    heard = decide(replace(samples.with_status_written(long, told), ray=seen.ray), samples.at(30))
    assert heard.status.attempts[0].silent_since is None


def test_a_finished_job_is_deleted_when_its_time_has_come() -> None:
    ttl = samples.spec({"runPolicy": {"ttlSecondsAfterFinished": 300}})
    done = samples.healthy(
        samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE), job_spec=ttl
    )
    end = decide(done)
    gone = replace(samples.with_status_written(done, end), clusters=(), pods=())
    clean = decide(gone, samples.at(10))
    assert clean.requeue_after_seconds == 290
    assert clean.status.result is not None
    assert clean.status.result.cleaned_up_at == "2026-03-01T12:00:10Z"
    last = samples.with_status_written(gone, clean)
    assert decide(last, samples.at(299)).effects == ()
    assert decide(last, samples.at(300)).effects == (DeleteJob(done.job.uid),)


def over() -> Observed:
    """Of which nothing is left."""
    seen = samples.without_retries(samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1)))
    return replace(samples.with_status_written(seen, decide(seen)), clusters=(), pods=())


def test_a_stop_that_was_asked_for_after_the_retry_stops_the_job() -> None:
    seen = asked(over(), stop=LATER, retry=EARLIER)
    plan = decide(seen, samples.at(10))
    assert (plan.status.phase, plan.effects, len(plan.status.attempts)) == ("Failed", (), 1)
    told = condition_of(plan.status, C.FAILED)
    assert told is not None
    assert told[1] == "StoppedByUser"
    handled = plan.status.handled_requests
    assert handled is not None
    assert (handled.stop, handled.retry) == (LATER, EARLIER)
    # Both are seen to once.
    assert decide(samples.with_status_written(seen, plan), samples.at(20)).status == plan.status


@pytest.mark.parametrize(
    ("stop", "retry"),
    [(EARLIER, LATER), (EARLIER, EARLIER), ("b", "a"), (LATER, "a"), ("b", EARLIER)],
    ids=["before it", "at its time", "no times", "a retry without time", "a stop without time"],
)
def test_any_other_stop_is_taken_back_by_the_retry(stop: str, retry: str) -> None:
    seen = asked(over(), stop=stop, retry=retry)
    plan = decide(seen, samples.at(10))
    assert plan.status.attempts[-1].number == 2
    assert decide(samples.with_status_written(seen, plan), samples.at(11)).status.attempts[-1].stop is None


def test_between_two_attempts_a_stop_counts_whatever_its_time() -> None:
    for stop, retry in ((EARLIER, LATER), (LATER, EARLIER)):
        assert (
            decide(asked(samples.moment(samples.waiting_for_retry(300)), stop=stop, retry=retry)).status.phase
            == "Failed"
        )
