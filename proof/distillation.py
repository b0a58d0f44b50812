"""Shows that on-policy distillation from a trained teacher needs at most as many steps as GRPO, with many responses per
step and with few.

    python proof/distillation.py [--seeds 0 1 2] [--folder FOLDER] [--picture PNG]

The teacher is the quickstart's model after the quickstart's 80 steps of GRPO. The students start from the model that
the teacher started from. GRPO and distillation have the same number of responses per step, the same learning rate, and
one update per step. Distillation does not use the rewards, which only measure the held-out score. The target scores,
greedy and sampled, are the mean final scores of GRPO's runs, minus MARGIN. A run reaches a target at its first
evaluation with at least that score. The exit code is 1 if distillation needs more steps than GRPO to a target (mean of
the seeds).

Existing runs are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_proof.curves import EVAL_GREEDY, EVAL_SAMPLED, Scores, draw, last, mean, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import TEACHER_KL

EXAMPLE = "quickstart.yaml"
TEACHER_SEED, TEACHER_STEPS = 100, 80
MARGIN = 0.02
GRPO, DISTILLATION = "GRPO", "Distillation"
COLOURS = {GRPO: "#222222", DISTILLATION: "#c8553d"}
SCORES = {"greedy": EVAL_GREEDY, "sampled": EVAL_SAMPLED}
"""The metrics of the two held-out scores."""


@dataclass(frozen=True)
class Setup:
    """A comparison."""

    name: str
    batches: Mapping[str, tuple[int, int]]
    """Prompts per step and responses to each, by recipe: equally many responses."""
    num_steps: int
    every_steps: int
    """Steps between two evaluations."""


SETUPS = (
    Setup("512 responses per step", {GRPO: (32, 16), DISTILLATION: (32, 16)}, 40, 2),
    # GRPO needs groups; distillation can use more prompts instead.
    Setup("32 responses per step", {GRPO: (4, 8), DISTILLATION: (32, 1)}, 80, 4),
)


def main() -> int:
    """Runs the program. The exit code is 1 if the result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "distillation")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    found: dict[str, dict[str, list[training_runs.RunFiles]]] = {}
    with runs_in(options.folder) as runs:
        teacher = runs.completed("teacher", teacher_job())
        for setup in SETUPS:
            students: dict[str, list[training_runs.RunFiles]] = {recipe: [] for recipe in setup.batches}
            found[setup.name] = students
            for seed in options.seeds:
                for recipe, files in students.items():
                    name = f"{recipe}-{setup.name.split()[0]}-{seed}"
                    files.append(runs.completed(name, student_job(setup, recipe, seed, teacher.folder / "export")))
                    print(f"{name}: done", flush=True)
    of_teacher = ", ".join(f"{name} {last(scores(teacher, metric)):.1%}" for name, metric in SCORES.items())
    print(f"\nThe teacher's held-out score: {of_teacher}")
    met = []
    for setup in SETUPS:
        print(f"\n{setup.name}")
        met += [table(name, metric, found[setup.name], setup.num_steps) for name, metric in SCORES.items()]
        show_kl(found[setup.name][DISTILLATION])
    draw_curves(found, options.picture or options.folder / "curves.png")
    print(f"\n{'met' if all(met) else 'MISSED'}: at most as many steps as GRPO to each score, mean of the seeds")
    return 0 if all(met) else 1


def teacher_job() -> training_runs.Document:
    """The quickstart with another seed than the students, and with an export."""
    changes: training_runs.Document = {
        "seed": TEACHER_SEED,
        "steps": TEACHER_STEPS,
        "rollout": {"engine": "HuggingFace"},
        "evaluations": {"everySteps": TEACHER_STEPS},
        "loggers": ["Console"],
    }
    job = example_job(EXAMPLE, changes, checkpoint_every=TEACHER_STEPS)
    return training_runs.merged(job, {"spec": {"checkpoint": {"exportHuggingFace": "Final"}}})


def student_job(setup: Setup, recipe: str, seed: int, teacher: Path) -> training_runs.Document:
    """The quickstart with this recipe. Its reward is trained on with GRPO only."""
    batch_size, group_size = setup.batches[recipe]
    changes: training_runs.Document = {
        "seed": seed,
        "steps": setup.num_steps,
        "batchSize": batch_size,
        # The example drops groups with equal scores, which is not part of the recipes.
        "algorithm": {"type": recipe, "dropZeroVarianceGroups": False},
        "rollout": {"engine": "HuggingFace", "groupSize": group_size},
        "evaluations": {"everySteps": setup.every_steps},
        "loggers": ["Console"],
    }
    job = example_job(EXAMPLE, changes, checkpoint_every=setup.num_steps)
    if recipe != DISTILLATION:
        return job
    return training_runs.merged(job, {"spec": {"roles": {"ref": {"model": {"source": str(teacher)}}}}})


def table(name: str, metric: str, students: Mapping[str, Sequence[training_runs.RunFiles]], num_steps: int) -> bool:
    """Prints a table of one score, and returns whether distillation needs at most as many steps as GRPO."""
    curves = {recipe: [scores(run, metric) for run in runs] for recipe, runs in students.items()}
    target = mean([last(curve) for curve in curves[GRPO]]) - MARGIN
    half = max(curves[GRPO][0]) // 2
    print(f"\n| {name} | after {half} steps | at the end | steps to {target:.1%} | mean |")
    print("|---|---|---|---|---|")
    means = {}
    for recipe, found in curves.items():
        reached = [steps_to(curve, target) for curve in found]
        # A run that never reached the score counts as one step more than its length.
        means[recipe] = mean([num_steps + 1 if each is None else each for each in reached])
        cells = [
            ", ".join(f"{curve[half]:.1%}" for curve in found),
            ", ".join(f"{last(curve):.1%}" for curve in found),
            ", ".join("never" if each is None else str(each) for each in reached),
            f"{means[recipe]:.1f}",
        ]
        print(f"| {recipe} | {' | '.join(cells)} |")
    return means[DISTILLATION] <= means[GRPO]


def steps_to(curve: Scores, score: float) -> int | None:
    """The first evaluated step with at least this score; None if there is none."""
    return next((step for step in sorted(curve) if curve[step] >= score), None)


def show_kl(runs: Sequence[training_runs.RunFiles]) -> None:
    """Prints the KL to the teacher in the first and in the last step."""
    series = [run.series(TEACHER_KL) for run in runs]
    print(f"\n{TEACHER_KL}, first and last step: " + ", ".join(f"{each[0]:.2f} -> {each[-1]:.3f}" for each in series))


def draw_curves(found: Mapping[str, Mapping[str, Sequence[training_runs.RunFiles]]], path: Path) -> None:
    """Draws the sampled scores of each setup."""
    figure, panels = new_figure(len(found), *found)
    for axes, students in zip(panels, found.values(), strict=True):
        axes.set_ylabel("held-out score, sampled")
        for recipe, runs in students.items():
            draw(axes, [scores(run, EVAL_SAMPLED) for run in runs], recipe, COLOURS[recipe])
    save(figure, panels, path)


if __name__ == "__main__":
    sys.exit(main())
