"""Answers in the dataset that MathAnswer cannot score are named before a device is used, or skipped when rows are
drawn. The processes are real. A function replaces MathAnswer where processes fail; it records its arguments."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from rljob_api.v1alpha1.reward import Reward, RewardType
from rljob_testing.messages import Mentions
from rljob_trainer.controller.checks import answers as answer_checks
from rljob_trainer.controller.checks.answers import (
    ADVICE,
    DrawnRowFilter,
    check_rewards,
    refuse_unusable_answers,
    refuse_unusable_tests,
    start_check_pools,
)
from rljob_trainer.datasets.cursor import PromptCursor
from rljob_trainer.datasets.prompts import DATASET, PromptRow, evaluation_dataset
from rljob_trainer.errors import DatasetError, ResourceError
from rljob_trainer.rewards.base import ScorerSpec
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.process_pool import ScorerPool
from rljob_trainer.rewards.scorer_environment import scorer_environment
from rljob_trainer.workers.reward import RewardSettings, ScorerSettings

WHERE = "spec.training.rewards[0]"
READER = """
import os, signal, time
from pathlib import Path

def read(prompt, response, answer, row):
    assert response == ""
    with Path(__file__).with_name("asked").open("a") as asked:
        asked.write(f"{answer!r}\\n")
    is_first = Path(__file__).with_name("asked").read_text().splitlines().count(repr(answer)) == 1
    if answer == "bad" or isinstance(answer, int) and answer < 0:
        raise ValueError("no mathematical expression")
    if answer == "dies" or answer == "dies once" and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == "no memory":
        raise MemoryError
    if answer == "no disk":
        raise OSError(5, "Input/output error")
    if answer == "no library":
        raise ModuleNotFoundError("sympy")
    if answer == "hangs" or answer == "hangs once" and is_first:
        time.sleep(60)
    return 0.0
