"""Several evaluations in one run: rewards, sampling, schedule, metrics, samples, and the best checkpoint."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from rljob_testing.training import training_runs

REWARDS = """
from pathlib import Path

def ends_with_sorted(prompt, response, answer, row):
    with Path(__file__).with_name("scored").open("a") as file:
        file.write(prompt + "\\n")
    return float(response[:1] == min(prompt[:-1]))
"""
NUM_STEPS = 3
SECOND: training_runs.Document = {
    "name": "second",
    "rewards": ["first"],
    "greedy": False,
    "numSamples": 4,
    "temperature": 0.8,
    "topP": 0.9,
    "maxNewTokens": 3,
    "everySteps": 2,
    "atStart": False,
}


def job(num_workers: int) -> training_runs.Document:
    """The first evaluation does not use the reward `first`, and the second one only this reward."""
    return training_runs.small_job(
        num_workers=num_workers,
        rewards=[
            training_runs.function_reward("rljob_trainer.rewards.exact_match:exact_match"),
            training_runs.function_reward("my_rewards:ends_with_sorted", name="first", weight=0),
        ],
        evaluations=[
            training_runs.held_out(6, 1) | {"numSamples": 2, "rewards": ["score"]},
            training_runs.held_out(5, 1) | SECOND,
        ],
        checkpoint={"everySteps": 100, "keep": 1, "keepBest": {"metric": "eval/heldout/response_length_mean"}},
        steps=NUM_STEPS,
    )


@pytest.fixture(scope="module")
def of_two_workers(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> training_runs.Ended:
    folder = tmp_path_factory.mktemp("two")
    (folder / "my_rewards.py").write_text(REWARDS)
    run = training_runs.RunTrainer(folder)(job(2), cluster)
    assert run.exit_code == 0, run.terminal
    return run


def test_each_evaluation_has_its_schedule_and_its_sampling(of_two_workers: training_runs.Ended) -> None:
    files = of_two_workers.files
    steps = {
        name: [int(row["step"]) for row in files.metrics() if f"eval/{name}/excluded_fraction" in row]
        for name in ("heldout", "second")
    }
    assert steps == {"heldout": [0, 1, 2, 3], "second": [2, 3]}
    samples = [row for row in training_runs.json_lines(files.folder / "samples.jsonl") if row["kind"] != "train"]
    found = {(row["evaluation"], row["kind"], row["step"]) for row in samples}
    assert ("heldout", "eval_greedy", 0) in found
    assert {each for each in found if each[0] == "second"} == {("second", "eval_sampled", step) for step in (2, 3)}
    of_second = [row for row in samples if row["evaluation"] == "second"]
    assert len(of_second) == 2 * 5 * 4
    assert max(len(str(row["response"])) for row in of_second) <= 3


def test_only_the_rewards_of_the_evaluation_score_it(of_two_workers: training_runs.Ended) -> None:
    samples = training_runs.json_lines(of_two_workers.files.folder / "samples.jsonl")
    names = {str(row.get("evaluation")): row["rewards"] for row in samples}
    assert {name: list(rewards) for name, rewards in names.items() if isinstance(rewards, dict)} == {
        "None": ["score", "first"],
        "heldout": ["score"],
        "second": ["first"],
    }
    scored = (of_two_workers.files.folder.parent / "scored").read_text().splitlines()
    assert len(scored) == NUM_STEPS * 16 + 2 * 5 * 4
    # A single reward with weight 0 counts with weight 1.
    assert any(row["score"] == 1 for row in samples if row.get("evaluation") == "second")


def test_the_metrics_follow_from_the_samples(of_two_workers: training_runs.Ended) -> None:
    files = of_two_workers.files
    samples = training_runs.json_lines(files.folder / "samples.jsonl")
    [row] = [row for row in files.metrics() if row["step"] == NUM_STEPS and "eval/second/mean_at_4" in row]
    groups: dict[object, list[float]] = {}
    for sample in samples:
        if sample.get("evaluation") == "second" and sample["step"] == NUM_STEPS:
            assert isinstance(sample["score"], float)
            groups.setdefault(sample["group"], []).append(sample["score"])
    assert [len(scores) for scores in groups.values()] == [4] * 5
    for k in (1, 2, 4):
        subsets = [[any(each) for each in combinations(scores, k)] for scores in groups.values()]
        expected = sum(Fraction(sum(each), len(each)) for each in subsets) / 5
        assert row[f"eval/second/pass_at_{k}"] == pytest.approx(float(expected))
    assert row["eval/second/mean_at_4"] == pytest.approx(sum(map(sum, groups.values())) / 20)
    assert "eval/second/greedy" not in row
    assert "eval/second/maj_at_4" not in row


def test_the_best_checkpoint_is_kept_and_exported(of_two_workers: training_runs.Ended) -> None:
    files = of_two_workers.files
    lengths = dict(enumerate(files.series("eval/heldout/response_length_mean")))
    best = max(range(1, NUM_STEPS + 1), key=lambda step: (lengths[step], -step))
    state = files.state()
    assert state.best is not None
    assert (state.best.step, state.best.value) == (best, lengths[best])
    kept = sorted({best, NUM_STEPS})
    assert files.checkpoint_names() == [f"step-{step:08d}.start-0001" for step in kept]
    assert (files.folder / "export-best" / "model.safetensors").exists() == (best != NUM_STEPS)
    assert state.progress.eval_score == files.series("eval/heldout/greedy")[-1]


def test_the_scores_do_not_depend_on_the_number_of_workers(
    of_two_workers: training_runs.Ended, run_trainer: training_runs.RunTrainer, cluster: str, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    run = run_trainer(job(1), cluster)
    assert run.exit_code == 0, run.terminal
    for name in ("greedy", "mean_at_2", "pass_at_2", "response_length_mean"):
        values = [each.files.series(f"eval/heldout/{name}")[0] for each in (run, of_two_workers)]
        assert values[0] == values[1], name
    for kind in ("eval_greedy", "eval_sampled"):
        assert run.files.samples(kind, 0) == of_two_workers.files.samples(kind, 0)
