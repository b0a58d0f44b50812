"""`rljob status` and watching, of jobs with several attempts: written out by hand."""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import UTC, datetime

from rich.console import Console

from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_cli.cluster.status import attempt_text, job_lines
from rljob_cli.cluster.stored_job import StoredJob, stored_job
from rljob_testing.job_cluster import condition

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
FIRST = {
    "number": 1,
    "cluster": "small-1",
    "state": "Ended",
    "started": "2026-01-31T12:01:00Z",
    "runningSince": "2026-01-31T12:03:00Z",
    "ended": "2026-01-31T12:11:00Z",
    "outcome": "Failed",
    "reason": "HeadLost",
    "failureClass": "Infrastructure",
    "message": "head pod small-1-head-x is gone:\n  node n7 was\tlost",
    "checkpointStep": 10,
}
SECOND = {
    "number": 2,
    "cluster": "small-2",
    "state": "Running",
    "started": "2026-01-31T12:12:00Z",
    "runningSince": "2026-01-31T12:15:00Z",
    "resumedFromStep": 10,
}
COUNTERS = {"attempts": 2, "infrastructureRetries": 1, "failedAttempts": 1}


def job(
    status: Mapping[str, object], spec: Mapping[str, object] | None = None, annotations: Mapping[str, str] | None = None
) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED, "annotations": annotations or {}}
    valid = condition("SpecValid", "True", "Valid", CREATED)
    return stored_job({"metadata": metadata, "spec": spec or {}, "status": {"conditions": [valid], **status}})


def facts(stored: StoredJob) -> list[str]:
    """The lines between the first one and the conditions."""
    lines = [line.plain for line in job_lines(stored, NOW)]
    return lines[1 : lines.index("")]


def test_attempts_with_why_they_ended_and_what_is_left_of_the_retries() -> None:
    status = {"phase": "Running", "reason": "Training", "attempts": [FIRST, SECOND], "counters": COUNTERS, "gpus": 8}
    stored = job(status, {"runPolicy": {"maxInfraRetries": 3}})
    assert job_lines(stored, NOW)[0].plain == "RLJob team-a/small   Running, Training   age 30m"
    assert facts(stored) == [
        "  GPUs         8",
        "  attempt 1    Failed after 10m, HeadLost (Infrastructure), cluster small-1, saved step 10",
        "                 head pod small-1-head-x is gone: node n7 was lost",
        "  attempt 2    Running for 15m, cluster small-2, resumed from step 10",
        "  retries      application 0 of 2 used, infrastructure 1 of 3 used; 1 of 2 attempts failed",
    ]


def test_retries_count_anew_once_a_later_checkpoint_is_saved() -> None:
    saved = {"step": 50, "uri": "file:///c/50", "digest": "sha256:1", "savedAt": CREATED}
    for former, used in ((10, 0), (50, 1)):
        counters = COUNTERS | {"checkpointStep": former}
        status = {"attempts": [FIRST, SECOND], "counters": counters, "checkpoint": saved}
        [retries] = [line for line in facts(job(status)) if "retries" in line]
        assert f"infrastructure {used} of 10 used" in retries


def test_an_attempt_that_is_to_end_or_is_not_heard_of() -> None:
    stop = {"reason": "Suspended", "requestedAt": "2026-01-31T12:29:40Z"}
    attempts = [SECOND | {"state": "Stopping", "stop": stop, "silentSince": "2026-01-31T12:28:30Z"}]
    assert facts(job({"attempts": attempts}, {"suspend": True})) == [
        "  suspended    asked for, and not done yet",
        "  attempts     the first 1 not shown; --output yaml has those that are still listed",
        "  attempt 2    Stopping for 20s, is to end: Suspended, cluster small-2, resumed from step 10, silent for 90s",
    ]


def test_between_two_attempts() -> None:
    waits = {
        "reason": "HeadLost",
        "failureClass": "Infrastructure",
        "message": "node n7\nwas lost",
        "notBefore": "2026-01-31T12:30:20Z",
        "sameCluster": True,
    }
    stored = job({"phase": "Retrying", "reason": "HeadLost", "attempts": [FIRST], "nextAttempt": waits})
    assert job_lines(stored, NOW)[0].plain == "RLJob team-a/small   Retrying, HeadLost   age 30m"
    assert facts(stored)[2:] == [
        "  next         attempt 2 at 2026-01-31T12:30:20Z, on the same cluster, after HeadLost (Infrastructure):"
        " node n7 was lost (in 20s)"
    ]


def test_suspended_results_and_requests() -> None:
    assert facts(job({"suspendedAt": "2026-01-31T12:20:00Z"}, {"suspend": True})) == [
        "  suspended    for 10m; it holds no nodes"
    ]
    result = {"outcome": "Failed", "reason": "StoppedByUser", "at": "2026-01-31T12:25:00Z"}
    annotations = {ANNOTATION_RETRY: "2026-01-31T12:29:59Z", ANNOTATION_STOP: "x"}
    stored = job({"result": result, "handledRequests": {"stop": "x"}}, {"suspend": True}, annotations)
    assert facts(stored) == [
        "  result       Failed, StoppedByUser, 5m ago; being cleaned up",
        "  retry asked  at 2026-01-31T12:29:59Z, and not seen by the operator yet",
    ]
    stored = job({"result": result | {"cleanedUpAt": "2026-01-31T12:26:00Z"}}, annotations={ANNOTATION_STOP: "a\tb"})
    assert facts(stored) == [
        "  result       Failed, StoppedByUser, 5m ago; cleaned up 4m ago",
        "  stop asked   at a b, and not seen by the operator yet",
    ]


def test_of_many_attempts_the_newest_are_shown() -> None:
    attempts = [FIRST | {"number": number, "message": None} for number in range(37, 101)]
    lines = facts(job({"attempts": attempts}))
    assert lines[0] == "  attempts     the first 92 not shown; --output yaml has those that are still listed"
    assert [line.split(" Failed")[0].strip() for line in lines[1:]] == [f"attempt {n}" for n in range(93, 101)]


def test_what_need_not_be_true_is_not_coloured_as_if_it_had_to() -> None:
    conditions = [
        condition("Suspended", "False", "Resumed", CREATED),
        condition("Retrying", "False", "NextAttemptStarted", CREATED),
        condition("ClusterReady", "False", "PodsPending", CREATED),
        condition("Finished", "True", "OutOfMemory", CREATED, "a\nb"),
        condition("Failed", "True", "OutOfMemory", CREATED, "a\nb"),
    ]
    output = io.StringIO()
    console = Console(file=output, highlight=False, force_terminal=True, width=120)
    for line in job_lines(job({"conditions": conditions}), NOW):
        console.print(line, soft_wrap=True)
    text = output.getvalue()
    assert text.count("\x1b[33mFalse\x1b[0m") == 1
    assert "Failed        \x1b[1;31mTrue\x1b[0m " in text
    assert "Finished      True " in text
    assert text.count("    b\n") == 1  # Finished repeats what Failed says


def test_an_attempt_in_words() -> None:
    first, second = job({"attempts": [FIRST, SECOND]}).status.attempts
    assert attempt_text(first) == "Failed, HeadLost (Infrastructure)"
    assert attempt_text(second) == "Running, resumed from step 10"
