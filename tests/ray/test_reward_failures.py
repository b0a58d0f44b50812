"""Rewards that go wrong, seen from the terminal, from RunState and from the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_testing.trainer_program import RunTrainer
from rljob_testing.training_runs import Document, small_job

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REWARDS = """
import time


def raises(prompt, response, answer, row):
    raise KeyError("no such colour")


def answers_with_text(prompt, response, answer, row):
    return "good"


def hangs_on_one(prompt, response, answer, row):
    if prompt.startswith("1"):
        time.sleep(3600)
    return 1.0
"""


def job(function: str, reward: Document | None = None, dataset: Document | None = None) -> Document:
    named: Document = {"function": {"path": f"my_rewards:{function}"}, **(reward or {})}
    return small_job(reward=named, dataset=dataset or {}, steps=2)


@pytest.mark.parametrize(
    ("function", "said"),
    [("raises", "KeyError: 'no such colour'"), ("answers_with_text", "'good'")],
)
def test_a_reward_that_fails_ends_the_run_and_is_quoted(
    run_trainer: RunTrainer, cluster: str, tmp_path: Path, function: str, said: str
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    run = run_trainer(job(function), cluster)
    assert run.exit_code == 1, run.terminal
    state = run.files.state()
    assert state.phase == "Failed"
    assert state.error is not None
    assert state.error.kind == "RewardError"
    for text in (run.terminal, state.error.message):
        assert f"spec.training.reward: my_rewards:{function}" in text
        assert said in text
        assert "prompt: " in text
        assert (
            "16 of 16 responses failed like this; mend the reward, or set spec.training.reward.onError: Score" in text
        )
    assert run.files.training_steps() == []
    assert run.files.checkpoint_names() == []


def test_a_reward_that_hangs_is_timed_out_and_counted(run_trainer: RunTrainer, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    # Two of the four prompts of each step begin with 1: half of the responses hang.
    rows = [f'{{"prompt": "{first}{n}>", "answer": "{n}"}}' for n in range(4) for first in "12"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    hanging = job(
        "hangs_on_one",
        reward={"timeoutSeconds": 0.3, "numProcesses": 4},
        dataset={"file": {"path": "rows.jsonl"}, "shuffle": False},
    )
    run = run_trainer(hanging, cluster)
    assert run.exit_code == 0, run.terminal
    assert run.files.training_steps() == [1, 2]
    assert run.files.series("reward/timeout_rate") == [0.5, 0.5]
    assert run.files.series("reward/error_rate") == [0.0, 0.0]
    assert run.files.series("critic/rewards/mean") == [0.5, 0.5]
