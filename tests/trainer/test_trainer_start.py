"""The start of the trainer's program where the machine or the job's folder is unusual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.handover import TrainerJob, dump_job
from rljob_api.v1alpha1.job import RLJob
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.settings import inherited_environment


@pytest.mark.parametrize(
    ("name", "hidden"), [("torch", "the installed package 'torch'"), ("queue", "Python's own module 'queue'")]
)
def test_a_file_that_hides_a_module_of_the_trainer_is_a_configuration_error(
    tmp_path: Path, name: str, hidden: str
) -> None:
    (tmp_path / f"{name}.py").write_text("def score(prompt, response, answer, row):\n    return 1\n")
    job = TrainerJob(name="small", spec=RLJob.from_wire(valid_job()).spec)
    state = tmp_path / "state.json"
    environment = inherited_environment()
    environment |= {
        "RLJOB_SPEC": dump_job(job),
        "RLJOB_RUN_FOLDER": str(tmp_path / "run"),
        "RLJOB_RUN_STATE_FILE": str(state),
        "PYTHONPATH": f"{tmp_path}:{environment.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rljob_trainer"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    problem = f"{tmp_path}/{name}.py: hides {hidden}, which the trainer needs; rename the file"
    assert problem in done.stderr
    assert "please report it" not in done.stderr
    assert json.loads(state.read_text())["error"]["message"].startswith(problem)


def test_standard_output_accepts_all_characters() -> None:
    program = "import sys\nfrom rljob_trainer.__main__ import main\ncode = main()\nprint('中')\nsys.exit(code)\n"
    environment = {name: value for name, value in inherited_environment().items() if name != "RLJOB_SPEC"}
    environment["PYTHONIOENCODING"] = "ascii"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "\\u4e2d\n")
