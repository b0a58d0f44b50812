"""Which prompts are trained on and which are held out."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from rljob_api.v1alpha1.dataset import FileDataset
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller import prompt_sets
from rljob_trainer.controller.prompt_sets import load_all_prompts
from rljob_trainer.datasets.prompts import evaluation_dataset
from rljob_trainer.errors import DatasetError

ASSETS = Path(str(files("rljob_trainer"))) / "assets"
MODEL, CHAT_MODEL = ASSETS / "sort_digits/model", ASSETS / "guess_letter/model"
HELD_OUT = evaluation_dataset(0)


def training(path: Path, reward: str, **settings: object) -> Training:
    dataset = {"type": "File", "file": {"path": str(path)}}
    function = {"function": {"path": "rljob_trainer.rewards.exact_match:exact_match"}} if reward == "Function" else {}
    return Training.from_wire(
        {
            "model": {"source": str(MODEL)},
            "dataset": dataset,
            "rewards": [{"type": reward, **function}],
            "evaluations": [{"dataset": dataset, "numPrompts": 1}],
            "steps": 1,
            **settings,
        }
    )


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>", "answer": "1"}\n{"prompt": "2>", "answer": "2"}\n')
    prompts = load_all_prompts(training(path, "Function"), MODEL, tmp_path)
    assert [row.prompt for row in prompts.training] == ["2>"]
    assert [row.prompt for row in prompts.held_out[HELD_OUT]] == ["1>"]
    assert str(prompts) == "1 training prompts, 1 held-out prompts, 1 training rows removed because they are held out"


def test_a_row_must_be_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>", "answer": "1"}\n' * 2)
    with pytest.raises(DatasetError, match=r"spec\.training\.dataset: all 2 rows are held out .*numPrompts"):
        load_all_prompts(training(path, "Function"), MODEL, tmp_path)


def test_rows_of_an_environment_with_the_same_prompt_are_different_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "Play.", "word": "{word}"}}\n' for word in ("crane", "slate", "crane")))
    environment = {"type": "Class", "classes": [{"path": "games:Wordle"}], "maxContextTokens": 64}
    job = training(path, "Environment", environment=environment)
    prompts = load_all_prompts(job, CHAT_MODEL, tmp_path)
    assert [row.row["word"] for row in prompts.training] == ["slate"]
    assert [row.row["word"] for row in prompts.held_out[HELD_OUT]] == ["crane"]
    path.write_text(path.read_text().replace("slate", "trace"))
    assert load_all_prompts(job, CHAT_MODEL, tmp_path).sources[0].digest != prompts.sources[0].digest


def test_equal_questions_of_reasoning_gym_are_equal_tasks() -> None:
    """Their metadata differ in the number of the row."""

    def dataset(seed: int) -> dict[str, object]:
        return {"type": "ReasoningGym", "reasoningGym": {"task": "leg_counting", "seed": seed, "size": 4}}

    environment = {"type": "Class", "classes": [{"path": "games:Legs"}], "maxContextTokens": 64}
    evaluation = {"dataset": dataset(2), "numPrompts": 4}
    job = training(Path(), "Environment", environment=environment, dataset=dataset(1), evaluations=[evaluation])
    prompts = load_all_prompts(job, CHAT_MODEL, Path())
    assert (len(prompts.training), prompts.num_removed) == (1, 3)


def test_rows_with_some_missing_answers_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>", "answer": "1"}\n{"prompt": "2>"}\n')
    with pytest.raises(
        DatasetError, match=r"spec\.training\.dataset\.answerField: 1 of 2 rows have no answer.*rows\.jsonl, line 2"
    ):
        load_all_prompts(training(path, "Function"), MODEL, tmp_path)


def test_a_mathematical_reward_needs_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>"}\n{"prompt": "2>"}\n')
    with pytest.raises(DatasetError, match=r"2 of 2 rows have no answer"):
        load_all_prompts(training(path, "MathAnswer"), MODEL, tmp_path)
    assert len(load_all_prompts(training(path, "Function"), MODEL, tmp_path).training) == 1


@pytest.mark.parametrize("answer", ['{"ground_truth": "1", "style": "rule"}', '["1"]', "true", "NaN", '"N/A"', '""'])
def test_a_mathematical_reward_accepts_strings_and_numbers(answer: str, tmp_path: Path) -> None:
    """Another reward accepts any value."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "1>", "answer": 1e-05}}\n\n{{"prompt": "2>", "answer": {answer}}}\n')
    with pytest.raises(
        DatasetError, match=r"dataset\.answerField: 1 of 2 rows .*\n  .*rows\.jsonl, line 3: the answer is"
    ):
        load_all_prompts(training(path, "MathAnswer"), MODEL, tmp_path)
    prompts = load_all_prompts(training(path, "Function"), MODEL, tmp_path)
    assert [row.answer for row in prompts.held_out[HELD_OUT]] == [1e-05]


