"""`rljob run --ray`: the job file and its folder are here, the workers on a Ray cluster that is there already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from rljob_testing.command_line import Workplace
from rljob_testing.ray_cluster import pod_cluster
from rljob_testing.ray_jobs import RayJob
from rljob_testing.settings import inherited_environment
from rljob_testing.training_runs import Document, RunFiles, function_reward, small_job

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REWARD = """
from pathlib import Path

from helpers.scores import GOOD

FOLDER = Path(__file__).parent


def score(prompt, response, answer, row):
    # Ray unpacks what goes along under this name.
    is_copy = FOLDER.name.startswith("_ray_pkg_")
    return GOOD if is_copy and Path("weights.json").exists() and not (FOLDER / "runs").exists() else 0.0
"""


def job_with_code(folder: Path) -> Document:
    """A job of two workers whose reward needs what lies beside it."""
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "scores.py").write_text("GOOD = 0.75\n")
    (folder / "weights.json").write_text("{}")
    return small_job(num_workers=2, steps=2, rewards=[function_reward("my_rewards:score", numProcesses=2)])


def test_rewards_are_scored_by_a_copy_of_the_folder(tmp_path: Path, cluster: str) -> None:
    place = Workplace(tmp_path)
    place.job_file.write_text(json.dumps(job_with_code(tmp_path)))
    process = place.command(
        "run", "job.yaml", "--ray", cluster, RLJOB_DEVICE="cpu", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1"
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"connecting to {cluster}" in output
    assert RunFiles(place.run_folder).series("critic/rewards/mean") == [0.75, 0.75]


def test_a_folder_that_is_too_large_is_refused(tmp_path: Path, cluster: str) -> None:
    place = Workplace(tmp_path)
    place.job_file.write_text(json.dumps(small_job()))
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(600 << 20)
    process = place.command("run", "job.yaml", "--ray", cluster, RLJOB_DEVICE="cpu", RAY_AUTH_MODE="disabled")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert f"{tmp_path}: cannot go along to the cluster" in output
    assert "or name them in its .gitignore" in output


def test_a_ray_job_brings_the_folder_along(tmp_path: Path) -> None:
    """`ray job submit` starts `rljob run --ray auto` on the head; the workers are on two other nodes."""
    folder, run_folder = tmp_path / "job", tmp_path / "run"
    folder.mkdir()
    (tmp_path / "nodes").mkdir()
    job = job_with_code(folder)
    cast(Document, job["spec"])["pools"] = [{"name": "main", "nodes": 2, "gpusPerNode": 1}]
    (folder / "job.yaml").write_text(json.dumps(job))
    variables = {"RLJOB_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with pod_cluster(tmp_path / "nodes", "a-token-of-the-test", variables) as cluster:
        # What Ray's command shows while the job runs comes over a socket that it waits for without a limit.
        submitted = subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--no-wait"),
                *("--submission-id", "by-hand", "--address", f"http://127.0.0.1:{cluster.port}"),
                *("--working-dir", str(folder), "--"),
                *("rljob", "run", "job.yaml", "--ray", "auto", "--run-folder", str(run_folder)),
            ],
            env=inherited_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert submitted.returncode == 0, submitted.stdout
        job_of_ray = RayJob(cluster, "by-hand")
        assert job_of_ray.end(seconds=180)["status"] == "SUCCEEDED", job_of_ray.output()
    assert RunFiles(run_folder).series("critic/rewards/mean") == [0.75, 0.75]
