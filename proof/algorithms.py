"""Shows that every recipe learns the quickstart's task as fast as GRPO, and learns nothing from random rewards.

    python proof/algorithms.py [--recipes NAMES] [--seeds 0 1 2] [--noise-seeds 0 1 2] [--folder FOLDER] [--picture PNG]

All runs have the same model, prompts, responses per step and learning rate. Each step has two updates, so that ratios
and clipping matter, and the held-out prompts are evaluated every other step. The target score is the mean final score
of GRPO's runs, minus MARGIN; a run has reached it at its first evaluation with that score. A recipe is as fast as GRPO
if its seeds need on average at most MAX_RATIO times GRPO's mean number of steps. The exit code is 1 if a recipe needs
more, or if a run on random rewards gains more than MAX_NOISE_GAIN.

Each run writes a result with its date; existing results are not repeated. At the end the program prints tables and
writes a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rljob_proof.curves import EVAL_SAMPLED, Scores, draw, last, mean, new_figure, save, scores
from rljob_proof.runs import REPOSITORY, Runs, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.samples import SampleKind

NUM_STEPS, NUM_NOISE_STEPS = 40, 20
EVERY_STEPS = 2
MARGIN = 0.05
"""Three standard errors of a score near the maximum on 256 prompts, plus the noise of a curve there."""
MAX_RATIO = 1.5
MAX_NOISE_GAIN = 0.08
"""Two standard errors of the difference between two scores near a quarter on 256 prompts."""
GRPO = "GRPO"


@dataclass(frozen=True)
class Recipe:
    """One curve of the picture."""

    name: str
    colour: str
    example: str = "quickstart.yaml"
    algorithm: training_runs.Document | None = None
    """The algorithm of the job; None for the recipe's name only."""


RECIPES = (
    Recipe(GRPO, "#222222"),
    Recipe("PPO", "#c8553d", "quickstart-ppo.yaml"),
    Recipe("RLOO", "#2a6f97"),
    Recipe("ReinforcePlusPlus", "#e09f3e"),
    Recipe("GSPO", "#3a7d44"),
    Recipe("CISPO", "#7b2d8b"),
    # Additionally replaces groups with equal scores by groups of fresh prompts.
    Recipe("DAPO", "#d62976", algorithm={"type": "DAPO"}),
    Recipe("ReMax", "#1b9aaa"),
    Recipe("DrGRPO", "#8d99ae"),
)


@dataclass(frozen=True)
class Result:
    """The result of a run, stored as JSON."""

    date: str
    seconds: float
    greedy: Scores
    """Fraction of the held-out prompts whose digits are sorted correctly."""
    sampled: Scores


def main() -> int:
    """Runs the program. The exit code is 1 if a result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [recipe.name for recipe in RECIPES]
    parser.add_argument(
        "--recipes", nargs="+", default=names, choices=names, help="recipes besides GRPO (default: all)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise-seeds", type=int, nargs="*", default=[0, 1, 2], choices=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "algorithms")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    recipes = [recipe for recipe in RECIPES if recipe.name in (GRPO, *options.recipes)]
    learned: dict[str, list[Result]] = {recipe.name: [] for recipe in recipes}
    on_noise: dict[str, list[Result]] = {recipe.name: [] for recipe in recipes}
    with runs_in(options.folder) as runs:
        for seed in options.seeds:
            for recipe in recipes:
                learned[recipe.name].append(result(runs, recipe, seed, is_noise=False))
        for seed in options.noise_seeds:
            for recipe in recipes:
                on_noise[recipe.name].append(result(runs, recipe, seed, is_noise=True))
    draw_both(recipes, learned, on_noise, options.picture or options.folder / "curves.png")
    are_fast = speed_table(learned)
    return 0 if noise_table(on_noise) and are_fast else 1


def job_of(recipe: Recipe, seed: int, *, is_noise: bool) -> training_runs.Document:
    """The example with the recipe, the seed and the reward."""
    num_steps = NUM_NOISE_STEPS if is_noise else NUM_STEPS
    # The example drops zero-variance groups, which is not part of the recipe GRPO.
    algorithm: training_runs.Document = recipe.algorithm or {"type": recipe.name, "dropZeroVarianceGroups": False}
    changes: training_runs.Document = {
        "steps": num_steps,
        "seed": seed,
        "batchSize": 32,
        "miniBatchSize": 16,
        "algorithm": algorithm,
        "rollout": {"engine": "HuggingFace"},
        "evaluations": {"everySteps": NUM_NOISE_STEPS if is_noise else EVERY_STEPS},
        "loggers": ["Console"],
    }
    if is_noise:
        changes["rewards"] = [{"type": "Function", "function": {"path": f"rljob_proof.noise:seed_{seed}"}}]
    return example_job(recipe.example, changes, checkpoint_every=num_steps)


def result(runs: Runs, recipe: Recipe, seed: int, *, is_noise: bool) -> Result:
    """Reads the result from its file, or makes the run."""
    name = f"{recipe.name}-{'noise-' if is_noise else ''}{seed}"
    path = runs.folder / f"{name}.json"
    if not path.exists():
        start = time.monotonic()
        run = runs.completed(name, job_of(recipe, seed, is_noise=is_noise))
        found = Result(time.strftime("%Y-%m-%d"), time.monotonic() - start, accuracies(run), scores(run, EVAL_SAMPLED))
        path.write_text(json.dumps(asdict(found)))
    read = json.loads(path.read_text())
    greedy, sampled = ({int(step): score for step, score in read[kind].items()} for kind in ("greedy", "sampled"))
    found = Result(read["date"], read["seconds"], greedy, sampled)
    print(f"{name}: {found.greedy[0]:.1%} -> {last(greedy):.1%}, {found.seconds:.0f} s, {found.date}", flush=True)
    return found


def accuracies(run: training_runs.RunFiles) -> Scores:
    """Computed from the texts, because the run's own scores can be random."""
    found = {}
    for step in scores(run):
        samples = run.samples(SampleKind.GREEDY, step)
        found[step] = mean([float(row["response"] == row["answer"]) for row in samples])
    return found


