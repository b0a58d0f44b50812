"""Shows that PPO with a reward model that was trained on pairs of answers learns correct answers.

    python proof/reward_model.py [--seeds 0 1 2] [--steps 80] [--folder FOLDER] [--picture PNG]

Uses examples/reward_model unchanged: the model is trained once, then PPO learns from its scores only. Whether an answer
is correct is measured, but not trained on. If PPO exploited the model, its score would rise while fewer answers are
correct; the table has both for each evaluation. The exit code is 1 if a seed stays below MIN_ACCURACY.

Existing models and runs are not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rljob_proof.curves import Scores, draw, last, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, Runs, example_job, runs_in
from rljob_testing.training import training_runs

EXAMPLE = "reward_model/ppo.yaml"
PREFERENCE, EXACT = "preference", "exact"
"""Names of the example's rewards."""
EVERY_STEPS = 10
MIN_ACCURACY = 0.8
"""Minimum fraction of correct greedy answers to the held-out prompts at the end."""


def main() -> int:
    """Runs the program. The exit code is 1 if the result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "reward-model")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    model = trained_model(options.folder)
    with runs_in(options.folder) as runs:
        found = {seed: run(runs, model, seed, options.steps) for seed in options.seeds}
    accuracies = {seed: scores(each, f"eval/heldout/reward/{EXACT}/greedy") for seed, each in found.items()}
    likings = {seed: scores(each, f"eval/heldout/reward/{PREFERENCE}/greedy") for seed, each in found.items()}
    show(accuracies, likings)
    figure, panels = new_figure(1, "PPO on a reward model: share of right answers")
    draw(panels[0], list(accuracies.values()), "right answers", "#2a6f97")
    save(figure, panels, options.picture or options.folder / "curves.png")
    met = all(last(curve) >= MIN_ACCURACY for curve in accuracies.values())
    print(f"\n{'met' if met else 'MISSED'}: at least {MIN_ACCURACY:.0%} of the held-out prompts at the end, each seed")
    return 0 if met else 1


def trained_model(folder: Path) -> Path:
    """The reward model; trains it with the example's program if it does not exist."""
    model = folder / "model"
    if not (model / "config.json").exists():
        program = REPOSITORY / "examples" / "reward_model" / "train.py"
        subprocess.run([sys.executable, str(program), "--output", str(model)], check=True)
    return model


def run(runs: Runs, model: Path, seed: int, num_steps: int) -> training_runs.RunFiles:
    """Runs the example with this model."""
    rewards = example_rewards()
    rewards[0] = {"name": PREFERENCE, "type": "RewardModel", "rewardModel": {"source": str(model)}}
    changes: training_runs.Document = {
        "seed": seed,
        "steps": num_steps,
        "rewards": list(rewards),
        "evaluations": {"everySteps": EVERY_STEPS},
        "loggers": ["Console"],
    }
    return runs.completed(f"seed-{seed}", example_job(EXAMPLE, changes, checkpoint_every=num_steps))


def example_rewards() -> list[training_runs.Document]:
    """The rewards of the example, the model first."""
    spec = example_job(EXAMPLE, {}, checkpoint_every=1)["spec"]
    assert isinstance(spec, dict)
    training = spec["training"]
    assert isinstance(training, dict)
    rewards = training["rewards"]
    assert isinstance(rewards, list)
    found = [each for each in rewards if isinstance(each, dict)]
    assert [each["name"] for each in found] == [PREFERENCE, EXACT]
    return found


def show(accuracies: dict[int, Scores], likings: dict[int, Scores]) -> None:
    """Prints the table."""
    print("\n| step | " + " | ".join(f"seed {seed}: right answers | score" for seed in accuracies) + " |")
    print("|---|" + "---|" * 2 * len(accuracies))
    for step in sorted(next(iter(accuracies.values()))):
        cells = (f"{accuracies[seed][step]:.1%} | {likings[seed][step]:.2f}" for seed in accuracies)
        print(f"| {step} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
