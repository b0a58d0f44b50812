"""Assert statements of the reward Code: what they can do with values of the code, and responses that try to forge a
result or to find the expected value. The sandbox is real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_testing.sandbox.code_scorer import SPEC
from rljob_trainer.rewards.base import RewardRequest, Scored, Scorer


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return replace(SPEC, response_seconds=20.0).load()


def scored(scorer: Scorer, code: str, answer: object) -> Scored:
    value = scorer(RewardRequest("", f"```python\n{code}\n```\n", answer, {}))
    assert isinstance(value, Scored)
    return value


@pytest.mark.parametrize(
    ("code", "statement"),
    [
        ("import numpy\ndef f(x): return numpy.float32(x)", "assert f(1.5) == 1.5 and isinstance(f(1), float)"),
        ("import numpy\ndef f(x): return numpy.bool_(x)", "assert f(True)\nassert not f(False)"),
        (
            "import numpy\ndef f(x): return numpy.arange(x)",
            "import numpy as np\nassert list(f(3)) == [0, 1, 2] and f(3).shape == (3,)\n"
            "assert (f(3) == np.array([0, 1, 2])).all()",
        ),
        ("def f(x): x[0] = x.sum()", "import numpy\nx = numpy.array([1, 2])\nf(x)\nassert x.tolist() == [3, 2]"),
        ("import numpy\ndef f(x): return numpy.zeros((0, x))", "assert f(3).shape == (0, 3)"),
        ("from fractions import Fraction\ndef f(x): return Fraction(x, 3)", "assert f(2) * 3 == 2"),
        ("from decimal import Decimal\ndef f(x): return Decimal(x)", "assert f('0.1') * 3 == f('0.3')"),
        ("from collections import deque\ndef f(x): return deque([x])", "assert list(f(2)) == [2] and f(2)[0] == 2"),
        ("def f(x): x.append(1)", "from collections import deque\nd = deque()\nf(d)\nassert d == deque([1])"),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "assert f('aab').most_common(1) == [('a', 2)]",
        ),
        ("def f(x): return x.keys()", "assert f({1: 2}) == {1} and list(f({1: 2})) == [1]"),
        ("def f(x): return x.values()", "assert list(f({1: 2})) == [2]"),
        ("def f(x): return x.items()", "assert sorted(f({1: 2, 0: 3})) == [(0, 3), (1, 2)]"),
        ("def f(x): return range(x)", "assert f(3) == range(3) and f(3)[1] == 1"),
        ("def f(x): return {frozenset([x])}", "assert f(1) == {frozenset([1])}"),
        ("import datetime\ndef f(x): return datetime.date(x, 1, 2)", "assert f(2020) == datetime.date(2020, 1, 2)"),
        ("import datetime\ndef f(x): return datetime.timedelta(x)", "assert f(2).days == 2"),
        ("import enum\nclass A(str, enum.Enum): B = 'b'\ndef f(x): return A.B", "assert f(1) == 'b'"),
        ("def f(x): return [each for each in x]", "assert f(bytearray(b'a')) == [97] and f(b'a') == [97]"),
    ],
)
def test_plain_data_of_the_code_is_plain_data_in_the_statement(scorer: Scorer, code: str, statement: str) -> None:
    assert scored(scorer, code, [statement]) == Scored(1.0, "passed 1 of 1 tests")


TREE = """
class Node:
    def __init__(self, val, left=None):
        self.val, self.left, self.items = val, left, {}
        self.root = self
    def __bool__(self): return self.val != 0
    def __len__(self): return self.val
    def __getitem__(self, key): return self.items[key]
    def __setitem__(self, key, value): self.items[key] = value
    def __eq__(self, other): return isinstance(other, Node) and self.val == other.val
    def __lt__(self, other): return self.val < other.val
    def __hash__(self): return self.val
    def __str__(self): return f'<{self.val}>'
    def me(self): return self
def val(node): return node.val
def count():
    yield from (1, 2)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "t = Node(1, Node(2))\nassert val(t.left) == 2 and val(t.root) == 1 and t.left.val == 2",
        "assert Node(1) and not Node(0)",
        "assert len(Node(3)) == 3",
        "t = Node(1)\nt['a'] = [2]\nassert t['a'] == [2] and t.items == {'a': [2]}",
        "t = Node(1)\nt.val = 5\nassert val(t) == 5",
        "assert Node(1) == Node(1) and Node(1) != Node(2) and Node(1) in [Node(1)]",
        "assert len({Node(1), Node(1), Node(2)}) == 2",
        "assert [each.val for each in sorted([Node(2), Node(1)])] == [1, 2]",
        "assert str(Node(4)) == '<4>' and f'{Node(4)}' == '<4>'",
        "assert isinstance(Node(1), Node) and not isinstance(1, Node) and not isinstance(count(), Node)",
        "t = Node(1)\nassert t.me() is t and t.left is None",
        "c = count()\nassert next(c) == 1 and list(c) == [2]",
        "try:\n    Node(1)['none']\n    assert False\nexcept KeyError:\n    pass",
        "assert list(map(val, [Node(1), Node(2)])) == [1, 2]",
    ],
)
def test_objects_of_the_code_behave_as_objects(scorer: Scorer, statement: str) -> None:
    assert scored(scorer, TREE, [statement]) == Scored(1.0, "passed 1 of 1 tests")


