"""Compares the two sources of old log-probabilities (rolloutCorrection.oldLogprobs) on the quickstart's task with two
updates per step, with new weights in every step and with weights that are up to N - 1 steps old.

    python proof/old_logprobs.py [--steps N] [--seeds 0 1 2] [--sync-every 5] [--folder FOLDER]

Completed runs are not repeated, and an interrupted run continues. At the end the program prints the mean scores.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rljob_api.v1alpha1.rollout_correction import OldLogprobs
from rljob_proof.curves import EVAL_SAMPLED, last, mean, scores
from rljob_proof.runs import REPOSITORY, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import CLIP_FRACTION, LOGPROB_DIFF_MEAN

MAX_POINTS_BEHIND = 0.05
"""How far the mean greedy score with Rollout may be below that with Trainer."""
STEP_SECONDS, PASS_SECONDS = "timing_s/step", "timing_s/old_logprob"


@dataclass(frozen=True)
class Result:
    """The results of a run."""

    greedy: float
    sampled: float
    clipped: float
    """Mean share of clipped tokens."""
    difference: float
    """Mean difference of the log-probabilities."""
    seconds: float
    """Mean seconds of a step, without the first one."""
    seconds_of_pass: float
    """Of which the pass for old log-probabilities."""


def main() -> int:
    """Runs the program. The exit code is 1 if the runs with Rollout end too far below those with Trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sync-every", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "old-logprobs")
    options = parser.parse_args()
    found: dict[tuple[int, OldLogprobs], list[Result]] = {}
    with runs_in(options.folder) as runs:
        for seed, sync_every, old in product(options.seeds, (1, options.sync_every), OldLogprobs):
            name = f"{old.value.lower()}-sync-{sync_every}-{seed}"
            result = result_of(runs.completed(name, job_of(old, seed, options.steps, sync_every, options.sync_every)))
            found.setdefault((sync_every, old), []).append(result)
            print(f"{name}: {result}", flush=True)
    behind = 0.0
    for (sync_every, old), results in found.items():
        greedy = mean([each.greedy for each in results])
        print(f"sync every {sync_every}, {old}: greedy {greedy:.1%}, sampled {mean([r.sampled for r in results]):.1%}")
        behind = max(behind, mean([each.greedy for each in found[sync_every, OldLogprobs.TRAINER]]) - greedy)
    print(f"Rollout is at most {behind:.1%} behind Trainer (limit {MAX_POINTS_BEHIND:.0%})")
    return 0 if behind <= MAX_POINTS_BEHIND else 1


def job_of(old: OldLogprobs, seed: int, steps: int, sync_every: int, evaluated: int) -> training_runs.Document:
    """The quickstart with two updates per step."""
    changes: training_runs.Document = {
        "steps": steps,
        "seed": seed,
        "miniBatchSize": 16,
        "evaluations": {"everySteps": 4 * evaluated},
        "rollout": {"syncEverySteps": sync_every},
        "algorithm": {"rolloutCorrection": {"oldLogprobs": old.value}},
    }
    return example_job("quickstart.yaml", changes, checkpoint_every=8 * evaluated)


def result_of(run: training_runs.RunFiles) -> Result:
    """Reads the results from the run's metrics."""
    clipped, difference = (mean(run.series(name)) for name in (CLIP_FRACTION, LOGPROB_DIFF_MEAN))
    seconds = mean(run.series(STEP_SECONDS)[1:])
    passes = run.series(PASS_SECONDS)[1:]
    of_pass = mean(passes) if passes else 0.0
    return Result(last(scores(run)), last(scores(run, EVAL_SAMPLED)), clipped, difference, seconds, of_pass)


if __name__ == "__main__":
    sys.exit(main())
