"""`rljob explain` for jobs that retry, are suspended, unreachable, stopped or finished: written out by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from rljob.stored_job import stored_job
from rljob_api.conditions import Reason
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_api.explanations import EXPLANATIONS
from rljob_cli.cluster.explain import explanation
from rljob_testing.cli import job_statuses
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
VALID = job_statuses.condition("SpecValid", "True", "Valid", CREATED)
TRAINING = job_statuses.condition("Progressing", "True", "Training", "2026-01-31T12:20:00Z")
CHECKPOINT = {"step": 10, "uri": "pvc://results/small/checkpoints/step-000010", "digest": "d", "savedAt": CREATED}
ENDED = {
    "number": 1,
    "cluster": "small-1",
    "state": "Ended",
    "started": CREATED,
    "ended": "2026-01-31T12:29:00Z",
    "outcome": "Failed",
    "reason": "HeadLost",
}
RUNNING = {
    "number": 2,
    "cluster": "small-2",
    "state": "Running",
    "started": "2026-01-31T12:10:00Z",
    "activeSince": "2026-01-31T12:12:00Z",
    "runningSince": "2026-01-31T12:15:00Z",
    "progressedAt": "2026-01-31T12:28:00Z",
}
COUNTERS = {
    "attempts": 2,
    "applicationRetries": 1,
    "infrastructureRetries": 4,
    "failedAttempts": 1,
    "activeSeconds": 600,
}
BETWEEN = {
    "reason": "HeadLost",
    "message": "node n7 is not ready",
    "failureClass": "Infrastructure",
    "notBefore": "2026-01-31T12:30:40Z",
}
RETRIES = "1 of 2 (Application), 6 of 10 (Infrastructure)"
NEXT = "What comes next:"


def explained(
    status: Mapping[str, object], spec: Mapping[str, object] | None = None, annotations: Mapping[str, str] | None = None
) -> list[str]:
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED, "annotations": annotations or {}}
    wanted = YAML(typ="safe", pure=True).load(SMALL_JOB)["spec"]
    wanted["checkpoint"] = {"storage": {"persistentVolumeClaim": "results"}}
    job = stored_job({"metadata": metadata, "spec": wanted | dict(spec or {}), "status": dict(status)})
    return [line for text in explanation(job, [], [], NOW) for line in text.plain.split("\n")]


def what_is_next(lines: list[str]) -> list[str]:
    return [line.removeprefix("  ") for line in lines[lines.index(NEXT) + 1 :]]


def test_a_retried_job_shows_the_retries_left() -> None:
    policy = {"runPolicy": {"activeDeadlineSeconds": 3600, "stallDeadlineSeconds": 600}}
    status = {"phase": "Running", "conditions": [VALID, TRAINING], "attempts": [ENDED, RUNNING], "counters": COUNTERS}
    assert explained(status, policy) == [
        "RLJob team-a/small: Running, 30m old",
        "",
        "Running: last progress 2m ago, attempt 2.",
        "",
        NEXT,
        Mentions("Complete", "status.exportUri"),
        Mentions("attempt 2", "progress", "2026-01-31T12:38:00Z (in 8m;", "runPolicy.stallDeadlineSeconds"),
        # 3600 s minus the 600 s of attempt 1, counted from when the cluster of attempt 2 existed.
        Mentions("Failed, without a retry", "not finished", "2026-01-31T13:02:00Z (in 32m)"),
        Mentions("attempt fails", "checkpoint", f"retries left: {RETRIES}"),
    ]


@pytest.mark.parametrize(
    ("same_cluster", "where"),
    [(False, ("new cluster",)), (True, ("same cluster", "healthy"))],
)
def test_a_job_between_two_attempts_is_explained(same_cluster: bool, where: tuple[str, ...]) -> None:
    status = {
        "phase": "Retrying",
        "reason": "HeadLost",
        "conditions": [VALID],
        "attempts": [ENDED],
        "counters": COUNTERS,
        "nextAttempt": BETWEEN | {"sameCluster": same_cluster},
        "checkpoint": CHECKPOINT,
    }
    assert explained(status, {"runPolicy": {"activeDeadlineSeconds": 3600}}) == [
        "RLJob team-a/small: Retrying, 30m old",
        "",
        Mentions("waiting for its next attempt", "attempt 1", "HeadLost (Infrastructure)", "60s ago"),
        "  node n7 is not ready",
        f"What to do: {EXPLANATIONS[Reason.HEAD_LOST].advice}",
        "",
        NEXT,
        Mentions("attempt 2", "2026-01-31T12:30:40Z (in 40s)", *where, "step 10"),
        f"  retries left: {RETRIES}",
        Mentions("`rljob retry small`", "ends this pause", "retry budgets"),
        Mentions("50m", "runPolicy.activeDeadlineSeconds", "paused"),
    ]


def test_an_attempt_that_is_due_waits_for_the_pods_of_the_former() -> None:
    status = {"attempts": [ENDED], "nextAttempt": BETWEEN | {"notBefore": "2026-01-31T12:29:30Z"}}
    assert what_is_next(explained(status))[:2] == [
        Mentions("attempt 2", "2026-01-31T12:29:30Z (now)", "new cluster", "step 0", "no checkpoint"),
        Mentions("waits", "pods of the previous attempt"),
    ]


def test_a_lowered_retry_limit_leaves_zero_retries_and_not_fewer() -> None:
    policy = {"runPolicy": {"maxAppRetries": 0, "maxInfraRetries": 3}}
    lines = what_is_next(explained({"attempts": [ENDED], "counters": COUNTERS, "nextAttempt": BETWEEN}, policy))
    assert "retries left: 0 of 0 (Application), 0 of 3 (Infrastructure)" in lines


def test_a_job_that_is_being_suspended_is_explained() -> None:
    stop = {"reason": "Suspended", "requestedAt": "2026-01-31T12:29:30Z", "sentAt": "2026-01-31T12:29:40Z"}
    status = {"conditions": [VALID], "attempts": [ENDED, RUNNING | {"state": "Stopping", "stop": stop}]}
    lines = explained(status, {"suspend": True})
    assert lines[2:5] == [
        Mentions("Attempt 2", "stopping", "Suspended", "30s"),
        Mentions("Ray", "asked 20s ago", "trainer"),
        f"What to do: {EXPLANATIONS[Reason.SUSPENDED].advice}",
    ]
    assert what_is_next(lines) == [
        "attempt 2: its trainer saves a checkpoint, if training has started, and exits; at 2026-01-31T12:31:40Z (in"
        " 100s; runPolicy.gracePeriodSeconds) the operator stops waiting for it",
        "then its RayCluster is deleted, and the job is suspended",
    ]
    # Its trainer has ended, and pods are left.
    lines = explained({"conditions": [VALID], "attempts": [ENDED]}, {"suspend": True})
    assert lines[2:4] == [Mentions("being suspended"), f"What to do: {EXPLANATIONS[Reason.SUSPENDING].advice}"]
    assert what_is_next(lines)[1:] == [
        Mentions("RayCluster is deleted"),
        Mentions("`rljob resume small`", "step 0", "no checkpoint"),
    ]


def test_a_suspended_job_is_explained() -> None:
    status = {
        "phase": "Suspended",
        "conditions": [VALID, job_statuses.condition("ClusterReady", "False", "Suspended", CREATED)],
        "attempts": [ENDED | {"outcome": "Stopped", "reason": "Suspended"}],
        "counters": COUNTERS,
        "suspendedAt": "2026-01-31T12:25:00Z",
        "checkpoint": CHECKPOINT,
    }
    lines = explained(status, {"suspend": True, "runPolicy": {"activeDeadlineSeconds": 900}})
    assert lines[0] == "RLJob team-a/small: Suspended, 30m old"
    assert lines[2] == Mentions("suspended", "5m", "no pods")
    assert what_is_next(lines) == [
        Mentions("`rljob resume small`", "step 10"),
        Mentions("5m", "runPolicy.activeDeadlineSeconds", "paused"),
    ]


def test_an_unreachable_trainer_is_reported_with_its_deadline() -> None:
    silent = job_statuses.condition(
        "Progressing", "Unknown", "DashboardUnreachable", "2026-01-31T12:21:00Z", "timed out"
    )
    status = {
        "conditions": [VALID, silent],
        "attempts": [ENDED, RUNNING | {"stateUnknownSince": "2026-01-31T12:20:30Z"}],
        "counters": COUNTERS,
    }
    lines = explained(status)
    assert lines[2:6] == [
        Mentions("waiting", "attempt 2", "Progressing=Unknown", "DashboardUnreachable", "9m"),
        "  timed out",
        Mentions("trainer of attempt 2", "since 2026-01-31T12:20:30Z", "9m30s"),
        f"What to do: {EXPLANATIONS[Reason.DASHBOARD_UNREACHABLE].advice}",
    ]
    assert what_is_next(lines)[:2] == [
        Mentions("already started", "Retrying or Failed"),
        Mentions("attempt 2", "cannot observe", "2026-01-31T13:20:30Z (in 50m;", "runPolicy.stallDeadlineSeconds"),
    ]


@pytest.mark.parametrize(
    ("admitted", "end"),
    [({}, "12:35:00Z (in 5m)"), ({"activeSince": "2026-01-31T12:12:00Z"}, "12:37:00Z (in 7m)")],
)
def test_provisioning_time_counts_from_the_creation_of_the_cluster(admitted: Mapping[str, object], end: str) -> None:
    attempt = {"number": 3, "cluster": "small-3", "state": "Provisioning", "started": "2026-01-31T12:10:00Z"}
    pending = job_statuses.condition("ClusterReady", "False", "PodsPending", "2026-01-31T12:02:00Z")
    # The deadline of the previous attempt.
    submitted = job_statuses.condition("JobSubmitted", "True", "Submitted", CREATED)
    status = {"conditions": [VALID, pending, submitted], "attempts": [attempt | admitted], "counters": COUNTERS}
    lines = explained(status, {"runPolicy": {"provisioningDeadlineSeconds": 1500, "activeDeadlineSeconds": 3600}})
    assert Mentions("waiting", "attempt 3", "ClusterReady=False", "PodsPending", "20m") in lines
    assert Mentions("attempt 3 has not started", f"2026-01-31T{end}", "uses a retry", without=["without a"]) in lines
    # Time without a cluster does not count.
    paused = Mentions("50m of runPolicy.activeDeadlineSeconds", "paused until the RayCluster exists")
    ends = Mentions("Failed, without a retry", "not finished", "2026-01-31T13:02:00Z (in 32m)")
    assert (ends in lines, paused in lines) == (bool(admitted), not admitted)


def test_a_stop_request_that_the_operator_has_not_seen_is_explained() -> None:
    status = {"conditions": [VALID, TRAINING], "attempts": [ENDED, RUNNING], "counters": COUNTERS}
    lines = explained(status, annotations={ANNOTATION_STOP: "2026-01-31T12:29:59Z"})
    assert lines[2] == Mentions("user", "stop", "operator", "not applied")
    handled = status | {"handledRequests": {"stop": "2026-01-31T12:29:59Z"}}
    assert explained(handled, annotations={ANNOTATION_STOP: "2026-01-31T12:29:59Z"})[2].startswith("Running:")


def test_a_stop_request_that_did_not_reach_ray_is_explained() -> None:
    stop = {"reason": "StoppedByUser", "requestedAt": "2026-01-31T12:29:30Z"}
    lines = explained({"conditions": [VALID], "attempts": [RUNNING | {"stop": stop, "state": "Stopping"}]})
    assert lines[2:4] == [
        Mentions("Attempt 2", "stopping", "StoppedByUser", "30s"),
        Mentions("Ray could not be asked", "trainer"),
    ]
    assert what_is_next(lines)[1] == Mentions("Failed (StoppedByUser)", "`rljob retry small`")


def test_a_stalled_trainer_is_stopped_after_its_stacks_are_written() -> None:
    stop = {"reason": "Stalled", "message": "no progress for 600 s; it stood at step 9 of 40"}
    stop |= {"requestedAt": "2026-01-31T12:29:30Z"}
    lines = explained({"conditions": [VALID], "attempts": [RUNNING | {"stop": stop, "state": "Stopping"}]})
    assert lines[2:4] == [
        Mentions("Attempt 2", "stopping", "Stalled", "30s"),
        "  no progress for 600 s; it stood at step 9 of 40",
    ]
    assert what_is_next(lines)[0] == Mentions(
        "attempt 2:", "stack traces", "2026-01-31T12:32:00Z (in 2m;", "runPolicy.gracePeriodSeconds"
    )


def failed(reason: str) -> dict[str, object]:
    result = {"outcome": "Failed", "reason": reason, "message": "why", "at": "2026-01-31T12:20:00Z"}
    return {"phase": "Failed", "conditions": [VALID], "attempts": [ENDED], "result": result, "checkpoint": CHECKPOINT}


def test_a_finally_failed_job_can_be_retried() -> None:
    lines = explained(failed("OutOfMemory"), {"runPolicy": {"ttlSecondsAfterFinished": 86400}})
    assert lines[2:] == [
        Mentions("finished", "attempt 1", "Failed", "OutOfMemory", "10m ago"),
        "  why",
        f"What to do: {EXPLANATIONS[Reason.OUT_OF_MEMORY].advice}",
        "",
        NEXT,
        Mentions("fix", "`rljob retry small`", "step 10", "retry budgets"),
        Mentions("results, logs and checkpoints: pvc://results/small"),
        Mentions("deleted", "2026-02-01T12:20:00Z (in 23h;", "runPolicy.ttlSecondsAfterFinished", "files are kept"),
    ]


@pytest.mark.parametrize(
    ("reason", "spec", "first"),
    [
        ("InvalidSpec", {}, Mentions("`rljob delete small` and `rljob submit`", without=["retry"])),
        ("StorageMissing", {}, Mentions("`rljob delete small` and `rljob submit`", without=["retry"])),
        ("StoppedByUser", {"suspend": True}, Mentions("`rljob resume small`", "suspended", without=["retry"])),
        (
            "HeadLost",
            {"checkpoint": {"resume": "Never"}},
            Mentions("`rljob retry small`", "step 0", "fails", "checkpoint.resume", "Never", "step 10"),
        ),
    ],
)
def test_the_advice_depends_on_the_reason_of_the_failure(
    reason: str, spec: Mapping[str, object], first: Mentions
) -> None:
    assert what_is_next(explained(failed(reason), spec))[0] == first


def test_a_configuration_error_may_be_in_the_job_or_in_its_files() -> None:
    lines = what_is_next(explained(failed("ConfigurationError")))
    assert lines[0] == Mentions("fix", "`rljob retry small`")
    assert lines[1] == Mentions("in the job itself", "`rljob delete small` and `rljob submit`")


def test_a_retry_request_is_reported_as_pending() -> None:
    lines = what_is_next(explained(failed("OutOfMemory"), annotations={ANNOTATION_RETRY: "now"}))
    assert lines[0] == Mentions("retry was requested", "operator", "step 10")


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence_and_an_action(reason: Reason) -> None:
    lines = explained(failed(reason.value))
    assert f"What to do: {EXPLANATIONS[reason].advice}" in lines
    assert re.fullmatch(r"[A-Z`].*\.", EXPLANATIONS[reason].means)
    assert re.fullmatch(r"[A-Z`].*\.", EXPLANATIONS[reason].advice)
    waits = job_statuses.condition("Progressing", "False", reason.value, CREATED, "m")
    assert f"What to do: {EXPLANATIONS[reason].advice}" in explained({"conditions": [VALID, waits]})


def test_only_failures_that_need_another_spec_suggest_a_new_job() -> None:
    again = {reason for reason, known in EXPLANATIONS.items() if "create the job again" in known.advice}
    assert again == {Reason.INVALID_SPEC, Reason.STORAGE_MISSING, Reason.CONFIGURATION_ERROR}


def test_alarms_of_the_training_are_explained_whatever_the_job_does() -> None:
    message = "75 % of the responses were truncated (since step 3, last in step 9)"
    health = job_statuses.condition("TrainingHealthy", "False", "ResponsesCutOff", CREATED, message)
    complete = job_statuses.condition("Complete", "True", "Succeeded", CREATED)
    for conditions in ([VALID, health], [VALID, health, complete]):
        text = "\n".join(explained({"conditions": conditions, "alarms": ["ResponsesCutOff", "EqualScores"]}))
        assert (
            "\nAlarm of the training: ResponsesCutOff. It stops nothing.\n"
            f"  {message}\n"
            f"What to do: {EXPLANATIONS[Reason.RESPONSES_CUT_OFF].advice}\n"
            "Other alarms: EqualScores; `rljob explain --reason REASON` explains them.\n"
        ) in text
    assert "larm" not in "\n".join(explained({"conditions": [VALID]}))
