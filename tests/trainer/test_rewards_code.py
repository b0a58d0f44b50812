"""The reward Code: the forms of tests, scores, and responses that try to forge a score. The sandbox is real."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from rljob_testing.sandbox.code_scorer import SPEC
from rljob_trainer.rewards.base import RewardRequest, Scored, Scorer
from rljob_trainer.rewards.code import find_code
from rljob_trainer.rewards.code_comparison import is_expected_output, is_expected_value
from rljob_trainer.rewards.code_tests import OutputTest, StatementTest, largest, parse_tests
from rljob_trainer.sandbox.programs import Mode
from rljob_trainer.sandbox.sandbox import ProgramLimits, Sandbox

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
SUM_CODE = "print(sum(map(int, input().split())))"
ADD = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return SPEC.load()


@pytest.fixture(scope="module")
def strict_scorer() -> Scorer:
    """Its score is 1 if all tests pass, and a test may take 0.3 s."""
    return replace(SPEC, test_seconds=0.3, is_fraction=False).load()


def scored(scorer: Scorer, code: str, answer: object) -> Scored:
    value = scorer(RewardRequest("", f"So:\n```python\n{code}\n```\n", answer, {}))
    assert isinstance(value, Scored)
    return value


@pytest.mark.parametrize(
    ("code", "answer", "score"),
    [
        (SUM_CODE, SUM, 1.0),
        (SUM_CODE, json.dumps(SUM), 1.0),
        ("print(3)", SUM, 0.5),
        (SUM_CODE, [{"input": "1 2", "output": "3"}, {"input": "1 1", "output": "3", "testtype": "stdin"}], 0.5),
        (SUM_CODE, {"inputs": [["1 2", "9"]], "outputs": [["3"]]}, 1.0),
        ("import sys\nsys.stdout.write(sys.stdin.read())", {"inputs": ["é\n"], "outputs": ["é"]}, 1.0),
        ("import atexit\natexit.register(print, 1)", {"inputs": [""], "outputs": ["1"]}, 1.0),
        (
            "import threading\nthreading.Thread(target=print, args=(1,)).start()",
            {"inputs": [""], "outputs": ["1"]},
            1.0,
        ),
        # As programs with deep recursion do.
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 26, -1))\n" + SUM_CODE,
            SUM,
            1.0,
        ),
        ("import numpy\nprint(numpy.arange(3).sum())", {"inputs": [""], "outputs": ["3"]}, 1.0),
        ("if __name__ == '__main__': print(1)\nexit()", {"inputs": [""], "outputs": ["1"]}, 1.0),
        ("def add(a, b): return a + b", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, 1.0),
        (
            "class Solution:\n    def add(self, a: List[int], b: int): return a + [b]",
            [{"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional", "metadata": {"func_name": "add"}}],
            1.0,
        ),
        (
            "def add(a, b): return (a, {'k': b})",
            {"fn_name": "add", "inputs": [[1, 2.5]], "outputs": [[1, {"k": 2.5}]]},
            1.0,
        ),
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return 3", ADD, 0.5),
        ("def add(a, b): return a + b", "\n".join(ADD), 1.0),
        ("def add(a, b): a.append(b)", ["x = [1]\nadd(x, 2)\nassert x == [1, 2]"], 1.0),
        ("def add(a, b): return {(a, b): {a}}", ["assert add(1, 2.5) == {(1, 2.5): {1}}"], 1.0),
        ("def add(a, b): yield from (a, b)", ["assert list(add(1, 2)) == [1, 2]"], 1.0),
        (
            "class Stack:\n    def __init__(self): self.x = []\n    def push(self, x): self.x.append(x); return self",
            ["s = Stack()\ns.push(1).push(2)\nassert s.x == [1, 2]"],
            1.0,
        ),
        (
            "def add(a, b): raise ValueError('no')",
            ["try:\n    add(1, 2)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"],
            1.0,
        ),
        (
            "def add(a, b): return a + b",
            {"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
            1.0,
        ),
    ],
)
def test_the_forms_of_tests(scorer: Scorer, code: str, answer: object, score: float) -> None:
    assert scored(scorer, code, answer).score == score


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("print(3", "SyntaxError: '(' was never closed"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; print(3); sys.exit(2)", "exit code 2"),
        ("import sys; sys.exit('no solution')", "no solution"),
        ("print(4)", "wrong output"),
        ("while True: pass", "ran longer than 0.3 s"),
        ("x = 'x' * (1 << 30)", "MemoryError"),
        ("import os; os.abort()", "ended by signal SIGABRT"),
    ],
)
def test_a_failed_test_says_why(strict_scorer: Scorer, code: str, failure: str) -> None:
    found = scored(strict_scorer, code, SUM)
    assert found == Scored(0.0, f"failed test 1 of 2: {failure}")


def test_tests_that_do_not_end_in_time_have_failed() -> None:
    scorer = replace(SPEC, test_seconds=0.4, response_seconds=0.5).load()
    began = time.monotonic()
    found = scored(scorer, "import time\ntime.sleep(100)", {"inputs": [""] * 5, "outputs": [""] * 5})
    assert found == Scored(0.0, "passed 0 of 5 tests; test 1: ran longer than 0.4 s")
    assert time.monotonic() - began < 20


FORGERIES = {
    "prints the words of a result": """
print('passed')
print('{"passed": ""}')
""",
    "writes to all descriptors": """
import os
for number in range(1, 32):
    try:
        os.write(number, b'{"passed": ""}\\n')
    except OSError:
        pass
""",
    "is equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def add(a, b): return Equal()
""",
    "is a number that is equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Equal(9)
