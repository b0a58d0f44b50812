"""The tests of a dataset row, in the forms of public datasets.

The answer has one of these forms, as values or as JSON text:

- `{"inputs": [...], "outputs": [...]}`: standard input and the expected standard output of each test (APPS, TACO,
  PRIME). A list of strings is the lines of one input. With `fn_name`, each input is the list of a function's arguments
  (or text with one JSON value per line), and each output the expected value.
- `[{"input": ..., "output": ...}, ...]`: the same, one object per test (DeepCoder, LiveCodeBench). If `testtype` is
  `functional`, `metadata.func_name` (or the object's `fn_name`) is the function.
- `["assert f(1) == 2", ...]`: one test per string, of one or more statements (MBPP). Text that is not JSON is one test
  of this kind.
- `{"test": "def check(candidate): ...", "entry_point": "f"}`: `check` is called with the function (HumanEval).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_trainer.rewards.base import excerpt

MAX_VALUE_CHARACTERS = 80
FORMS = "{inputs, outputs}, a list of {input, output}, a list of assert statements, or {test, entry_point}"


@dataclass(frozen=True)
class OutputTest:
    """The code gets `stdin` and must print `expected`."""

    stdin: str
    expected: str

    @property
    def size(self) -> int:
        """Characters of the input."""
        return len(self.stdin)


@dataclass(frozen=True)
class CallTest:
    """The function must return the expected value."""

    function: str
    arguments: Sequence[object]
    keywords: Mapping[str, object]
    expected: object

    @property
    def size(self) -> int:
        """Characters of the input."""
        return len(repr((self.arguments, self.keywords)))


@dataclass(frozen=True)
class StatementTest:
    """The statements must raise nothing."""

    source: str

    @property
    def size(self) -> int:
        """Characters of the input."""
        return len(self.source)


CodeTest = OutputTest | CallTest | StatementTest


def parse_tests(answer: object) -> list[CodeTest]:
    """The tests of an answer. Raises ValueError with a reason that continues the sentence "the answer is ..."."""
    tests: list[CodeTest]
    match _loaded(answer):
        case {"inputs": list() as inputs, "outputs": list() as outputs, **others}:
            if len(inputs) != len(outputs):
                raise ValueError(f"an object with {len(inputs)} inputs and {len(outputs)} outputs")
            name = others.get("fn_name")
            tests = [_pair_test(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]
        case {"test": str() as source, "entry_point": str() as name}:
            tests = [_statement_test(f"{source}\ncheck({name})")]
        case [str(), *_] as items:
            tests = [_statement_test(each) for each in items]
        case [Mapping(), *_] as items:
            tests = [_object_test(each) for each in items]
        case _:
            raise ValueError(f"{_seen(answer)}, which is not {FORMS}")
    if not tests:
        raise ValueError("an object without tests")
    return tests


def largest(tests: Sequence[CodeTest], max_tests: int) -> list[CodeTest]:
    """At most `max_tests` tests, those with the longest inputs, in their order (as DeepCoder chooses them)."""
    if len(tests) <= max_tests:
        return list(tests)
    by_size = sorted(range(len(tests)), key=lambda index: -tests[index].size)
    return [tests[index] for index in sorted(by_size[:max_tests])]


def _loaded(answer: object) -> object:
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return [answer]


def _object_test(test: object) -> CodeTest:
    if not isinstance(test, Mapping):
        raise ValueError(f"a list with {_seen(test)} among objects")
    if "input" not in test or "output" not in test:
        raise ValueError(f"a list with an object that has no input and output (keys: {', '.join(map(str, test))})")
    name = test.get("fn_name")
    metadata = test.get("metadata")
    if name is None and isinstance(metadata, Mapping):
        name = metadata.get("func_name")
    if test.get("testtype") == "functional" and name is None:
        raise ValueError("a list with a functional test without a name of the function (metadata.func_name)")
    return _pair_test(test["input"], test["output"], name if test.get("testtype") != "stdin" else None)


def _pair_test(given: object, expected: object, name: object) -> CodeTest:
    if name is not None:
        if not isinstance(name, str):
            raise ValueError(f"an object whose fn_name is {_seen(name)}, not a string")
        arguments, keywords = _arguments(given)
        return CallTest(name, arguments, keywords, _expected_value(expected))
    return OutputTest(_text(given), _text(expected))


def _arguments(given: object) -> tuple[Sequence[object], Mapping[str, object]]:
    match given:
        case str():
            try:
                return [json.loads(line) for line in given.splitlines() if line.strip()], {}
            except ValueError:
                raise ValueError(f"an object with the arguments {_seen(given)}, whose lines are not JSON") from None
        case list():
            return given, {}
        case Mapping():
            return [], {str(key): value for key, value in given.items()}
    raise ValueError(f"an object with the arguments {_seen(given)}, which are neither a list nor an object")


def _expected_value(expected: object) -> object:
    if isinstance(expected, str):
        try:
            return json.loads(expected)
        except ValueError:
            return expected
    return expected


def _text(value: object) -> str:
    match value:
        case str():
            return value
        case list() if all(isinstance(each, str) for each in value):
            return "\n".join(value)
        case bool() | int() | float():
            return str(value)
    raise ValueError(
        f"an object with the input or output {_seen(value)}, which is not text; name the function: fn_name"
    )


def _statement_test(source: object) -> StatementTest:
    if not isinstance(source, str):
        raise ValueError(f"a list with {_seen(source)} among statements")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{_seen(source)}, which is neither Python ({error}) nor {FORMS}") from None
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise ValueError(f"{_seen(source)}, a test without assert statement, which all code would pass")
    return StatementTest(source)


def _seen(value: object) -> str:
    return "null" if value is None else excerpt(repr(value), MAX_VALUE_CHARACTERS)
