"""`rljob get-results` and the copy for `rljob view`, on a real API server. The stand-in kubelet runs the pod's program
as a process of this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from rljob.cluster import ClusterOptions
from rljob.polling import Clock
from rljob.results import pod_program
from rljob_api.constants import LABEL_RESULTS_OF
from rljob_api.contract_documents import load_run_state
from rljob_cli.cluster import results
from rljob_cli.cluster import view_job as view_of_job
from rljob_cli.cluster.view_job import view_job
from rljob_cli.local.view import ViewOptions, write_view
from rljob_page.page import WrittenPage
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import NODE, JobCluster, StandInKubelet
from rljob_testing.cli.pod_runner import PodRunner, running_pods
from rljob_testing.pages import REPOSITORY

pytestmark = pytest.mark.apiserver

Rljob = Callable[..., tuple[int, str, str]]
STORAGE = "  checkpoint: {storage: {persistentVolumeClaim: data, subPath: team/small}}\n"
SINCE = "2026-11-27T12:00:00Z"
ATTEMPT = {"number": 1, "cluster": "small-1", "started": SINCE}
PODS = {"image": "trainer:1", "imagePullPolicy": "IfNotPresent", "runAsUser": 1234}


def claim_object(modes: list[str]) -> dict[str, object]:
    resources = {"requests": {"storage": "1Gi"}}
    return {"metadata": {"name": "data"}, "spec": {"accessModes": modes, "resources": resources}}


def create_claim(cluster: JobCluster, *, modes: tuple[str, ...] = ("ReadWriteMany",), phase: str = "Bound") -> None:
    path = f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims"
    cluster.http.post(path, json=claim_object(list(modes))).raise_for_status()
    cluster.http.patch(f"{path}/data/status", json={"status": {"phase": phase}}).raise_for_status()


@pytest.fixture
def job(job_cluster: JobCluster) -> JobCluster:
    """A namespace with a job that has run."""
    job_cluster.create_small_job(STORAGE)
    job_cluster.write_status("small", {"attempts": [ATTEMPT], "pods": PODS})
    return job_cluster


@pytest.fixture
def access_mode() -> str:
    return "ReadWriteMany"


@pytest.fixture
def claim(job: JobCluster, kubelet: StandInKubelet, tmp_path: Path, access_mode: str) -> Iterator[Path]:
    """The folder of the job in its claim."""
    create_claim(job, modes=(access_mode,))
    folder = tmp_path / "claim"
    (folder / "run" / "export").mkdir(parents=True)
    (folder / "run" / "export" / "model.safetensors").write_bytes(os.urandom(1_000_000))
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    kubelet.mounts["/rljob/storage"] = folder
    kubelet.environment["RLJOB_PROGRAM"] = Path(pod_program.__file__).read_text()
    yield folder
    kubelet.break_after.clear()


@pytest.fixture
def pods(job: JobCluster) -> Iterator[PodRunner]:
    with running_pods(job) as runner:
        yield runner


def short_sleep(seconds: float) -> None:
    time.sleep(min(seconds, 0.02))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses between requests, and a cache folder of the test's own."""
    for module in (results, view_of_job):
        monkeypatch.setattr(module, "Clock", lambda: Clock(sleep=short_sleep))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class SteppedClock:
    """A clock that only advances when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.after_steps: tuple[int, Callable[[], object]] | None = None
        """A number of sleeps, and what happens then."""
        self.later: tuple[int, Callable[[], object]] | None = None

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.seconds)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
        for event in (self.after_steps, self.later):
            if event is not None and event[0] == self.steps:
                event[1]()


def pulling(job: JobCluster, pod: str) -> dict[str, object]:
    about = {"kind": "Pod", "name": pod, "namespace": job.namespace}
    return {
        "metadata": {"generateName": "e-"},
        "involvedObject": about,
        "type": "Normal",
        "reason": "Pulling",
        "message": 'Pulling image "trainer:1"',
        "firstTimestamp": SINCE,
        "lastTimestamp": SINCE,
    }


def wait_until_deleted(pods: PodRunner, but: Sequence[str] = ()) -> None:
    deadline = time.monotonic() + 30
    while pods.names() != list(but):
        assert time.monotonic() < deadline, pods.names()
        time.sleep(0.02)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_model_and_metrics_are_copied_and_the_pod_is_deleted(
    rljob: Rljob, claim: Path, pods: PodRunner, tmp_path: Path
) -> None:
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert "2 new files" in output
    assert "<html" in (tmp_path / "copy" / "view.html").read_text()
    assert "page: " in output
    assert digest(tmp_path / "copy/export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    wait_until_deleted(pods)


def test_broken_connections_continue_and_a_finished_copy_does_not_start_again(
    rljob: Rljob, claim: Path, pods: PodRunner, kubelet: StandInKubelet, tmp_path: Path
) -> None:
    kubelet.break_after = [400_000, 300_000]
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert output.count("the connection broke") == 2
    assert digest(tmp_path / "copy/export/model.safetensors") == digest(claim / "run/export/model.safetensors")
    assert len(pods.created) == 1
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert "0 new files, 0 B received, 2 were there already" in output


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


def test_after_ctrl_c_the_pod_is_deleted_and_the_next_command_continues(
    rljob: Rljob, claim: Path, pods: PodRunner, kubelet: StandInKubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(kubelet.asked)

    def interrupt_after_the_break(seconds: float) -> None:
        if len(kubelet.asked) > before:
            raise KeyboardInterrupt
        short_sleep(seconds)

    kubelet.break_after = [400_000]
    with monkeypatch.context() as patched:
        patched.setattr(results, "Clock", lambda: Clock(sleep=interrupt_after_the_break))
        code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 130
    assert "run the command again" in output
    wait_until_deleted(pods)
    assert not (tmp_path / "copy/export/model.safetensors").exists()
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert digest(tmp_path / "copy/export/model.safetensors") == digest(claim / "run/export/model.safetensors")


def test_a_pod_that_is_deleted_during_the_copy_is_replaced(
    rljob: Rljob, job: JobCluster, claim: Path, pods: PodRunner, kubelet: StandInKubelet, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = len(kubelet.asked)

    def delete_after_the_break(seconds: float) -> None:
        if len(kubelet.asked) == before + 1:
            job.delete_pod(pods.names()[0])
            kubelet.asked.append(("deleted", {}))
        short_sleep(seconds)

    kubelet.break_after = [400_000]
    monkeypatch.setattr(results, "Clock", lambda: Clock(sleep=delete_after_the_break))
    code, _, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert len(pods.created) == 2
    assert digest(tmp_path / "copy/export/model.safetensors") == digest(claim / "run/export/model.safetensors")


@pytest.mark.usefixtures("claim")
def test_left_overs_of_earlier_commands_are_deleted_and_pods_in_use_are_not(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path
) -> None:
    uid = job.http.get(f"{job.jobs}/small").json()["metadata"]["uid"]
    pods.statuses = [{"phase": "Succeeded"}, {"phase": "Running"}]
    job.create_pod("left-over", {LABEL_RESULTS_OF: uid}, ["results"], {"phase": "Succeeded"})
    job.create_pod("of-a-colleague", {LABEL_RESULTS_OF: uid}, ["results"], {"phase": "Running"})
    assert rljob("get-results", "small", str(tmp_path / "copy"))[0] == 0
    wait_until_deleted(pods, but=["of-a-colleague"])


NO_IMAGE = {"name": "results", "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "trainer:1 is absent"}}}
NO_PYTHON = {"terminated": {"reason": "StartError", "message": 'exec: "python3": not found', "exitCode": 128}}
CONTAINER = {"image": "trainer:1", "imageID": "", "ready": False, "restartCount": 0}


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
    clock.after_steps = 3, lambda: job.warn("Pod", pods.names()[0], reason, message, count=1, seen=SINCE)
    monkeypatch.setattr(results, "Clock", lambda: Clock(clock.now, clock.sleep))
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 2
    assert all(text in errors for text in (reason, message, advice)), errors
    assert 60 <= clock.seconds < 70
    wait_until_deleted(pods)


@pytest.mark.usefixtures("claim")
def test_while_the_image_is_pulled_the_command_waits(
    rljob: Rljob, job: JobCluster, pods: PodRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods.statuses = [{"phase": "Pending"}]
    clock = SteppedClock()

    def pull() -> None:
        job.http.post(f"/api/v1/namespaces/{job.namespace}/events", json=pulling(job, pods.names()[0]))

    clock.after_steps = 3, pull
    clock.later = 200, lambda: job.write_pod_status(pods.names()[0], {"phase": "Running"})
    monkeypatch.setattr(results, "Clock", lambda: Clock(clock.now, clock.sleep))
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert "Pulling image" in output


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
    pods.statuses = [{"phase": "Running"}]
    job.http.post(pods.path, json={"metadata": {"name": "head"}, "spec": spec}).raise_for_status()
    job.write_pod_status("head", {"phase": "Running"})
    assert rljob("get-results", "small", str(tmp_path / "copy"))[0] == 0
    created = pods.created[-1]["spec"]
    assert isinstance(created, dict)
    rule = created["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    fields = [{"key": "metadata.name", "operator": "In", "values": [NODE]}]
    assert rule == {"nodeSelectorTerms": [{"matchFields": fields}]}
    assert taint in created["tolerations"]


@pytest.mark.usefixtures("claim")
def test_a_folder_with_other_files_is_left_alone(rljob: Rljob, pods: PodRunner, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "metrics.jsonl").write_text("of a run on this machine\n")
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert (code, "has files of something else" in errors) == (2, True)
    assert (tmp_path / "copy" / "metrics.jsonl").read_text() == "of a run on this machine\n"
    assert pods.created == []


def test_before_the_first_attempt_there_are_no_results(rljob: Rljob, job_cluster: JobCluster, tmp_path: Path) -> None:
    job_cluster.create_small_job(STORAGE)
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert (code, "has no attempt yet" in errors) == (2, True)


def test_view_watches_until_the_job_finishes_and_copies_only_what_has_grown(
    job: JobCluster, claim: Path, pods: PodRunner, kubelet: StandInKubelet, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pages: list[tuple[str, str]] = []

    def record(options: ViewOptions) -> WrittenPage:
        state = load_run_state((options.folder / "rljob-run-state.json").read_text())
        pages.append(((options.folder / "metrics.jsonl").read_text(), state.phase.value))
        return write_view(options)

    monkeypatch.setattr(view_of_job, "write_view", record)
    steps = iter(range(2, 100))

    def train(seconds: float) -> None:
        if seconds != view_of_job.WATCH_SECONDS:
            short_sleep(seconds)
            return
        step = next(steps)
        with (claim / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        if step == 3:
            job.write_status("small", {"result": job_statuses.COMPLETE})

    status = job_statuses.full_status() | {"attempts": [ATTEMPT | {"state": "Running"}]}
    job.write_status("small", status)
    options = ViewOptions(tmp_path, watch=True, output=tmp_path / "page.html")
    selected = ClusterOptions(kubeconfig=job.kubeconfig)
    console = Console(file=io.StringIO(), width=200)
    assert view_job(selected, "small", None, options, console, Clock(sleep=train)) == 0
    assert [(text.count("step"), phase) for text, phase in pages] == [(1, "Running"), (2, "Running"), (3, "Complete")]
    assert "Complete at step 12 of 80" in (tmp_path / "page.html").read_text()
    (folder,) = (tmp_path / "cache" / "rljob" / "view" / job.namespace).iterdir()
    assert not (folder / "export").exists(), "the page does not need the model"
    assert len(pods.created) == 1
    programs = [path for path, _ in kubelet.asked if path.startswith(f"/exec/{job.namespace}/")]
    assert len(programs) == 1, "the connection stays open between two copies"
    wait_until_deleted(pods)


def test_view_means_a_folder_if_there_is_one_and_otherwise_a_job(
    rljob: Rljob, job: JobCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = rljob("view", "other")
    assert (code, "other: there is no folder of this name, and for a job: RLJob other: not found" in errors) == (
        3,
        True,
    )
    code, _, errors = rljob("view", "./small")
    assert (code, "small: is not a folder" in errors) == (2, True)
    (tmp_path / "small").mkdir()
    code, _, errors = rljob("view", "small")
    assert (code, "small: is not the folder of a run" in errors) == (2, True)
    code, _, errors = rljob("view", "small", "--job")
    assert (code, f"RLJob {job.namespace}/small: its claim data does not exist" in errors) == (2, True)
