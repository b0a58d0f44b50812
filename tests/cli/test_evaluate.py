"""`rljob evaluate`: the job that it makes of a job file, its run folder, and the table of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_api.job_file import load_job_text
from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.rules import violations
from rljob_cli.errors import CliError
from rljob_cli.local.evaluation_job import EvaluationOptions, checkpoint_source, evaluation_job
from rljob_cli.local.evaluation_table import evaluation_table
from rljob_cli.local.run_options import RunOptions
from rljob_testing.messages import Mentions

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  pools:
  - {name: train, nodes: 1, gpusPerNode: 2}
  - {name: other, nodes: 1, gpusPerNode: 2}
  roles: {ref: {pool: other, shardSize: 2}, critic: {pool: other}}
  training:
    steps: 20
    batchSize: 4
    model: {source: owner/model, revision: main, lora: {rank: 4}}
    dataset: {type: File, file: {path: rows.jsonl}}
    rewards: [{type: MathAnswer}]
    algorithm: {type: PPO, kl: {coefficient: 0.1}}
    critic: {warmupSteps: 2}
    optimizer: {warmupSteps: 5}
    timelineSteps: [3]
    profile: {steps: [2]}
    trackers: [{type: MLflow}]
    evaluations:
    - {name: heldout, dataset: {type: File, file: {path: a.jsonl}}, numSamples: 2, atStart: false}
    - {name: gsm8k, dataset: {type: File, file: {path: b.jsonl}}, greedy: false, numSamples: 4}
  checkpoint: {storage: {persistentVolumeClaim: a}, keepBest: {metric: eval/heldout/greedy}}
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a checkpoint and an export."""
    folder = tmp_path / "runs" / "small"
    (folder / "checkpoints" / "step-00000020.start-0001").mkdir(parents=True)
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text("{}")
    return folder.parent


def made(*names: str, checkpoint: str | None = None, text: str = JOB) -> RLJob:
    return evaluation_job(load_job_text(text), EvaluationOptions(checkpoint, names))


def test_nothing_is_left_that_only_training_uses() -> None:
    spec = made().spec
    training = spec.training
    assert (training.steps, training.critic, training.profile, training.timeline_steps) == (0, None, None, ())
    assert training.model.source == "owner/model"
    assert (training.model.revision, training.model.lora) == ("main", None)
    assert [each.name for each in training.evaluations] == ["heldout", "gsm8k"]
    assert [pool.name for pool in spec.pools] == ["train"]
    assert not violations(spec)


def test_chosen_evaluations_keep_the_order_of_the_file() -> None:
    assert [each.name for each in made("gsm8k", "heldout").spec.training.evaluations] == ["heldout", "gsm8k"]
    assert [each.name for each in made("gsm8k").spec.training.evaluations] == ["gsm8k"]


def test_an_unknown_evaluation_and_a_job_without_evaluations_are_rejected() -> None:
    with pytest.raises(CliError) as caught:
        made("gsm8")
    assert str(caught.value) == Mentions("--evaluation", "'gsm8'", "did you mean gsm8k?", "heldout, gsm8k")
    head, _, tail = JOB.partition("    evaluations:")
    without = head + "  checkpoint: {}\n" if tail else ""
    with pytest.raises(CliError, match=r"spec\.training\.evaluations: the job has none; add one"):
        made(text=without)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs/small", "run://{runs}/small"),
        ("runs/small/", "run://{runs}/small"),
        ("run://runs/small@step-20", "run://{runs}/small@step-20"),
        ("runs/small@step-20", "run://{runs}/small@step-20"),
        ("runs/small/checkpoints/step-00000020.start-0001", "run://{runs}/small@step-20"),
        ("runs/small/export", "{runs}/small/export"),
    ],
)
def test_a_checkpoint_is_the_source_of_the_model(
    runs: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    monkeypatch.chdir(runs.parent)
    model = made(checkpoint=given).spec.training.model
    assert (model.source, model.revision) == (expected.format(runs=runs), None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs/none", ("'runs/none' is not a folder", "runs/NAME@step-20")),
        ("runs/small@20", ("'runs/small@20' is not a folder",)),
        ("~nobody-has-this-name/x", ("is not a folder",)),
        ("x" * 300, ("is not a folder",)),
        ("", ("'' is not a folder",)),
        ("runs/small/export@step-20", ("is a model, which has no steps; remove @step-20",)),
        ("s3://bucket/run", ("s3://bucket/run is in a bucket", "rljob get-results NAME --checkpoints")),
    ],
)
def test_other_checkpoints_are_rejected(
    runs: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.chdir(runs.parent)
    with pytest.raises(CliError) as caught:
        checkpoint_source(given)
    assert str(caught.value) == Mentions("--checkpoint", *expected)


def test_each_evaluation_has_a_run_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = RunOptions(Path("job.yaml"), evaluation=EvaluationOptions("runs/small", ("gsm8k",)))
    for number in (1, 2):
        folder = options.folder_of_run("small")
        assert folder == Path("runs") / f"small-evaluation-{number}"
        folder.mkdir(parents=True)
    assert options.command(resume=False) == "rljob evaluate job.yaml --checkpoint runs/small --evaluation gsm8k"


def test_the_table_has_every_metric(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "wall_time": 0.0, "eval/heldout/greedy": 0.25, "eval/heldout/mean_at_2": 0.5},
        {"step": 0, "wall_time": 1.0, "eval/heldout/response_length_mean": 12.34, "eval/gsm8k/reward/a/mean_at_4": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = evaluation_table(tmp_path, made().spec.training.evaluations)
    assert [line.plain.split() for line in lines] == [
        ["EVALUATION", "METRIC", "VALUE"],
        ["heldout", "greedy", "0.2500"],
        ["heldout", "mean_at_2", "0.5000"],
        ["heldout", "response_length_mean", "12.3"],
        ["gsm8k", "reward/a/mean_at_4", "1.0000"],
    ]
    assert evaluation_table(tmp_path / "missing", made().spec.training.evaluations) == []