def test_a_code_reward_needs_tests_in_every_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>"}\n')
    with pytest.raises(DatasetError, match=r"1 of 1 rows have no answer, but the reward Code needs one"):
        load_all_prompts(training(path, "Code"), MODEL, tmp_path)
    path.write_text('{"prompt": "1>", "answer": ["assert f(1)"]}\n{"prompt": "2>", "answer": "18"}\n')
    with pytest.raises(
        DatasetError, match=r"1 of 2 rows .* the reward Code .*\n  .*rows\.jsonl, line 2: the answer is"
    ):
        load_all_prompts(training(path, "Code"), MODEL, tmp_path)


def test_held_out_answers_are_checked_too(tmp_path: Path) -> None:
    """Those of the prompts that the evaluation uses."""
    path, evaluation = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "1>", "answer": 1}\n')
    evaluation.write_text('{"prompt": "2>", "answer": "-"}\n')
    job = training(path, "MathAnswer")
    [heldout] = job.evaluations
    dataset = job.dataset.model_copy(update={"file": FileDataset(path=str(evaluation))})
    job = job.model_copy(update={"evaluations": (heldout.model_copy(update={"dataset": dataset}),)})
    with pytest.raises(
        DatasetError, match=r"evaluations\[0\]\.dataset\.answerField: 1 of 1 rows .*\n  .*held_out\.jsonl, line 1: "
    ):
        load_all_prompts(job, MODEL, tmp_path)
    evaluation.write_text('{"prompt": "2>", "answer": "3"}\n{"prompt": "3>", "answer": "-"}\n')
    assert [row.answer for row in load_all_prompts(job, MODEL, tmp_path).held_out[HELD_OUT]] == ["3"]


def test_prompts_are_chosen_by_pass_rate_only_from_few_rows_with_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}>", "answer": "1"}}\n' for number in range(4)))
    sampling = {"promptSampling": {"type": "PassRate"}}
    assert len(load_all_prompts(training(path, "Function", **sampling), MODEL, tmp_path).training) == 3
    monkeypatch.setattr(prompt_sets, "MAX_ROWS_PARSED", 2)
    with pytest.raises(DatasetError, match=r"promptSampling\.type: PassRate .* at most 2 rows \(seen: 3\); .* Uniform"):
        load_all_prompts(training(path, "Function", **sampling), MODEL, tmp_path)
    assert len(load_all_prompts(training(path, "Function"), MODEL, tmp_path).training) == 3
    environment = {"type": "Class", "classes": [{"path": "games:Wordle"}], "maxContextTokens": 64}
    without: dict[str, object] = {"dataset": None, "evaluations": [], "environment": environment, **sampling}
    with pytest.raises(DatasetError, match=r"promptSampling\.type: PassRate needs a dataset"):
        load_all_prompts(training(path, "Environment", **without), CHAT_MODEL, tmp_path)
    with pytest.raises(DatasetError, match=r"promptSampling\.type: PassRate needs a reward"):
        load_all_prompts(training(path, "Function", rewards=[], **sampling), MODEL, tmp_path)