""",
    "exits early": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "exits as Python does": "def add(a, b): raise SystemExit(0)",
    "changes builtins": """
import builtins, json, sys
json.dumps = lambda *a, **k: '3'
sys.excepthook = lambda *a: None
builtins.AssertionError = type('E', (BaseException,), {})
def add(a, b): return 0
""",
    "reads frames and objects": """
import gc, sys
def add(a, b):
    frame, text = sys._getframe(), repr([each for each in gc.get_objects() if type(each) in (str, dict, list)])
    while frame:
        text += repr(frame.f_locals)
        frame = frame.f_back
    return 31000 + 337 if str(31000 + 337) in text else 0
if sys.argv: print(add(1, 2))
""",
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize(
    "answer",
    [
        ["assert add(1, 2) == 31337"],
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [31337]},
        {"inputs": ["1 2"], "outputs": ["31337"]},
    ],
    ids=["statement", "call", "output"],
)
def test_a_forged_result_is_not_a_pass(scorer: Scorer, name: str, answer: object) -> None:
    assert scored(scorer, FORGERIES[name], answer).score == 0.0


def test_a_response_does_not_change_the_next_one(scorer: Scorer) -> None:
    spoil = "\n".join(["import builtins, json, os", "builtins.print = json.loads = None", "open('left', 'w').close()"])
    scored(scorer, spoil, SUM)
    look = "import os\nprint(os.listdir('.'), os.getcwd() == '/')"
    assert scored(scorer, look, {"inputs": [""], "outputs": ["[] False"]}).score == 1.0
    assert scored(scorer, SUM_CODE, SUM).score == 1.0


def test_the_same_code_gives_the_same_output() -> None:
    code = "import random\nprint(random.random(), hash('a'), {'a', 'b', 'c', 'd'})"
    # Two programs of one sandbox, and one of another one.
    first, limits = Sandbox(256 << 20), ProgramLimits(10.0, 1000)
    runs = [each.run(Mode.SCRIPT, {"code": code}, b"", limits) for each in (first, first, Sandbox(256 << 20))]
    assert runs[0].failure == ""
    assert runs[0].output.count(b"'") == 8
    assert runs[1:] == [runs[0], runs[0]]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("<think>\n```python\na\n```\n</think>\n```\nb\n```<|im_end|>", "b\n"),
        ("<think>\n```python\na\n```\n</think>\n```\nb\n```\n<|im_end|>", "b\n"),
        ("<think>\n```python\na\n```", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("~~~python\nprint('```')\n~~~", "print('```')\n"),
        ("1. a\n   ```python\n   b\n   ```", "b\n"),
        ("````\n```\n````", "```\n"),
        ("```python\r\nb\r\n```\r\n", "b\r\n"),
        ("```python\nprint('<|im_end|>')\n```", "print('<|im_end|>')\n"),
        ("`` ` `` and ```x``` are no blocks", None),
        ("print(1)", None),
    ],
)
def test_the_last_fenced_block_is_the_code(response: str, code: str | None) -> None:
    assert find_code(response) == code


def test_a_response_without_code_has_score_0(scorer: Scorer) -> None:
    assert scorer(RewardRequest("", "I do not know", SUM, {})) == Scored(0.0, "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "null, which is not {inputs, outputs}"),
        ("42", "42', which is not {inputs, outputs}"),
        ("the answer", "which is neither Python (invalid syntax"),
        ({"inputs": ["1"], "outputs": []}, "an object with 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "an object without tests"),
        ({"inputs": [[1]], "outputs": [[2]]}, "name the function: fn_name"),
        (["x = 1"], "a test without assert statement, which all code would pass"),
        ([{"input": "1"}], "no input and output (keys: input)"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": [1]}, "whose lines are not JSON"),
    ],
)
def test_tests_that_cannot_be_used_are_explained(scorer: Scorer, answer: object, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^the row's answer is ") as caught:
        scored(scorer, SUM_CODE, answer)
    assert reason in str(caught.value)


def test_the_largest_tests_are_used() -> None:
    tests = parse_tests({"inputs": ["1", "333", "22", "4"], "outputs": ["a", "b", "c", "d"]})
    assert largest(tests, 2) == [OutputTest("333", "b"), OutputTest("22", "c")]
    assert largest(tests, 4) == tests
    assert parse_tests(["assert 1"]) == [StatementTest("assert 1")]


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("a \nb\n\n", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        ("1.0", "1", True),
        ("0.33333333", "0.3333333333", True),
        ("0.33", "0.3333333333", False),
        ("12345678", "12345679", False),
        ("1_0", "10", False),
        ("nan", "nan", True),
        ("1  2", "1 2", True),
        ("YES", "yes", False),
        ("9" * 500, "9" * 499 + "8", False),
        ("1e999999999", "1", False),
    ],
)
def test_outputs_are_compared_by_lines_words_and_numbers(output: str, expected: str, is_same: bool) -> None:
    assert is_expected_output(output, expected) is is_same


@pytest.mark.parametrize(
    ("result", "expected", "is_same"),
    [
        ("[1, 2]", [1, 2], True),
        ("[1, 2]", [[1, 2]], True),
        ("true", 1, False),
        ("1.0000000001", 1, True),
        ('{"1": 2}', {1: 2}, True),
        ("", None, False),
        ("null", None, True),
        ("[" * 100000, [], False),
        ("1" * 5000, 1, False),
        ("1e400", 10**400, False),
    ],
)
def test_values_are_compared_as_json(result: str, expected: object, is_same: bool) -> None:
    assert is_expected_value(result.encode(), expected) is is_same
