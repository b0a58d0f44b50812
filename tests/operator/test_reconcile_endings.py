"""How attempts end: the failure class, and the message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.conditions import ConditionType, Reason
from rljob_api.constants import HEAD_GROUP, ExitCode
from rljob_api.run_state import RunError, RunPhase
from rljob_api.v1alpha1.status import AttemptOutcome
from rljob_operator.reconcile.observed import Observed, ObservedRay, PodProblem, RayJobStatus
from rljob_testing.messages import Mentions
from rljob_testing.operator import inputs

C, R = ConditionType, Reason
OOM = PodProblem(R.OUT_OF_MEMORY, "container ray ran out of memory (OOMKilled)")


def stop_requested() -> Observed:
    """A running job that a user wants to stop."""
    seen = inputs.healthy(state=inputs.run_state())
    return replace(seen, job=replace(seen.job, stop_request="2026-03-01T11:59:59Z"))


def failure(seen: Observed) -> tuple[str, str]:
    """Reason and message of the failure."""
    status = inputs.decide(inputs.without_retries(seen)).status
    condition = inputs.condition_of(status, C.FAILED)
    assert condition is not None
    assert inputs.condition_of(status, C.FINISHED) == condition
    return condition[1:]


@pytest.mark.parametrize(
    ("code", "reason", "end"),
    [
        (1, R.APPLICATION_ERROR, "code 1"),
        (2, R.CONFIGURATION_ERROR, "code 2"),
        (3, R.APPLICATION_ERROR, "code 3"),
        (75, R.INFRASTRUCTURE_ERROR, "code 75"),
        (130, R.STOPPED_THROUGH_RAY, "code 130"),
        (-9, R.INFRASTRUCTURE_ERROR, "SIGKILL"),
        (-15, R.INFRASTRUCTURE_ERROR, "SIGTERM"),
        (137, R.INFRASTRUCTURE_ERROR, "code 137"),
        (143, R.INFRASTRUCTURE_ERROR, "code 143"),
        (-11, R.APPLICATION_ERROR, "SIGSEGV"),
        (-99, R.APPLICATION_ERROR, "signal 99"),
    ],
)
def test_the_exit_code_decides_the_failure_class(code: int, reason: Reason, end: str) -> None:
    decision = inputs.decide(inputs.without_retries(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, code))))
    assert inputs.condition_of(decision.status, C.FAILED) == ("True", reason.value, Mentions(f"{end}: Ray's message"))
    stopped = reason is R.STOPPED_THROUGH_RAY
    assert decision.status.attempts[0].outcome == (AttemptOutcome.STOPPED if stopped else AttemptOutcome.FAILED)
    assert decision.status.attempts[0].reason == reason.value


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
def test_without_an_exit_code_the_error_type_of_ray_decides(error_type: str | None, reason: Reason) -> None:
    assert failure(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, None, error_type)))[0] == reason


@pytest.mark.parametrize("code", [75, -9, None])
def test_a_failure_explained_by_memory_is_reported_as_out_of_memory(code: int | None) -> None:
    state = inputs.run_state(RunPhase.FAILED, error=RunError(kind="WorkerLost", message="rank 3 is gone"))
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, code), state)
    pods = (*inputs.ready_pods(), inputs.pod("worker-7", problem=OOM))
    reason, message = failure(replace(seen, pods=pods))
    assert reason == "OutOfMemory"
    assert message.startswith("pod worker-7: container ray ran out of memory (OOMKilled); ")
    assert message.endswith(": WorkerLost: rank 3 is gone")
    ended = inputs.decide(replace(seen, pods=pods)).status.attempts[-1]
    assert (ended.failure_cause, ended.failed_pod) == ("HostMemory", "worker-7")
    # The job's own error stays its own.
    assert failure(replace(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1)), pods=pods))[0] == "ApplicationError"


def test_a_head_that_ran_out_of_memory_is_reported() -> None:
    ended = inputs.pod("h", HEAD_GROUP, ended=True, problem=OOM)
    assert failure(inputs.observed(inputs.running(), inputs.cluster(), (ended, inputs.pod("w"))))[0] == "OutOfMemory"
    restarted = inputs.pod("h", HEAD_GROUP, problem=OOM)
    assert (
        failure(inputs.observed(inputs.running(), inputs.cluster(), (restarted, inputs.pod("w")), inputs.ray()))[0]
        == "OutOfMemory"
    )


def test_an_evicted_head_is_named_with_the_reason() -> None:
    evicted = inputs.pod(
        "h", HEAD_GROUP, ended=True, problem=PodProblem(R.INFRASTRUCTURE_ERROR, "Evicted: low on disk")
    )
    assert failure(inputs.observed(inputs.running(), inputs.cluster(), (evicted, inputs.pod("w")))) == (
        "HeadLost",
        Mentions("pod h on node node-of-h", "Evicted: low on disk"),
    )


def test_a_terminating_head_is_waited_for() -> None:
    going = inputs.observed(
        inputs.running(),
        inputs.cluster(),
        (inputs.pod("h", HEAD_GROUP, ready=False, deleting=True), inputs.pod("w")),
    )
    decision = inputs.decide(going)
    assert inputs.condition_of(decision.status, C.FAILED) is None
    assert inputs.condition_of(decision.status, C.PROGRESSING) == (
        "False",
        "Stopping",
        Mentions("head pod h is being deleted"),
    )
    stopped = replace(going, ray=inputs.ray(inputs.ray_job(RayJobStatus.STOPPED)))
    assert failure(stopped) == ("HeadLost", Mentions("head pod h was deleted"))


def test_a_head_that_never_terminates_is_lost_with_its_node() -> None:
    stuck = inputs.pod("h", HEAD_GROUP, ready=False, deleting=True, overdue=True)
    assert failure(inputs.observed(inputs.running(), inputs.cluster(), (stuck, inputs.pod("w")))) == (
        "HeadLost",
        Mentions("pod h on node node-of-h", "deleted", "node seems to be lost"),
    )


def test_a_cluster_that_has_never_been_complete_may_get_a_new_head() -> None:
    assert (
        inputs.decide(inputs.observed(inputs.provisioning(), inputs.cluster(), (inputs.pod("w"),)))
        .status.attempts[0]
        .ended
        is None
    )


def test_a_cluster_that_was_complete_gets_no_new_head() -> None:
    lacking = inputs.decide(
        inputs.observed(inputs.provisioning(), inputs.cluster(), inputs.ready_pods(), inputs.ray(gpus=(1,)))
    ).status
    assert lacking.attempts[0].submissions == 0
    assert failure(inputs.observed(lacking, inputs.cluster(), (inputs.pod("w"),)))[0] == "HeadLost"


def test_a_cluster_that_kuberay_saw_complete_gets_no_new_head_either() -> None:
    assert (
        failure(inputs.observed(inputs.provisioning(), inputs.cluster(provisioned=True), (inputs.pod("w"),)))[0]
        == "HeadLost"
    )


def test_a_cluster_that_is_being_deleted_is_lost() -> None:
    seen = inputs.observed(inputs.running(), inputs.cluster(deleting=True), inputs.ready_pods())
    assert failure(seen) == ("ClusterLost", Mentions("RayCluster example-1 was deleted"))
    replaced = inputs.observed(inputs.running(), inputs.cluster(uid="c2"), inputs.ready_pods())
    assert failure(replaced)[0] == "ClusterLost"


def test_the_result_reported_by_ray_takes_precedence_over_the_state_of_the_cluster() -> None:
    done = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE))
    assert (
        inputs.condition_of(inputs.decide(replace(done, clusters=(inputs.cluster(deleting=True),))).status, C.COMPLETE)
        is not None
    )


def test_success_requires_the_trainers_final_state() -> None:
    done = inputs.ray_job(RayJobStatus.SUCCEEDED, 0)
    assert failure(inputs.healthy(done, inputs.run_state()))[0] == "ExitedWithoutResult"
    assert (
        inputs.condition_of(inputs.decide(inputs.healthy(done, inputs.run_state(RunPhase.COMPLETE))).status, C.COMPLETE)
        is not None
    )


def test_progressing_is_set_for_a_trainer_that_ended_before_the_first_poll() -> None:
    done = inputs.healthy(
        inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE), status=inputs.running(30)
    )
    assert inputs.condition_of(done.job.status, C.PROGRESSING) is None
    assert inputs.condition_of(inputs.decide(done).status, C.PROGRESSING) == ("False", "Ended", "")


def test_a_missing_final_run_state_is_polled_again() -> None:
    done = inputs.ray_job(RayJobStatus.SUCCEEDED, 0)
    first = inputs.without_retries(
        inputs.healthy(done, status=inputs.running(900, inputs.condition(C.PROGRESSING, seconds_ago=800)))
    )
    decision = inputs.decide(first)
    assert inputs.condition_of(decision.status, C.FAILED) is None
    assert (decision.effects, decision.requeue_after_seconds) == ((), 4)
    message = Mentions("succeeded", "waiting", "run state")
    assert inputs.condition_of(decision.status, C.PROGRESSING) == ("False", "DashboardUnreachable", message)
    later = inputs.with_status_written(first, decision)
    assert inputs.condition_of(inputs.decide(later, inputs.at(29)).status, C.FAILED) is None
    assert inputs.condition_of(inputs.decide(later, inputs.at(30)).status, C.FAILED) == (
        "True",
        "ExitedWithoutResult",
        Mentions("code 0", "no run state"),
    )
    read = replace(later, ray=inputs.ray(done, inputs.run_state(RunPhase.COMPLETE)))
    assert inputs.condition_of(inputs.decide(read, inputs.at(8)).status, C.COMPLETE) is not None


def test_the_trainers_own_error_comes_before_its_log() -> None:
    state = inputs.run_state(
        RunPhase.FAILED, error=RunError(kind="RewardError", message="score() raised ValueError: no")
    )
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), state, log_tail="last line")
    assert failure(seen)[1].endswith("code 1: RewardError: score() raised ValueError: no")


@pytest.mark.parametrize("cause", [None, "DeviceMemory", "DiskSpaceOfANewerTrainer"])
def test_the_status_has_the_cause_and_the_pod_that_the_trainer_reports(cause: str | None) -> None:
    error = RunError(kind="WorkerError", message="any words", cause=cause, pod="j-1-main-worker-a")
    seen = inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), inputs.run_state(RunPhase.FAILED, error=error))
    ended = inputs.decide(seen).status.attempts[-1]
    assert (ended.reason, ended.failure_cause, ended.failed_pod) == ("ApplicationError", cause, "j-1-main-worker-a")


def test_a_long_error_keeps_its_start_and_a_long_log_its_end() -> None:
    state = inputs.run_state(RunPhase.FAILED, error=RunError(kind="E", message="a" * 4000))
    long_error = failure(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), state))[1]
    assert len(long_error) == 1023
    assert "code 1: E: aaa" in long_error
    assert long_error.endswith("a...")
    lines = "\n".join(f"line {number}" for number in range(400))
    long_log = failure(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), log_tail=lines))[1]
    assert len(long_log) <= 1024
    assert "code 1: ... line " in long_log
    assert long_log.endswith("line 398\nline 399")


def test_messages_are_printable() -> None:
    log_tail = "\x1b[31mTraceback\x1b[0m\r\n\tValueError: \ud800\x00bad\u2028end\n"
    message = failure(inputs.healthy(inputs.ray_job(RayJobStatus.FAILED, 1), log_tail=log_tail))[1]
    assert message.endswith("code 1: Traceback\n ValueError:   bad end")


def test_an_end_seen_at_the_deadline_is_the_result() -> None:
    stopping = inputs.running(60, inputs.condition(C.PROGRESSING))
    done = inputs.healthy(inputs.ray_job(RayJobStatus.SUCCEEDED, 0), inputs.run_state(RunPhase.COMPLETE), stopping)
    assert inputs.condition_of(inputs.decide(done).status, C.COMPLETE) is not None
    assert isinstance(done.ray, ObservedRay)


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (ExitCode.INTERRUPTED, "the trainer stopped as requested"),
        (1, "the trainer was asked to stop, and it exited with code 1"),
        (-9, "the trainer was asked to stop, and it was killed by SIGKILL"),
        (None, "the trainer was asked to stop, and it was lost by Ray"),
    ],
)
def test_a_trainer_that_fails_while_it_stops_is_not_reported_as_stopped(code: int | None, part: str) -> None:
    seen = stop_requested()
    failed = replace(
        inputs.with_status_written(seen, inputs.decide(seen)), ray=inputs.ray(inputs.ray_job(RayJobStatus.FAILED, code))
    )
    result = inputs.decide(failed, inputs.at(10)).status.result
    assert result is not None
    assert part in result.message


@pytest.mark.parametrize(
    ("ray_job_status", "code", "part"),
    [
        (RayJobStatus.FAILED, 1, "the trainer exited with code 1 before it was asked to stop"),
        (RayJobStatus.STOPPED, None, "the trainer ended before it was asked to stop"),
    ],
)
def test_a_trainer_that_ended_before_the_stop_was_sent_is_not_reported_as_asked(
    ray_job_status: RayJobStatus, code: int | None, part: str
) -> None:
    seen = stop_requested()
    status = inputs.decide(seen).status
    [attempt] = status.attempts
    assert attempt.stop is not None
    not_sent = attempt.model_copy(update={"stop": attempt.stop.model_copy(update={"sent_at": None})})
    ended = replace(
        seen,
        job=replace(seen.job, status=status.model_copy(update={"attempts": (not_sent,)})),
        ray=inputs.ray(inputs.ray_job(ray_job_status, code)),
    )
    result = inputs.decide(ended, inputs.at(10)).status.result
    assert result is not None
    assert part in result.message
