"""The pod of `rljob get-results`: where and as whom it runs, why it does not start, and who may create it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rljob.polling import Clock
from rljob_api.constants import LABEL_RESULTS_OF
from rljob_cli.cluster import results
from rljob_testing.cli.job_cluster import NODE, JobCluster
from rljob_testing.cli.job_results import (
    SINCE,
    SteppedClock,
    create_claim,
    pulling,
    wait_until_deleted,
)
from rljob_testing.cli.pod_runner import PodRunner
from rljob_testing.pages import REPOSITORY

pytestmark = [pytest.mark.apiserver, pytest.mark.usefixtures("quick")]

Rljob = Callable[..., tuple[int, str, str]]

NO_IMAGE = {"name": "results", "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "trainer:1 is absent"}}}
NO_PYTHON = {"terminated": {"reason": "StartError", "message": 'exec: "python3": not found', "exitCode": 128}}
CONTAINER = {"image": "trainer:1", "imageID": "", "ready": False, "restartCount": 0}


@pytest.mark.usefixtures("claim")
def test_the_pod_is_restricted_small_and_runs_as_the_user_who_wrote_the_files(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path
) -> None:
    path = f"/api/v1/namespaces/{job.namespace}"
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    job.http.patch(path, json={"metadata": {"labels": level}}).raise_for_status()
    assert rljob("get-results", "small", str(tmp_path / "copy"))[0] == 0
    (pod,) = pods.created
    spec = pod["spec"]
    assert isinstance(spec, dict)
    assert spec["securityContext"]["runAsUser"] == 1234
    assert spec["securityContext"]["supplementalGroups"] == [1234]
    assert "fsGroup" not in spec["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 3600
    (container,) = spec["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("trainer:1", "IfNotPresent")
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "256Mi"}
    assert container["volumeMounts"] == [
        {"name": "storage", "mountPath": "/rljob/storage", "subPath": "team/small", "readOnly": True}
    ]
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    labels = {name for name in metadata["labels"] if name.startswith("rljob.dev/")}
    assert labels == {LABEL_RESULTS_OF}, "with the job's labels it would count as a pod of the job"
    assert metadata["ownerReferences"][0]["name"] == "small"
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"


@pytest.mark.usefixtures("claim")
def test_left_overs_of_earlier_commands_are_deleted_and_pods_in_use_are_not(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path
) -> None:
    uid = job.http.get(f"{job.jobs}/small").json()["metadata"]["uid"]
    job.create_pod("left-over", {LABEL_RESULTS_OF: uid}, ["results"], {"phase": "Succeeded"})
    job.create_pod("of-a-colleague", {LABEL_RESULTS_OF: uid}, ["results"], {"phase": "Running"})
    assert rljob("get-results", "small", str(tmp_path / "copy"))[0] == 0
    wait_until_deleted(pods, but=["of-a-colleague"])


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"phase": "Pending", "containerStatuses": [CONTAINER | NO_IMAGE]},
            ["ErrImageNeverPull", "trainer:1 is absent", "--image"],
        ),
        (
            {"phase": "Failed", "containerStatuses": [CONTAINER | {"name": "results", "state": NO_PYTHON}]},
            ["StartError", "python3", "--image"],
        ),
        (
            {"phase": "Failed", "reason": "OutOfmemory", "message": "Node didn't have enough memory"},
            ["OutOfmemory", "Node didn't have enough memory"],
        ),
    ],
)
@pytest.mark.usefixtures("claim")
def test_a_pod_that_cannot_start_is_one_error_and_is_deleted(
    rljob: Rljob, pods: PodRunner, tmp_path: Path, status: dict[str, object], expected: list[str]
) -> None:
    pods.statuses = [status]
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 2
    assert errors.count("error:") == 1
    assert all(text in errors for text in expected), errors
    wait_until_deleted(pods)


@pytest.mark.parametrize(
    ("reason", "message", "advice"),
    [
        ("FailedMount", "MountVolume.SetUp failed for volume data", "kubectl describe pvc data"),
        ("FailedScheduling", "0/3 nodes are available: 3 Insufficient cpu.", "50m CPU"),
    ],
)
@pytest.mark.usefixtures("claim")
def test_a_pod_that_does_not_start_in_time_is_an_error_with_its_event(
    rljob: Rljob,
    job: JobCluster,
    pods: PodRunner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    message: str,
    advice: str,
) -> None:
    pods.statuses = [{"phase": "Pending"}]
    clock = SteppedClock()
    clock.events = {3: lambda: job.warn("Pod", pods.names()[0], reason, message, count=1, seen=SINCE)}
    monkeypatch.setattr(results, "Clock", lambda: Clock(clock.now, clock.sleep))
    code, output, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 2
    assert all(text in errors for text in (reason, message, advice)), errors
    assert output.count(f"waiting: {message}") == 1
    assert 300 <= clock.seconds < 310
    wait_until_deleted(pods)


@pytest.mark.usefixtures("claim")
def test_the_time_to_pull_the_image_does_not_count_as_time_to_start(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the kubelet writes until the containers have started says nothing.
    unready = {
        "status": "False",
        "reason": "ContainersNotReady",
        "message": "containers with unready status: [results]",
    }
    conditions = [{"type": kind, **unready} for kind in ("Ready", "ContainersReady")]
    pods.statuses = [{"phase": "Pending", "conditions": conditions}]
    clock = SteppedClock()

    events = f"/api/v1/namespaces/{job.namespace}/events"

    def pull() -> None:
        kubelet = pulling(job, pods.names()[0])
        # In the same second, but the scheduler's events have microseconds.
        times = {"firstTimestamp": None, "lastTimestamp": None, "eventTime": SINCE.replace("Z", ".700000Z")}
        source = {"reportingComponent": "default-scheduler", "reportingInstance": "s", "action": "Binding"}
        for event in (kubelet, kubelet | times | source | {"reason": "Scheduled", "message": "assigned"}):
            job.http.post(events, json=event).raise_for_status()

    def end_pull() -> None:
        event = pulling(job, pods.names()[0]) | {"reason": "Pulled", "message": "Successfully pulled image"}
        job.http.post(events, json=event).raise_for_status()

    run = {"phase": "Running"}
    clock.events = {3: pull, 420: end_pull, 423: lambda: job.write_pod_status(pods.names()[0], run)}
    monkeypatch.setattr(results, "Clock", lambda: Clock(clock.now, clock.sleep))
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert "Pulling image" in output
    assert "unready" not in output


@pytest.mark.usefixtures("claim", "default_hangup")
def test_when_the_terminal_is_closed_the_pod_is_deleted(job: JobCluster, pods: PodRunner, tmp_path: Path) -> None:
    pods.statuses = [{"phase": "Pending"}]
    command = [sys.executable, "-m", "rljob_cli", "get-results", "small", str(tmp_path / "copy")]
    with subprocess.Popen(command, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while not pods.created:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 130
    wait_until_deleted(pods)
    assert not (tmp_path / "copy").exists()


def test_a_claim_that_does_not_exist_or_has_no_volume_is_an_error_without_a_pod(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path
) -> None:
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert (code, "claim data does not exist" in errors) == (2, True)
    create_claim(job, phase="Pending")
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert (code, "claim data has no volume (phase: Pending)" in errors) == (2, True)
    assert pods.created == []


@pytest.mark.usefixtures("claim", "pods")
def test_a_quota_that_is_used_up_is_an_error(rljob: Rljob, job: JobCluster, tmp_path: Path) -> None:
    quotas = f"/api/v1/namespaces/{job.namespace}/resourcequotas"
    job.http.post(quotas, json={"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}).raise_for_status()
    # No controller fills in what is used.
    used = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    job.http.patch(f"{quotas}/full/status", json=used).raise_for_status()
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 2
    assert "exceeded quota: full" in errors


@pytest.mark.usefixtures("claim")
def test_the_missing_permission_is_named(rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path) -> None:
    """Everything is allowed except `pods/exec`."""
    rule = {"apiGroups": ["rljob.dev"], "resources": ["rljobs"], "verbs": ["get"]}
    pods_rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "create", "delete"]}
    token = job.account_token({"metadata": {"name": "visitor"}, "rules": [rule, pods_rule]})
    kubeconfig = tmp_path / "visitor"
    kubeconfig.write_text(job.server.kubeconfig(token=token, namespace=job.namespace))
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"), "--kubeconfig", str(kubeconfig))
    assert code == 2
    assert 'resource "pods/exec"' in errors
    assert "docs/install.md" in errors
    wait_until_deleted(pods)


@pytest.mark.usefixtures("claim")
def test_the_documented_roles_suffice(rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "install.md").read_text()
    found = re.findall(r"```yaml\n(apiVersion: rbac.*?)```", text, re.DOTALL)
    roles = [document for part in found for document in YAML(typ="safe", pure=True).load_all(part)]
    rules = [rule for role in roles if role["kind"] == "Role" for rule in role["rules"]]
    token = job.account_token({"metadata": {"name": "visitor"}, "rules": rules})
    kubeconfig = tmp_path / "visitor"
    kubeconfig.write_text(job.server.kubeconfig(token=token, namespace=job.namespace))
    for command in (["get-results", "small", str(tmp_path / "copy")], ["view", "small", "--job"]):
        code, _, errors = rljob(*command, "--kubeconfig", str(kubeconfig))
        assert (code, errors) == (0, "")
    wait_until_deleted(pods)


@pytest.mark.usefixtures("claim")
@pytest.mark.parametrize("access_mode", ["ReadWriteOnce"])
def test_a_read_write_once_claim_is_read_on_the_node_that_has_mounted_it(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path
) -> None:
    volumes = [{"name": "s", "persistentVolumeClaim": {"claimName": "data"}}]
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    spec = {"nodeName": NODE, "containers": [{"name": "ray", "image": "x"}], "volumes": volumes, "tolerations": [taint]}
    job.http.post(pods.path, json={"metadata": {"name": "head"}, "spec": spec}).raise_for_status()
    job.write_pod_status("head", {"phase": "Running"})
    assert rljob("get-results", "small", str(tmp_path / "copy"))[0] == 0
    created = pods.created[-1]["spec"]
    assert isinstance(created, dict)
    rule = created["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    fields = [{"key": "metadata.name", "operator": "In", "values": [NODE]}]
    assert rule == {"nodeSelectorTerms": [{"matchFields": fields}]}
    assert taint in created["tolerations"]
