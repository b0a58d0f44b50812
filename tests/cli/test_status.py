"""`rljob status` and `rljob list`, written out by hand for a job at several moments of its life."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob_cli.cluster.status import job_lines
from rljob_cli.cluster.stored_job import StoredJob, stored_job
from rljob_testing.command_line import JOB
from rljob_testing.job_cluster import JobCluster, condition, full_status

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


def test_everything_about_a_job_that_runs() -> None:
    assert printed(job(full_status())) == (
        "RLJob team-a/small   Running   age 30m\n"
        "  step         12/80, 10s ago\n"
        "  reward       0.4125\n"
        "  eval score   0.25\n"
        "  tokens/s     1,235\n"
        "  ETA          9m30s\n"
        "  checkpoint   step 10, 50s ago, pvc://results/small/checkpoints/step-000010\n"
        "  pools        main 2/2 ready\n"
        "  attempt 1    Running for 28m, cluster small-1\n"
        "\n"
        "  CONDITION          STATUS  REASON     SINCE  MESSAGE\n"
        "  SpecValid          True    Valid      30m\n"
        "  ClusterReady       True    Ready      25m    3 of 3 pods are ready\n"
        "  PlacementFeasible  True    Feasible   25m\n"
        "  JobSubmitted       True    Submitted  24m\n"
        "  Progressing        True    Training   20m\n"
        "  Checkpointed       True    Saved      50s\n"
    )


def test_a_failure_shows_its_whole_message_and_nothing_that_steers_a_terminal() -> None:
    message = "reward my_rewards:score failed\nTraceback:\n  ZeroDivisionError: \x1b[31mdivision by zero"
    failed = condition("Failed", "True", "ApplicationError", "2026-01-31T12:29:00Z", message)
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


def test_a_job_that_has_ended_has_no_time_left() -> None:
    status = full_status()
    assert isinstance(status["conditions"], list)
    status["conditions"].append(condition("Complete", "True", "Succeeded", "2026-01-31T12:29:55Z", "80 of 80 steps"))
    ended = {"ended": "2026-01-31T12:29:55Z", "outcome": "Succeeded", "reason": "Succeeded"}
    attempts = [{"number": 1, "cluster": "small-1", "started": "2026-01-31T12:02:00Z", **ended}]
    text = printed(job(status | {"attempts": attempts, "exportUri": "pvc://results/small/run/export"}))
    assert "ETA" not in text
    assert "  export       pvc://results/small/run/export\n" in text
    assert "  attempt 1    Succeeded after 27m, cluster small-1\n" in text


def test_a_job_that_nobody_has_seen_yet() -> None:
    assert printed(job({})) == (
        "RLJob team-a/small   Unseen   age 30m\n"
        "  no operator has looked at it yet; `rljob explain small` says what to check\n"
    )


def test_on_a_terminal_the_same_text_has_colours() -> None:
    text = printed(job(full_status()), is_terminal=True)
    assert "\x1b[32mTrue\x1b[0m" in text
    assert "\x1b[1mRLJob team-a/small\x1b[0m   Running   age 30m\n" in text


def test_square_brackets_in_messages_are_not_markup() -> None:
    waiting = condition("ClusterReady", "False", "Creating", CREATED, "[bold]pods[/bold]")
    assert "[bold]pods[/bold]" in printed(job({"conditions": [waiting]}))


@pytest.mark.apiserver
def test_the_command_shows_what_the_server_has(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_job(YAML(typ="safe", pure=True).load(JOB))
    job_cluster.write_status("small", full_status())
    code, output, errors = rljob("status", "small")
    assert (code, errors) == (0, "")
    assert output.startswith(f"RLJob {job_cluster.namespace}/small   Running   age ")
    assert "  checkpoint   step 10, " in output
    code, output, _ = rljob("list", "--all-namespaces")
    assert code == 0
    assert any(line.split()[:4] == [job_cluster.namespace, "small", "Running", "12/80"] for line in output.splitlines())


@pytest.mark.apiserver
def test_programs_get_the_object_itself(job_cluster: JobCluster, rljob: Rljob) -> None:
    stored = job_cluster.create_job(YAML(typ="safe", pure=True).load(JOB))
    code, output, _ = rljob("status", "small", "-o", "json")
    assert code == 0
    shown = json.loads(output)
    assert "managedFields" not in shown["metadata"]
    assert shown["spec"] == stored["spec"]
    code, output, _ = rljob("status", "small", "-o", "yaml")
    assert YAML(typ="safe", pure=True).load(output) == shown


@pytest.mark.apiserver
@pytest.mark.usefixtures("job_cluster")
def test_a_job_that_is_not_there_has_an_exit_code_of_its_own(rljob: Rljob) -> None:
    looks = (["status"], ["status", "--watch"], ["logs"], ["explain"])
    for command in (*looks, ["delete"], ["suspend"], ["resume"], ["stop", "--wait"], ["retry"]):
        code, output, errors = rljob(*command, "nothing")
        assert (code, output) == (3, "")
        assert errors == (
            "error: RLJob nothing: there is none in this namespace; `rljob list` shows which there are, --namespace"
            " names another one\n"
        )
    _, _, errors = rljob("status", "nothing", "--namespace", "team-a")
    assert "; `rljob list --namespace team-a` shows which there are" in errors
