"""MathAnswer: which answer of a response is final, and which answers equal the row's. `math_answers.jsonl` holds rows
as users have them: the row's answer, a response, and the score (`refused`: the row's answer cannot be used). Half of
them were written by a reader of the documentation who had not seen the code."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rljob_trainer.rewards.base import RewardRequest, Scored, Scorer
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.math_sympy import _parsed

CASES = [json.loads(line) for line in Path(__file__).with_name("math_answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return MathAnswerScorer("spec.training.rewards[0].type (reward accuracy)").load()


def scored(scorer: Scorer, answer: object, response: str) -> Scored:
    result = scorer(RewardRequest("", response, answer, {}))
    assert isinstance(result, Scored)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['answer']!r:.30} {case['response'][-40:]!r}")
def test_the_final_answer_is_compared_with_the_answer_of_the_row(case: dict[str, object], scorer: Scorer) -> None:
    answer, response = case["answer"], str(case["response"])
    if case["score"] == "refused":
        with pytest.raises(ValueError, match="the row's answer"):
            scored(scorer, answer, response)
        return
    assert scored(scorer, answer, response).score == case["score"]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("<think>3 and 15</think>\n<answer>18</answer>", "18"),
        ("<think>still thinking about 18", ""),
        ("<answer>17</answer> no, <answer>The total is 18.</answer>", "18"),
        ("<answer>17</answer> so <answer>18", "18"),
        ("<answer>17</answer> so <answer></answer>", ""),
        ("\\boxed{17}. Wait, no: \\boxed{18}", "18"),
        ("\\boxed{17}. Wait, no: \\boxed{18", ""),
        ("2+40=42\n#### 42\n\nQuestion: Tom has 5 apples.", "42"),
        ("#### Step 1\nadd 3\n\nThe answer is 18.", "18"),
        ("The answer is 5 or 6", "5 or 6"),
        ("The answer is 18 because 3*6 = 18 and not 19.", "18"),
        ("There are 5 apples. The answer is unknown.", ""),
        ("There are 5 apples. The answer is correct.", "5"),
        ("The rate is 60 per hour. Total is \\$460.", "\\$460"),
        ("nothing", ""),
    ],
)
def test_the_extracted_answer_is_reported(response: str, found: str, scorer: Scorer) -> None:
    assert scored(scorer, "18", response).found == found


@pytest.mark.parametrize("template", ["\\boxed{%s}", "<answer>%s</answer>", "#### %s", "The answer is %s.", "%s"])
def test_every_answer_equals_itself(template: str, scorer: Scorer) -> None:
    answers = {str(case["answer"]) for case in CASES if case["score"] != "refused"}
    answers = {answer for answer in answers if "\\boxed" not in answer}  # solutions with their steps
    unequal = [answer for answer in sorted(answers) if scored(scorer, answer, template % answer).score != 1]
    assert unequal == []


FRAGMENTS = [
    *(
        "\n ",
        "\n",
        " ",
        "\t",
        "*",
        "* ",
        "**",
        "_ ",
        "- ",
        "'",
        '"',
        "`",
        "~",
        "|",
        "-",
        "+",
        "=",
        "^",
        "/",
        "%",
        ".",
        "..",
        "? ",
    ),
    *(
        "1",
        "1 ",
        "1,",
        "1, ",
        "1,234,",
        "1 000 ",
        "0.1",
        "1=",
        "1e",
        "2^",
        "1/",
        "- 1",
        "½",
        "2½",
        "²",
        "√",
        "√(",
        "12:",
        "2020-",
    ),
    *(
        "(",
        ")",
        "[",
        "{",
        "}",
        "(5",
        "$",
        "$a",
        "$ $",
        "\\[",
        "\\(",
        "\\{",
        "\\",
        "\\ ",
        "\\sqrt[",
        "\\sqrt{",
        "\\frac{1}{",
        "\\text{",
    ),
    *(
        "\\boxed{",
        "\\boxed ",
        "5^\\circ ",
        "\\times ",
        "answer ",
        "answer is ",
        "answer is not ",
        "answer: ",
        '"answer": [',
        "#### ",
    ),
    *(
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<|",
        "<|x|>",
        "not ",
        "n't ",
        "never be ",
        "negative ",
        "1 and ",
        "a b ",
    ),
    *(
        "5 and a half ",
        "halves ",
        "5 million ",
        "5 km ",
        "times ",
        "out of ",
        "x > ",
        "mod 7 ",
        "A, ",
        "not A ",
        "答案是",
        "–",
    ),
]


def seconds(scorer: Scorer, response: str) -> float:
    started = time.process_time()
    scored(scorer, "-7", response)
    return time.process_time() - started


@pytest.mark.parametrize("template", ["{0}5{0}", "The answer is{0}5{0}"])
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=repr)
def test_the_time_to_read_a_response_is_linear_in_its_length(fragment: str, template: str, scorer: Scorer) -> None:
    """For four times the length a quadratic search takes sixteen times as long, a linear one four times."""
    short, long = (template.format(fragment * (length // len(fragment))) for length in (5000, 20_000))
    assert any(seconds(scorer, long) < 10 * max(seconds(scorer, short), 0.1) for _ in range(3))


@pytest.mark.parametrize(
    "response",
    [
        *("9" * 900 + "^" + "9" * 900, "\\boxed{1e999999999}", "\\boxed{" + "(" * 4000 + "}", "1" + " " * 30_000 + "x"),
        *("\\boxed{" + "[" * 450 + "5" + "]" * 450 + "}", '{"answer": ' + "[" * 5000),
    ],
    ids=lambda response: f"{response[:12]!r} x {len(response)}",
)
def test_an_unreadable_response_is_wrong(response: str, scorer: Scorer) -> None:
    assert scored(scorer, "-7", response).score == 0


def test_an_error_while_reading_a_response_does_not_fail_the_run(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("rljob_trainer.rewards.math_answer.find_answer", fail)
    found = scored(scorer, "5", "5")
    assert found.score == 0.0
    assert "KeyError: 'x'" in found.found


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error"), ImportError("x")], ids=repr)
@pytest.mark.parametrize("part", ["math_answer.find_answer", "math_sympy.latex2sympy", "math_sympy._same"])
def test_an_error_of_the_machine_is_no_wrong_answer(
    part: str, error: Exception, scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    _parsed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(f"rljob_trainer.rewards.{part}", fail)
        with pytest.raises(type(error)):
            scored(scorer, "x^2 + 1", "\\boxed{1 + x^2}")
    assert scored(scorer, "x^2 + 1", "\\boxed{1 + x^2}").score == 1


@pytest.mark.parametrize(
    "answer", ["", "N/A", "null", None, True, [1], {"ground_truth": "72"}, float("nan"), "\\frac{1"]
)
def test_an_unscorable_answer_is_rejected_whatever_the_response(answer: object, scorer: Scorer) -> None:
    for response in ("", "5"):
        with pytest.raises(ValueError, match="the row's answer"):
            scored(scorer, answer, response)


@pytest.mark.parametrize(
    "payload",
    [
        "__import__('pathlib').Path('{}').touch()",
        "exec(\"open('{}', 'w')\")",
        "\\text{{__import__('os').system('touch {}')}}",
        "[c for c in ().__class__.__base__.__subclasses__()] + [open('{}', 'w')]",
    ],
)
@pytest.mark.parametrize("form", ["\\boxed{%s}", "#### %s", "The answer is %s", "<answer>$%s$</answer>"])
def test_code_in_a_response_is_not_executed_and_later_responses_are_scored_as_before(
    tmp_path: Path, scorer: Scorer, payload: str, form: str
) -> None:
    """As an attacker of the training data would write it (CVE-2026-6878 of another trainer)."""
    mark = tmp_path / "executed"
    response = form % payload.format(mark)
    assert scored(scorer, "18", response).score != 1.0
    assert not mark.exists()
    assert scored(scorer, "18", "\\boxed{18}").score == 1.0
    assert scored(scorer, "18", "\\boxed{19}").score == 0.0
