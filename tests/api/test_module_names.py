"""Functions of the user's whose module is called like one of the standard library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_file, load_job_file_to_run
from rljob_api.module_names import standard_module_problem

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: example}
spec:
  pools: [{name: main, gpusPerNode: 2}]
  training:
    model: {source: owner/model}
    dataset: {type: File, file: {path: train.jsonl}}
    steps: STEPS
    rewards:
    - {type: Function, function: {path: "REWARD"}}
    algorithm:
      advantage: {type: Function, function: {path: "ADVANTAGE"}}
      loss: {type: Function, function: {path: "LOSS"}}
"""


def job(steps: str, reward: str, advantage: str, loss: str) -> str:
    return JOB.replace("STEPS", steps).replace("REWARD", reward).replace("ADVANTAGE", advantage).replace("LOSS", loss)


def test_each_function_is_refused_at_its_place_beside_other_problems(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job("0", "numbers:score", "random.own:advantage", "types:loss"))
    with pytest.raises(JobFileError) as caught:
        load_job_file_to_run(file)
    assert [(problem.line, problem.column, problem.path) for problem in caught.value.problems] == [
        (9, 12, "spec.training.steps"),
        (11, 41, "spec.training.rewards[0].function.path"),
        (13, 52, "spec.training.algorithm.advantage.function.path"),
        (14, 47, "spec.training.algorithm.loss.function.path"),
    ]
    assert caught.value.problems[1].message == (
        "'numbers' is the name of a module of Python's standard library, which is imported in place of yours or fails"
        " because of it (seen: 'numbers:score'); rename your file or folder, for example to my_numbers, and name it"
        " here"
    )


@pytest.mark.parametrize("path", ["my_numbers:score", "rewards.numbers:score", "math_verify.grader:verify", "numpy:f"])
def test_other_modules_are_none_of_the_standard_library(tmp_path: Path, path: str) -> None:
    assert standard_module_problem(path) is None
    file = tmp_path / "job.yaml"
    file.write_text(job("3", path, path, path))
    assert load_job_file_to_run(file) == load_job_file(file)
