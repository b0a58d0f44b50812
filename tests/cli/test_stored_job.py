"""A status written by an operator of another version is shown as far as it is known here, and never raises."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from rljob.job_attempts import attempt_state
from rljob.stored_job import StoredJob, stored_job
from rljob_api.v1alpha1.run_policy import Cleanup
from rljob_cli.cluster.explain import explanation
from rljob_cli.cluster.listing import list_lines
from rljob_cli.cluster.status import job_lines
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import Json
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"


def job(status: object, spec: Mapping[str, object] | None = None) -> StoredJob:
    metadata = {"name": "small", "namespace": "team-a", "uid": "u", "creationTimestamp": CREATED}
    return stored_job({"metadata": metadata, "spec": dict(spec or {}), "status": status})


def shown(stored: StoredJob) -> str:
    """Everything that any command shows of a job."""
    lines = [*job_lines(stored, NOW), *list_lines([stored], NOW, everywhere=True, wide=True)]
    return "\n".join(line.plain for line in [*lines, *explanation(stored, [], [], NOW)])


def newer_status() -> Json:
    """Every field of this version, with additional words and fields of a later one in each of them."""
    new: Json = {"mood": {"deep": ["news"]}}
    attempt = {"number": 3, "cluster": "small-3", "state": "Migrating", "started": CREATED, "outcome": "Moved", **new}
    stop = {"reason": "Preempted", "requestedAt": CREATED, **new}
    status = job_statuses.full_status() | {
        "phase": "Migrating",
        "reason": "QuotaReserved",
        "gpus": 4,
        "attempts": [attempt, attempt | {"number": 4, "outcome": "Running", "stop": stop}],
        "counters": {"attempts": 4, "failedAttempts": 1, "migrations": 3},
        "nextAttempt": {"reason": "Moved", "failureClass": "Weather", "notBefore": CREATED, **new},
        "handledRequests": {"stop": "a", "migrate": "b"},
        **new,
    }
    conditions = status["conditions"]
    assert isinstance(conditions, list)
    status["conditions"] = [{**each, **new} for each in conditions] + [
        job_statuses.condition("QuotaReserved", "Perhaps", "Borrowed", CREATED)
    ]
    for field in ("progress", "checkpoint"):
        part = status[field]
        assert isinstance(part, dict)
        status[field] = {**part, **new}
    return status


def test_unknown_values_of_a_newer_operator_are_shown_unchanged() -> None:
    stored = job(newer_status())
    assert stored.unparsed_fields == ('status.conditions[6].status (seen: "Perhaps")',)
    assert [attempt_state(attempt) for attempt in stored.status.attempts] == ["Moved", "Migrating"]
    assert stored.phase == "Migrating"
    text = shown(stored)
    for word in ("Migrating", "QuotaReserved", "Moved", "Borrowed", "Preempted", "Moved (Weather)", '"Perhaps"'):
        assert word in text, word
    assert "  QuotaReserved      Unknown  Borrowed" in text
    assert text == Mentions("operator", "another version")


def test_an_unknown_result_counts_as_finished() -> None:
    result = {"outcome": "Evacuated", "reason": "Flood", "message": "m", "at": "2026-01-31T12:20:00Z", "by": "them"}
    stored = job({"phase": "Evacuated", "result": result})
    end = stored.ending
    assert end is not None
    assert (end.kind, end.is_complete) == ("Evacuated", False)
    assert shown(stored) == Mentions("finished", "Evacuated, reason Flood, 10m ago")


def test_the_conditions_give_the_result_of_a_job_whose_result_cannot_be_read() -> None:
    failed = job_statuses.condition("Failed", "True", "ApplicationError", "2026-01-31T12:20:00Z", "exit code 1")
    stored = job({"phase": "Failed", "result": {"outcome": 1}, "conditions": [failed]})
    assert [part.split(" (")[0] for part in stored.unparsed_fields if part.startswith("status.result")]
    end = stored.ending
    assert end is not None
    assert (end.kind, end.reason, end.message, end.cleaned_up_at) == ("Failed", "ApplicationError", "exit code 1", None)
    assert end.at == datetime(2026, 1, 31, 12, 20, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "unread", "left"),
    [
        (
            {"pools": [{"name": "a", "desired": 1, "ready": "all"}, {"name": "b", "desired": 2, "ready": 1}]},
            ('status.pools[0].ready (seen: "all")', "status.pools[0].ready (missing)"),
            {"pools": [{"name": "b", "desired": 2, "ready": 1}]},
        ),
        ({"gpus": {"total": 4}, "phase": "Running"}, ('status.gpus (seen: {"total": 4})',), {"phase": "Running"}),
        (
            {"attempts": [{"cluster": "a", "started": "soon"}, {"number": 2, "cluster": "b", "started": CREATED}]},
            ("status.attempts[0].number (missing)",),
            {"attempts": [{"number": 2, "cluster": "b", "started": CREATED}]},
        ),
        ("Running", ('status (seen: "Running")',), {}),
    ],
)
def test_unreadable_fields_are_left_out_and_reported(status: object, unread: tuple[str, ...], left: Json) -> None:
    before = copy.deepcopy(status)
    stored = job(status)
    assert stored.unparsed_fields == unread
    assert stored.status.to_wire() == left
    assert status == before  # JSON output is what the server returned
    assert unread[0] in shown(stored)


def test_no_text_of_a_status_sends_control_characters_to_a_terminal() -> None:
    red = "\x1b[31mR\x07"
    bad = job_statuses.condition("ClusterReady", "False", red, CREATED, f"a {red}\nb {red}")
    result = {"outcome": red, "reason": red, "message": red, "at": CREATED}
    attempt = {"number": 1, "cluster": red, "started": CREATED, "state": red, "reason": red, "message": red}
    common = {"phase": red, "reason": red, "conditions": [bad], "attempts": [attempt], "exportUri": red, red: 1}
    requests = {"handledRequests": {"stop": red}}
    for status in (common, common | {"result": result}, common | requests, {"phase": red, "attempts": red}):
        stored = job(status)
        assert "R" in shown(stored)
        assert not set(shown(stored)) & {"\x1b", "\x07"}
    handled = job(requests).status.handled_requests
    assert handled is not None
    assert handled.stop == red, "it is compared with the annotation"


@pytest.mark.parametrize("field", ["started", "activeSince", "stateUnknownSince", "progressedAt"])
@pytest.mark.parametrize("end", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+12:00"])
def test_times_at_the_ends_of_the_calendar_cannot_be_read(field: str, end: str) -> None:
    attempt = {"number": 1, "cluster": "c", "started": CREATED} | {field: end}
    stored = job({"attempts": [attempt]})
    assert stored.unparsed_fields[0] == f'status.attempts[0].{field} (seen: "{end}")'
    assert stored.unparsed_fields[0] in shown(stored)


def test_more_attempts_than_this_version_lists_lose_the_oldest() -> None:
    attempts = [{"number": number, "cluster": f"c{number}", "started": CREATED} for number in range(1, 81)]
    stored = job({"attempts": attempts})
    assert [attempt.number for attempt in stored.status.attempts] == list(range(17, 81))
    long = job({"result": {"outcome": "Failed", "reason": "R", "message": "a" * 2000, "at": CREATED}})
    assert long.status.result is not None
    assert long.status.result.message == "a" * 1024


def test_an_unreadable_spec_of_a_newer_crd_does_not_hide_the_status() -> None:
    spec = YAML(typ="safe", pure=True).load(SMALL_JOB)["spec"]
    spec["training"]["algorithm"] = {"type": "Telepathy"}
    spec["pools"][0]["nodes"] = 3
    spec["checkpoint"] = {"storage": {"persistentVolumeClaim": "results", "mirror": "b"}, "resume": "Sometimes"}
    spec["runPolicy"] = {"cleanup": "Archive", "maxAppRetries": 7, "mood": "good"}
    stored = job(job_statuses.full_status(), spec)
    assert stored.pool_sizes == {"main": 3}
    assert stored.storage is not None
    assert stored.storage.persistent_volume_claim == "results"
    assert (stored.run_policy.max_app_retries, stored.run_policy.cleanup) == (7, Cleanup.DELETE_CLUSTER)
    assert "RLJob team-a/small: Running" in shown(stored)
