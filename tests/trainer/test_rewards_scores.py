"""What counts as a score, which part of a response is scored, and what failures do to the job."""

from __future__ import annotations

import math
import pickle
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rljob_api.v1alpha1.reward import ErrorPolicy, Reward, RewardType
from rljob_trainer.errors import ConfigurationError, DatasetError, RewardError
from rljob_trainer.processes.wire import decode, encode
from rljob_trainer.rewards.base import RewardOutcome, RewardRequest, RewardStatus, Scored, as_found, as_score, excerpt
from rljob_trainer.rewards.error_policies import apply_error_policies
from rljob_trainer.rewards.exact_match import exact_match
from rljob_trainer.rewards.final_message import final_message
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.reasoning_gym import find_answer


@pytest.mark.parametrize(
    ("value", "score"),
    [
        *[(1, 1.0), (0.25, 0.25), (-3, -3.0), (True, 1.0), (False, 0.0)],
        *[(np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1.0)],
        *[(Fraction(1, 4), 0.25), (float(np.finfo(np.float32).max), 3.4028234663852886e38), (10**30, 1e30)],
    ],
)
def test_numbers_and_booleans_are_scores(value: object, score: float) -> None:
    assert as_score(value) == score


class Unconvertible(Fraction):
    """A number that cannot be converted."""

    def __float__(self) -> float:
        raise KeyError("float")


