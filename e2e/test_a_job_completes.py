"""A job is applied from one file, trains on two GPU pods, reports its progress, and is cleaned up."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from safetensors import safe_open

from rljob.cluster import ClusterOptions, connect
from rljob.results.download import Download
from rljob.results.pod import ResultsPod
from rljob.results.pod_client import PodClient
from rljob.results.selection import Part, Selection
from rljob_api.conditions import ConditionType
from rljob_api.constants import LABEL_RESULTS_OF
from rljob_kind.processes import run
from rljob_kind.progress import Progress
from rljob_testing.cluster.kubectl import Kubectl, StatusRecording, recorded_statuses, wait_for

JOB = "sort-digits"
CLUSTER = f"{JOB}-1"
STEPS = 40
LARGE_BYTES = 200_000_000
"""More than all buffers between the pod and this process hold, so that bytes are missing when the pod is deleted."""


@dataclass(frozen=True)
class Finished:
    """A completed job."""

    recording: StatusRecording
    applied_at: float
    storage: Path
    """The job's folder in the shared storage."""
    gpus_of_workers: list[str]
    """The GPU limit of each worker pod."""
    dashboard_answers: tuple[int, int]
    """HTTP status of the dashboard behind `rljob dashboard`: without a token, and with the printed one."""


@pytest.fixture(scope="module")
def finished(kubectl: Kubectl, storage: Path, jobs: Path, rljob: list[str]) -> Iterator[Finished]:
    applied_at = time.time()
    kubectl("apply", "-f", str(jobs / f"{JOB}.yaml"))
    with recorded_statuses(kubectl, JOB) as recording:
        wait_for(recording.first_step, "the first training step", timeout_seconds=420)
        limits = "jsonpath={.items[*].spec.containers[0].resources.limits.nvidia\\.com/gpu}"
        gpus = kubectl("get", "pods", "-l", f"rljob.dev/job={JOB},rljob.dev/pool=main", "-o", limits).split()
        answers = visited_dashboard(rljob)
        kubectl("wait", "--for=condition=Complete", f"rljob/{JOB}", "--timeout=420s", timeout_seconds=430)
        # The recorder's watch may be a moment behind that of kubectl.
        wait_for(lambda: recording.when(ConditionType.COMPLETE), "the end to be recorded", timeout_seconds=30)
    yield Finished(recording, applied_at, storage / JOB, gpus, answers)
    kubectl("delete", "rljob", JOB, "--ignore-not-found")


def visited_dashboard(rljob: list[str]) -> tuple[int, int]:
    """Runs `rljob dashboard` until it has printed the token, and asks the dashboard without and with it."""
    command = [*rljob, "dashboard", JOB]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as shown:
        assert shown.stdout is not None
        url = shown.stdout.readline().split()[-1]
        token = shown.stdout.readline().split()[-1]
        try:
            with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
                without = http.get("/api/version")
                with_token = http.get("/api/version", headers={"Authorization": f"Bearer {token}"})
        finally:
            shown.terminate()
        assert shown.wait(30) == 0
    return without.status_code, with_token.status_code


def test_the_dashboard_was_reached_with_the_printed_token(finished: Finished) -> None:
    assert finished.dashboard_answers == (401, 200)


def test_progress_was_in_the_status_while_the_job_ran(finished: Finished) -> None:
    running = [
        s.status.progress
        for s in finished.recording.sightings
        if s.status.progress and not any(c.type == "Complete" and c.status == "True" for c in s.status.conditions)
    ]
    steps = sorted({progress.step for progress in running if 0 < progress.step < STEPS})
    assert len(steps) >= 2, steps
    assert any(progress.reward_mean is not None and progress.eta_seconds is not None for progress in running)


def test_the_status_changed_at_least_every_ten_seconds(finished: Finished) -> None:
    times = [s.at for s in finished.recording.sightings if s.status.progress and 0 < s.status.progress.step < STEPS]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps, default=0.0) <= 10.0, gaps


def test_conditions_came_in_order(finished: Finished) -> None:
    order = [
        ConditionType.SPEC_VALID,
        ConditionType.CLUSTER_READY,
        ConditionType.PLACEMENT_FEASIBLE,
        ConditionType.JOB_SUBMITTED,
        ConditionType.PROGRESSING,
        ConditionType.CHECKPOINTED,
        ConditionType.COMPLETE,
    ]
    times = [(finished.recording.when(condition) or 0.0, condition) for condition in order]
    assert all(at > 0 for at, _ in times), times
    assert [at for at, _ in times] == sorted(at for at, _ in times), times
    assert finished.recording.when(ConditionType.FAILED) is None


def test_the_job_ran_on_two_worker_pods_with_one_gpu_each(finished: Finished) -> None:
    assert finished.gpus_of_workers == ["1", "1"]