def steps_to(curve: Scores, score: float) -> int | None:
    """The first evaluated step with at least this score; None if there is none."""
    return next((step for step in sorted(curve) if curve[step] >= score), None)


def counted(steps: int | None) -> int:
    """Counts a run that never reached the score as one step more than its length."""
    return NUM_STEPS + 1 if steps is None else steps


def speed_table(learned: Mapping[str, Sequence[Result]]) -> bool:
    """Prints the table of speeds and returns whether all recipes meet the target."""
    target = mean([last(each.greedy) for each in learned[GRPO]]) - MARGIN
    of_grpo = mean([float(counted(steps_to(each.greedy, target))) for each in learned[GRPO]])
    print(f"\nThe score to reach: {target:.1%}; GRPO's mean: {of_grpo:.1f} steps\n")
    print("| recipe | at the end, greedy | sampled | steps to it | times GRPO's, by seed | mean |")
    print("|---|---|---|---|---|---|")
    met = True
    for name, results in learned.items():
        steps = [steps_to(each.greedy, target) for each in results]
        ratio = mean([counted(each) for each in steps]) / of_grpo
        met = met and None not in steps and ratio <= MAX_RATIO
        cells = [
            ", ".join(f"{last(each.greedy):.1%}" for each in results),
            ", ".join(f"{last(each.sampled):.1%}" for each in results),
            ", ".join("never" if each is None else str(each) for each in steps),
            ", ".join("-" if each is None else f"{each / of_grpo:.2f}" for each in steps),
            f"{ratio:.2f}" if None not in steps else "-",
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n{'met' if met else 'MISSED'}: at most {MAX_RATIO} times GRPO's steps, mean of the seeds of each")
    return met


def noise_table(on_noise: Mapping[str, Sequence[Result]]) -> bool:
    """Prints the table of runs on random rewards and returns whether none of them has learned."""
    print("\n| noise, recipe | greedy before | after, by seed | largest gain |")
    print("|---|---|---|---|")
    gains = {name: [last(each.greedy) - each.greedy[0] for each in found] for name, found in on_noise.items() if found}
    for name, found in gains.items():
        after = ", ".join(f"{last(each.greedy):.1%}" for each in on_noise[name])
        print(f"| {name} | {on_noise[name][0].greedy[0]:.1%} | {after} | {100 * max(found):+.1f} points |")
    met = all(gain <= MAX_NOISE_GAIN for found in gains.values() for gain in found)
    print(f"\n{'met' if met else 'MISSED'}: on noise no run gains more than {100 * MAX_NOISE_GAIN:.0f} points")
    return met


def draw_both(
    recipes: Sequence[Recipe],
    learned: Mapping[str, Sequence[Result]],
    on_noise: Mapping[str, Sequence[Result]],
    path: Path,
) -> None:
    """Draws the curves with the true reward, and the two points of each run on random rewards."""
    figure, panels = new_figure(2, "trained with the true reward", "trained with a random reward")
    for recipe in recipes:
        for axes, results in zip(panels, (learned[recipe.name], on_noise[recipe.name]), strict=True):
            if results:
                draw(axes, [each.greedy for each in results], recipe.name, recipe.colour)
    save(figure, panels, path)


if __name__ == "__main__":
    sys.exit(main())