class Unshown:
    """An object without a string form."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1.0", "returned a str ('1.0'); return a finite number (int, float, True or False)"),
        (None, "returned None; return a finite number (int, float, True or False)"),
        (math.nan, "returned nan; return a finite number"),
        (math.inf, "returned inf; return a finite number"),
        ({"score": 1}, "returned a dict ({'score': 1}); return a finite number (int, float, True or False)"),
        (torch.tensor(1.0), "returned a Tensor (tensor(1.)); return a finite number (int, float, True or False)"),
    ],
)
def test_other_values_are_rejected_with_the_value_seen(value: object, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        as_score(value)
    assert str(caught.value) == text


def test_a_score_may_include_the_extracted_answer() -> None:
    assert (as_score(Scored(0.5, "18")), as_found(Scored(0.5, "18"))) == (0.5, "18")
    assert as_found(Scored(0.0, "")) == ""
    assert as_found(1.0) is None
    with pytest.raises(TypeError, match=r"^returned None; return a finite number"):
        as_score(Scored(None, "18"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned Scored with found of type int; it must be a string"):
        as_found(Scored(1.0, 18))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (
            10**400,
            f"a int (1{'0' * 99} ... (201 characters) ... {'0' * 100}), which cannot be converted to float (Overflow",
        ),
        (Fraction(10**400, 3), "a Fraction (Fraction(1000"),
        (Unconvertible(1), "a Unconvertible (Unconvertible(1, 1)), which cannot be converted to float (KeyError)"),
        (np.longdouble("1e400"), "inf; return a finite number"),
        (3.5e38, "3.5e+38, which is not finite in float32; return a number of at most 3.4e+38 in size"),
        (np.float64(-1e39), "-1e+39, which is not finite in float32"),
    ],
    ids=["int", "fraction", "unconvertible", "longdouble", "float", "float64"],
)
def test_numbers_beyond_float32_are_rejected(value: object, seen: str) -> None:
    with pytest.raises(ValueError, match=f"^returned {re.escape(seen)}"):
        as_score(value)


@pytest.mark.parametrize("value", [Decimal("1e400"), Decimal("0.5"), Unshown()])
def test_values_that_are_not_real_numbers_are_rejected_whatever_their_string_form(value: object) -> None:
    seen = "its repr raises RuntimeError" if isinstance(value, Unshown) else repr(value)
    with pytest.raises(TypeError, match=re.escape(f"returned a {type(value).__name__} ({seen}); return a finite")):
        as_score(value)


@pytest.mark.parametrize(
    ("response", "expected", "found"),
    [
        ("thinking 5 ... <answer> 42 </answer> bye 7", "42", "42"),
        ("<answer>1</answer> no: <answer>2</answer>", "2", "2"),
        ("cut off <answer>9", "9", "9"),
        ("88 + 94 = 182\nQuestion: What is 3 + 5?\nAnswer: 8", "182", "182"),
        (" 182", "182", "182"),
        ("The result is -17.", "-17", "-17"),
        ("5-3", "2", "3"),
        ("12 - 30 = -18", "-18", "-18"),
        ("about 1,234,567 people", "1234567", "1234567"),
        ("0.50", "0.5", "0.50"),
        ("no idea", "3", "no idea"),
        ("  01 2\n", "01 2", "01 2"),
        ("red\nbecause 5", "red", "red\nbecause 5"),
        ("7 apples", None, "7 apples"),
        ("<think>\n1 + 2 = 3\n</think>\n\n12 - 2 = 10", "10", "10"),
        ("<think>\n\n</think>\n\nred", "red", "red"),
        ("<answer>3</answer></think><answer>4</answer>", "4", "4"),
        ("<think>is it 3? <answer>3</answer>", "3", ""),
    ],
)
def test_the_scored_part_of_a_response_is_found(response: str, expected: str | None, found: str) -> None:
    assert find_answer(response, expected) == found


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("00359", "00359", 1.0),
        ("359", "00359", 0.0),
        (" 42\n", "\t42 ", 1.0),
        ("4 2", "42", 0.0),
        ("42", 42, 1.0),
        ("0.5", 0.5, 1.0),
        ("None", "None", 1.0),
        ("", "42", 0.0),
        ("<think>\n40 + 2\n</think>\n\n42", "42", 1.0),
        ("40 + 2</think>42", "42", 1.0),
        ("<think>\n\n</think>\n\n41", "42", 0.0),
        ("<think>42", "42", 0.0),
        ("</think><think>42", "42", 0.0),
        ("18<|eom|>", "18", 1.0),
        ("<s>18</s>", "18", 1.0),
        # The answer itself has special tokens, or what looks like them.
        ("<|tool|>18", "<|tool|>18", 1.0),
        ("<s>18</s>", "<s>18</s>", 1.0),
        ("<|call|>18", "<|tool|>18", 0.0),
        # pandas writes a column of integers with nulls as floats.
        ("18", 18.0, 1.0),
        ("18.0", 18.0, 1.0),
        ("-2", -2.0, 1.0),
        ("18", 18.5, 0.0),
        ("18", "18.0", 0.0),
    ],
)
def test_a_number_has_one_accepted_spelling(response: str, answer: object, score: float) -> None:
    assert exact_match("p", response, answer, {}) == score


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        *[(None, "null, which is neither"), (math.nan, "nan, which is neither"), (True, "True, which is neither")],
        *[(["a"], r"\['a'\], which is neither"), ({}, r"\{\}, which is neither"), ("", r"empty \(''\)")],
        (" \n", r"empty \(' \\n'\)"),
    ],
)
def test_an_answer_without_a_spelling_is_no_answer(answer: object, seen: str) -> None:
    for response in ("None", "nan", "True", "['a']", "{}", ""):
        with pytest.raises(ValueError, match=f"the row's answer is {seen}.*; correct the dataset"):
            exact_match("p", response, answer, {})


HARMONY = (
    "<|channel|>analysis<|message|>I think \\boxed{20}<|end|><|start|>assistant<|channel|>final<|message|>It is 18"
)
FINAL_MESSAGES = {
    "18<|eom|>": "18",
    "18<|fim_pad|>": "18",
    "18<unk>": "18",
    "<s> 18": "18",
    "<pad><bos>18<eos></s>": "18",
    "18<end_of_turn>": "18",
    "<｜Assistant｜>18<｜end▁of▁sentence｜>": "18",
    "<think>20<|eom|></think><|sep|>18": "18",
    "<think>20</think>18<|im_end|><think>": "",
    "18<|endoftext|>Question 2": "18\nQuestion 2",
    "<answer>18</answer><|eom|>": "<answer>18</answer>",
    # These have none.
    "E<|x|>": "E<|x|>",
    "0 <|x| and |y|> 2": "0 <|x| and |y|> 2",
    "[INST] 18 [/INST]": "[INST] 18 [/INST]",
    f"<|{'a' * 41}|>": f"<|{'a' * 41}|>",
    HARMONY: "It is 18",
    f"{HARMONY}<|return|>": "It is 18",
    "<|channel|>final <|constrain|>json<|message|>18": "18",
    "<|channel|>analysis<|message|>It is 18": "",
    "<|channel|>commentary to=python<|message|>18<|call|>": "",
    f"{HARMONY}<|end|><|start|>assistant<|channel|>analysis<|message|>or 20": "",
    f"{HARMONY}<|end|><|start|>assistant<|channel|>final<|message|>No, 19": "No, 19",
}


@pytest.mark.parametrize("response", list(FINAL_MESSAGES))
def test_the_final_message_has_no_thinking_and_no_special_tokens(response: str) -> None:
    assert final_message(response).strip() == FINAL_MESSAGES[response]


def test_every_reward_that_extracts_an_answer_reads_the_final_message() -> None:
    score = MathAnswerScorer("spec.training.rewards[0]").load()
    with_18 = [response for response, message in FINAL_MESSAGES.items() if message in ("18", "It is 18")]
    without_answer = [response for response, message in FINAL_MESSAGES.items() if message == ""]
    assert len(with_18) >= 11
    assert len(without_answer) >= 4
    assert {score(RewardRequest("", response, "18", {})) for response in with_18} == {Scored(1.0, "18")}
    assert {score(RewardRequest("", response, "18", {})) for response in without_answer} == {Scored(0.0, "")}
    assert {find_answer(response, "18") for response in with_18} == {"18"}
    assert {find_answer(response, "18") for response in without_answer} == {""}
    assert {exact_match("", response, FINAL_MESSAGES[response], {}) for response in with_18} == {1.0}
    assert {exact_match("", response, "18", {}) for response in without_answer} == {0.0}


WHERE = "spec.training.rewards[1]"
REQUESTS = [RewardRequest(f"prompt {n}", f"response {n}", n, {}) for n in range(3)]
OUTCOMES = [
    RewardOutcome(0.75, RewardStatus.OK, "", 0.1),
    RewardOutcome(None, RewardStatus.ERROR, "raised ValueError: no", 0.1),
    RewardOutcome(None, RewardStatus.TIMEOUT, "ran longer than 2 s and was killed", 2.0),
]


def reward(on_error: ErrorPolicy, on_timeout: ErrorPolicy) -> Reward:
    return Reward(name="style", type=RewardType.MATH_ANSWER, on_error=on_error, on_timeout=on_timeout, error_score=-1.0)


def test_tolerated_failures_get_the_error_score() -> None:
    scores = apply_error_policies(reward(ErrorPolicy.SCORE, ErrorPolicy.SCORE), WHERE, "f", REQUESTS, OUTCOMES)
    assert scores == (0.75, -1.0, -1.0)


def test_an_error_beyond_the_limit_names_everything_needed_to_fix_it() -> None:
    with pytest.raises(RewardError) as caught:
        apply_error_policies(reward(ErrorPolicy.FAIL, ErrorPolicy.SCORE), WHERE, "my.module:score", REQUESTS, OUTCOMES)
    *lines, advice = str(caught.value).splitlines()
    assert lines == [
        "spec.training.rewards[1] (reward style): my.module:score raised ValueError: no",
        "  prompt: 'prompt 1'",
        "  response: 'response 1'",
        "  answer: '1'",
    ]
    assert advice.startswith("1 of 3 responses of this worker failed")
    assert "set spec.training.rewards[1].onError: Exclude" in advice
    assert "or Score" in advice


def test_an_error_shows_no_answer_if_the_job_has_none() -> None:
    request, failed = RewardRequest("prompt", "response", None, {}), OUTCOMES[1]
    with pytest.raises(RewardError) as caught:
        apply_error_policies(reward(ErrorPolicy.FAIL, ErrorPolicy.SCORE), WHERE, "the environment", [request], [failed])
    assert "answer" not in str(caught.value)


def test_a_timeout_beyond_the_limit_names_its_own_setting() -> None:
    with pytest.raises(RewardError, match=r"(?s)ran longer than 2 s.*'response 2'.*onTimeout: Exclude"):
        apply_error_policies(reward(ErrorPolicy.SCORE, ErrorPolicy.FAIL), WHERE, "f", REQUESTS, OUTCOMES)


def test_long_texts_are_shortened_in_the_middle() -> None:
    assert excerpt("a" * 6 + "b" * 6, 4) == "aa ... (8 characters) ... bb"
    assert excerpt("short", 5) == "short"


@pytest.mark.parametrize(
    "value",
    [
        *({"a": [1, 2.5, None, True, "ä\n"], "b": {"c": (1, (2, [3]))}}, {1: "x", (2, 3): {"__tuple__": 1}}, [], ""),
        *(
            {"__tuple__": [1, 2]},
            {"a": {"__pairs__": [[1, 2]]}},
            {"__pairs__": [[[1], 2]]},
            {"a": {"__pairs__": [[1]]}},
        ),
        {"__pairs__": {"__tuple__": [(1,)]}, "other": 1},
    ],
)
def test_values_are_received_as_they_were_sent(value: object) -> None:
    assert decode(encode(value)) == value


def test_errors_survive_the_transfer_between_processes() -> None:
    for kind in (RewardError, DatasetError, ConfigurationError):
        copy = pickle.loads(pickle.dumps(kind("where: what")))
        assert type(copy) is kind
        assert str(copy) == "where: what"
    assert issubclass(DatasetError, ConfigurationError)
    assert issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize(
    ("on_timeout", "expected"),
    [(ErrorPolicy.EXCLUDE, None), (ErrorPolicy.SCORE, -1.0), (ErrorPolicy.FAIL, RewardError)],
)
@pytest.mark.parametrize("status", [RewardStatus.TIMEOUT, RewardStatus.DIED, RewardStatus.UNREACHABLE])
def test_a_failure_that_is_no_error_of_the_code_follows_the_policy_for_timeouts(
    on_timeout: ErrorPolicy, status: RewardStatus, expected: float | type[RewardError] | None
) -> None:
    """An unreachable service never gives a score."""
    reward = Reward(name="a", type=RewardType.MATH_ANSWER, on_timeout=on_timeout, error_score=-1.0)
    arguments = reward, "rewards[0]", "f", [RewardRequest("p", "r", "", {})], [RewardOutcome(None, status, "no", 1.0)]
    if isinstance(expected, type):
        with pytest.raises(expected, match=r"rewards\[0\]\.onTimeout: Exclude"):
            apply_error_policies(*arguments)
        return
    [score] = apply_error_policies(*arguments)
    if expected is None or status is RewardStatus.UNREACHABLE:
        assert math.isnan(score)
    else:
        assert score == expected
