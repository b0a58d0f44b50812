"""Shows that rollout correction helps: the quickstart's task with responses from weights that are up to N - 1 steps
old.

    python proof/rollout_correction.py [--steps N] [--seeds 0 1 2] [--sync-every 5] [--folder FOLDER]

For each seed there is a run with current weights, one with old weights and correction, and one with old weights and no
correction. Completed runs are not repeated, and an interrupted run continues. At the end the program prints a table and
writes a picture of the held-out scores into the folder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from rljob_api.v1alpha1.rollout_correction import RolloutCorrectionType
from rljob_proof.curves import EVAL_SAMPLED, Scores, draw, last, mean, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import LOGPROB_DIFF_MEAN, STALENESS_MEAN

MAX_POINTS_BEHIND = 0.05
"""How far the greedy score with correction may be below that with current weights."""


@dataclass(frozen=True)
class Variant:
    """How often weights are synced, and which correction is used."""

    name: str
    colour: str
    is_stale: bool
    correction: RolloutCorrectionType = RolloutCorrectionType.NONE


FRESH = Variant("fresh", "#2a6f97", is_stale=False)
CORRECTED = Variant("stale, corrected", "#3a7d44", is_stale=True, correction=RolloutCorrectionType.TOKEN_TRUNCATED)
UNCORRECTED = Variant("stale, uncorrected", "#c8553d", is_stale=True)
VARIANTS = (FRESH, CORRECTED, UNCORRECTED)


@dataclass(frozen=True)
class Curve:
    """The results of a run."""

    greedy: Scores
    sampled: float
    staleness: float
    """Mean age of the weights in steps."""
    difference: float
    """Mean difference of the log-probabilities."""


def main() -> int:
    """Runs the program. The exit code is 1 if the corrected runs end too far below the runs with current weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: that of the example")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "rollout-correction")
    options = parser.parse_args()
    curves: dict[str, list[Curve]] = {variant.name: [] for variant in VARIANTS}
    with runs_in(options.folder) as runs:
        for seed in options.seeds:
            for variant in VARIANTS:
                job = job_of(variant, seed, options.steps, options.sync_every, options.learning_rate)
                curve = curve_of(runs.completed(f"{variant.name.replace(', ', '-')}-{seed}", job))
                curves[variant.name].append(curve)
                print(row_of(variant, seed, curve), flush=True)
    figure, panels = new_figure(1, f"Weights handed over every {options.sync_every} steps")
    for variant in VARIANTS:
        draw(panels[0], [each.greedy for each in curves[variant.name]], variant.name, variant.colour)
    save(figure, panels, options.folder / "curves.png")
    means = {name: mean([last(each.greedy) for each in found]) for name, found in curves.items()}
    behind = means[FRESH.name] - means[CORRECTED.name]
    print(" | ".join(f"{name}: {score:.1%}" for name, score in means.items()))
    print(f"corrected is {behind:.1%} behind fresh (at most {MAX_POINTS_BEHIND:.0%})")
    return 0 if behind <= MAX_POINTS_BEHIND else 1


def job_of(
    variant: Variant, seed: int, steps: int, sync_every: int, learning_rate: float | None
) -> training_runs.Document:
    """The quickstart with the variant's settings."""
    changes: training_runs.Document = {
        "steps": steps,
        "seed": seed,
        "evaluations": {"everySteps": 2 * sync_every},
        "rollout": {"syncEverySteps": sync_every if variant.is_stale else 1},
        "algorithm": {"rolloutCorrection": {"type": variant.correction.value}},
    }
    if learning_rate is not None:
        changes["optimizer"] = {"learningRate": learning_rate}
    return example_job("quickstart.yaml", changes, checkpoint_every=8 * sync_every)


def curve_of(run: training_runs.RunFiles) -> Curve:
    """Reads the results from the run's metrics."""
    staleness, difference = (mean(run.series(name)) for name in (STALENESS_MEAN, LOGPROB_DIFF_MEAN))
    return Curve(scores(run), last(scores(run, EVAL_SAMPLED)), staleness, difference)


def row_of(variant: Variant, seed: int, curve: Curve) -> str:
    """A row of the table."""
    return (
        f"| {variant.name} | {seed} | {last(curve.greedy):.1%} | {curve.sampled:.1%} | {curve.staleness:.2f} | "
        f"{curve.difference:.4f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
