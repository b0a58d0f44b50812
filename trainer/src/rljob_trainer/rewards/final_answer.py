"""Finds the final answer of a response.

The first rules select a part of the response. Each continues with the part that the rule before it selected:

1. Text up to the last `</think>` is ignored. A `<think>` that is not closed means that there is no answer.
2. The last `<answer>` element.
3. The last `\\boxed{}` or `\\fbox{}`. A box that is not closed means that there is no answer.

If the selected part is exactly one value, this value is the answer. Otherwise these rules search the part, in this
order, until one finds an answer, or finds that there is none ("the answer is unknown"):

4. The text after the last `####` (GSM8K's form), up to the end of its line. It must be one value, not a heading.
5. The text after the last "answer is", "Answer:" or JSON key `answer`: a value in the sentence, else in what follows.
6. The last number or expression; for a multiple-choice question the last letter, for an answer in words a `Yes,` or
   `False.` at the beginning.

A number that belongs to an expression that cannot be parsed, or to several values in a row, is not the answer by
itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rljob_trainer.rewards.answer_values import GSM8K_MARK
from rljob_trainer.rewards.final_message import final_message
from rljob_trainer.rewards.math_context import (
    Denial,
    denial,
    end_of_negation,
    is_part_of_expression,
    is_refusal,
    leading_verdict,
)
from rljob_trainer.rewards.math_numbers import AND_A_FRACTION, IN_FRACTIONS
from rljob_trainer.rewards.math_text import braced, plain_characters, undecorated
from rljob_trainer.rewards.math_units import MAGNITUDES, is_known_unit, read_unit
from rljob_trainer.rewards.math_values import Expression, Value, Words, read_value

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s*(?=[^\s{a-zA-Z])")
_WORD = re.compile(r"[^\s$]+")
_PHRASE = re.compile(
    r"""(?aix)
    ["'](?:final[_ ])?(?:answer)["']\s*:                                          # JSON
    | \bans(?:wers?)?["'*_`)\]]*\s*[:=]\s*\}?                                    # Answer: 18
    | \banswers?\b[^.\n:=?!]{0,80}?(?:\bis(?:n't)?\b|\baren?'?t?\b|\bequals\b|\bbe\b)["'*_]*+\s*+:?\s*+\}? # it is 18
    | 答案\s*(?:是|为|為|:|=)\s*:? | 答えは\s*:? | 答え\s*: | 정답은?\s*:?
    """
)
_JSON = re.compile(r"[\"'](?:final[_ ])?answer[\"']\s*:", re.ASCII | re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$|\*|\"|')|[!?](?=\s|$)|\n")
_OPENERS = ((r"\[", r"\]"), (r"\(", r"\)"), ("$$", "$$"), ("$", "$"))
# The beginning of another clause, which is not part of the answer: `5 because ...`.
_CONNECTIVE = re.compile(
    r"\b(?:because|since|as|so|which|where|when|for|but|not|rather than|instead of)\b"
    r"|,\s*(?!and\b|or\b)(?=[a-z]{2})|\s\((?=[a-z]{2})|;",
    re.ASCII | re.IGNORECASE,
)
# A word between a denied and the right value: `not 5 but 18`.
_CORRECTION = re.compile(r"\b(?:but|so|instead|rather|hence|therefore)\b", re.ASCII | re.IGNORECASE)
# What follows a phrase that names no answer: `the answer is correct`.
_CONFIRMATION = re.compile(
    r"\s*(?:it\s+is\s+|this\s+is\s+|that\s+is\s+)?(?:indeed\s+|therefore\s+)?"
    r"(?:correct|right|verified|confirmed|consistent|reasonable|valid|above|as above)\b",
    re.ASCII | re.IGNORECASE,
)
# The mark of an item in a list, such as `2. `, whose number is no answer.
_BULLET = re.compile(r"(?m)^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+(?=\S)")

# The pieces of a run of numbers and operators in a sentence: `3 + 15 = 18`, `2\\frac{1}{2}`, `-$1,000.50`. Braces are
# possessive and repetitions bounded, so that no response makes the search quadratic.
_INNER_BRACES = r"\{[^{}]*+\}"
_MIDDLE_BRACES = rf"\{{[^{{}}]*+(?:{_INNER_BRACES}[^{{}}]*+)*+\}}"
_BRACES = rf"\{{[^{{}}]*+(?:{_MIDDLE_BRACES}[^{{}}]*+)*+\}}"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
_ARGUMENT = rf"\s*(?:{_BRACES}|\d)"
_COMMAND = rf"\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}|\\sqrt(?:\[[^\[\]]*+\])?{_ARGUMENT}|\\(?:pi|infty)(?![a-z])"
_POWER = rf"(?:\s*\^\s*(?:{_BRACES}|-?\d+))?"
_ATOM = rf"(?:(?:{_NUMBER})\s*(?:{_COMMAND})|{_NUMBER}|{_COMMAND})(?:[a-z](?![A-Za-z]))?{_POWER}%?"
_CURRENCY = r"(?:\\?\$|[€£¥₹])?"
_OPERAND = (
    rf"(?:[Nn]egative\s|[-+]?\s?)\({{0,4}}\s{{0,2}}{_CURRENCY}[-+]?{_CURRENCY}(?:{_ATOM})\s{{0,2}}\){{0,4}}{_POWER}"
)
_OPERATOR = r"(?:\*\*(?=\d)|\s*(?:\\times|\\cdot|\\div|[-+*/^=:])\s*)"
_MODULUS = r"(?:\s{0,2}\(?\s{0,2}\\?[bp]?mod\s{0,2}\{?\d+\}?\)?)?"
_RUN = re.compile(rf"(?<![A-Za-z0-9_.\\^{{])(?:{_OPERAND})(?:{_OPERATOR}(?:{_OPERAND}|[a-z](?![A-Za-z])))*{_MODULUS}")
_LAST_OPERAND = re.compile(rf"(?:{_OPERAND})$")
# LaTeX between its delimiters. As in Pandoc, the text between single dollars neither begins nor ends with white space,
# and no digit follows it.
_DELIMITED = re.compile(
    r"\$\$((?:(?!\$\$).)+)\$\$|\\\[((?:(?!\\\[|\\\]).)+)\\\]|\\\(((?:(?!\\\(|\\\)).)+)\\\)|(?<![\\$])\$(?=[^\s$])([^$\n]*?[^\s$\\])\$(?!\d)",
    re.DOTALL,
)
MAX_JOINED = 50
"""The maximum number of values before the last one that are parsed together with it (`3, 5 and 12`)."""
MAX_PHRASE = 120
"""The number of characters of a phrase, such as "The answer to the question is", that are searched for a negation."""
# The text between two values in a row: `3, 5 and 12`.
_JOINT = re.compile(
    r"\s{0,3}(?:,|;|,?\s{0,3}\b(?:and|or|nor)\b|&|/)\s*(?:maybe\s+|perhaps\s+|possibly\s+|also\s+)?(?:[a-zA-Z]\s*=\s*)?",
    re.ASCII | re.IGNORECASE,
)
_DATE = re.compile(r"\b\d{4}-\d{1,2}-\d{1,2}\b")
# What may follow a number and belong to it: a magnitude, a percent sign, degrees, a unit.
_AMOUNT_AFTER = re.compile(
    rf"(?:{AND_A_FRACTION}|{IN_FRACTIONS}|\s*(?:{'|'.join(MAGNITUDES)})s?)(?![A-Za-z])", re.ASCII | re.IGNORECASE
)
_UNIT_AFTER = re.compile(
    r"\s*\\?%|\^\s*\{?\\circ\s*\}?|\s*percent(?![A-Za-z])"
    r"|\s*\\(?:text|mathrm)\s*\{[^{}]*\}(?:\^\s*\{?[23]\}?)?|\s?[A-Za-z/²³]+(?:\^\{?[23]\}?)?",
    re.ASCII | re.IGNORECASE,
)
# A letter of a multiple-choice question; neither the article `A car` nor the pronoun `I`.
_CHOICE = re.compile(
    r"(?<![A-Za-z\\])(?:\(([A-Ja-j])\)|([A-HJ]))(?![A-Za-z'0-9])"
    r"(?!\s+(?!is\b|because\b|since\b|or\b|and\b)[a-z])(?!\s+is\s+(?:wrong|incorrect|false|not)\b)"
    r"|(?<![A-Za-z\\])(I)(?=\s*[.)]|\s*$)"
)


Found = tuple[str, Value | None]
"""An answer as written, and its parsed value; an empty string and None for a response without an answer."""


def find_answer(response: str, *, is_choice: bool, is_words: bool) -> Found:
    """The final answer as written, and its parsed value; an empty string and None if there is none.

    `is_choice`: the row's answer is a letter of a multiple-choice question; `is_words`: it is words, such as `Tuesday`.
    """
    reader = _Reader(is_choice, is_words)
    text = plain_characters(final_message(response))
    if (element := last_element(text)) is not None:
        text = element
    box = last_box(text)
    if box is not None:
        text = box
    if not text.strip():
        return "", None
    finders: tuple[Callable[[str, _Reader], Found | None], ...] = (_after_mark, _after_phrase, _last)
    # A solution with its steps is not a single value, and a sentence is not an answer in words.
    if GSM8K_MARK not in text and not (is_words and _PHRASE.search(text)):
        finders = (_whole, *finders)
    return next((found for find in finders if (found := find(text, reader)) is not None), ("", None))


def reference_answer(answer: str) -> str:
    """The answer of a dataset's row; if it is a solution with its steps, the last `<answer>` element, the last box, or
    the text after the last `####`."""
    text = plain_characters(answer)
    if (element := last_element(text)) is not None:
        text = element
    if (box := last_box(text)) is not None:
        return box.strip()
    return text.rpartition(GSM8K_MARK)[2].strip()


def last_element(text: str) -> str | None:
    """The content of the last `<answer>` element, which may be truncated; None if there is none."""
    _, mark, after = text.rpartition("<answer>")
    return after.partition("</answer>")[0] if mark else None


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{}`; an empty string if it is not closed, None if there is none."""
    last, position = None, 0
    while match := _BOX.search(text, position):
        if text[match.end()] != "{":
            word = _WORD.match(text, match.end())
            last, position = word[0] if word else "", match.end()
            continue
        inside = braced(text, match.end())
        if inside is None:
            return ""
        last, position = inside, match.end() + len(inside) + 2
    while last is not None and (match := _BOX.search(last)) and last[match.end() : match.end() + 1] == "{":
        inside = braced(last, match.end())
        if inside is None:
            return ""
        last = last[: match.start()] + inside + last[match.end() + len(inside) + 2 :]
    return last


class _Reader:
    """Parses values of the same kind as the row's answer."""

    def __init__(self, is_choice: bool, is_words: bool) -> None:
        self.is_choice = is_choice
        self.is_words = is_words

    def __call__(self, text: str) -> Value | None:
        value = read_value(text, is_choice=self.is_choice)
        if isinstance(value, Words) and not self.is_words:
            return None
        # `\text{Answer: }5` is a phrase and a number.
        return None if isinstance(value, Expression) and _PHRASE.search(text) else value


def _whole(text: str, reader: _Reader) -> Found | None:
    value = reader(text)
    return None if value is None else (text.strip(), value)


def _after_mark(text: str, reader: _Reader) -> Found | None:
    """The value in the line after the last `####`; None if this line is not one value, or there is no `####`."""
    _, mark, after = text.rpartition(GSM8K_MARK)
    if not mark or not after.strip():
        return None
    line = after.strip().splitlines()[0]
    return _whole(line, reader) or (_after_phrase(line, reader) if _PHRASE.search(line) else None)


def _after_phrase(text: str, reader: _Reader) -> Found | None:
    """The value after the last phrase: in its sentence, otherwise in all text after it. Without a value there is no
    answer ("the answer is unknown"). None without a phrase; a phrase that only confirms ("the answer is correct") does
    not count."""
    matches = [match for match in _PHRASE.finditer(text) if not _CONFIRMATION.match(text, match.end())]
    if not matches:
        return None
    match = matches[-1]
    after = text[match.end() :]
    if _JSON.fullmatch(match[0].strip()) and (value := _json_value(after)) is not None:
        return _whole(value, reader) or _last(value, reader)
    sentence = _sentence(after)
    denied = end_of_negation(match[0][:MAX_PHRASE], sentence)
    if denied is not None:
        # "not 5 but 18": the value after the correction counts.
        correction = _CORRECTION.search(sentence, denied)
        return (_last(sentence[correction.end() :], reader) if correction else None) or ("", None)
    if is_refusal(sentence) and not reader.is_words:
        return "", None
    beginning = _CONNECTIVE.split(sentence, maxsplit=1)[0]
    for part in dict.fromkeys((sentence, beginning) if reader.is_words else (beginning, sentence)):
        if (found := _whole(part, reader)) is not None:
            return found
    for part in (beginning, sentence, after):
        if (found := _last(part, reader)) is not None:
            return found
    return "", None


def _json_value(text: str) -> str | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else json.dumps(value)


def _sentence(text: str) -> str:
    """The text up to the end of its first sentence, without leading white space and Markdown."""
    text = re.sub(r"^\s*(?:[*_]+(?=\s))?\s*", "", text)
    for start, end in _OPENERS:
        close = text.find(end, len(start)) if text.startswith(start) else -1
        if close > 0 and (start != "$" or "\n" not in text[:close]):
            return text[: close + len(end)] + _SENTENCE_END.split(text[close + len(end) :], maxsplit=1)[0]
    return _SENTENCE_END.split(text, maxsplit=1)[0]


def _last(text: str, reader: _Reader) -> Found | None:
    """The last value in the text, by its end position; None if there is none. For an answer in words, the verdict at
    the beginning of the text."""
    if reader.is_words:
        verdict = leading_verdict(text)
        return (verdict, reader(verdict)) if verdict else None
    if reader.is_choice and (letters := list(_CHOICE.finditer(text))):
        return _last_choice(text, letters, reader)
    # Bullets become spaces, so that positions are valid in both texts.
    plain = _BULLET.sub(lambda match: " " * len(match[0]), text)
    spans = [_Span(match.start(), match.end(), is_delimited=True) for match in _DELIMITED.finditer(text)]
    spans += [_Span(match.start(), match.end()) for match in _DATE.finditer(plain)]
    spans += [_Span(match.start(), match.start() + len(match[0].rstrip())) for match in _RUN.finditer(plain)]
    spans.sort(key=lambda span: (span.end, -span.start))
    while spans:
        span = spans.pop()
        match denial(text, span.start):
            case Denial.INSTEAD:
                continue
            case Denial.ALONE:
                return "", None
        others = [other for other in spans[-MAX_JOINED:] if other.end <= span.start]
        if others and _JOINT.fullmatch(plain, others[-1].end, span.start):
            return _joined(plain, [*others, span], reader)
        if span.is_delimited:
            candidates = _delimited(text, span)
        elif is_part_of_expression(plain, span.start, span.end):
            return "", None
        else:
            candidates = _plain(plain, span)
        for candidate in candidates:
            if (value := reader(candidate)) is not None:
                return undecorated(candidate), value
    return None


def _last_choice(text: str, letters: list[re.Match[str]], reader: _Reader) -> Found:
    """The last letter that is not denied; no answer if it is one of several in a row."""
    while letters and denial(text, letters[-1].start()) is not Denial.NONE:
        letters.pop()
    if not letters or (len(letters) > 1 and _JOINT.fullmatch(text, letters[-2].end(), letters[-1].start())):
        return "", None
    letter = next(filter(None, letters[-1].groups())).upper()
    return letter, reader(letter)


@dataclass(frozen=True)
class _Span:
    """The position in a text of a number, a run of numbers and operators, or delimited LaTeX."""

    start: int
    end: int
    is_delimited: bool = False


def _joined(text: str, spans: Sequence[_Span], reader: _Reader) -> Found:
    """Parses several values in a row as one answer, such as `5 and 6` or `[3, 12]`; no answer if that fails."""
    first = len(spans) - 1
    while first and _JOINT.fullmatch(text, spans[first - 1].end, spans[first].start):
        first -= 1
    start, end = spans[first].start, spans[-1].end
    if text[start - 1 : start] in ("(", "[", "{") and text[end : end + 1] in (")", "]", "}"):
        start, end = start - 1, end + 1
    candidate = text[start:end]
    value = reader(candidate)
    return (undecorated(candidate), value) if value is not None else ("", None)


def _delimited(text: str, span: _Span) -> Iterator[str]:
    """The delimited LaTeX with its unit."""
    yield text[span.start : span.end] + _unit_after(text, span.end)


def _plain(text: str, span: _Span) -> Iterator[str]:
    """The part of the run after its last `=`, then the last number of this part; each with its unit. Nothing if letters
    follow directly, because `3D` is not a number."""
    run, after = text[span.start : span.end], _unit_after(text, span.end)
    next_two = text[span.end : span.end + 2]
    if not after and next_two[:1].isalpha() and next_two not in ("st", "nd", "rd", "th"):
        return
    last = run.rpartition("=")[2] or run
    yield last + after
    if number := _LAST_OPERAND.search(last):
        yield number[0] + after


def _unit_after(text: str, end: int) -> str:
    """The fraction, magnitude or known unit after a number; other words belong to the sentence."""
    begin = end
    while match := _AMOUNT_AFTER.match(text, end):
        end = match.end()
    match = _UNIT_AFTER.match(text, end)
    shown = match[0] if match else ""
    word = shown.strip()
    if not word[:1].isalpha():
        return text[begin:end] + shown
    unit = read_unit(shown)
    return text[begin:end] + (shown if unit is not None and is_known_unit(unit) else "")
