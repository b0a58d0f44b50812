"""Names that people write: which slips get "did you mean" (typing errors, not other things with a similar name), and
functions whose module is named like one of the standard library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.errors import JobFileError
from rljob_api.job_file import load_job_file, load_job_file_to_run
from rljob_api.names import similar_names, standard_library_clash
from rljob_api.v1alpha1.algorithm import AlgorithmType
from rljob_api.v1alpha1.model import Dtype
from rljob_api.v1alpha1.policy_loss import LossType

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


@pytest.mark.parametrize(
    ("written", "known", "suggestion"),
    [
        ("GPRO", AlgorithmType, "GRPO"),
        ("grpo", AlgorithmType, "GRPO"),
        ("Dr.GRPO", AlgorithmType, "DrGRPO"),
        ("REINFORCE++", AlgorithmType, "ReinforcePlusPlus"),
        ("remax", AlgorithmType, "ReMax"),
        ("Cliped", LossType, "Clipped"),
        ("kl-cov", LossType, "KLCov"),
        ("float-32", Dtype, "Float32"),
        ("nodess", ["name", "nodes"], "nodes"),
        ("gpusPerNod", ["gpuResource", "gpusPerNode"], "gpusPerNode"),
        ("max_new_tokens", ["maxNewTokens", "maxPromptTokens"], "maxNewTokens"),
        ("naem", ["name", "nodes"], "name"),
        ("stepz", ["steps", "seed"], "steps"),
    ],
)
def test_a_slip_gets_a_suggestion(written: str, known: list[str], suggestion: str) -> None:
    assert similar_names(written, known) == [suggestion]


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("DPO", AlgorithmType),
        ("ORPO", AlgorithmType),
        ("VAPO", AlgorithmType),
        ("REINFORCE", AlgorithmType),
        ("PPO", LossType),
        ("Float16", Dtype),
        ("BFloat32", Dtype),
        ("topN", ["topK", "topP"]),
        ("start", ["status", "stop", "list"]),
        ("", ["name"]),
    ],
)
def test_another_name_is_not_a_slip(written: str, known: list[str]) -> None:
    assert similar_names(written, known) == []


def test_the_nearest_name_comes_first() -> None:
    assert similar_names("scores", ["scorer", "score", "other", "store"], max_names=2) == ["score", "scorer"]


def job(steps: str, reward: str, advantage: str, loss: str) -> str:
    return JOB.replace("STEPS", steps).replace("REWARD", reward).replace("ADVANTAGE", advantage).replace("LOSS", loss)


def test_each_function_is_rejected_at_its_path_beside_other_problems(tmp_path: Path) -> None:
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
    message = caught.value.problems[1].message
    for words in ("Python's standard library", "(seen: 'numbers:score')", "rename", "my_numbers"):
        assert words in message


@pytest.mark.parametrize("path", ["my_numbers:score", "rewards.numbers:score", "math_verify.grader:verify", "numpy:f"])
def test_other_modules_are_not_of_the_standard_library(tmp_path: Path, path: str) -> None:
    assert standard_library_clash(path) is None
    file = tmp_path / "job.yaml"
    file.write_text(job("3", path, path, path))
    assert load_job_file_to_run(file) == load_job_file(file)
