"""Which prompts are trained on and which are held out."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from rljob_api.v1alpha1.dataset import FileDataset
from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller import prompt_sets
from rljob_trainer.controller.prompt_sets import load_all_prompts, prompt_cursor
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
    """The message names each filter."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1>", "answer": "1"}\n' * 2)
    with pytest.raises(
        DatasetError, match=r"^spec\.training\.dataset: no row is left .*\(heldOut dropped 2 of 2 rows .*numPrompts"
    ):
        load_all_prompts(training(path, "Function"), MODEL, tmp_path)
    path.write_text("".join(f'{{"prompt": "{number} and five other words>"}}\n' for number in range(1, 4)))
    job = training(path, "Function", filters={"contaminationNgramWords": 3})
    with pytest.raises(DatasetError, match=r"\(heldOut dropped 1 of 3 rows .*; contamination dropped 2 of 3 rows"):
        load_all_prompts(job, MODEL, tmp_path)


def environment_job(path: Path, **settings: object) -> Training:
    environment = {"type": "Class", "classes": [{"path": "games:Wordle"}], "maxContextTokens": 64}
    return training(path, "Environment", environment=environment, **settings)


def test_rows_of_an_environment_with_the_prompt_of_an_evaluation_are_removed(tmp_path: Path) -> None:
    """Other columns may differ, and columns that are the same in all rows do not matter."""
    rules = "Answer with one of the letters from a to h, and do not write anything else."
    rows = [{"prompt": f"Guess {number}.", "split": "train", "rules": rules} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[1] | {"prompt": " Guess  1.", "split": "test"}) + "\n")
    dataset = {"type": "File", "file": {"path": str(tmp_path / "rows.jsonl")}, "systemPrompt": "Think."}
    evaluation = {"type": "File", "file": {"path": str(tmp_path / "held_out.jsonl")}}
    job = environment_job(
        tmp_path, dataset=dataset, evaluations=[{"dataset": evaluation}], filters={"contaminationNgramWords": 13}
    )
    prompts = load_all_prompts(job, CHAT_MODEL, tmp_path)
    assert [row.row["prompt"] for row in prompts.training] == ["Guess 0.", "Guess 2."]


def test_rows_of_an_environment_whose_prompts_repeat_are_different_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    words = ("crane", "slate", "trace", "crane")
    path.write_text("".join(f'{{"prompt": "Play.", "word": "{word}"}}\n' for word in words))
    file = {"type": "File", "file": {"path": str(path)}}
    job = environment_job(path, evaluations=[{"dataset": file, "numPrompts": 2}])
    prompts = load_all_prompts(job, CHAT_MODEL, tmp_path)
    assert [row.row["word"] for row in prompts.training] == ["trace"]
    assert [row.row["word"] for row in prompts.held_out[HELD_OUT]] == ["crane", "slate"]
    path.write_text(path.read_text().replace("trace", "stare"))
    assert load_all_prompts(job, CHAT_MODEL, tmp_path).sources[0].digest != prompts.sources[0].digest


def test_an_evaluation_reads_no_more_rows_than_it_uses(tmp_path: Path) -> None:
    path, evaluation = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "1>"}\n')
    # The second row is too long, and the fifth one is invalid.
    evaluation.write_text('{"prompt": "2>"}\n{"prompt": "22222>"}\n{"prompt": "3>"}\n{"prompt": "4>"}\nno JSON\n')
    dataset = {"type": "File", "file": {"path": str(evaluation)}, "maxPromptTokens": 2, "overlongPrompt": "Drop"}
    job = training(path, "Function", evaluations=[{"dataset": dataset, "numPrompts": 2}])
    assert [row.prompt for row in load_all_prompts(job, MODEL, tmp_path).held_out[HELD_OUT]] == ["2>", "3>"]


def test_equal_questions_of_reasoning_gym_are_equal_tasks() -> None:
    """Their metadata differ in the number of the row."""

    def dataset(seed: int) -> dict[str, object]:
        return {"type": "ReasoningGym", "reasoningGym": {"task": "leg_counting", "seed": seed, "size": 4}}

    environment = {"type": "Class", "classes": [{"path": "games:Legs"}], "maxContextTokens": 64}
    evaluation = {"dataset": dataset(2), "numPrompts": 4}
    job = training(Path(), "Environment", environment=environment, dataset=dataset(1), evaluations=[evaluation])
    prompts = load_all_prompts(job, CHAT_MODEL, Path())
    assert (len(prompts.training), prompts.num_removed) == (1, 3)


def test_datasets_of_the_same_size_have_different_orders(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}>", "answer": "{number}"}}\n' for number in range(8)))
    dataset = {"type": "File", "file": {"path": str(path)}}
    datasets = [{**dataset, "name": name} for name in ("first", "second")]
    several = training(path, "Function", dataset=None, datasets=datasets, evaluations=[])
    one = training(path, "Function", evaluations=[])
    order, *orders = (
        [row.row.index for row in prompt_cursor(load_all_prompts(job, MODEL, tmp_path), 3, None).next_batch(16)]
        for job in (one, several)
    )
    # That of a single dataset was recorded once.
    assert order[:8] == [6, 1, 5, 2, 7, 4, 3, 0]
    assert sorted(orders[0][::2]) == sorted(orders[0][1::2]) == list(range(8))
    assert orders[0][::2] != orders[0][1::2]


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
