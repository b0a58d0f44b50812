"""Shows that on-policy distillation from a trained teacher reaches the teacher's score in fewer steps than GRPO.

    python proof/distillation.py [--seeds 0 1 2] [--steps 40] [--folder FOLDER] [--picture PNG]

The teacher is the quickstart's model after the quickstart's 80 steps of GRPO. The students start from the model that
the teacher started from. GRPO and distillation have the same prompts, responses per step and learning rate, and one
update per step; distillation reads no rewards, which only measure the held-out score. The target scores, greedy and
sampled, are the mean final scores of GRPO's runs, minus MARGIN; a run has reached a target at its first evaluation with
that score. The exit code is 1 if distillation does not reach both in fewer steps than GRPO, mean of the seeds.

Existing runs are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_proof.curves import Scores, draw, last, mean, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, Runs, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import EVAL_GREEDY, EVAL_SAMPLED, TEACHER_KL

EXAMPLE = "quickstart.yaml"
TEACHER_SEED, TEACHER_STEPS = 100, 80
EVERY_STEPS = 2
MARGIN = 0.02
GRPO, DISTILLATION = "GRPO", "Distillation"
COLOURS = {GRPO: "#222222", DISTILLATION: "#c8553d"}
SCORES = {"greedy": EVAL_GREEDY, "sampled": EVAL_SAMPLED}
"""The metrics of the two held-out scores."""


def main() -> int:
    """Runs the program. The exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "distillation")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    students: dict[str, list[training_runs.RunFiles]] = {GRPO: [], DISTILLATION: []}
    with runs_in(options.folder) as runs:
        teacher = runs.completed("teacher", teacher_job())
        for seed in options.seeds:
            for name, found in students.items():
                job = student_job(name, seed, options.steps, teacher.folder / "export")
                found.append(runs.completed(f"{name}-{seed}", job))
                print(f"{name}, seed {seed}: done", flush=True)
    of_teacher = ", ".join(f"{name} {last(scores(teacher, metric)):.1%}" for name, metric in SCORES.items())
    print(f"\nThe teacher's held-out score: {of_teacher}")
    met = [table(name, metric, students, options.steps) for name, metric in SCORES.items()]
    show_kl(students[DISTILLATION])
    draw_curves(students, options.picture or options.folder / "curves.png")
    print(f"\n{'met' if all(met) else 'MISSED'}: fewer steps than GRPO to both scores, mean of the seeds")
    return 0 if all(met) else 1


def teacher_job() -> training_runs.Document:
    """The quickstart with another seed than the students, and with an export."""
    changes: training_runs.Document = {
        "seed": TEACHER_SEED,
        "steps": TEACHER_STEPS,
        "rollout": {"engine": "HuggingFace"},
        "evaluation": {"everySteps": TEACHER_STEPS},
        "loggers": ["Console"],
    }
    job = example_job(EXAMPLE, changes, checkpoint_every=TEACHER_STEPS)
    return training_runs.merged(job, {"spec": {"checkpoint": {"exportHuggingFace": "Final"}}})


def student_job(recipe: str, seed: int, num_steps: int, teacher: Path) -> training_runs.Document:
    """The quickstart with this recipe. Its reward is trained on with GRPO only."""
    changes: training_runs.Document = {
        "seed": seed,
        "steps": num_steps,
        # The example drops groups with equal scores, which is not part of the recipes.
        "algorithm": {"type": recipe, "dropZeroVarianceGroups": False},
        "rollout": {"engine": "HuggingFace"},
        "evaluation": {"everySteps": EVERY_STEPS},
        "loggers": ["Console"],
    }
    job = example_job(EXAMPLE, changes, checkpoint_every=num_steps)
    if recipe != DISTILLATION:
        return job
    return training_runs.merged(job, {"spec": {"roles": {"ref": {"model": {"source": str(teacher)}}}}})


def table(name: str, metric: str, students: Mapping[str, Sequence[training_runs.RunFiles]], num_steps: int) -> bool:
    """Prints a table of one score, and returns whether distillation needs fewer steps than GRPO."""
    curves = {recipe: [scores(run, metric) for run in runs] for recipe, runs in students.items()}
    target = mean([last(curve) for curve in curves[GRPO]]) - MARGIN
    print(f"\n| {name} | after 10 steps | at the end | steps to {target:.1%} | mean |")
    print("|---|---|---|---|---|")
    means = {}
    for recipe, found in curves.items():
        reached = [steps_to(curve, target) for curve in found]
        # A run that never reached the score counts as one step more than its length.
        means[recipe] = mean([num_steps + 1 if each is None else each for each in reached])
        cells = [
            ", ".join(f"{curve[10]:.1%}" for curve in found),
            ", ".join(f"{last(curve):.1%}" for curve in found),
            ", ".join("never" if each is None else str(each) for each in reached),
            f"{means[recipe]:.1f}",
        ]
        print(f"| {recipe} | {' | '.join(cells)} |")
    return means[DISTILLATION] < means[GRPO]


def steps_to(curve: Scores, score: float) -> int | None:
    """The first evaluated step with at least this score; None if there is none."""
    return next((step for step in sorted(curve) if curve[step] >= score), None)


def show_kl(runs: Sequence[training_runs.RunFiles]) -> None:
    """Prints the KL to the teacher in the first and in the last step."""
    series = [run.series(TEACHER_KL) for run in runs]
    print(f"\n{TEACHER_KL}, first and last step: " + ", ".join(f"{each[0]:.2f} -> {each[-1]:.3f}" for each in series))


def draw_curves(students: Mapping[str, Sequence[training_runs.RunFiles]], path: Path) -> None:
    """Draws the greedy and the sampled scores."""
    figure, panels = new_figure(2, *(f"held-out score, {name}" for name in SCORES))
    for axes, (name, metric) in zip(panels, SCORES.items(), strict=True):
        axes.set_ylabel(f"held-out score, {name}")
        for recipe, runs in students.items():
            draw(axes, [scores(run, metric) for run in runs], recipe, COLOURS[recipe])
    save(figure, panels, path)


if __name__ == "__main__":
    sys.exit(main())
