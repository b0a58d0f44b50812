"""Compares `promptSampling: {type: PassRate}` with uniform sampling, on a mixture of easy, fitting and too hard rows.

    python proof/pass_rate.py [--seeds 0 1 2] [--folder FOLDER] [--picture PNG]

The task is that of the quickstart: to sort five digits, with GRPO. Easy rows have one digit five times. Rows that are
too hard have seven digits; the model has never seen such rows. Both kinds of sampling have the same number of steps,
prompts and responses. The held-out score is that of random rows of five digits. The exit code is 1 if the sampled score
at the end (mean of the seeds) is below that of uniform sampling.

Existing runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_proof.curves import EVAL_GREEDY, EVAL_SAMPLED, draw, last, mean, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import PASS_RATE_SKIPPED, SOURCE_PREFIX, SOURCE_PROMPTS, TRAINED_FRACTION

EXAMPLE = "quickstart.yaml"
UNIFORM, PASS_RATE = "Uniform", "PassRate"
COLOURS = {UNIFORM: "#222222", PASS_RATE: "#c8553d"}
SCORES = {"greedy": EVAL_GREEDY, "sampled": EVAL_SAMPLED}
EASY, FITTING, HARD = "easy", "fitting", "hard"
NUM_ROWS = {EASY: 50, FITTING: 100, HARD: 100}
NUM_STEPS, EVERY_STEPS = 60, 10
BATCH_SIZE, GROUP_SIZE = 16, 8
"""In 60 steps uniform sampling draws each row 3.84 times."""


def main() -> int:
    """Runs the program. The exit code is 1 if the result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "pass_rate")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = options.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in mixture()))
    found: dict[str, list[training_runs.RunFiles]] = {UNIFORM: [], PASS_RATE: []}
    with runs_in(options.folder) as runs:
        for seed in options.seeds:
            for sampling, files in found.items():
                files.append(runs.completed(f"{sampling}-{seed}", job(rows, sampling, seed)))
                print(f"{sampling}-{seed}: done", flush=True)
    show_prompts(found)
    is_met = [table(name, metric, found) for name, metric in SCORES.items()][-1]
    draw_curves(found, options.picture or options.folder / "curves.png")
    print(f"\n{'met' if is_met else 'MISSED'}: sampled held-out score at the end at least that of uniform sampling")
    return 0 if is_met else 1


def mixture() -> list[dict[str, str]]:
    """The training rows, always the same."""
    draw_digits = random.Random(7)
    rows = []
    for kind, number in NUM_ROWS.items():
        for index in range(number):
            digits = str(index % 10) * 5 if kind == EASY else ""
            digits = digits or "".join(draw_digits.choices("0123456789", k=5 if kind == FITTING else 7))
            rows.append({"prompt": f"{digits}>", "answer": "".join(sorted(digits)), "kind": kind})
    return rows


def job(rows: Path, sampling: str, seed: int) -> training_runs.Document:
    """The quickstart on these rows."""
    changes: training_runs.Document = {
        "seed": seed,
        "steps": NUM_STEPS,
        "batchSize": BATCH_SIZE,
        "dataset": {"file": {"path": str(rows.resolve())}, "sourceField": "kind"},
        "promptSampling": {"type": sampling},
        "rollout": {"engine": "HuggingFace", "groupSize": GROUP_SIZE},
        "evaluations": {"everySteps": EVERY_STEPS},
        "loggers": ["Console"],
    }
    return example_job(EXAMPLE, changes, checkpoint_every=NUM_STEPS)


def show_prompts(found: Mapping[str, Sequence[training_runs.RunFiles]]) -> None:
    """Prints what the steps were trained on."""
    print("\n| sampling | prompts: easy | fitting | hard | responses used in updates | rows skipped |")
    print("|---|---|---|---|---|---|")
    for sampling, runs in found.items():
        counts = [
            f"{mean([sum(run.series(f'{SOURCE_PREFIX}/{kind}/{SOURCE_PROMPTS}')) for run in runs]):.0f}"
            for kind in NUM_ROWS
        ]
        used = mean([mean(run.series(TRAINED_FRACTION)) for run in runs])
        skipped = mean([sum(run.series(PASS_RATE_SKIPPED)) for run in runs]) if sampling == PASS_RATE else 0
        print(f"| {sampling} | {' | '.join(counts)} | {used:.1%} | {skipped:.0f} |")


def table(name: str, metric: str, found: Mapping[str, Sequence[training_runs.RunFiles]]) -> bool:
    """Prints a table of one held-out score, and returns whether PassRate's is at least as high at the end."""
    curves = {sampling: [scores(run, metric) for run in runs] for sampling, runs in found.items()}
    steps = sorted(curves[UNIFORM][0])
    print(f"\n| {name} | " + " | ".join(f"step {step}" for step in steps) + " | at the end, by seed |")
    print("|---" * (len(steps) + 2) + "|")
    for sampling, of_seeds in curves.items():
        means = [f"{mean([curve[step] for curve in of_seeds]):.1%}" for step in steps]
        print(f"| {sampling} | {' | '.join(means)} | {', '.join(f'{last(curve):.1%}' for curve in of_seeds)} |")
    ends = {sampling: mean([last(curve) for curve in of_seeds]) for sampling, of_seeds in curves.items()}
    return ends[PASS_RATE] >= ends[UNIFORM]


def draw_curves(found: Mapping[str, Sequence[training_runs.RunFiles]], path: Path) -> None:
    """Draws the sampled scores."""
    figure, panels = new_figure(1, "sampling of prompts")
    panels[0].set_ylabel("held-out score, sampled")
    for sampling, runs in found.items():
        draw(panels[0], [scores(run, EVAL_SAMPLED) for run in runs], sampling, COLOURS[sampling])
    save(figure, panels, path)


if __name__ == "__main__":
    sys.exit(main())
