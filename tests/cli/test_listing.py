"""`rljob list`: the table, written out by hand, and the machine-readable form."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob.cluster import Cluster, ClusterOptions, connect
from rljob.stored_job import StoredJob, stored_job
from rljob_api.crdgen.manifest import custom_resource_definition
from rljob_cli.cluster.listing import JobList, list_lines, show_list, watch_list
from rljob_testing.cli import job_statuses, job_steering
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

Rljob = Callable[..., tuple[int, str, str]]
NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
FAILED = {
    "phase": "Retrying",
    "reason": "OutOfMemory",
    "gpus": 16,
    "attempts": [{"number": 12, "cluster": "big-12", "started": CREATED}],
    "counters": {"attempts": 12, "failedAttempts": 11},
}


def job(status: object, name: str = "small") -> StoredJob:
    metadata = {"name": name, "namespace": "team-a", "uid": "u", "creationTimestamp": CREATED}
    return stored_job({"metadata": metadata, "status": status})


def test_the_table_shows_reason_and_gpus() -> None:
    jobs = [job(job_statuses.full_status()), job(FAILED, "big"), job({}, "waiting-for-an-operator")]
    assert [line.plain for line in list_lines(jobs, NOW, everywhere=False)] == [
        "NAME                     PHASE     REASON       STEP   REWARD  CKPT  ATTEMPT  GPUS  AGE",
        "small                    Running                12/80  0.4125  10    1              30m",
        "big                      Retrying  OutOfMemory                       12       16    30m",
        "waiting-for-an-operator  New                                                        30m",
    ]
    assert [line.plain for line in list_lines(jobs[:2], NOW, everywhere=True, wide=True)] == [
        "NAMESPACE  NAME   PHASE     REASON       STEP  REWARD  CKPT  ATTEMPT  GPUS  TOTAL  FAILURES  CLUSTER  AGE",
        "team-a     small  Running                12    0.4125  10    1              80               small-1  30m",
        "team-a     big    Retrying  OutOfMemory                      12       16           11        big-12   30m",
    ]


def test_the_columns_are_those_of_kubectl() -> None:
    spec = custom_resource_definition()["spec"]
    assert isinstance(spec, dict)
    columns = spec["versions"][0]["additionalPrinterColumns"]
    usual = ["NAME", *(column["name"].upper() for column in columns if not column.get("priority"))]
    wide = ["NAME", *(column["name"].upper() for column in columns)]
    assert list_lines([job({})], NOW, everywhere=False)[0].plain.split() == usual
    assert list_lines([job({})], NOW, everywhere=False, wide=True)[0].plain.split() == wide


@pytest.mark.parametrize(
    ("status", "row", "unread"),
    [
        ("gone", ["bad", "?", "StatusUnreadable", "?", "?", "?", "?", "?", "30m"], 'status (seen: "gone")'),
        ({"phase": 3}, ["bad", "?", "StatusUnreadable", "30m"], "status.phase (seen: 3)"),
        ({"phase": "Running", "gpus": "many"}, ["bad", "Running", "?", "30m"], 'status.gpus (seen: "many")'),
    ],
)
def test_an_unreadable_status_has_its_row_and_hides_no_other(status: object, row: list[str], unread: str) -> None:
    jobs = [job(job_statuses.full_status()), job(status, "bad"), job({}, "z")]
    out, notes = io.StringIO(), io.StringIO()
    consoles = (Console(file=file, highlight=False, width=80) for file in (out, notes))
    cluster = cast("Cluster", SimpleNamespace(jobs=lambda **_: jobs))
    show_list(JobList(cluster), *consoles, NOW)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "small", "bad", "z"]
    assert lines[2].split() == row
    assert notes.getvalue() == Mentions("RLJob team-a/bad:", unread, "another version", "`rljob`", "--output yaml")
    assert notes.getvalue().count("\n") == 1


def test_control_characters_do_not_reach_the_terminal() -> None:
    lines = list_lines([job({"phase": "Run\x1b[31mning\nx", "reason": "a\tb"})], NOW, everywhere=False)
    assert len(lines) == 2
    assert lines[1].plain.split() == ["small", "Running", "x", "a", "b", "30m"]


def load(output: str, form: str) -> object:
    return json.loads(output) if form == "json" else YAML(typ="safe", pure=True).load(output)


@pytest.mark.apiserver
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_json_output_is_a_list_of_the_objects(job_cluster: JobCluster, rljob: Rljob, form: str) -> None:
    code, output, errors = rljob("list", "-o", form)
    assert (code, errors) == (0, "")
    assert load(output, form) == {"apiVersion": "v1", "kind": "List", "items": []}
    wanted = YAML(typ="safe", pure=True).load(SMALL_JOB)
    for name in ("a", "b"):
        job_cluster.create_job({**wanted, "metadata": {"name": name}})
    code, output, errors = rljob("list", "--output", form)
    assert (code, errors) == (0, "")
    found = load(output, form)
    assert isinstance(found, dict)
    for item, name in zip(found["items"], ("a", "b"), strict=True):
        stored = job_cluster.job(name)
        assert isinstance(stored["metadata"], Mapping)
        metadata = {key: value for key, value in stored["metadata"].items() if key != "managedFields"}
        assert item == {**stored, "metadata": metadata}
        assert (item["apiVersion"], item["kind"]) == ("rljob.dev/v1alpha1", "RLJob")


@pytest.mark.apiserver
def test_all_namespaces_and_wide_columns_are_shown(job_cluster: JobCluster, rljob: Rljob) -> None:
    job_cluster.create_job(YAML(typ="safe", pure=True).load(SMALL_JOB))
    attempts = [{"number": 12, "cluster": "small-12", "started": CREATED, "outcome": "Evacuated", "state": "Moved"}]
    job_cluster.write_status("small", FAILED | {"attempts": attempts})
    code, output, errors = rljob("list", "-A", "-o", "wide")
    assert (code, errors) == (0, "")
    row = next(line.split() for line in output.splitlines() if line.startswith(f"{job_cluster.namespace} "))
    assert row[:-1] == [job_cluster.namespace, "small", "Retrying", "OutOfMemory", "12", "16", "11", "small-12"]


@pytest.mark.apiserver
def test_an_empty_table_is_a_sentence(job_cluster: JobCluster, rljob: Rljob) -> None:
    assert rljob("list", "-o", "wide") == (0, "", Mentions("no jobs", job_cluster.namespace))


@pytest.fixture
def three(job_cluster: JobCluster) -> JobCluster:
    """A namespace with the jobs `a` of team red, `b` and `c` of team blue, with rewards 0.5, none and 0.75."""
    for name, team, reward in (("a", "red", 0.5), ("b", "blue", None), ("c", "blue", 0.75)):
        text = SMALL_JOB.replace("{name: small}", f"{{name: {name}, labels: {{team: {team}}}}}")
        job_cluster.create_job(YAML(typ="safe", pure=True).load(text))
        if reward is not None:
            progress = {"step": 9, "totalSteps": 80, "rewardMean": reward, "updatedAt": CREATED}
            job_cluster.write_status(name, {"phase": "Running", "progress": progress})
    return job_cluster


def names(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines()[1:]]


@pytest.mark.apiserver
def test_jobs_are_selected_by_labels_and_sorted_by_a_column(three: JobCluster, rljob: Rljob) -> None:
    assert names(rljob("list", "-l", "team=blue")[1]) == ["b", "c"]
    assert names(rljob("list", "--selector", "team!=blue")[1]) == ["a"]
    assert names(rljob("list", "--sort-by", "reward")[1]) == ["a", "c", "b"]
    assert names(rljob("list", "--sort-by", "-Reward")[1]) == ["c", "a", "b"]
    assert names(rljob("list", "--sort-by", "phase", "-o", "wide")[1]) == ["b", "a", "c"]
    assert json.loads(rljob("list", "--sort-by", "-name", "-o", "json")[1])["items"][0]["metadata"]["name"] == "c"
    assert rljob("list", "-l", "team=green") == (
        0,
        "",
        f"no jobs in namespace {three.namespace} with labels team=green\n",
    )


@pytest.mark.apiserver
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort-by", "rewards"], "--sort-by rewards: there is no such column; did you mean reward?"),
        (["--sort-by", "x"], "--sort-by x: there is no such column; use one of namespace, name, phase"),
        (["-l", "a=b=c"], "the API server rejected the request"),
        (["--watch", "-o", "json"], "--output json: cannot be combined with --watch"),
    ],
)
@pytest.mark.usefixtures("job_cluster")
def test_wrong_options_of_list_are_one_clear_error(rljob: Rljob, arguments: list[str], message: str) -> None:
    code, output, errors = rljob("list", *arguments)
    assert (code, output) == (2, "")
    assert errors == Mentions("error:", message)
    assert errors.count("\n") == 1


@pytest.mark.apiserver
def test_a_watched_list_prints_rows_that_change(three: JobCluster) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    steps = [
        lambda: None,
        lambda: three.write_status("b", {"phase": "Queued"}),
        lambda: three.delete("a"),
        interrupt,
    ]
    for is_terminal in (False, True):
        output, notes = io.StringIO(), io.StringIO()
        out = Console(file=output, highlight=False, width=100, force_terminal=is_terminal)
        jobs = JobList(connect(ClusterOptions(kubeconfig=three.kubeconfig)), selector="team")
        clock = job_steering.Script(steps if not is_terminal else [interrupt]).clock()
        assert watch_list(jobs, out, Console(file=notes), clock) == 130
        if is_terminal:
            assert ["NAME" in output.getvalue(), "Queued" in output.getvalue()] == [True, True]
        else:
            *lines, last = output.getvalue().splitlines()
            rows = [line.split()[:2] for line in lines]
            assert rows == [["NAME", "PHASE"], ["a", "Running"], ["b", "New"], ["c", "Running"], ["b", "Queued"]]
            assert last == f"RLJob {three.namespace}/a: was deleted, or has other labels now"
            assert notes.getvalue() == ""
            nothing = JobList(connect(ClusterOptions(kubeconfig=three.kubeconfig)), selector="team=none")
            assert watch_list(nothing, out, Console(file=notes), job_steering.Script([interrupt]).clock()) == 130
            assert notes.getvalue() == f"no jobs in namespace {three.namespace} with labels team=none\n"
