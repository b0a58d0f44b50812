"""The filters of training rows, without files: contamination by sequences of words, and duplicates. With files:
`test_run_prompts`, and for large datasets `test_large_datasets`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.training import Training
from rljob_trainer.controller.prompt_sets import load_all_prompts
from rljob_trainer.datasets.filters import FilterName, HeldOut, ngrams_of

HELD_OUT_PROMPT = "Anna has three red apples. How many are left?"
WORDS = st.lists(st.sampled_from("abc"), min_size=0, max_size=9)
MODEL = Path(str(files("rljob_trainer"))) / "assets/sort_digits/model"


def reason(prompt: str, num_words: int | None = 4, *held_out: str) -> FilterName | None:
    return HeldOut.of(held_out or [HELD_OUT_PROMPT], num_words).reason(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "Anna has three red",
        "HAS THREE RED APPLES",
        "has three -- red, (apples)!",
        "She\nhas\tthree  red apples",
        "Tom says: 'Three red apples! How?'",
        "how many are left",
        "Are 4 or 5 left? How many are left",
    ],
)
def test_four_words_in_common_are_contamination_whatever_case_and_punctuation(prompt: str) -> None:
    assert reason(prompt) is FilterName.CONTAMINATION
    assert reason(prompt, None) is None


@pytest.mark.parametrize(
    "prompt",
    [
        "Anna has three green apples. How many remain?",
        # Three words in common, at the start and at the end.
        "Anna has three",
        "many are left",
        # All words, in another order or with another one in between.
        "left are many How apples red three has Anna",
        "Anna has three big red apples and how many more are left?",
        # A part of a word is another word.
        "has three red apple",
        "hasthree red apples. How",
        "",
        "?!",
    ],
)
def test_fewer_consecutive_words_are_not(prompt: str) -> None:
    assert reason(prompt) is None


def test_the_number_of_words_is_exact() -> None:
    words = HELD_OUT_PROMPT.split()
    for num_words in range(2, len(words) + 1):
        for num_shared in range(len(words) + 1):
            prompt = " ".join(["Other", *words[:num_shared], "words"])
            expected = FilterName.CONTAMINATION if num_shared >= num_words else None
            assert reason(prompt, num_words) is expected, (num_words, num_shared)


def test_words_of_two_held_out_prompts_do_not_add_up_and_equal_prompts_count_as_held_out() -> None:
    assert reason("one two three four", 4, "one two", "three four") is None
    assert reason("one two three four", 4, "zero one two three", "one two three four") is FilterName.HELD_OUT
    # The same words with other punctuation.
    assert reason("One, two: three; four.", 4, "one two three four") is FilterName.CONTAMINATION
    # A held-out prompt that is too short for the filter still excludes an equal one.
    assert (reason("one  two", 4, "one two"), reason("one two three", 4, "one two")) == (FilterName.HELD_OUT, None)


def test_numbers_and_letters_of_other_languages_are_words() -> None:
    assert list(ngrams_of("3.5 + x_1 = Größe", 4)) == ["3 5 x_1 größe"]
    assert list(ngrams_of("Сколько ЯБЛОК осталось", 3)) == ["сколько яблок осталось"]
    assert list(ngrams_of("don't", 2)) == ["don t"]


@given(held_out=WORDS, prompt=WORDS, num_words=st.integers(2, 5))
def test_the_filter_equals_a_comparison_of_all_ranges_of_words(
    held_out: list[str], prompt: list[str], num_words: int
) -> None:
    ranges = [held_out[first : first + num_words] for first in range(len(held_out) - num_words + 1)]
    is_shared = any(prompt[first : first + num_words] in ranges for first in range(len(prompt) - num_words + 1))
    found = reason(" ".join(prompt), num_words, " ".join(held_out))
    expected = FilterName.CONTAMINATION if is_shared else None
    assert found is (FilterName.HELD_OUT if held_out == prompt else expected)


def load(folder: Path, filters: Mapping[str, object] = MappingProxyType({})) -> tuple[list[str], dict[str, int]]:
    """Returns the training prompts, and the number of rows that each filter has dropped."""
    prompts = ["1 2 3 4 5", "0 2, 3, 4", "2 3 9 4", "1  2 3 4 6", "7 7"]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    (folder / "test.jsonl").write_text(json.dumps({"prompt": "1 2 3 4 6"}) + "\n")
    files = {name: {"type": "File", "file": {"path": f"{name}.jsonl"}} for name in ("train", "test")}
    job = {
        "model": {"source": str(MODEL)},
        "dataset": files["train"],
        "filters": dict(filters),
        "evaluations": [{"dataset": files["test"]}],
        "rewards": [{"type": "Function", "function": {"path": "rljob_trainer.rewards.exact_match:exact_match"}}],
        "steps": 1,
    }
    found = load_all_prompts(Training.from_wire(job), MODEL, folder, folder / "data")
    [report] = json.loads((folder / "data" / "filters.json").read_text())
    return [row.prompt for row in found.training], {each["filter"]: each["numRows"] for each in report["dropped"]}


def test_the_field_of_the_job_sets_the_number_of_words(tmp_path: Path) -> None:
    assert load(tmp_path) == (["1 2 3 4 5", "0 2, 3, 4", "2 3 9 4", "7 7"], {"heldOut": 1})
    four = load(tmp_path, {"contaminationNgramWords": 4})
    assert four == (["0 2, 3, 4", "2 3 9 4", "7 7"], {"heldOut": 1, "contamination": 1})
    three = load(tmp_path, {"contaminationNgramWords": 3})
    assert three == (["2 3 9 4", "7 7"], {"heldOut": 1, "contamination": 2})
    assert load(tmp_path, {"contaminationNgramWords": 2}) == (["7 7"], {"heldOut": 1, "contamination": 3})
