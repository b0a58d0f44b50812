"""Shows that the examples with environments learn, and that they do not learn without feedback or from random rewards.

    python proof/environments.py [--examples guess_letter calculator] [--seeds 0 1 2] [--control-seeds 0] [--folder
        FOLDER] [--picture PNG]

Each run is an example of examples/ with another seed. Controls are the same with an environment of
rljob_proof/environment_controls.py: either its answers say nothing, or its reward is a coin flip. The real success of
runs with random rewards is measured as a reward with weight 0. The exit code is 1 if a seed does not reach the target
of its example, or if a control gains more than MAX_CONTROL_GAIN.

Existing runs are not repeated. At the end the program prints a table and writes a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_proof.curves import EVAL_GREEDY, EVAL_SAMPLED, Scores, draw, last, new_figure, save, scores
from rljob_proof.environment_controls import RANDOM, SUCCESS
from rljob_proof.runs import REPOSITORY, Runs, example_job, runs_in
from rljob_testing.training import training_runs
from rljob_trainer.observability.metrics import TIME_PER_STEP

CONTROLS = "rljob_proof.environment_controls"
MAX_CONTROL_GAIN = 0.08
"""Two standard errors of the difference between two scores near a quarter on 256 rollouts."""
NO_FEEDBACK, RANDOM_REWARD = "answers say nothing", "random reward"


@dataclass(frozen=True)
class Example:
    """An example, and what its runs should reach."""

    name: str
    file: str
    steps: int
    control_steps: int
    every_steps: int
    target: float
    """Lowest success of sampled conversations at the end."""
    controls: Mapping[str, str]
    """The changed environment class, by the control's name."""


EXAMPLES = (
    Example(
        "guess_letter",
        "guess_letter/guess-letter.yaml",
        160,
        80,
        20,
        0.7,
        {NO_FEEDBACK: f"{CONTROLS}:GuessWithoutFeedback", RANDOM_REWARD: f"{CONTROLS}:GuessWithRandomRewards"},
    ),
    Example(
        "calculator",
        "calculator/calculator.yaml",
        60,
        40,
        10,
        0.8,
        {NO_FEEDBACK: f"{CONTROLS}:CalculatorWithoutResults", RANDOM_REWARD: f"{CONTROLS}:CalculatorWithRandomRewards"},
    ),
)


@dataclass(frozen=True)
class Result:
    """The success of a run by step."""

    greedy: Scores
    sampled: Scores
    seconds: float
    """Median duration of a step."""


def main() -> int:
    """Runs the program. The exit code is 1 if a result misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [example.name for example in EXAMPLES]
    parser.add_argument("--examples", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "proof" / "environments")
    parser.add_argument("--picture", type=Path, help="default: curves.png in the folder")
    options = parser.parse_args()
    examples = [example for example in EXAMPLES if example.name in options.examples]
    learned: dict[str, list[Result]] = {}
    controls: dict[tuple[str, str], list[Result]] = {}
    with runs_in(options.folder) as runs:
        for example in examples:
            learned[example.name] = [result(runs, example, seed) for seed in options.seeds]
        for example in examples:
            for control in example.controls if options.control_seeds else ():
                found = [result(runs, example, seed, control) for seed in options.control_seeds]
                controls[example.name, control] = found
    draw_all(examples, learned, controls, options.picture or options.folder / "curves.png")
    return 0 if table(examples, learned, controls) else 1


def job_of(example: Example, seed: int, control: str | None) -> training_runs.Document:
    """The example with this seed, and with the environment of the control."""
    num_steps = example.control_steps if control else example.steps
    changes: training_runs.Document = {
        "seed": seed,
        "steps": num_steps,
        "evaluations": {"everySteps": example.every_steps},
        "loggers": ["Console"],
    }
    if control is not None:
        changes["environment"] = {"classes": [{"path": example.controls[control]}]}
    if control == RANDOM_REWARD:
        changes["rewards"] = [
            {"type": "Environment", "name": RANDOM},
            {"type": "Environment", "name": SUCCESS, "weight": 0},
        ]
    return example_job(example.file, changes, checkpoint_every=num_steps)


def result(runs: Runs, example: Example, seed: int, control: str | None = None) -> Result:
    """Reads the result of a run, which is made if needed."""
    name = f"{example.name}-{control.replace(' ', '-') + '-' if control else ''}{seed}"
    run = runs.completed(name, job_of(example, seed, control))
    names = [EVAL_GREEDY, EVAL_SAMPLED]
    if control == RANDOM_REWARD:
        names = [name.replace("heldout/", f"heldout/reward/{SUCCESS}/") for name in names]
    seconds = sorted(run.series(TIME_PER_STEP))
    greedy, sampled = (scores(run, name) for name in names)
    found = Result(greedy, sampled, seconds[len(seconds) // 2])
    print(
        f"{name}: sampled {found.sampled[0]:.1%} -> {last(found.sampled):.1%}, {found.seconds:.2f} s per step",
        flush=True,
    )
    return found


def table(
    examples: Sequence[Example],
    learned: Mapping[str, Sequence[Result]],
    controls: Mapping[tuple[str, str], Sequence[Result]],
) -> bool:
    """Prints the results and returns whether all targets are met."""
    print("\n| run | greedy before | after | sampled before | after | steps |")
    print("|---|---|---|---|---|---|")
    rows = [(name, results) for name, results in learned.items()]
    rows += [(f"{name}, {control}", results) for (name, control), results in controls.items()]
    for name, results in rows:
        cells = [
            ", ".join(f"{value:.1%}" for value in values)
            for values in (
                [each.greedy[0] for each in results],
                [last(each.greedy) for each in results],
                [each.sampled[0] for each in results],
                [last(each.sampled) for each in results],
            )
        ]
        print(f"| {name} | {' | '.join(cells)} | {max(results[0].greedy)} |")
    has_learned = all(last(each.sampled) >= example.target for example in examples for each in learned[example.name])
    gains = [last(each.sampled) - each.sampled[0] for results in controls.values() for each in results]
    is_clean = all(gain <= MAX_CONTROL_GAIN for gain in gains)
    targets = ", ".join(f"{example.name} {example.target:.0%}" for example in examples)
    print(f"\n{'met' if has_learned else 'MISSED'}: sampled success at the end, each seed: at least {targets}")
    print(f"{'met' if is_clean else 'MISSED'}: no control gains more than {100 * MAX_CONTROL_GAIN:.0f} points")
    return has_learned and is_clean


def draw_all(
    examples: Sequence[Example],
    learned: Mapping[str, Sequence[Result]],
    controls: Mapping[tuple[str, str], Sequence[Result]],
    path: Path,
) -> None:
    """Draws the sampled success of each example with its controls."""
    figure, panels = new_figure(len(examples), *(example.name for example in examples))
    for axes, example in zip(panels, examples, strict=True):
        axes.set_ylabel("success, sampled")
        draw(axes, [each.sampled for each in learned[example.name]], "example", "#2a6f97")
        for control, colour in ((NO_FEEDBACK, "#e09f3e"), (RANDOM_REWARD, "#c8553d")):
            if results := controls.get((example.name, control)):
                draw(axes, [each.sampled for each in results], control, colour)
    save(figure, panels, path)


if __name__ == "__main__":
    sys.exit(main())
