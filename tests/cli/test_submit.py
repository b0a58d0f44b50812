"""`rljob submit` against a real API server: created once, found again, changed where that is allowed, otherwise
rejected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from rljob.cluster import Cluster
from rljob.stored_job import StoredJob
from rljob_api.v1alpha1.pools import PRIORITY_CLASS_LABEL, QUEUE_LABEL
from rljob_operator.raw_json import object_at
from rljob_testing.cli.job_cluster import JobCluster
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
ON_CLUSTER = SMALL_JOB + "  checkpoint: {storage: {persistentVolumeClaim: results}}\n"
NEXT = ("next: rljob status small --watch", "rljob logs small --follow", "rljob explain small")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(ON_CLUSTER)
    return path


def test_a_job_is_created_from_the_file_unchanged(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    code, output, errors = rljob("submit", str(file))
    assert (code, output, errors) == (
        0,
        Mentions(f"RLJob {job_cluster.namespace}/small created (context here)", *NEXT),
        "",
    )
    spec = job_cluster.job("small")["spec"]
    assert isinstance(spec, dict)
    assert spec["training"]["steps"] == 3
    assert spec["checkpoint"]["storage"] == {"persistentVolumeClaim": "results"}


def test_a_job_from_a_pipe_is_created(job_cluster: JobCluster, rljob: Rljob, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=pipe.write_text, args=(ON_CLUSTER,), daemon=True).start()
    code, output, errors = rljob("submit", str(pipe))
    assert (code, output, errors) == (
        0,
        Mentions(f"RLJob {job_cluster.namespace}/small created (context here)", *NEXT),
        "",
    )


def test_a_warning_of_the_server_is_shown_as_a_warning(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    file.write_text(ON_CLUSTER + "  head: {resources: {requests: {memory: 400m}}}\n")
    code, output, errors = rljob("submit", str(file))
    assert (code, errors) == (0, "")
    line = len(file.read_text().splitlines())
    where = f"{file}:{line}:41: warning: spec.head.resources.requests.memory:"
    assert output.splitlines()[0] == Mentions(where, "whole number of bytes", '(seen: "400m")')
    assert f"RLJob {job_cluster.namespace}/small created" in output


def test_the_same_file_again_finds_the_same_job(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    rljob("submit", str(file))
    stored = job_cluster.job("small")["metadata"]
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    assert output == Mentions(f"RLJob {job_cluster.namespace}/small", "exists", "(New)", *NEXT, without=["created"])
    assert job_cluster.job("small")["metadata"] == stored


def test_explicit_defaults_are_the_same_job(rljob: Rljob, job_cluster: JobCluster, file: Path) -> None:
    rljob("submit", str(file))
    file.write_text(ON_CLUSTER + "  head: {resources: {limits: {}}}\n  runPolicy: {gracePeriodSeconds: 120}\n")
    _, output, _ = rljob("submit", str(file))
    assert output == Mentions(f"RLJob {job_cluster.namespace}/small", "exists", without=["created", "changed"])


def test_another_spec_under_the_same_name_is_rejected_with_every_difference(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    rljob("submit", str(file))
    changed = ON_CLUSTER.replace("steps: 3", "steps: 4").replace("nodes: 1", "nodes: 2")
    file.write_text(changed + "  runPolicy: {gracePeriodSeconds: 60}\n  image: mine:1\n")
    code, output, errors = rljob("submit", str(file))
    assert (code, output) == (2, "")
    message, *differences = errors.splitlines()
    where = f"error: {file}: RLJob {job_cluster.namespace}/small"
    assert message == Mentions(
        where, "exists", "suspend", "runPolicy", "queue", "metadata.name", "`rljob delete small`"
    )
    assert differences == [
        "  spec.pools[main].nodes: 1 -> 2",
        "  spec.training.steps: 3 -> 4",
        '  spec.image: unset -> "mine:1"',
    ]
    assert job_cluster.job("small")["metadata"]["generation"] == 1  # type: ignore[index]


def test_a_changed_run_policy_is_applied_and_can_be_reverted(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    rljob("submit", str(file))
    file.write_text(ON_CLUSTER + "  runPolicy: {gracePeriodSeconds: 60, activeDeadlineSeconds: 600}\n")
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    assert output == Mentions(f"RLJob {job_cluster.namespace}/small", "exists", "changed", *NEXT)
    assert [line for line in output.splitlines() if "->" in line] == [
        "  spec.runPolicy.gracePeriodSeconds: 120 -> 60",
        "  spec.runPolicy.activeDeadlineSeconds: unset -> 600",
    ]
    retries = {"maxAppRetries": 2, "maxInfraRetries": 10, "stallDeadlineSeconds": 3600}
    policy = retries | {"provisioningDeadlineSeconds": 1800, "cleanup": "DeleteCluster", "keepClusterSeconds": 86_400}
    assert run_policy(job_cluster) == policy | {"gracePeriodSeconds": 60, "activeDeadlineSeconds": 600}
    file.write_text(ON_CLUSTER)
    rljob("submit", str(file))
    assert run_policy(job_cluster) == policy | {"gracePeriodSeconds": 120}


def test_a_file_without_suspend_does_not_resume_a_suspended_job(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    rljob("submit", str(file))
    rljob("suspend", "small")
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    first, following = output.splitlines()
    assert first == Mentions(f"RLJob {job_cluster.namespace}/small", "exists", "(New)")
    assert following == Mentions("next: rljob resume small", "suspended")
    file.write_text(ON_CLUSTER + "  suspend: false\n")
    assert "  spec.suspend: true -> false\n" in rljob("submit", str(file))[1]
    assert job_cluster.job("small")["spec"]["suspend"] is False  # type: ignore[index]


QUEUED = {"number": 1, "cluster": "small-1", "clusterUid": "c1", "state": "Queued", "started": "2026-01-31T12:00:00Z"}
RUNNING = QUEUED | {"state": "Running"}
ENDED = RUNNING | {"state": "Ended", "ended": "2026-01-31T12:05:00Z"}
AGAIN = {"reason": "HeadLost", "failureClass": "Infrastructure", "notBefore": "2026-01-31T12:06:00Z"}
SAME = AGAIN | {"sameCluster": True}
COMPLETE = {"outcome": "Succeeded", "reason": "Succeeded", "at": "2026-01-31T12:05:00Z"}
MOVED = Mentions("operator deletes", "a new one waits", "these labels", without=["rljob suspend"])
NEXT_ATTEMPT = Mentions("the next attempt uses these labels", without=["rljob suspend"])
NEXT_CLUSTER = Mentions("existing RayCluster keeps its labels", "`rljob suspend small`", "`rljob resume small`")


def with_labels(labels: str) -> str:
    """The job file with these labels, written as a YAML mapping."""
    return ON_CLUSTER.replace("{name: small}", f"{{name: small, labels: {labels}}}")


A = f"{{{QUEUE_LABEL}: a, team: red}}"
B = f"{{{QUEUE_LABEL}: b, team: blue}}"
URGENT = f"{{{QUEUE_LABEL}: a, {PRIORITY_CLASS_LABEL}: urgent}}"


@pytest.mark.parametrize(
    ("before", "after", "status", "change", "when"),
    [
        (A, B, {}, f'[{QUEUE_LABEL}]: "a" -> "b"', NEXT_ATTEMPT),
        (A, B, {"attempts": [ENDED], "nextAttempt": AGAIN}, f'[{QUEUE_LABEL}]: "a" -> "b"', NEXT_ATTEMPT),
        (A, B, {"attempts": [ENDED], "nextAttempt": SAME}, f'[{QUEUE_LABEL}]: "a" -> "b"', NEXT_CLUSTER),
        (A, B, {"attempts": [QUEUED]}, f'[{QUEUE_LABEL}]: "a" -> "b"', MOVED),
        (A, B, {"attempts": [RUNNING]}, f'[{QUEUE_LABEL}]: "a" -> "b"', NEXT_CLUSTER),
        (A, B, {"attempts": [ENDED], "result": COMPLETE}, f'[{QUEUE_LABEL}]: "a" -> "b"', Mentions("no effect")),
        ("{}", B, {"attempts": [RUNNING]}, f'[{QUEUE_LABEL}]: unset -> "b"', NEXT_CLUSTER),
        (A, URGENT, {"attempts": [QUEUED]}, f'[{PRIORITY_CLASS_LABEL}]: unset -> "urgent"', MOVED),
        (A, URGENT, {"attempts": [RUNNING]}, f'[{PRIORITY_CLASS_LABEL}]: unset -> "urgent"', NEXT_CLUSTER),
    ],
)
def test_another_queue_or_priority_in_the_file_changes_the_job(
    job_cluster: JobCluster,
    rljob: Rljob,
    file: Path,
    before: str,
    after: str,
    status: dict[str, object],
    change: str,
    when: Mentions,
) -> None:
    file.write_text(with_labels(before))
    rljob("submit", str(file))
    job_cluster.write_status("small", status)
    file.write_text(with_labels(after))
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    assert output.splitlines()[:3] == [
        Mentions(f"RLJob {job_cluster.namespace}/small", "exists", "changed"),
        f"  metadata.labels{change}",
        when,
    ]
    # Only the labels of Kueue are changed.
    assert object_at(job_cluster.job("small"), "metadata", "labels").get("team") == (
        "red" if "team: red" in before else None
    )
    assert "already exists with this spec" in rljob("submit", str(file))[1]


def test_a_label_for_kueue_that_the_file_does_not_name_stays(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    file.write_text(with_labels(A))
    rljob("submit", str(file))
    file.write_text(with_labels("{team: red}"))
    assert "already exists with this spec" in rljob("submit", str(file))[1]
    assert object_at(job_cluster.job("small"), "metadata", "labels")[QUEUE_LABEL] == "a"


def changes_after_reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Calls `change` once, right after a command has read a job."""
    read, pending = Cluster.job, [change]

    def read_and_change(cluster: Cluster, name: str) -> StoredJob:
        found = read(cluster, name)
        if pending:
            pending.pop()()
        return found

    monkeypatch.setattr(Cluster, "job", read_and_change)