"""


def rows(*answers: object) -> list[PromptRow]:
    return [
        PromptRow(index, f"p{index}", f"p{index}", (1,), answer, {}, location=f"a.jsonl, line {index + 1}")
        for index, answer in enumerate(answers)
    ]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Check:
    """The check of a job with one MathAnswer reward."""

    def __init__(self, folder: Path, stack: ExitStack, scorer: ScorerSpec | None = None, **limits: object) -> None:
        (folder / "readers.py").write_text(READER)
        self._asked = folder / "asked"
        self._stack = stack
        reward = Reward.model_validate({"type": RewardType.MATH_ANSWER, **limits})
        scorer = scorer or FunctionScorer("readers:read", WHERE)
        environment = scorer_environment(os.environ, [], [folder])
        settings = ScorerSettings(reward, WHERE, scorer, 1)
        self.settings = RewardSettings((settings,), (), 8, folder / "logs", environment)
        self.pools: list[ScorerPool] = []
        self.reported: list[str] = []

    def run(
        self, training: Sequence[PromptRow], held_out: Sequence[PromptRow] = (), *, is_large: bool = False
    ) -> DrawnRowFilter | None:
        self.pools = start_check_pools(self.settings, self._stack)
        by_dataset = {evaluation_dataset(0): held_out}
        return check_rewards(
            self.settings.scorers, self.pools, {DATASET: training}, by_dataset, self.reported.append, is_large=is_large
        )

    @property
    def asked(self) -> Counter[str]:
        return Counter(self._asked.read_text().splitlines())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            ["1", {"style": "rule", "ground_truth": "72"}, 2],
            "spec.training.dataset.answerField: 1 of 3 rows have an answer that the reward MathAnswer cannot score; "
            "name the value in the dictionary, such as `answerField: reward_model.ground_truth`\n  a.jsonl, line 2: "
            "the answer is a dictionary with the keys style, ground_truth ({'style': 'rule', 'ground_truth': '72'})",
        ),
        (
            [["1"], True, math.nan, "N/A", "", "null", "?"],
            "spec.training.dataset.answerField: 7 of 7 rows have an answer that the reward MathAnswer cannot score; "
            f"{ADVICE}\n  a.jsonl, line 1: the answer is a list "
            "(['1'])\n  a.jsonl, line 2: the answer is the truth value true\n  a.jsonl, line 3: the answer is the "
            "number nan, which is not finite\n  a.jsonl, line 4: the answer is the string 'N/A', which stands for a "
            "missing value\n  a.jsonl, line 5: the answer is the string '', which is empty\n  and 2 more",
        ),
    ],
)
def test_answers_that_are_neither_strings_nor_numbers_are_rejected(answers: list[object], message: str) -> None:
    with pytest.raises(DatasetError) as caught:
        refuse_unusable_answers(rows(*answers), DATASET, "reward_model")
    assert str(caught.value) == message


def test_tests_of_code_that_cannot_be_parsed_are_named() -> None:
    good = {"inputs": ["1"], "outputs": ["2"]}
    refuse_unusable_tests(rows(good, ["assert f(1) == 2"], '{"inputs": ["1"], "outputs": ["2"]}'), DATASET)
    with pytest.raises(DatasetError) as caught:
        refuse_unusable_tests(rows(good, {"inputs": ["1"], "outputs": []}, ["x = 1"]), DATASET)
    assert str(caught.value) == (
        "spec.training.dataset.answerField: 2 of 3 rows have an answer that the reward Code cannot score; "
        f"{ADVICE}\n  a.jsonl, line 2: the answer is an object with 1 inputs and 0 outputs\n  a.jsonl, line 3: "
        "the answer is 'x = 1', a test without assert statement, which all code would pass"
    )


def test_answers_of_any_spelling_pass_the_check(tmp_path: Path, stack: ExitStack) -> None:
    check = Check(tmp_path, stack, MathAnswerScorer(WHERE))
    good = rows("18", "work\n#### 18", "\\frac{1}{2}", 1e-05, 1e16, 72, "$x^2$", "-3")
    assert check.run(good, rows("7")) is None
    with pytest.raises(DatasetError) as caught:
        Check(tmp_path, stack, MathAnswerScorer(WHERE)).run(good, rows("7", "\\boxed{}"))
    first, second = str(caught.value).splitlines()
    assert first == Mentions("spec.training.evaluations[0].dataset.answerField:", "1 of 2 rows")
    assert second == Mentions("a.jsonl, line 2:", "'\\\\boxed{}'", "cannot be scored")


def test_each_distinct_answer_is_checked_once_and_all_failing_rows_are_counted(
    tmp_path: Path, stack: ExitStack
) -> None:
    check = Check(tmp_path, stack)
    with pytest.raises(DatasetError) as caught:
        check.run(rows("1", "bad", 1, "1", 1.0, -1, "bad", "bad", -1, -2), rows("1"))
    reason = ("cannot be scored", "no mathematical expression")
    assert str(caught.value).splitlines() == [
        Mentions("spec.training.dataset.answerField:", "6 of 10 rows", "MathAnswer"),
        Mentions("a.jsonl, line 2:", "string 'bad'", *reason),
        Mentions("a.jsonl, line 6:", "number -1", *reason),
        Mentions("a.jsonl, line 7:", "string 'bad'", *reason),
        Mentions("a.jsonl, line 8:", "string 'bad'", *reason),
        Mentions("a.jsonl, line 9:", "number -1", *reason),
        Mentions("1 more"),
    ]
    assert ADVICE in str(caught.value)
    assert check.asked == Counter(["'1'", "'bad'", "1", "1.0", "-1", "-2"])


def test_a_row_whose_answer_takes_too_long_is_named(tmp_path: Path, stack: ExitStack) -> None:
    check = Check(tmp_path, stack, timeout_seconds=1.0)
    with pytest.raises(DatasetError) as caught:
        check.run(rows("1", "hangs", "hangs once"))
    assert str(caught.value) == Mentions("1 of 3 rows", "spec.training.rewards[0].timeoutSeconds")
    assert str(caught.value).splitlines()[1] == Mentions("a.jsonl, line 2:", "string 'hangs'", "1 s", "killed")


CAUSES = {
    "dies": "signal SIGKILL",
    "no memory": "MemoryError",
    "no disk": "OSError",
    "no library": "ModuleNotFoundError",
}


@pytest.mark.parametrize("answer", CAUSES)
def test_a_failing_process_is_not_blamed_on_the_answer(tmp_path: Path, stack: ExitStack, answer: str) -> None:
    check = Check(tmp_path, stack)
    assert check.run(rows("1", "dies once", "2")) is None
    with pytest.raises(ResourceError, match=r"^spec\.training\.rewards\[0\]: .* failed twice") as caught:
        check.run(rows("bad", "1", answer))
    assert str(caught.value) == Mentions(f"string '{answer}'", "a.jsonl, line 3")
    assert CAUSES[answer] in str(caught.value)


def test_a_wrong_column_is_found_before_all_of_it_is_parsed(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_checks, "ANSWERS_PER_BLOCK", 4)
    monkeypatch.setattr(answer_checks, "MAX_FAILED", 4)
    check = Check(tmp_path, stack)
    with pytest.raises(DatasetError, match=r"at least 8 of 21 rows"):
        check.run(rows("1", *(-number for number in range(1, 20)), -1))
    assert check.reported == [Mentions("spec.training.dataset", f"{number} of 20") for number in (0, 4)]
    assert sum(check.asked.values()) == 8


def test_above_the_limit_rows_are_skipped_when_they_are_drawn(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    check = Check(tmp_path, stack)
    training = rows("1", "bad", "2", -1, "bad", "3")
    drawn = check.run(training, rows("7"), is_large=True)
    assert drawn is not None
    assert check.asked == Counter(["'7'"])
    cursor = PromptCursor(training, seed=0, shuffle=False, digest="any", are_usable=drawn.are_usable)
    assert [each.row.answer for each in cursor.next_batch(2)] == ["1", "2"]
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        [
            Mentions("spec.training.dataset:", "skipped", "MathAnswer", "1 now, 1 so far"),
            Mentions("a.jsonl, line 2:", "string 'bad'", "cannot be scored", "no mathematical expression"),
        ]
    ]
    assert [each.row.answer for each in cursor.next_batch(4)] == ["3", "1", "2", "3"]
    assert [len(record.getMessage().splitlines()) for record in caplog.records[1:]] == [3]
    assert "2 now, 3 so far" in caplog.text
    assert cursor.num_skipped == 6
    assert set(check.asked.values()) == {1}


@pytest.mark.parametrize(
    ("answer", "end"), [("dies", "ended its process (signal SIGKILL)"), ("no memory", "raised Mem")]
)
def test_a_drawn_row_that_kills_its_process_is_skipped(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture,
    answer: str, end: str,
) -> None:  # fmt: skip
    """Otherwise each attempt would draw the same row and fail in the same way."""
    check = Check(tmp_path, stack)
    training = rows("5", answer, "dies once", "6")
    drawn = check.run(training, is_large=True)
    assert drawn is not None
    cursor = PromptCursor(training, seed=0, shuffle=False, digest="any", are_usable=drawn.are_usable)
    assert [each.row.answer for each in cursor.next_batch(6)] == ["5", "dies once", "6"] * 2
    [message] = [record.getMessage() for record in caplog.records if "rows skipped because" in record.getMessage()]
    assert message == Mentions("spec.training.dataset:", "skipped", "MathAnswer", "1 now, 1 so far")
    assert message.splitlines()[1] == Mentions("a.jsonl, line 2:", f"string '{answer}'")
    assert end in message.splitlines()[1]
    assert check.asked == {"'5'": 1, f"'{answer}'": 2, "'dies once'": 2, "'6'": 1, "'1'": 1}


def test_a_drawn_row_is_not_blamed_if_no_answer_can_be_scored(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_checks, "KNOWN_GOOD_ANSWER", "dies")
    drawn = Check(tmp_path, stack).run(rows("5", "no memory"), is_large=True)
    assert drawn is not None
    with pytest.raises(ResourceError, match=r"string 'no memory' \(a\.jsonl, line 2\) failed twice"):
        drawn.are_usable(rows("5", "no memory"))


def test_rows_of_two_files_with_the_same_index_are_both_named(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    drawn = Check(tmp_path, stack).run(rows("5", "bad"), is_large=True)
    assert drawn is not None
    one = rows("bad")
    other = [dataclasses.replace(row, location="b.jsonl, line 1") for row in one]
    assert [drawn.are_usable(each) for each in (one, other, one)] == [[False]] * 3
    assert "1 now, 1 so far\n  a.jsonl, line 1: " in caplog.text
    assert "1 now, 2 so far\n  b.jsonl, line 1: " in caplog.text
    assert len(caplog.records) == 2


def of_datasets(answers: dict[str, str]) -> dict[str, list[PromptRow]]:
    """A row for each dataset, with this answer; the dataset's only reward has the dataset's name."""
    return {
        f"spec.training.datasets[{index}]": [
            dataclasses.replace(row, rewards=(name,), dataset=name, location=f"{name}.jsonl, line 1")
            for row in rows(answer)
        ]
        for index, (name, answer) in enumerate(answers.items())
    }


def test_rows_of_every_maths_reward_are_checked_and_named_by_their_dataset(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def settings() -> RewardSettings:
        check = Check(tmp_path, stack)
        [first] = check.settings.scorers
        named = [
            dataclasses.replace(
                first, reward=first.reward.model_copy(update={"name": name, "timeout_seconds": seconds})
            )
            for name, seconds in (("first", 9.0), ("second", 10.0))
        ]
        return dataclasses.replace(check.settings, scorers=tuple(named))

    training = of_datasets({"first": "5", "second": "bad", "other": "bad"})
    of_all = settings()
    with pytest.raises(DatasetError) as caught:
        check_rewards(of_all.scorers, start_check_pools(of_all, stack), training, {}, is_large=False)
    assert str(caught.value).startswith("spec.training.datasets[1].answerField: 1 of 1 rows have an answer")
    drawn = check_rewards(of_all.scorers, start_check_pools(of_all, stack), training, {}, is_large=True)
    assert drawn is not None
    assert [drawn.are_usable(each) for each in training.values()] == [[True], [False], [True]]
    assert "spec.training.datasets: rows skipped because MathAnswer cannot score their answer: 1 now" in caplog.text


def test_below_the_limit_or_without_math_no_process_stays(tmp_path: Path, stack: ExitStack) -> None:
    check = Check(tmp_path, stack)
    assert check.run(rows("1", "2")) is None
    assert all(not Path(f"/proc/{pid}").exists() for pool in check.pools for pid in pool.process_ids())
    function = Reward.model_validate({"type": RewardType.FUNCTION, "function": {"path": "readers:read"}})
    settings = ScorerSettings(function, WHERE, FunctionScorer("readers:read", WHERE), 1)
    check.settings = RewardSettings((settings,), (), 8, tmp_path / "logs", check.settings.environment)
    assert check.run(rows({"any": "thing"}, "bad", None)) is None
    assert "'bad'" not in check.asked
