"""A control for the whole chain: the true reward raises held-out accuracy, a random reward does not. Rewards given to
the wrong responses, labels that leak into the prompts, or an evaluation that scores something else would make both runs
look alike. The same for a game of several turns, whose answers say nothing in the control."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest
from ruamel.yaml import YAML

from rljob_testing.gpu import engine_jobs
from rljob_testing.gpu.device import DeviceContext
from rljob_testing.training import training_runs
from rljob_trainer.dispatch.worker import WorkerContext

pytestmark = [pytest.mark.ray]

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess_letter"
NUM_STEPS, NUM_GAME_STEPS = 12, 20
# A coin with the probability that the model is right at step 0, tossed without reading the response.
REWARDS = """
import random

coin = random.Random(1)


def true(prompt, response, answer, row):
    return float(response == answer)


def noise(prompt, response, answer, row):
    return float(coin.random() < 0.3)
"""


RECIPES: dict[str, training_runs.Document] = {
    "GRPO": {"algorithm": {"dropZeroVarianceGroups": True}},
    "PPO": {
        "algorithm": {"type": "PPO", "advantage": {"gae": {"lambda": 0.95}}},
        "critic": {"optimizer": {"learningRate": 1.0e-3}},
    },
}
"""`make proof PART=algorithms` has the other recipes."""


def job(reward: str, recipe: str) -> training_runs.Document:
    return training_runs.small_job(
        **RECIPES[recipe],
        rewards=[training_runs.function_reward(f"my_rewards:{reward}")],
        optimizer={"learningRate": 6.0e-4, "warmupSteps": 3},
        rollout={"groupSize": 16, "maxNumSequences": 512},
        evaluations=[training_runs.held_out(num_prompts=256, every_steps=NUM_STEPS)],
        batchSize=32,
        steps=NUM_STEPS,
        checkpoint={"everySteps": 100, "exportHuggingFace": "Never"},
    )


GAMES = """
from guess_letter import GuessLetter


class WithoutFeedback(GuessLetter):
    def _feedback(self, guess):
        return "?"
"""


def accuracy(files: training_runs.RunFiles, step: int) -> float:
    """Fraction of held-out prompts that are sorted correctly. The run's own score would be the noise."""
    answers = [row["response"] == row["answer"] for row in files.samples("eval_greedy", step)]
    assert len(answers) == 256
    return sum(answers) / len(answers)


@pytest.mark.parametrize(
    ("reward", "recipe"),
    [
        ("true", "GRPO"),
        pytest.param("noise", "GRPO", marks=pytest.mark.long),
        pytest.param("true", "PPO", marks=pytest.mark.long),
    ],
)
def test_only_the_true_reward_improves_accuracy(
    reward: str, recipe: str, run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    run = run_trainer(job(reward, recipe), cluster)
    assert run.exit_code == 0, run.terminal
    before, after = accuracy(run.files, 0), accuracy(run.files, NUM_STEPS)
    if reward == "true":
        assert after > before + 0.3, (before, after)
        assert run.files.series("eval/heldout/greedy") == [before, after]
        # The check of a run on GPUs draws the same conclusion.
        case = DeviceContext(WorkerContext(0, 1, 0, 0, "", 0, "cpu", 1), tmp_path)
        engine_jobs.check_learning(case, run.files)
    else:
        assert after < before + 0.03, (before, after)


@pytest.mark.long
def test_a_game_of_several_turns_is_not_learned_without_its_feedback(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    """The control of the second tutorial, whose training `test_tutorial.py` repeats: there the same model learns the
    same game in as many steps, by more than 30 points."""
    shutil.copy(EXAMPLE / "guess_letter.py", tmp_path)
    (tmp_path / "my_games.py").write_text(GAMES)
    job = cast(training_runs.Document, YAML(typ="safe").load((EXAMPLE / "guess-letter.yaml").read_text()))
    changes: training_runs.Document = {
        "environment": {"classes": [{"path": "my_games:WithoutFeedback"}]},
        "evaluations": {"everySteps": NUM_GAME_STEPS},
        "loggers": ["Console"],
        "steps": NUM_GAME_STEPS,
    }
    checkpoint: training_runs.Document = {"everySteps": 100, "exportHuggingFace": "Never"}
    run = run_trainer(training_runs.merged(job, {"spec": {"training": changes, "checkpoint": checkpoint}}), cluster)
    assert run.exit_code == 0, run.terminal
    before, after = run.files.series("eval/heldout/mean_at_1")
    # A player who ignores the feedback finds 6 of 26 letters, 23 %. Two standard errors of a difference are 8 points.
    assert after < before + 0.08, (before, after)
