"""Which values of a dataset may be a mathematical answer."""

from __future__ import annotations

import math
import re

import pytest

from rljob_trainer.rewards.answer_values import why_unusable


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "72",
            "-3",
            "x",
            "na",
            "NA",
            "I",
            "E",
            "\\frac{1}{2}",
            "\\infty",
            "\u221e",
            "{}",
            "(1, 2)",
            "C",
            "none of these",
        ),
        *("half of it\n#### 18", "0", "-x", "1?", "\\boxed{7}"),
        *(0, -7, 10**30, 1e-05, 1e16, 0.0),
    ],
)
def test_strings_and_numbers_may_be_answers(answer: object) -> None:
    assert why_unusable(answer) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "^null$"),
        (True, "^the truth value true$"),
        (math.nan, "^the number nan, which is not finite$"),
        (-math.inf, "^the number -inf, which is not finite$"),
        ({"ground_truth": "72", "style": "rule"}, "^a dictionary with the keys ground_truth, style .*'72'"),
        (["72"], r"^a list \(\['72'\]\)"),
        (b"72", r"^of type bytes \(b'72'\)"),
        ("", "^the string '', which is empty$"),
        (" \n", r"^the string ' \\n', which is empty$"),
        ("so it is\n#### ", "which is empty after the last ####"),
        *(
            (text, "which stands for a missing value")
            for text in ("N/A", "n/a", "NaN", " none ", "NULL", "-", "?", "??", "...")
        ),
        *(
            (text, "which stands for a missing value")
            for text in ("\u2014", "\u2212", "<NA>", "n.a.", "$N/A$", "'null'", "nil")
        ),
        ("cannot be solved\n#### N/A", "'cannot be solved.*, which stands for a missing value"),
    ],
)
def test_other_values_are_rejected_with_the_value_seen(answer: object, reason: str) -> None:
    assert (found := why_unusable(answer)) is not None
    assert re.search(reason, found), found
