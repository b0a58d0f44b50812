"""Rewards that fail, as shown in the terminal, in RunState and in the metrics of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from pydantic import JsonValue

from rljob_testing.messages import Mentions
from rljob_testing.training import training_runs
from rljob_trainer.controller import prompt_sets

pytestmark = [pytest.mark.ray]

REWARDS = """
import os
import time


def raises_later(prompt, response, answer, row):
    if prompt.startswith("2"):
        raise KeyError("no such colour")
    return 1.0


def says_good_later(prompt, response, answer, row):
    return "good" if prompt.startswith("2") else 1.0


def first_character(prompt, response, answer, row):
    from rljob_trainer.rewards.base import Scored

    return Scored(1.0, response[:1])


def dies(prompt, response, answer, row):
    os._exit(3)


def hangs_on_one(prompt, response, answer, row):
    if prompt.startswith("1"):
        time.sleep(3600)
    return 1.0
"""


def job(folder: Path, first_digits: str, function: str, **reward: JsonValue) -> training_runs.Document:
    """Two steps; prompt i of all eight begins with digit i."""
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{digit}0>", "answer": f"0{digit}"}) for digit in first_digits]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return training_runs.small_job(
        rewards=[training_runs.function_reward(f"my_rewards:{function}", **reward)],
        dataset={"file": {"path": "rows.jsonl"}, "shuffle": False},
        steps=2,
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [("raises_later", "KeyError: 'no such colour'"), ("says_good_later", "'good'")],
)
def test_a_failing_reward_ends_the_run_with_its_error(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path, function: str, expected: str
) -> None:
    run = run_trainer(job(tmp_path, "11112222", function), cluster)
    assert run.exit_code == 1, run.terminal
    state = run.files.state()
    assert state.phase == "Failed"
    assert state.error is not None
    assert state.error.kind == "RewardError"
    for text in (run.terminal, state.error.message):
        assert f"spec.training.rewards[0] (reward score): my_rewards:{function}" in text
        assert expected in text
        assert "prompt: " in text
        assert "16 of 16 responses of this worker failed" in text
        assert "set spec.training.rewards[0].onError: Exclude" in text
    # The previous step is kept, although its save was still running.
    assert run.files.training_steps() == [1]
    assert run.files.checkpoint_names() == ["step-00000001.start-0001"]
    assert run.files.newest_checkpoint() == 1


def test_responses_whose_reward_hangs_are_excluded_and_counted(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    # Half of the responses of each step hang.
    hanging = job(tmp_path, "12121212", "hangs_on_one", timeoutSeconds=1.0, numProcesses=8)
    run = run_trainer(hanging, cluster)
    assert run.exit_code == 0, run.terminal
    assert run.files.training_steps() == [1, 2]
    assert run.files.series("reward/timeout_rate") == [0.5, 0.5]
    assert run.files.series("reward/error_rate") == [0.0, 0.0]
    assert run.files.series("outcome/excluded_fraction") == [0.5, 0.5]
    assert run.files.series("actor/trained_fraction") == [0.5, 0.5]
    assert run.files.series("critic/rewards/mean") == [1.0, 1.0]
    assert run.files.series("groups/equal_scores_fraction") == [1.0, 1.0]
    [alarm] = run.files.state().alarms or ()
    assert (alarm.reason, alarm.value, alarm.since_step) == ("RewardErrors", 0.5, 2)
    assert run.terminal.count("alarm RewardErrors: a reward failed for 50 % of the responses") == 1
    scores = [(sample["score"], sample["statuses"]) for sample in run.files.samples("train", 1)]
    assert (None, {"score": "TIMEOUT"}) in scores
    assert (1.0, {"score": "OK"}) in scores


def test_a_reward_whose_processes_die_trains_nothing_and_ends_the_run(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    dying = job(tmp_path, "12121212", "dies", numProcesses=8)
    run = run_trainer(training_runs.merged(dying, {"spec": {"training": {"maxFailureRate": 0.1, "steps": 3}}}), cluster)
    assert run.exit_code == 75, run.terminal
    state = run.files.state()
    assert state.error is not None
    assert state.error.kind == "ResourceError"
    assert "maxFailureRate: 32 of 32 responses of the last 2 steps were excluded" in state.error.message
    assert "score DIED: 32" in state.error.message
    logs = "\n".join(path.read_text() for path in (run.files.folder / "logs").rglob("*") if path.is_file())
    assert logs == Mentions("spec.training.rewards[0]", "score", "DIED", "exit code 3", "only counted")
    assert run.files.series("reward/score/died_rate") == [1.0, 1.0]
    assert run.files.series("critic/rewards/mean") == []
    assert run.files.training_steps() == [1, 2]
    # Nothing was trained, so a retry begins again.
    assert run.files.checkpoint_names() == []


def test_rows_with_unscorable_answers_are_skipped_and_samples_show_the_extracted_answer(
    run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_sets, "MAX_ROWS_PARSED", 7)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    answers = ["0", "\\boxed{}", "2", "3", "4", "5", "6", "7"]
    rows = [json.dumps({"prompt": f"{number}>", "answer": answer}) for number, answer in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    evaluation = {**training_runs.held_out(2, 1), "numSamples": 1, "temperature": 1.0}
    run = run_trainer(
        training_runs.small_job(
            rewards=[
                {"name": "math", "type": "MathAnswer", "numProcesses": 1},
                training_runs.function_reward("my_rewards:first_character", name="first", weight=0.5),
            ],
            dataset={"file": {"path": "rows.jsonl"}, "shuffle": False},
            evaluations=[evaluation],
            steps=2,
        ),
        cluster,
    )
    assert run.exit_code == 0, run.terminal
    assert run.files.series("data/rows_skipped") == [1.0, 0.0]
    # The second batch begins the next epoch with the last row of the dataset.
    prompts = [[each["prompt"] for each in run.files.samples("train", step)] for step in (1, 2)]
    assert prompts == [["0>"] * 4 + ["2>"] * 4, ["5>"] * 4 + ["6>"] * 4]
    assert run.terminal == Mentions("skipped", "MathAnswer", "1 now, 1 so far", "rows.jsonl, line 2:")
    samples = [each for kind in ("train", "eval_greedy", "eval_sampled") for each in run.files.samples(kind, 1)]
    assert len(samples) == 8 + 2 + 2
    found = [cast(dict[str, str], sample["found"]) for sample in samples]
    assert all(set(each) == {"math", "first"} for each in found)
    assert [each["first"] for each in found] == [sample["response"][:1] for sample in samples]
    assert {each["first"] for each in found} - {""}
    assert {each["math"] for each in found} - {""}
