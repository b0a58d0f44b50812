"""How attempts end: whose fault it is, and what the message says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import AttemptOutcome
from rljob_operator.reconcile.observed import Observed, ObservedRay, PodProblem, RayJobStatus
from rljob_testing.messages import Mentions
from rljob_testing.operator import samples
from rljob_testing.operator.samples import condition_of, decide

C, R = ConditionType, Reason
OOM = PodProblem(R.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)")


def failure(seen: Observed) -> tuple[str, str]:
    """Reason and message of the failure."""
    status = decide(samples.without_retries(seen)).status
    told = condition_of(status, C.FAILED)
    assert told is not None
    assert condition_of(status, C.FINISHED) == told
    return told[1:]


@pytest.mark.parametrize(
    ("code", "reason", "end"),
    [
        (1, R.APPLICATION_ERROR, "code 1"),
        (2, R.CONFIGURATION_ERROR, "code 2"),
        (3, R.APPLICATION_ERROR, "code 3"),
        (75, R.INFRASTRUCTURE_ERROR, "code 75"),
        (130, R.STOPPED_OUTSIDE, "code 130"),
        (-9, R.INFRASTRUCTURE_ERROR, "SIGKILL"),
        (-15, R.INFRASTRUCTURE_ERROR, "SIGTERM"),
        (137, R.INFRASTRUCTURE_ERROR, "code 137"),
        (143, R.INFRASTRUCTURE_ERROR, "code 143"),
        (-11, R.APPLICATION_ERROR, "SIGSEGV"),
        (-99, R.APPLICATION_ERROR, "signal 99"),
    ],
)
def test_the_exit_code_says_whose_fault_it_is(code: int, reason: Reason, end: str) -> None:
    plan = decide(samples.without_retries(samples.healthy(samples.ray_job(RayJobStatus.FAILED, code))))
    assert condition_of(plan.status, C.FAILED) == ("True", reason.value, Mentions(f" {end}: Ray's message"))
    stopped = reason is R.STOPPED_OUTSIDE
    assert plan.status.attempts[0].outcome == (AttemptOutcome.STOPPED if stopped else AttemptOutcome.FAILED)
    assert plan.status.attempts[0].reason == reason.value


@pytest.mark.parametrize(
    ("error_type", "reason"),
    [
        ("JOB_SUPERVISOR_ACTOR_DIED", R.INFRASTRUCTURE_ERROR),
        ("JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE", R.INFRASTRUCTURE_ERROR),
        (None, R.INFRASTRUCTURE_ERROR),
        ("JOB_SUPERVISOR_ACTOR_START_TIMEOUT", R.INFRASTRUCTURE_ERROR),
        ("JOB_ENTRYPOINT_COMMAND_START_ERROR", R.SUBMISSION_FAILED),
        ("RUNTIME_ENV_SETUP_FAILURE", R.SUBMISSION_FAILED),
    ],
)
def test_without_an_exit_code_ray_says_what_happened(error_type: str | None, reason: Reason) -> None:
    assert failure(samples.healthy(samples.ray_job(RayJobStatus.FAILED, None, error_type)))[0] == reason


@pytest.mark.parametrize("code", [75, -9, None])
def test_a_failure_that_memory_explains_says_so(code: int | None) -> None:
    state = samples.run_state(RunPhase.FAILED, error=RunError(kind="WorkerLost", message="rank 3 is gone"))
    seen = samples.healthy(samples.ray_job(RayJobStatus.FAILED, code), state)
    pods = (*samples.ready_pods(), samples.pod("worker-7", problem=OOM))
    reason, message = failure(replace(seen, pods=pods))
    assert reason == "OutOfMemory"
    assert message.startswith("pod worker-7: container ray ran out of memory (OOMKilled); ")
    assert message.endswith(": WorkerLost: rank 3 is gone")
    # The job's own error stays its own.
    assert (
        failure(replace(samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1)), pods=pods))[0] == "ApplicationError"
    )


def test_a_head_that_ran_out_of_memory() -> None:
    ended = samples.pod("h", HEAD_GROUP, ended=True, problem=OOM)
    assert failure(samples.moment(samples.running(), samples.cluster(), (ended, samples.pod("w"))))[0] == "OutOfMemory"
    restarted = samples.pod("h", HEAD_GROUP, problem=OOM)
    assert (
        failure(samples.moment(samples.running(), samples.cluster(), (restarted, samples.pod("w")), samples.ray()))[0]
        == "OutOfMemory"
    )


def test_an_evicted_head_is_named_with_the_reason() -> None:
    evicted = samples.pod(
        "h", HEAD_GROUP, ended=True, problem=PodProblem(R.INFRASTRUCTURE_ERROR, "Evicted: low on disk")
    )
    assert failure(samples.moment(samples.running(), samples.cluster(), (evicted, samples.pod("w")))) == (
        "HeadLost",
        Mentions("pod h on node node-of-h", "Evicted: low on disk"),
    )


def test_a_head_that_goes_is_waited_for() -> None:
    going = samples.moment(
        samples.running(),
        samples.cluster(),
        (samples.pod("h", HEAD_GROUP, ready=False, deleting=True), samples.pod("w")),
    )
    plan = decide(going)
    assert condition_of(plan.status, C.FAILED) is None
    assert condition_of(plan.status, C.PROGRESSING) == ("False", "Stopping", Mentions("head pod h is being deleted"))
    stopped = replace(going, ray=samples.ray(samples.ray_job(RayJobStatus.STOPPED)))
    assert failure(stopped) == ("HeadLost", Mentions("head pod h was deleted"))


def test_a_head_that_never_goes_is_lost_with_its_node() -> None:
    stuck = samples.pod("h", HEAD_GROUP, ready=False, deleting=True, overdue=True)
    assert failure(samples.moment(samples.running(), samples.cluster(), (stuck, samples.pod("w")))) == (
        "HeadLost",
        Mentions("pod h on node node-of-h", "deleted", "node seems to be lost"),
    )


def test_a_cluster_that_has_never_been_complete_may_get_a_new_head() -> None:
    assert (
        decide(samples.moment(samples.provisioning(), samples.cluster(), (samples.pod("w"),))).status.attempts[0].ended
        is None
    )


def test_a_cluster_that_was_complete_gets_none() -> None:
    lacking = decide(
        samples.moment(samples.provisioning(), samples.cluster(), samples.ready_pods(), samples.ray(gpus=(1,)))
    ).status
    assert lacking.attempts[0].submissions == 0
    assert failure(samples.moment(lacking, samples.cluster(), (samples.pod("w"),)))[0] == "HeadLost"


def test_a_cluster_that_kuberay_saw_complete_gets_none_either() -> None:
    assert (
        failure(samples.moment(samples.provisioning(), samples.cluster(provisioned=True), (samples.pod("w"),)))[0]
        == "HeadLost"
    )


def test_a_cluster_that_is_being_deleted_is_lost() -> None:
    seen = samples.moment(samples.running(), samples.cluster(deleting=True), samples.ready_pods())
    assert failure(seen) == ("ClusterLost", Mentions("RayCluster example-1 was deleted"))
    replaced = samples.moment(samples.running(), samples.cluster(uid="c2"), samples.ready_pods())
    assert failure(replaced)[0] == "ClusterLost"


def test_what_ray_says_of_the_end_comes_before_what_became_of_the_cluster() -> None:
    done = samples.healthy(samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE))
    assert (
        condition_of(decide(replace(done, clusters=(samples.cluster(deleting=True),))).status, C.COMPLETE) is not None
    )


def test_success_needs_the_trainers_word() -> None:
    done = samples.ray_job(RayJobStatus.SUCCEEDED, 0)
    assert failure(samples.healthy(done, samples.run_state()))[0] == "EndedWithoutResult"
    assert (
        condition_of(decide(samples.healthy(done, samples.run_state(RunPhase.COMPLETE))).status, C.COMPLETE) is not None
    )


def test_progressing_is_told_also_of_a_trainer_that_ended_before_the_first_look() -> None:
    done = samples.healthy(
        samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE), status=samples.running(30)
    )
    assert condition_of(done.job.status, C.PROGRESSING) is None
    assert condition_of(decide(done).status, C.PROGRESSING) == ("False", "Ended", "")


def test_a_last_word_that_is_not_there_is_looked_for_again() -> None:
    done = samples.ray_job(RayJobStatus.SUCCEEDED, 0)
    first = samples.without_retries(
        samples.healthy(done, status=samples.running(900, samples.condition(C.PROGRESSING, seconds_ago=800)))
    )
    plan = decide(first)
    assert condition_of(plan.status, C.FAILED) is None
    assert (plan.effects, plan.requeue_after_seconds) == ((), 4)
    message = Mentions("succeeded", "waiting", "run state")
    assert condition_of(plan.status, C.PROGRESSING) == ("False", "DashboardUnreachable", message)
    later = samples.with_status_written(first, plan)
    assert condition_of(decide(later, samples.at(29)).status, C.FAILED) is None
    assert condition_of(decide(later, samples.at(30)).status, C.FAILED) == (
        "True",
        "EndedWithoutResult",
        Mentions("code 0", "no run state"),
    )
    read = replace(later, ray=samples.ray(done, samples.run_state(RunPhase.COMPLETE)))
    assert condition_of(decide(read, samples.at(8)).status, C.COMPLETE) is not None


def test_the_trainers_own_error_comes_before_its_log() -> None:
    state = samples.run_state(
        RunPhase.FAILED, error=RunError(kind="RewardError", message="score() raised ValueError: no")
    )
    seen = samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1), state, log_tail="last line")
    assert failure(seen)[1].endswith("code 1: RewardError: score() raised ValueError: no")


def test_a_long_error_keeps_its_start_and_a_long_log_its_end() -> None:
    state = samples.run_state(RunPhase.FAILED, error=RunError(kind="E", message="a" * 4000))
    long_error = failure(samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1), state))[1]
    assert len(long_error) == 1023
    assert "code 1: E: aaa" in long_error
    assert long_error.endswith("a...")
    lines = "\n".join(f"line {number}" for number in range(400))
    long_log = failure(samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1), log_tail=lines))[1]
    assert len(long_log) <= 1024
    assert "code 1: ... line " in long_log
    assert long_log.endswith("line 398\nline 399")


def test_messages_are_printable() -> None:
    log_tail = "\x1b[31mTraceback\x1b[0m\r\n\tValueError: \ud800\x00bad\u2028end\n"
    message = failure(samples.healthy(samples.ray_job(RayJobStatus.FAILED, 1), log_tail=log_tail))[1]
    assert message.endswith("code 1: Traceback\n ValueError:   bad end")


def test_an_ending_seen_at_the_deadline_is_the_ending() -> None:
    asked = samples.running(60, samples.condition(C.PROGRESSING))
    done = samples.healthy(samples.ray_job(RayJobStatus.SUCCEEDED, 0), samples.run_state(RunPhase.COMPLETE), asked)
    assert condition_of(decide(done).status, C.COMPLETE) is not None
    assert isinstance(done.ray, ObservedRay)
