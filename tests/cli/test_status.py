"""`rljob status`, written out by hand for a job at several times of its life, and for jobs with several attempts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob.job_attempts import attempt_text
from rljob.stored_job import StoredJob, stored_job
from rljob_api.constants import ANNOTATION_RETRY, ANNOTATION_STOP
from rljob_cli.cluster.status import job_lines
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]
NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"


def job(status: Mapping[str, object], name: str = "small") -> StoredJob:
    metadata = {"name": name, "namespace": "team-a", "uid": "u", "creationTimestamp": CREATED}
    return stored_job({"metadata": metadata, "status": dict(status)})


def printed(stored: StoredJob, *, is_terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, highlight=False, force_terminal=is_terminal, width=80)
    for line in job_lines(stored, NOW):
        console.print(line, soft_wrap=True)
    return output.getvalue()


def test_a_running_job_is_shown_completely() -> None:
    assert printed(job(job_statuses.full_status())) == (
        "RLJob team-a/small   Running   age 30m\n"
        "  step         12/80, 10s ago\n"
        "  reward       0.4125\n"
        "  eval score   0.25\n"
        "  tokens/s     1,235\n"
        "  ETA          9m30s\n"
        "  checkpoint   step 10, 50s ago, pvc://results/small/checkpoints/step-000010\n"
        "  pools        main 2/2 ready\n"
        "  attempt 1    Running for 24m, cluster small-1\n"
        "\n"
        "  CONDITION          STATUS  REASON     SINCE  MESSAGE\n"
        "  SpecValid          True    Valid      30m\n"
        "  ClusterReady       True    Ready      25m    3 of 3 pods are ready\n"
        "  PlacementFeasible  True    Feasible   25m\n"
        "  JobSubmitted       True    Submitted  24m\n"
        "  Progressing        True    Training   20m\n"
        "  Checkpointed       True    Saved      50s\n"
    )


def test_a_failure_shows_its_whole_message_without_control_characters() -> None:
    message = "reward my_rewards:score failed\nTraceback:\n  ZeroDivisionError: \x1b[31mdivision by zero"
    failed = job_statuses.condition("Failed", "True", "ApplicationError", "2026-01-31T12:29:00Z", message)
    attempt = {"number": 1, "cluster": "small-1", "started": CREATED, "ended": "2026-01-31T12:29:00Z"}
    ended = attempt | {"outcome": "Failed", "reason": "ApplicationError", "resumedFromStep": 5}
    assert printed(job({"phase": "Failed", "attempts": [ended], "conditions": [failed]})) == (
        "RLJob team-a/small   Failed   age 30m\n"
        "  attempt 1    Failed after 29m, ApplicationError, cluster small-1, resumed from step 5\n"
        "\n"
        "  CONDITION  STATUS  REASON            SINCE  MESSAGE\n"
        "  Failed     True    ApplicationError  60s    reward my_rewards:score failed ...\n"
        "\n"
        "  Failed, ApplicationError:\n"
        "    reward my_rewards:score failed\n"
        "    Traceback:\n"
        "      ZeroDivisionError: division by zero\n"
    )


def test_a_finished_job_has_no_time_left() -> None:
    status = job_statuses.full_status()
    assert isinstance(status["conditions"], list)
    status["conditions"].append(
        job_statuses.condition("Complete", "True", "Succeeded", "2026-01-31T12:29:55Z", "80 of 80 steps")
    )
    ended = {"ended": "2026-01-31T12:29:55Z", "outcome": "Succeeded", "reason": "Succeeded"}
    attempts = [{"number": 1, "cluster": "small-1", "started": "2026-01-31T12:02:00Z", **ended}]
    text = printed(job(status | {"attempts": attempts, "exportUri": "pvc://results/small/run/export"}))
    assert "ETA" not in text
    assert "  export       pvc://results/small/run/export\n" in text
    assert "  attempt 1    Succeeded after 27m, cluster small-1\n" in text


def test_alarms_are_a_line() -> None:
    status = job_statuses.full_status() | {"alarms": ["ResponsesCutOff", "EqualScores"]}
    assert "  alarms       ResponsesCutOff, EqualScores\n" in printed(job(status))
    assert "alarms" not in printed(job(job_statuses.full_status()))


def test_a_job_without_a_status_is_shown() -> None:
    first, second = printed(job({})).splitlines()
    assert first == "RLJob team-a/small   New   age 30m"
    assert second == Mentions("no operator", "`rljob explain small`")


def test_on_a_terminal_the_same_text_has_colours() -> None:
    text = printed(job(job_statuses.full_status()), is_terminal=True)
    assert "\x1b[32mTrue\x1b[0m" in text
    assert "\x1b[1mRLJob team-a/small\x1b[0m   Running   age 30m\n" in text


def test_square_brackets_in_messages_are_not_markup() -> None:
    waiting = job_statuses.condition("ClusterReady", "False", "Creating", CREATED, "[bold]pods[/bold]")
    assert "[bold]pods[/bold]" in printed(job({"conditions": [waiting]}))


@pytest.mark.apiserver
def test_the_command_shows_the_stored_status(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))
    job_cluster.write_status("small", job_statuses.full_status())
    code, output, errors = rljob("status", "small")
    assert (code, errors) == (0, "")
    assert output.startswith(f"RLJob {job_cluster.namespace}/small   Running   age ")
    assert "  checkpoint   step 10, " in output
    code, output, _ = rljob("list", "--all-namespaces")
    assert code == 0
    assert any(line.split()[:4] == [job_cluster.namespace, "small", "Running", "12/80"] for line in output.splitlines())


@pytest.mark.apiserver
def test_json_output_is_the_object_itself(job_cluster: JobCluster, rljob: Rljob) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))
    code, output, _ = rljob("status", "small", "-o", "json")
    assert code == 0
    shown = json.loads(output)
    assert "managedFields" not in shown["metadata"]
    assert shown["spec"] == stored["spec"]
    code, output, _ = rljob("status", "small", "-o", "yaml")
    assert YAML(typ="safe", pure=True).load(output) == shown


@pytest.mark.apiserver
@pytest.mark.usefixtures("job_cluster")
def test_a_missing_job_has_its_own_exit_code(rljob: Rljob) -> None:
    reading = (["status"], ["status", "--watch"], ["logs"], ["explain"])
    for command in (*reading, ["delete"], ["suspend"], ["resume"], ["stop", "--wait"], ["retry"]):
        code, output, errors = rljob(*command, "nothing")
        assert (code, output) == (3, "")
        assert errors == Mentions("error: RLJob nothing:", "not found", "`rljob list`", "--namespace")
        assert errors.count("\n") == 1
    _, _, errors = rljob("status", "nothing", "--namespace", "team-a")
    assert errors == Mentions("`rljob list --namespace team-a`")


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


def attempted(
    status: Mapping[str, object], spec: Mapping[str, object] | None = None, annotations: Mapping[str, str] | None = None
) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED, "annotations": annotations or {}}
    valid = job_statuses.condition("SpecValid", "True", "Valid", CREATED)
    return stored_job({"metadata": metadata, "spec": spec or {}, "status": {"conditions": [valid], **status}})


def facts(stored: StoredJob) -> list[str]:
    """The lines between the first one and the conditions."""
    lines = [line.plain for line in job_lines(stored, NOW)]
    return lines[1 : lines.index("")]


def test_attempts_show_why_they_ended_and_the_retries_left() -> None:
    status = {"phase": "Running", "reason": "Training", "attempts": [FIRST, SECOND], "counters": COUNTERS, "gpus": 8}
    stored = attempted(status, {"runPolicy": {"maxInfraRetries": 3}})
    assert job_lines(stored, NOW)[0].plain == "RLJob team-a/small   Running, Training   age 30m"
    assert facts(stored) == [
        "  GPUs         8",
        "  attempt 1    Failed after 10m, HeadLost (Infrastructure), cluster small-1, saved step 10",
        "                 head pod small-1-head-x is gone: node n7 was lost",
        "  attempt 2    Running for 15m, cluster small-2, resumed from step 10",
        "  retries      application 0 of 2 used, infrastructure 1 of 3 used; 2 attempts so far, 1 failed",
    ]


def test_the_retry_budgets_count_as_reset_once_a_later_checkpoint_is_saved() -> None:
    saved = {"step": 50, "uri": "file:///c/50", "digest": "sha256:1", "savedAt": CREATED}
    for former, used in ((10, 0), (50, 1)):
        counters = COUNTERS | {"checkpointStep": former}
        status = {"attempts": [FIRST, SECOND], "counters": counters, "checkpoint": saved}
        [retries] = [line for line in facts(attempted(status)) if "retries" in line]
        assert f"infrastructure {used} of 10 used" in retries


def test_an_attempt_that_stops_or_does_not_report_is_shown() -> None:
    stop = {"reason": "Suspended", "requestedAt": "2026-01-31T12:29:40Z"}
    attempts = [SECOND | {"state": "Stopping", "stop": stop, "stateUnknownSince": "2026-01-31T12:28:30Z"}]
    assert facts(attempted({"attempts": attempts}, {"suspend": True})) == [
        Mentions("suspended    requested"),
        Mentions("attempts     the first 1", "--output yaml"),
        Mentions("attempt 2    Stopping for 20s", "Suspended", "cluster small-2", "from step 10", "90s"),
    ]


def test_a_job_between_two_attempts_is_shown() -> None:
    waits = {
        "reason": "HeadLost",
        "failureClass": "Infrastructure",
        "message": "node n7\nwas lost",
        "notBefore": "2026-01-31T12:30:20Z",
        "sameCluster": True,
    }
    stored = attempted({"phase": "Retrying", "reason": "HeadLost", "attempts": [FIRST], "nextAttempt": waits})
    assert job_lines(stored, NOW)[0].plain == "RLJob team-a/small   Retrying, HeadLost   age 30m"
    assert facts(stored)[2:] == [
        Mentions(
            "next         attempt 2",
            "2026-01-31T12:30:20Z",
            "same cluster",
            "HeadLost (Infrastructure): node n7 was lost",
            "in 20s",
        )
    ]


def test_suspension_results_and_requests_are_shown() -> None:
    assert facts(attempted({"suspendedAt": "2026-01-31T12:20:00Z"}, {"suspend": True})) == [
        Mentions("suspended    for 10m", "pods are deleted")
    ]
    result = {"outcome": "Failed", "reason": "StoppedByUser", "at": "2026-01-31T12:25:00Z"}
    annotations = {ANNOTATION_RETRY: "2026-01-31T12:29:59Z", ANNOTATION_STOP: "x"}
    stored = attempted({"result": result, "handledRequests": {"stop": "x"}}, {"suspend": True}, annotations)
    assert facts(stored) == [
        Mentions("result       Failed, StoppedByUser, 5m ago", "being cleaned up"),
        Mentions("retry request at 2026-01-31T12:29:59Z", "not applied"),
    ]
    stored = attempted(
        {"result": result | {"cleanedUpAt": "2026-01-31T12:26:00Z"}}, annotations={ANNOTATION_STOP: "a\tb"}
    )
    assert facts(stored) == [
        Mentions("result       Failed, StoppedByUser, 5m ago", "cleaned up 4m ago"),
        Mentions("stop request at a b", "not applied"),
    ]


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("Queued", "quota of its queue"),
        ("QuotaExceeded", "quota of a ResourceQuota"),
        ("Unschedulable", "quota or free capacity"),
    ],
)
def test_what_a_job_waits_for_is_shown(reason: str, what: str) -> None:
    waits = job_statuses.condition("ClusterReady", "False", reason, CREATED)
    text = printed(job({"conditions": [waits], "waitingSince": "2026-01-31T12:20:00Z"}))
    assert f"  waiting      for {what} since 2026-01-31T12:20:00Z\n" in text


def test_of_many_attempts_the_newest_are_shown() -> None:
    attempts = [FIRST | {"number": number, "message": None} for number in range(37, 101)]
    lines = facts(attempted({"attempts": attempts}))
    assert lines[0] == Mentions("attempts     the first 92", "--output yaml")
    assert [line.split(" Failed")[0].strip() for line in lines[1:]] == [f"attempt {n}" for n in range(93, 101)]


def test_conditions_that_may_be_false_are_not_coloured_as_errors() -> None:
    conditions = [
        job_statuses.condition("Suspended", "False", "Resumed", CREATED),
        job_statuses.condition("Retrying", "False", "NextAttemptStarted", CREATED),
        job_statuses.condition("ClusterReady", "False", "PodsPending", CREATED),
        job_statuses.condition("Finished", "True", "OutOfMemory", CREATED, "a\nb"),
        job_statuses.condition("Failed", "True", "OutOfMemory", CREATED, "a\nb"),
    ]
    output = io.StringIO()
    console = Console(file=output, highlight=False, force_terminal=True, width=120)
    for line in job_lines(attempted({"conditions": conditions}), NOW):
        console.print(line, soft_wrap=True)
    text = output.getvalue()
    assert text.count("\x1b[33mFalse\x1b[0m") == 1
    assert "Failed        \x1b[1;31mTrue\x1b[0m " in text
    assert "Finished      True " in text
    assert text.count("    b\n") == 1  # Finished repeats the reason of Failed


def test_an_attempt_is_described_in_one_line() -> None:
    first, second = attempted({"attempts": [FIRST, SECOND]}).status.attempts
    assert attempt_text(first) == "Failed, HeadLost (Infrastructure)"
    assert attempt_text(second) == "Running, resumed from step 10"