def replaced(job_cluster: JobCluster) -> None:
    """Deletes the job and creates another one with its name."""
    job_cluster.http.delete(f"{job_cluster.jobs}/small").raise_for_status()
    job_cluster.create_small_job()


def test_a_change_by_somebody_else_is_not_overwritten(
    job_cluster: JobCluster, rljob: Rljob, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rljob("submit", str(file))
    theirs = {"spec": {"runPolicy": {"maxAppRetries": 7}}}
    changes_after_reading(monkeypatch, lambda: job_cluster.change("small", theirs))
    file.write_text(ON_CLUSTER + "  runPolicy: {gracePeriodSeconds: 60}\n")
    code, _, errors = rljob("submit", str(file))
    assert code != 0
    assert errors == Mentions(f"RLJob {job_cluster.namespace}/small", "somebody else changed", "run the command again")
    policy = run_policy(job_cluster)
    assert isinstance(policy, dict)
    assert (policy["maxAppRetries"], policy["gracePeriodSeconds"]) == (7, 120)
    assert rljob("submit", str(file))[0] == 0


@pytest.mark.parametrize("command", ["suspend", "stop", "delete"])
def test_a_new_job_with_the_same_name_is_left_alone(
    job_cluster: JobCluster, rljob: Rljob, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    job_cluster.create_small_job()
    changes_after_reading(monkeypatch, lambda: replaced(job_cluster))
    code, _, errors = rljob(command, "small")
    assert code != 0
    assert errors == Mentions("somebody else changed, deleted or replaced", "nothing was done")
    job = job_cluster.job("small")
    assert "annotations" not in object_at(job, "metadata")
    assert object_at(job, "spec").get("suspend") is not True


def test_a_status_that_the_operator_writes_meanwhile_is_no_change_of_the_job(
    job_cluster: JobCluster, rljob: Rljob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_cluster.create_small_job()
    changes_after_reading(monkeypatch, lambda: job_cluster.write_status("small", {"phase": "Provisioning"}))
    assert rljob("suspend", "small")[0] == 0
    assert object_at(job_cluster.job("small"), "spec")["suspend"] is True


def test_a_queue_that_somebody_else_changes_is_not_overwritten(
    job_cluster: JobCluster, rljob: Rljob, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rljob("submit", str(file))
    theirs = {"metadata": {"labels": {QUEUE_LABEL: "theirs"}}}
    changes_after_reading(monkeypatch, lambda: job_cluster.change("small", theirs))
    file.write_text(with_labels(f"{{{QUEUE_LABEL}: mine}}"))
    code, _, errors = rljob("submit", str(file))
    assert (code, errors) == (2, Mentions("somebody else changed, deleted or replaced"))
    assert object_at(job_cluster.job("small"), "metadata", "labels") == {QUEUE_LABEL: "theirs"}


def run_policy(job_cluster: JobCluster) -> object:
    spec = job_cluster.job("small")["spec"]
    assert isinstance(spec, dict)
    return spec["runPolicy"]


def test_a_failed_job_can_be_retried(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    rljob("submit", str(file))
    result = {"outcome": "Failed", "reason": "OutOfMemory", "at": "2026-01-31T12:00:00Z"}
    job_cluster.write_status("small", {"phase": "Failed", "result": result})
    code, output, _ = rljob("submit", str(file), "--namespace", job_cluster.namespace)
    assert code == 0
    assert output.splitlines()[1:] == [
        Mentions(f"next: rljob explain small --namespace {job_cluster.namespace}", "failed"),
        Mentions(f"rljob retry small --namespace {job_cluster.namespace}", "checkpoint"),
    ]


def test_a_complete_job_must_be_deleted_first(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    rljob("submit", str(file))
    complete = {"type": "Complete", "status": "True", "reason": "Succeeded"}
    times = {"lastTransitionTime": "2026-01-31T12:00:00Z"}
    job_cluster.write_status("small", {"phase": "Complete", "conditions": [complete | times]})
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    first, following = output.splitlines()
    assert first == Mentions(f"RLJob {job_cluster.namespace}/small", "exists", "Complete")
    assert following == Mentions("next: rljob delete small", "submit", "checkpoint")


def test_submitting_a_job_that_is_being_deleted_asks_to_wait(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    rljob("submit", str(file))
    patch = {"metadata": {"finalizers": ["example.com/slow"]}}
    http, path = job_cluster.server.http, f"{job_cluster.jobs}/small"
    http.patch(path, json=patch).raise_for_status()
    job_cluster.delete("small")
    code, _, errors = rljob("submit", str(file))
    assert code == 2
    assert errors == Mentions(f"error: RLJob {job_cluster.namespace}/small:", "deleted", "submit", "`rljob list`")
    assert "Deleting" in rljob("list")[1]
    assert rljob("explain", "small")[1].splitlines()[-1] == Mentions("deleted", "pods", "grace period")
    http.patch(path, json={"metadata": {"finalizers": None}}).raise_for_status()


def test_mistakes_in_the_file_are_reported_without_a_cluster(
    rljob: Rljob, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    file.write_text(ON_CLUSTER.replace("steps: 3", "steps: three"))
    code, _, errors = rljob("submit", str(file))
    assert code == 2
    assert errors.splitlines()[0] == Mentions(f"{file}:8:12: spec.training.steps:", "whole number", '(seen: "three")')


def test_missing_storage_for_a_cluster_is_reported_before_anything_is_created(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    file.write_text(SMALL_JOB)
    code, _, errors = rljob("submit", str(file))
    assert code == 2
    advice = "storage: {persistentVolumeClaim: <name>}"
    assert errors == Mentions(f"error: {file}: spec.checkpoint.storage:", "required", "cluster", advice)
    assert job_cluster.server.http.get(job_cluster.jobs).json()["items"] == []


def test_a_namespace_of_the_file_is_used_and_repeated_in_the_next_commands(
    job_cluster: JobCluster, rljob: Rljob, file: Path
) -> None:
    other = f"{job_cluster.namespace}-other"
    job_cluster.server.http.post("/api/v1/namespaces", json={"metadata": {"name": other}}).raise_for_status()
    file.write_text(ON_CLUSTER.replace("{name: small}", f"{{name: small, namespace: {other}}}"))
    code, output, _ = rljob("submit", str(file))
    assert code == 0
    assert output.splitlines()[0] == f"RLJob {other}/small created (context here)"
    assert f"rljob status small --namespace {other} --watch" in output
    code, _, errors = rljob("submit", str(file), "--namespace", "elsewhere")
    assert code == 2
    assert errors == Mentions(f"error: {file}:", "metadata.namespace", other, "--namespace", "elsewhere", "remove")


@pytest.mark.usefixtures("job_cluster")
def test_a_missing_namespace_is_named(rljob: Rljob, file: Path) -> None:
    code, _, errors = rljob("submit", str(file), "-n", "nowhere")
    assert code == 2
    assert errors == Mentions("error: context here:", "API server", 'namespaces "nowhere" not found')


def test_a_rejection_shows_the_message_of_the_server(job_cluster: JobCluster, rljob: Rljob, file: Path) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rljobs.rljob.dev": "0"}}}
    path = f"/api/v1/namespaces/{job_cluster.namespace}/resourcequotas"
    job_cluster.server.http.post(path, json=quota).raise_for_status()
    # No quota controller runs here to copy this.
    status = {"status": {"hard": {"count/rljobs.rljob.dev": "0"}, "used": {"count/rljobs.rljob.dev": "0"}}}
    job_cluster.server.http.patch(f"{path}/none/status", json=status).raise_for_status()
    code, _, errors = rljob("submit", str(file))
    assert code == 2
    message = (
        'rljobs.rljob.dev "small" is forbidden: exceeded quota: none, requested: count/rljobs.rljob.dev=1, used:'
        " count/rljobs.rljob.dev=0, limited: count/rljobs.rljob.dev=0"
    )
    assert errors == Mentions("error: context here:", "API server", message)