FORGING_OBJECT = """
SEEN = []
class Any:
    def __getattr__(self, name): return Any()
    def __call__(self, *a, **k): return Any()
    def __eq__(self, other): SEEN.append(other); return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __ne__(self, other): return False
    def __getitem__(self, key): return Any()
    def __iter__(self): return iter([Any()])
    def __sub__(self, other): SEEN.append(other); return 0
    __rsub__ = __add__ = __mul__ = __mod__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 31337.0
    def __len__(self): return 1
    def __hash__(self): return hash(31337)
    def __array__(self, *a, **k): return __import__('numpy').array([31337])
    def __instancecheck__(self, other): return True
class Module:
    def isclose(self, *a, **k): SEEN.extend(a); return True
    def array_equal(self, *a, **k): SEEN.extend(sum(a, [])); return True
    def dumps(self, *a): return '31337'
math = np = numpy = json = Module()
def f(x): return Any()
def leaked(): return 31337 in SEEN
"""


@pytest.mark.parametrize(
    "statement",
    [
        "assert f(1) == 31337",
        "assert 31337 == f(1)",
        "assert not f(1) != 31337",
        "assert f(1) in [31337]",
        "assert 31337 in f(1)",
        "assert f(1) in {31337}",
        "assert f(1) >= 31337",
        "assert abs(f(1) - 31337) < 1e-6",
        "assert [f(1)] == [31337]",
        "assert f(1)[0] == 31337",
        "assert f(1).x == 31337",
        "assert math.isclose(f(1), 31337)",
        "assert np.isclose(0, 31337)",
        "assert numpy.array_equal([f(1)], [31337])",
        "assert json.dumps(f(1)) == '31337'",
        "assert isinstance(f(1), int)",
        "import math\nassert math.isclose(f(1), 31337)",
    ],
)
def test_an_object_forges_no_result_and_gets_no_expected_value(scorer: Scorer, statement: str) -> None:
    no_leak = "\n".join(["try:", *(f"    {line}" for line in statement.split("\n")), "except BaseException: pass"])
    found = scored(scorer, FORGING_OBJECT, [statement, f"{no_leak}\nassert leaked() is False"])
    assert found.score == 0.5
    assert found.found.startswith("passed 1 of 2 tests; test 1: ")


@pytest.mark.parametrize(
    ("code", "statement"),
    [
        ("def f(x): return x + 1e-12", "assert math.isclose(f(2), 2)"),
        ("def f(x): return [x]", "assert np.allclose(f(2), [2])"),
        ("def f(x): return x", "def check(c):\n    assert math.fabs(c(2) - 2) < 1e-9\ncheck(f)"),
        # Names of modules that mean something of the code.
        ("def copy(x): return [x]", "assert copy(2) == [2]"),
        ("class string:\n    def push(x): return [x]", "assert string.push(2) == [2]"),
        ("from datetime import datetime", "assert datetime.strptime('2020', '%Y').year == 2020"),
    ],
)
def test_a_statement_uses_standard_modules_without_an_import(scorer: Scorer, code: str, statement: str) -> None:
    assert scored(scorer, code, [statement]) == Scored(1.0, "passed 1 of 1 tests")


@pytest.mark.parametrize(
    "code",
    [
        """
import os, time
def add(a, b):
    os.closerange(3, 100)
    time.sleep(100)
""",
        """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(100,)).start()
def add(a, b):
    os.closerange(0, 100)
    ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
""",
    ],
    ids=["and sleeps", "and ends its first thread"],
)
def test_code_that_closes_the_connection_fails(scorer: Scorer, code: str) -> None:
    found = scored(scorer, code, ["assert add(1, 2) == 3"])
    assert found == Scored(0.0, "passed 0 of 1 tests; test 1: RuntimeError: the code ended its process")


@pytest.mark.parametrize(
    ("code", "failure"),
    [("raise ValueError('no')", "ValueError: no"), ("exit()", "RuntimeError: the code ended its process")],
)
def test_a_statement_on_code_that_has_ended_says_why(scorer: Scorer, code: str, failure: str) -> None:
    # The code ends before the statement's first request.
    found = scored(scorer, code, ["import time\ntime.sleep(0.3)\nassert add(1, 2) == 3"])
    assert found == Scored(0.0, f"passed 0 of 1 tests; test 1: {failure}")


def test_a_test_that_passes_a_function_to_the_code_is_an_error_and_not_a_score(scorer: Scorer) -> None:
    with pytest.raises(ValueError, match="type function to the code; use plain data"):
        scored(scorer, "def add(a, b): return a(b)", ["assert add(lambda x: x, 2) == 2"])


@pytest.mark.parametrize("error", ["SyntaxError", "ValueError", "MemoryError", "UnsupportedTest", "SystemExit"])
def test_what_the_code_raises_is_never_an_error_of_the_row(scorer: Scorer, error: str) -> None:
    code = f"class UnsupportedTest(BaseException): pass\ndef add(a, b): raise {error}('of the code')"
    found = scored(scorer, code, ["assert add(1, 2) == 3"])
    assert found.score == 0.0
    assert "of the code" in found.found


def test_a_statement_that_cannot_be_compiled_is_an_error_of_the_row(scorer: Scorer) -> None:
    with pytest.raises(ValueError, match="a test of the row cannot be used: SyntaxError: 'return' outside function"):
        scored(scorer, "def add(a, b): return 3", ["assert add(1, 2) == 3\nreturn"])
