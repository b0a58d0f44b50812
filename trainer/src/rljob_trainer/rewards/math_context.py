"""Interprets the words around a number in a sentence: they can make it part of an expression, or deny it."""

from __future__ import annotations

import re
from enum import Enum, auto

from rljob_trainer.rewards.math_numbers import AND_A_FRACTION

MAX_BEFORE = 48
"""The number of characters before a number that are examined."""
_IGNORECASE = re.ASCII | re.IGNORECASE

# A number is part of an expression if one of these is before it: an operator or `x >`; or words such as `1 out of`,
# `twice` and `the square root of`. The words do not count before an equation: `half of 10 = 5` is 5.
_OPERATOR_BEFORE = re.compile(
    r"""(?aix)
    (?: [-+/^\u00b1{] | (?<!\*)\* | (?<=[\w)])\*\*
      | \\(?:pm|mp|times|cdot|div|le|ge|ne|lt|gt)
      | (?:(?<=[\s$(])|^)[\w.)}\]]+\s*(?:[<>]=?|!=)
      | (?<![A-Za-z])(?:ln|log|sin|cos|tan|sqrt|minus|plus|times|[bp]?mod)
    )$"""
)
_WORDS_BEFORE = re.compile(
    r"""(?aix)
    (?: (?<![A-Za-z])(?:twice|thrice|double|triple
          | (?:less|fewer|more|greater|larger|smaller|lower|higher)\s+than
          | (?:half|third|quarter|root|square|cube|factorial|logarithm|power|reciprocal|percent|%)\s+of)
      | \d\s+(?:out\s+of|of|in|to|r|remainder(?:\s+of)?)
    )$"""
)
# A `+` or `-` after one of these is an operator, not a sign: a variable, a closing bracket or a digit.
_OPERAND_BEFORE = re.compile(r"(?:(?<![A-Za-z])[A-Za-z]|[)}\]$\d])$")
# It is also part of an expression if one of these follows: a word such as `pi`, `squared`, `or more` or `below zero`; a
# fraction in words after a unit; or a variable, which is a single letter other than an article or a unit.
_WORD_AFTER = re.compile(
    r"\s{0,3}\*?\s{0,3}(?:pi|sqrt|factorial|squared|cubed|sin|cos|tan|log|ln|alpha|beta|theta|times|over"
    r"|is\s+(?:not|wrong|incorrect)|minus|plus|modulo|remainder|unknown|undefined|out\s+of"
    r"|no\s+(?:real\s+)?solutions?|or\s+(?:more|less|fewer|greater|higher|lower)|fewer(?!\s+[A-Za-z])"
    rf"|(?:[a-z]+\s+){{0,2}}below\s+(?:zero|freezing)|[a-z]+{AND_A_FRACTION}(?!-))(?![A-Za-z])"
    r"|\s{0,3}\^\s{0,3}\{?\\circ\s{0,3}\}?\s{0,3}[CF]?\s{1,3}below(?![A-Za-z])"
    r"|\s+(?!(?:a|A|I|m|g|s|h|L|N|J|W|V|K)\b)[A-Za-z](?![A-Za-z'.])"
)
# `6, not 5` says what the answer is instead; `it is not 5` does not. `6, not counting the 5 pears` is not 5, either.
_NOT_THIS = re.compile(
    r"""(?aix)
    (?: (?P<instead> (?:[.,;(-]|\d|\band|\bbut)[\s$]*(?:not|never)\b | \brather\s+than | \binstead\s+of | \bunlike
          | (?:\bnot\s+|\bwithout\s+)(?:counting|including) | \bexcluding | [,(]\s*(?:besides|ignoring) )
      | \b(?:not|never|cannot|neither) | n't
      | \b(?:other\s+than | (?:anything|all)\s+but | except(?:\s+for)? | by\s+no\s+means | far\s+from | hardly)
    )
    (?:[\s}]+(?:be|a|an|the|is|equal|equals|to|exactly|option|choice|answer)\b){0,4} [\s}$(*_"'{\\=]*$"""
)
# A negation at the beginning of the sentence after "the answer is" (`definitely not`), or `isn't` in the phrase itself.
_NEGATION = re.compile(
    r"\s*+(?:(?:[a-z]+ly|of\s+course|in\s+fact),?\s+){0,2}"
    r"(?:\bnot\b|\bnever\b|\bcannot\b|n't\b|\bneither\b"
    r"|\b(?:anything\s+but|other\s+than|except|by\s+no\s+means|far\s+from|hardly)\b)"
    r"|.*(?:n't|\bcannot|\bnever|\bnot)\s+(?:be|is)\W*$",
    _IGNORECASE,
)
_REFUSAL = re.compile(
    r"\W*(?:(?:undefined|unknown|unclear|uncertain|indeterminate|impossible|unavailable)\b"
    r"(?!\s+(?:number|quantity|value)\b)|(?:wrong|incorrect|false)\s*[:=])",
    _IGNORECASE,
)
# `Yes, it does.`, and not `Yes? No.`
_VERDICT = re.compile(
    r"[*_\"'\s]*+(yes|no|true|false)\b[*_\"']*(?:[,.;:!\n]|\s+(?:because|since|as)\b)", re.ASCII | re.IGNORECASE
)
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


class Denial(Enum):
    """Whether the words before a value deny that it is the answer."""

    NONE = auto()
    INSTEAD = auto()
    """Another value is the answer, as in `6, not 5`."""
    ALONE = auto()
    """No other value is named, as in `it is not 5`."""


def denial(text: str, start: int) -> Denial:
    """Whether the words before the value at `start` deny that it is the answer."""
    match = _NOT_THIS.search(text[max(start - MAX_BEFORE, 0) : start])
    if match is None:
        return Denial.NONE
    return Denial.INSTEAD if match["instead"] else Denial.ALONE


def leading_verdict(text: str) -> str:
    """The verdict at the beginning of a text: `Yes` of `Yes, it does.` Empty if there is none, or if the text also has
    the opposite verdict."""
    match = _VERDICT.match(text)
    if not match:
        return ""
    opposite = _OPPOSITES[match[1].lower()]
    is_taken_back = re.search(rf"\b{opposite}\b(?=[*_\"']*(?:[,.;:!?\n]|$))", text, re.ASCII | re.IGNORECASE)
    return "" if is_taken_back else match[1]


def end_of_negation(phrase: str, sentence: str) -> int | None:
    """The end position in `sentence` of a negation, such as `definitely not` after the phrase `The answer is`; 0 if the
    phrase itself is negated, None if there is no negation."""
    if _NEGATION.search(phrase):
        return 0
    match = _NEGATION.match(sentence)
    return match.end() if match else None


def is_refusal(sentence: str) -> bool:
    """Whether the sentence after "the answer is" says that there is no answer, or that the named answer is wrong."""
    return _REFUSAL.match(sentence) is not None


def is_part_of_expression(text: str, start: int, end: int) -> bool:
    """Whether the number is part of an expression that the search for numbers cannot parse: `x^2 + 2`, `12 pi`."""
    before, shown = text[max(start - 4 * MAX_BEFORE, 0) : start].rstrip()[-MAX_BEFORE:], text[start:end]
    if _OPERATOR_BEFORE.search(before) or _WORD_AFTER.match(text, end):
        return True
    if "=" not in shown and _WORDS_BEFORE.search(before):
        return True
    return shown.lstrip()[:1] in ("+", "-") and _OPERAND_BEFORE.search(before) is not None
