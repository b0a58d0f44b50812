"""Rollout correction, shown to help: the quickstart's task with responses by weights that are up to N - 1 steps old.

    python proof/rollout_correction.py [--steps N] [--seeds 0 1 2] [--sync-every 5] [--folder FOLDER]

For each seed a run with fresh weights, one with old weights and correction, one with old weights and none. Runs that
are complete are not made again, and one that was interrupted goes on. Ends with a table, and a picture of the held-out
scores in the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rljob_api.constants import RUN_STATE_FILE_NAME
from rljob_api.handover import load_run_state
from rljob_api.job_file import load_job_file, resolved_job_text
from rljob_api.run_state import RunPhase
from rljob_api.v1alpha1.rollout_correction import RolloutCorrection, RolloutCorrectionType
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_trainer.observability.jsonl import read_rows
from rljob_trainer.observability.metrics import EVAL_GREEDY, EVAL_SAMPLED, LOGPROB_DIFF_MEAN, STALENESS_MEAN
from rljob_trainer.observability.sinks import METRICS_FILE_NAME

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "quickstart.yaml"
MAX_POINTS_BEHIND = 0.05
"""Of the greedy score: what correction may lose against fresh weights."""


@dataclass(frozen=True)
class Variant:
    """How responses are made, and what is done about it."""

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
    """What a run came to."""

    greedy: Mapping[int, float]
    """Held-out score after so many steps."""
    sampled: float
    staleness: float
    """Mean over the steps."""
    difference: float
    """Of log-probabilities, mean over the steps."""


def main() -> int:
    """Exit code 1 where the corrected runs end further behind the fresh ones than they may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=None, help="the example's when left out")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "rollout-correction")
    options = parser.parse_args()
    curves: dict[str, list[Curve]] = {variant.name: [] for variant in VARIANTS}
    for seed in options.seeds:
        for variant in VARIANTS:
            spec = spec_of(variant, seed, options.steps, options.sync_every, options.learning_rate)
            folder = options.folder / f"{variant.name.replace(', ', '-')}-{seed}"
            run(spec, folder)
            curves[variant.name].append(curve_of(folder))
            print(row_of(variant, seed, curves[variant.name][-1]), flush=True)
    draw(curves, options.folder / "curves.png", options.sync_every)
    means = {name: sum(last(each) for each in found) / len(found) for name, found in curves.items()}
    behind = means[FRESH.name] - means[CORRECTED.name]
    print(" | ".join(f"{name}: {mean:.1%}" for name, mean in means.items()))
    print(f"corrected is {behind:.1%} behind fresh (at most {MAX_POINTS_BEHIND:.0%})")
    return 0 if behind <= MAX_POINTS_BEHIND else 1


def spec_of(variant: Variant, seed: int, steps: int, sync_every: int, learning_rate: float | None) -> RLJobSpec:
    """The quickstart, changed."""
    spec = load_job_file(EXAMPLE).spec
    training = spec.training
    assert training.evaluation is not None
    optimizer = training.optimizer
    if learning_rate is not None:
        optimizer = optimizer.model_copy(update={"learning_rate": learning_rate})
    changed = {
        "steps": steps,
        "seed": seed,
        "optimizer": optimizer,
        "evaluation": training.evaluation.model_copy(update={"every_steps": 2 * sync_every}),
        "rollout": training.rollout.model_copy(update={"sync_every_steps": sync_every if variant.is_stale else 1}),
        "algorithm": training.algorithm.model_copy(
            update={"rollout_correction": RolloutCorrection(type=variant.correction)}
        ),
    }
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": 8 * sync_every})
    return spec.model_copy(update={"training": training.model_copy(update=changed), "checkpoint": checkpoint})


def run(spec: RLJobSpec, folder: Path) -> None:
    """To its end, unless it is there. Raises CalledProcessError."""
    job, text = folder.parent / f"{folder.name}.yaml", resolved_job_text(load_job_file(EXAMPLE).metadata, spec)
    if job.exists() and job.read_text() != text:
        raise SystemExit(f"{job}: another job was made there; choose another --folder, or remove this one")
    state = folder / RUN_STATE_FILE_NAME
    if state.exists() and load_run_state(state.read_text(encoding="utf-8")).phase is RunPhase.COMPLETE:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(text)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        command = [sys.executable, "-m", "rljob_cli", "run", str(job), "--run-folder", str(folder)]
        command += ["--resume"] if state.exists() else []
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def curve_of(folder: Path) -> Curve:
    """From the run's metrics."""
    rows = list(read_rows(folder / METRICS_FILE_NAME))
    scores = [row for row in rows if EVAL_GREEDY in row]
    return Curve(
        greedy={int(str(row["step"])): number(row, EVAL_GREEDY) for row in scores},
        sampled=number(scores[-1], EVAL_SAMPLED),
        staleness=mean_of(rows, STALENESS_MEAN),
        difference=mean_of(rows, LOGPROB_DIFF_MEAN),
    )


def mean_of(rows: Sequence[Mapping[str, object]], name: str) -> float:
    """Over the rows that have it."""
    values = [number(row, name) for row in rows if name in row]
    return sum(values) / len(values)


def number(row: Mapping[str, object], name: str) -> float:
    """A metric of a row."""
    value = row[name]
    assert isinstance(value, int | float)
    return float(value)


def last(curve: Curve) -> float:
    """The greedy score at the end."""
    return curve.greedy[max(curve.greedy)]


def row_of(variant: Variant, seed: int, curve: Curve) -> str:
    """Of the table."""
    return (
        f"| {variant.name} | {seed} | {last(curve):.1%} | {curve.sampled:.1%} | {curve.staleness:.2f} | "
        f"{curve.difference:.4f} |"
    )


def draw(curves: Mapping[str, Sequence[Curve]], path: Path, sync_every: int) -> None:
    """Mean of the seeds, and each of them faintly."""
    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for variant in VARIANTS:
        found = curves[variant.name]
        for curve in found:
            axes.plot(list(curve.greedy), list(curve.greedy.values()), color=variant.colour, alpha=0.25, linewidth=1)
        steps = sorted(found[0].greedy)
        means = [sum(curve.greedy[step] for curve in found) / len(found) for step in steps]
        axes.plot(steps, means, color=variant.colour, label=variant.name, linewidth=2)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out score, greedy")
    axes.set_ylim(0, 1)
    axes.set_title(f"Weights handed over every {sync_every} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
