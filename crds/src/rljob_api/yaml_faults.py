"""Faults of YAML text: plain scalars that YAML parsers interpret differently, and where the cause of a syntax error is.

The YAML parser reports a syntax error where it stops. A missing `:`, quote or bracket is often in a line above, and the
user must look there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.tokens import ScalarToken, Token

from rljob_api.errors import Problem

Path = tuple[str | int, ...]

_BOOLEAN = re.compile(r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF")
_NUMBERS = (
    (re.compile(r"[-+]?0[0-9][0-9_]*(\.[0-9]*)?"), "a number with a leading zero"),
    (re.compile(r"0o[0-7_]+|0O[0-7_]+"), "an octal number"),
    (re.compile(r"[-+]?0b[01_]+"), "a binary number"),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]*_[0-9a-fA-F_]*"), "a number with underscores"),
    (re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?"), "a number with underscores"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "a number in base 60"),
)
_ADVICE = {
    "'\\t'": "indent with spaces",
    "<block end>": "the indentation of this line, or its '- ', does not match the lines above; align it with them",
    "mapping values are not allowed": "correct the indentation of this line, or quote a value that contains ': '",
    "cannot start any token": "put the value in quotes",
    "expected ',' or": "close the bracket{opening}, or add the comma, before this position",
}
"""What to do, by a part of the YAML parser's message. The first part that the message contains decides."""


class YamlProblem(Exception):
    """The text cannot be read; `problem` says why and where."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class AmbiguousScalarProblem(YamlProblem):
    """The value at `path` is a plain scalar that YAML parsers interpret differently. The message has no advice, because
    this depends on the type of the field."""

    def __init__(self, problem: Problem, path: Path) -> None:
        self.path = path
        super().__init__(problem)


def disagreement(scalar: str) -> str | None:
    """How parsers of YAML 1.1 and 1.2 interpret a plain scalar differently; None if they agree."""
    if _BOOLEAN.fullmatch(scalar):
        return "some YAML parsers read it as true or false"
    what = next((what for pattern, what in _NUMBERS if pattern.fullmatch(scalar)), None)
    return None if what is None else f"YAML parsers disagree about {what}"


def syntax_problem(error: YAMLError, text: str, tokens: Iterator[Token]) -> Problem:
    """The problem for an error of the YAML parser, at the line and column where the user must look. `tokens` are those
    of the text; they end with an error."""
    if isinstance(error, ReaderError):
        before = text[: error.position]
        message = f"the character U+{error.character:04X} is not allowed in YAML; remove it"
        return Problem("", message, before.count("\n") + 1, len(before) - before.rfind("\n"))
    if not isinstance(error, MarkedYAMLError):
        return Problem("", f"invalid YAML: {' '.join(str(error).split())}", 1, 1)
    start, found = error.context_mark, error.problem_mark or error.context_mark
    context, problem = error.context or "", error.problem or error.context or ""
    if start is not None and (at_start := _message_at_start(context, problem)) is not None:
        return _problem(at_start, start)
    if found is None:
        return Problem("", f"invalid YAML: {problem}", 1, 1)
    scalar = _scalar_before(found, tokens)
    if scalar is not None and scalar.style in ("'", '"'):
        message = f"the quotes that open here close only in line {found.line + 1}, before more text; close them earlier"
        return _problem(message, scalar.start_mark)
    if scalar is not None and "mapping values" in problem and _begins_its_line(scalar, text):
        message = f"the text that begins here continues to the ':' in line {found.line + 1}"
        return _problem(f"{message}; write ': ' after the key in this line", scalar.start_mark)
    advice = next((f"; {advice}" for part, advice in _ADVICE.items() if part in problem), "")
    is_above = start is not None and start.line != found.line
    opening = f" that opens in line {start.line + 1}" if is_above and start is not None else ""
    return _problem(f"{problem}{advice.format(opening=opening)}", found)


def _problem(message: str, mark: StreamMark) -> Problem:
    return Problem("", f"invalid YAML: {message}", mark.line + 1, mark.column + 1)


def _message_at_start(context: str, problem: str) -> str | None:
    """The message for an error whose cause is at the beginning of its context, for example at an opening quote; None
    for other errors."""
    if "could not find expected ':'" in problem:
        return "this line has no ': '; write it after the key, or indent the line if it continues the value above"
    if "quoted scalar" in context and ("end of stream" in problem or "document separator" in problem):
        return "the quotes that open here are not closed; close them"
    if "parsing a flow" in context and "<stream end>" in problem:
        return "the bracket that opens here is not closed; close it"
    return None


def _scalar_before(mark: StreamMark, tokens: Iterator[Token]) -> ScalarToken | None:
    """The last scalar of several lines that ends in the line of `mark`, before it."""
    found = None
    try:
        for token in tokens:
            if (token.start_mark.line, token.start_mark.column) >= (mark.line, mark.column):
                break
            if isinstance(token, ScalarToken) and token.start_mark.line < token.end_mark.line == mark.line:
                found = token
    except YAMLError:
        pass
    return found


def _begins_its_line(scalar: ScalarToken, text: str) -> bool:
    """Whether only spaces and `- ` are to the left of the scalar."""
    mark = scalar.start_mark
    return not text.split("\n")[mark.line][: mark.column].strip(" -")
