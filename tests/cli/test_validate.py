"""`rljob validate`: every problem with its place and source line, or one line that all is well."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from rljob_api.job_file import load_job_file, load_job_text
from rljob_api.v1alpha1.recipes import resolve_algorithm
from rljob_cli.validate import validate_file
from rljob_testing.command_line import Workplace

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: example}
spec:
  pools:
  - {name: main, nodes: 2, gpusPerNode: 6}
  training:
    model: {source: owner/model}
    dataset: {type: File, file: {path: "[bold]train.jsonl"}}
    rewards: [{type: MathAnswer}]
    steps: 10
    batchSize: 72
"""


def validated(path: Path) -> tuple[bool, str]:
    output = io.StringIO()
    job = validate_file(path, Console(file=output, width=80))
    return job is not None, output.getvalue()


def test_a_valid_file_gives_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert validated(path) == (True, f"{path}: RLJob example is valid (pools: main 2x6)\n")


def test_every_problem_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("batchSize: 72", "batchSize: 64").replace("type: MathAnswer", "type: Function"))
    accepted, output = validated(path)
    assert not accepted
    assert output == (
        f"{path}:10:15: spec.training.rewards[0].function: `type: Function` needs this block; add it, or choose"
        " another type\n"
        "   10 |     rewards: [{type: Function}]\n"
        "                      ^\n"
        f"{path}:12:16: spec.training.batchSize: batchSize * rollout.groupSize must be divisible by nodes * gpusPerNode"
        " of the pool / roles.actor.sequenceParallel (seen: 64); change one of them, so that every GPU trains on as"
        " many responses as the others\n"
        "   12 |     batchSize: 64\n"
        "                       ^\n"
        f"{path}: 2 problems found\n"
    )


def test_resolved_prints_a_job_file_and_the_rest_goes_to_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: DrGRPO}\n")
    command = [sys.executable, "-m", "rljob_cli", "validate", "--resolved", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == f"{path}: RLJob example is valid (pools: main 2x6)\n"
    resolved, job = load_job_text(result.stdout).spec.training, load_job_file(path).spec.training
    assert resolved.algorithm == resolve_algorithm(job.algorithm).as_algorithm()
    assert resolved.model_copy(update={"algorithm": job.algorithm}) == job


def test_resolved_prints_no_job_where_there_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "    algorithm: {type: A2C}\n")
    command = [sys.executable, "-m", "rljob_cli", "validate", "--resolved", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert ":13:23: spec.training.algorithm.type: must be one of GRPO, DrGRPO, " in result.stderr


def test_square_brackets_in_a_file_are_not_markup(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("path:", "paht:"))
    _, output = validated(path)
    assert '{paht: "[bold]train.jsonl"}' in output


def test_a_missing_file_is_a_problem_without_a_source_line(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    assert validated(path) == (
        False,
        f"{path}:1:1: the file cannot be read (No such file or directory); check the path\n{path}: 1 problem found\n",
    )


def test_a_reward_in_a_file_called_like_a_module_of_python_is_refused_by_name(workplace: Workplace) -> None:
    text = workplace.job_file.read_text()
    rewards = "rewards: [{type: Function, function: {path: 'numbers:score'}}]"
    workplace.job_file.write_text(text.replace("rewards: [{type: MathAnswer}]", rewards))
    for command in (("validate", "job.yaml"), ("run", "job.yaml"), ("submit", "job.yaml")):
        process = workplace.command(*command)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "job.yaml:12:49: spec.training.rewards[0].function.path: " in output
        assert "'numbers' is the name of a module of Python's standard library" in output
        assert "for example to my_numbers, and name it here\n" in output
    assert not workplace.run_folder.exists()
