"""`rljob run --ray`: the job file and its folder are here, the workers on a Ray cluster that is there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_testing.command_line import Workplace
from rljob_testing.training_runs import RunFiles, small_job

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


def test_rewards_are_scored_by_a_copy_of_the_folder(tmp_path: Path, cluster: str) -> None:
    place = Workplace(tmp_path)
    job = small_job(num_workers=2, steps=2, reward={"function": {"path": "my_rewards:score"}, "numProcesses": 2})
    place.job_file.write_text(json.dumps(job))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").touch()
    (tmp_path / "helpers" / "scores.py").write_text("GOOD = 0.75\n")
    (tmp_path / "weights.json").write_text("{}")
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
