"""`rljob get-results` and the copy for `rljob view`, on a real API server. The stand-in kubelet runs the pod's program
as a process of this machine."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rljob import Client, RejectedError, ResultsError
from rljob.cluster import ClusterOptions
from rljob.polling import Clock
from rljob_api.contract_documents import load_run_state
from rljob_cli.cluster import results
from rljob_cli.cluster import view_job as view_of_job
from rljob_cli.cluster.view_job import view_job
from rljob_cli.local.view import ENDED, WATCHING, ViewOptions, write_view
from rljob_page.page import WrittenPage
from rljob_testing.cli import job_statuses
from rljob_testing.cli.job_cluster import JobCluster, StandInKubelet
from rljob_testing.cli.job_results import (
    ATTEMPT,
    STORAGE,
    short_sleep,
    wait_until_deleted,
)
from rljob_testing.cli.pod_runner import PodRunner

pytestmark = [pytest.mark.apiserver, pytest.mark.usefixtures("quick")]

Rljob = Callable[..., tuple[int, str, str]]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_model_and_metrics_are_copied_and_the_pod_is_deleted(
    rljob: Rljob, claim: Path, pods: PodRunner, tmp_path: Path
) -> None:
    code, output, _ = rljob("get-results", "small", str(tmp_path / "copy"))
    assert code == 0
    assert "2 new or changed files" in output
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
    assert "0 new or changed files, 0 B received, 2 were there already" in output


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
def test_a_folder_with_other_files_is_left_alone(rljob: Rljob, pods: PodRunner, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "metrics.jsonl").write_text("of a run on this machine\n")
    code, _, errors = rljob("get-results", "small", str(tmp_path / "copy"))
    assert (code, "has files that do not belong to" in errors) == (2, True)
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
    output = io.StringIO()
    assert view_job(selected, "small", None, options, Console(file=output, width=200), Clock(sleep=train)) == 0
    assert output.getvalue().endswith(f"{WATCHING}\n{ENDED}\n")
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
    assert (code, "other: no such folder; looked for a job of this name: RLJob other: not found" in errors) == (
        3,
        True,
    )
    code, _, errors = rljob("view", "other", "--job")
    assert (code, "folder" in errors, "RLJob other: not found" in errors) == (3, False, True)
    code, _, errors = rljob("view", "./small")
    assert (code, "small: is not a folder" in errors) == (2, True)
    (tmp_path / "small").mkdir()
    code, _, errors = rljob("view", "small")
    assert (code, "small: is not the folder of a run" in errors) == (2, True)
    code, _, errors = rljob("view", "small", "--job")
    assert (code, f"RLJob {job.namespace}/small: its claim data does not exist" in errors) == (2, True)


def test_the_client_copies_results(job: JobCluster, claim: Path, pods: PodRunner, tmp_path: Path) -> None:
    client = Client(kubeconfig=job.kubeconfig, clock=Clock(sleep=short_sleep))
    downloaded = client.results("small", tmp_path / "copy", only=["model"])
    assert downloaded.written == [tmp_path / "copy" / "export" / "model.safetensors"]
    assert digest(downloaded.written[0]) == digest(claim / "run/export/model.safetensors")
    wait_until_deleted(pods)
    with pytest.raises(RejectedError, match="there is no part weights; use some of model, metrics"):
        client.results("small", tmp_path / "copy", only=["weights"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ResultsError, match="has files that do not belong to"):
        client.results("small", tmp_path / "other")