def test_the_checkpoint_loads(finished: Finished, kubectl: Kubectl) -> None:
    checkpoint = kubectl.status(JOB).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    assert checkpoint.uri.startswith(f"pvc://rljob-storage/{JOB}/checkpoints/")
    folder = finished.storage / "checkpoints" / checkpoint.uri.rsplit("/", 1)[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 2, manifest
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            assert len(list(tensors.keys())) > 0


def test_the_export_loads(finished: Finished, kubectl: Kubectl) -> None:
    assert kubectl.status(JOB).export_uri == f"pvc://rljob-storage/{JOB}/run/export"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.storage / "run" / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).vocab_size > 0
    assert sum(parameter.numel() for parameter in model.parameters()) > 100_000


@pytest.mark.usefixtures("finished")
def test_only_the_rljob_is_left(kubectl: Kubectl) -> None:
    wait_for(lambda: not kubectl.names("pods", f"rljob.dev/job={JOB}"), "all pods are deleted", timeout_seconds=90)
    assert kubectl.names("rayclusters") == []
    status = kubectl.status(JOB)
    assert status.phase == "Complete"
    assert [a.outcome for a in status.attempts] == ["Succeeded"]


@pytest.mark.usefixtures("finished")
def test_describe_shows_the_events(kubectl: Kubectl) -> None:
    described = kubectl("describe", "rljob", JOB)
    events = described.split("Events:")[1]
    for reason in ("Ready", "Submitted", "Training", "Saved", "Succeeded"):
        assert f" {reason} " in events, events


def test_seconds_by_stage(finished: Finished, progress: Progress) -> None:
    """Not a check of speed: adds the durations to the report of the run."""
    recording = finished.recording
    moments = {
        "apply to SpecValid": recording.when(ConditionType.SPEC_VALID),
        "to all pods and Ray nodes ready": recording.when(ConditionType.CLUSTER_READY),
        "to submitted": recording.when(ConditionType.JOB_SUBMITTED),
        "to the first step": recording.first_step(),
        "to Complete": recording.when(ConditionType.COMPLETE),
    }
    before = finished.applied_at
    for name, at in moments.items():
        assert at is not None, name
        progress.add(f"job: {name}", at - before)
        before = at


def test_the_results_are_fetched_and_the_page_is_written(
    finished: Finished, rljob: list[str], kubectl: Kubectl, tmp_path: Path
) -> None:
    run([*rljob, "get-results", JOB, str(tmp_path / "results")])
    copied, run_folder = tmp_path / "results", finished.storage / "run"
    files = [file.relative_to(run_folder) for file in run_folder.rglob("*") if file.is_file()]
    # The model's configuration is copied with the checkpoints.
    expected = [file for file in files if file.parts[0] not in {"logs", "model-config"}]
    assert {file: digest(copied / file) for file in expected} == {file: digest(run_folder / file) for file in expected}
    assert "<html" in (copied / "view.html").read_text()
    wait_for(lambda: kubectl.names("pods", LABEL_RESULTS_OF) == [], "the pod is deleted", timeout_seconds=60)


def test_a_copy_continues_when_its_pod_is_deleted(
    finished: Finished, kubectl: Kubectl, kubeconfig: Path, tmp_path: Path
) -> None:
    large = finished.storage / "run" / "export" / "large.bin"
    large.write_bytes(os.urandom(LARGE_BYTES))
    progress = DeletingProgress(kubectl)
    cluster = connect(ClusterOptions(kubeconfig=kubeconfig))
    selection = Selection(only=frozenset({Part.MODEL}))
    with ResultsPod(cluster, cluster.job(JOB), progress.note) as pod:
        download = Download(lambda: PodClient(pod.connect()), selection, tmp_path / "results", progress, time.sleep)
        downloaded = download.run()
        download.close()
    assert progress.is_deleted
    breaks = [note for note in progress.notes if not note.startswith("waiting: ")]
    assert len(breaks) == 1, progress.notes
    assert digest(tmp_path / "results" / "export" / "large.bin") == digest(large)
    size = sum(file.stat().st_size for file in large.parent.iterdir())
    assert downloaded.num_bytes == size, "bytes were sent twice"
    large.unlink()
    wait_for(lambda: kubectl.names("pods", LABEL_RESULTS_OF) == [], "the pod is deleted", timeout_seconds=60)


@dataclass
class DeletingProgress:
    """Deletes the pod when a tenth of the file has arrived."""

    kubectl: Kubectl
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    is_deleted: bool = False

    def plan(self, num_files: int, num_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > LARGE_BYTES / 10 and not self.is_deleted:
            self.is_deleted = True
            self.kubectl("delete", "pod", "-l", LABEL_RESULTS_OF)

    def note(self, text: str) -> None:
        self.notes.append(text)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
