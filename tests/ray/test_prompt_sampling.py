"""A run that chooses its prompts by their pass rates, with metrics for each source of rows."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from rljob_testing.training import training_runs

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS, NUM_BEFORE = 9, 6
EASY, FITTING, HARD = "easy", "fitting/5 digits", "hard"
NAMES = {"easy", "fitting_5_digits", "hard"}
NUM_ROWS = 6
"""Rows of each source."""


def job(folder: Path) -> training_runs.Document:
    """Three steps draw as many prompts as the dataset has. The model solves the easy rows, and no row that is hard."""
    digits = [f"{10_000 + 3_377 * number}" for number in range(NUM_ROWS)]
    rows = [{"prompt": f"{str(number) * 5}>", "answer": str(number) * 5, "kind": EASY} for number in range(NUM_ROWS)]
    rows += [{"prompt": f"{each}>", "answer": "".join(sorted(each)), "kind": FITTING} for each in digits]
    rows += [{"prompt": f"{each[::-1]}>", "answer": "none", "kind": HARD} for each in digits]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [{"prompt": f"{number}>", "answer": "none", "kind": FITTING} for number in range(4)]
    held_out += [{"prompt": f"{number}>", "answer": str(number), "kind": HARD} for number in range(4, 7)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    evaluation: training_runs.Document = {
        "dataset": {"type": "File", "file": {"path": "held_out.jsonl"}, "sourceField": "kind"},
        "numSamples": 2,
        "everySteps": 0,
        "atStart": False,
    }
    return training_runs.small_job(
        checkpoint={"everySteps": 3},
        dataset={"file": {"path": "rows.jsonl"}, "sourceField": "kind"},
        evaluations=[evaluation],
        promptSampling={"type": "PassRate"},
        batchSize=NUM_ROWS,
        rollout={"groupSize": 8},
        steps=NUM_STEPS,
    )


@pytest.fixture(scope="module")
def ended(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> training_runs.Ended:
    folder = tmp_path_factory.mktemp("whole")
    ended = training_runs.RunTrainer(folder)(job(folder), cluster)
    assert ended.exit_code == 0, ended.terminal
    return ended


def prompts_of(files: training_runs.RunFiles, name: str) -> list[float]:
    """The number of prompts of a source in each step."""
    return [row.get(f"data/{name}/prompts", 0.0) for row in files.metrics() if "critic/rewards/mean" in row]


def test_rows_that_are_always_or_never_solved_are_drawn_less_often_after_the_first_epoch(
    ended: training_runs.Ended,
) -> None:
    drawn = {name: prompts_of(ended.files, name) for name in NAMES}
    assert {name: sum(each[:3]) for name, each in drawn.items()} == dict.fromkeys(NAMES, NUM_ROWS)
    assert sum(drawn["hard"][3:]) < sum(drawn["fitting_5_digits"][3:])
    assert ended.files.series("prompt_sampling/rows_skipped")[:3] == [0, 0, 0]
    assert sum(ended.files.series("prompt_sampling/rows_skipped")) > NUM_ROWS
    assert 0 < ended.files.series("prompt_sampling/pass_rate_mean")[-1] < 1


def test_a_resumed_run_chooses_the_same_prompts(
    ended: training_runs.Ended, run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    shutil.copytree(ended.files.folder, run_trainer.files.folder)
    shutil.rmtree(run_trainer.files.checkpoints / f"step-{NUM_STEPS:08d}.start-0001")
    run = run_trainer(job(run_trainer.folder), cluster, attempt=2)
    assert run.exit_code == 0, run.terminal
    assert f"resumed from step {NUM_BEFORE} " in run.terminal
    for step in range(NUM_BEFORE + 1, NUM_STEPS + 1):
        assert run.files.samples("train", step) == ended.files.samples("train", step)
    for name in ("prompt_sampling/rows_skipped", "prompt_sampling/pass_rate_mean", "critic/rewards/mean"):
        assert run.files.series(name) == ended.files.series(name)


def test_each_source_has_the_scores_of_its_own_prompts(ended: training_runs.Ended) -> None:
    samples = ended.files.samples("eval_greedy", NUM_STEPS)
    assert Counter(sample["source"] for sample in samples) == {"fitting_5_digits": 4, "hard": 3}
    for name in ("fitting_5_digits", "hard"):
        scores = [float(sample["score"]) for sample in samples if sample["source"] == name]
        [greedy] = ended.files.series(f"eval/heldout/source/{name}/greedy")
        assert greedy == pytest.approx(sum(scores) / len(scores))
        assert ended.files.series(f"eval/heldout/source/{name}/pass_at_2")
    assert {sample["source"] for sample in ended.files.samples("train", 2)} <= NAMES
