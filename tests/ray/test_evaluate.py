"""`rljob evaluate` and jobs that start from another run's checkpoint: they find exactly the scores of that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from rljob_api.job_file import load_job_file
from rljob_cli.local.evaluation_job import EvaluationOptions, evaluation_job
from rljob_testing.cli.rljob_command import JobFolder
from rljob_testing.training import training_runs

pytestmark = pytest.mark.long

NUM_STEPS = 2
LORA: training_runs.Document = {"lora": {"rank": 4, "sync": "Merged"}}
SECOND: training_runs.Document = {"name": "second", "greedy": False, "numSamples": 4, "everySteps": 0}
NOT_AT_START: training_runs.Document = {"spec": {"training": {"evaluations": {"atStart": False}}}}


def job(num_workers: int = 1, **training: training_runs.JsonValue) -> training_runs.Document:
    """A high learning rate, so that each step changes the scores of the responses."""
    evaluations = [training_runs.held_out(16, 1) | {"numSamples": 2}, training_runs.held_out(8, 0) | SECOND]
    changes = {"optimizer": {"learningRate": 1.0e-3}, "steps": NUM_STEPS, "evaluations": evaluations, **training}
    return training_runs.small_job(num_workers=num_workers, **changes)


def results(run: training_runs.Ended | training_runs.RunFiles, step: int) -> dict[str, object]:
    """Everything that the evaluations after a step have found, except times."""
    files = run.files if isinstance(run, training_runs.Ended) else run
    metrics = {
        name: value
        for row in files.metrics()
        for name, value in row.items()
        if name.startswith("eval/") and row["step"] == step
    }
    assert metrics
    return metrics | {
        kind: [(each["evaluation"], each["response"]) for each in files.samples(kind, step)]
        for kind in ("eval_greedy", "eval_sampled")
    }


@pytest.fixture(scope="module")
def trained(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> training_runs.Ended:
    run = training_runs.RunTrainer(tmp_path_factory.mktemp("trained"))(job(2), cluster)
    assert run.exit_code == 0, run.terminal
    assert results(run, 1) != results(run, 2)
    return run


def evaluated(
    folder: Path, run: training_runs.Ended, step: int, document: training_runs.Document, cluster: str
) -> training_runs.Ended:
    """Evaluates the checkpoint of a step of a run, in this process."""
    file = folder / "evaluated.json"
    # Evaluations that are not due at the start are done, too.
    file.write_text(json.dumps(training_runs.merged(document, NOT_AT_START)))
    found = evaluation_job(load_job_file(file), EvaluationOptions(f"{run.files.folder}@step-{step}"))
    ended = training_runs.RunTrainer(folder)(cast(training_runs.Document, found.to_wire()), cluster)
    assert ended.exit_code == 0, ended.terminal
    return ended


def test_a_checkpoint_has_the_scores_of_its_step(trained: training_runs.Ended, tmp_path: Path, cluster: str) -> None:
    found = evaluated(tmp_path, trained, 2, job(), cluster)
    assert results(found, 0) == results(trained, 2)
    assert found.files.checkpoint_names() == []
    assert found.files.training_steps() == []
    assert not (found.files.folder / "export").exists()
    assert not (found.files.folder / "initial-models").exists()
    state = found.files.state()
    assert (state.progress.step, state.progress.total_steps, state.checkpoint) == (0, 0, None)
    assert state.progress.eval_score == trained.files.series("eval/heldout/greedy")[-1]


def test_the_command_prints_every_metric(trained: training_runs.Ended, tmp_path: Path, cluster: str) -> None:
    """After the first step only the first evaluation was due."""
    (tmp_path / "job.yaml").write_text(json.dumps(job()))
    checkpoint = next(trained.files.checkpoints.glob("step-00000001.*"))
    chosen = ("--checkpoint", str(checkpoint), "--evaluation", "heldout")
    process = JobFolder(tmp_path).command("evaluate", "job.yaml", *chosen, "--ray", cluster, OMP_NUM_THREADS="1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    files = training_runs.RunFiles(tmp_path / "runs" / "small-evaluation-1")
    assert results(files, 0) == results(trained, 1)
    lines = [line.split() for line in output.splitlines()]
    for name, value in results(trained, 1).items():
        if name.startswith("eval/heldout/") and not name.endswith("_mean"):
            assert ["heldout", name.rpartition("/")[2], f"{value:.4f}"] in lines


def test_a_job_starts_with_the_scores_of_the_other_run(
    trained: training_runs.Ended, tmp_path: Path, cluster: str
) -> None:
    """When it is resumed, it does not need that run any more."""
    document = job(model={"source": f"run://{trained.files.folder}"}, steps=1)
    run_trainer = training_runs.RunTrainer(tmp_path)
    first = run_trainer(document, cluster)
    assert first.exit_code == 0, first.terminal
    assert results(first, 0) == results(trained, 2)
    moved = trained.files.folder.rename(tmp_path / "moved")
    try:
        resumed = run_trainer(training_runs.merged(document, {"spec": {"training": {"steps": 2}}}), cluster, attempt=2)
        assert resumed.exit_code == 0, resumed.terminal
        assert resumed.files.training_steps() == [1, 2]
        document = job(model={"source": f"run://{trained.files.folder}"}, steps=1)
        missing = training_runs.RunTrainer(tmp_path / "other")
        (tmp_path / "other").mkdir()
        refused = missing(document, cluster)
        assert refused.exit_code == 2
        assert f"spec.training.model.source: 'run://{trained.files.folder}' not found" in refused.terminal
    finally:
        moved.rename(trained.files.folder)


def test_adapters_are_merged(tmp_path: Path, cluster: str) -> None:
    """The policy of a run with adapters, and a job that trains new adapters on top of it."""
    (tmp_path / "first").mkdir()
    adapted = training_runs.RunTrainer(tmp_path / "first")(job(model=LORA, steps=1), cluster)
    assert adapted.exit_code == 0, adapted.terminal
    assert results(adapted, 0) != results(adapted, 1)
    found = evaluated(tmp_path, adapted, 1, job(model=LORA), cluster)
    assert results(found, 0) == results(adapted, 1)
