"""`rljob validate`: every problem with its place and source line, or one line that all is well."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from rljob_cli.validate import validate_file

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
    reward: {type: MathAnswer}
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
        f"{path}:10:5: spec.training.reward.function: the block `function` must be given if `type` is Function, and"
        " only then; write the block that `type` names and no other\n"
        "   10 |     reward: {type: Function}\n"
        "            ^\n"
        f"{path}:12:16: spec.training.batchSize: batchSize * rollout.groupSize must be divisible by nodes * gpusPerNode"
        " of the pool (seen: 64); change one of them, so that every GPU trains on as many responses as the others\n"
        "   12 |     batchSize: 64\n"
        "                       ^\n"
        f"{path}: 2 problems found\n"
    )


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
