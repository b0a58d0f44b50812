"""What is found out about an environment's class, and the errors of classes that cannot be used."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_testing.environments import WHERE, class_specs, probe, run, write_module
from rljob_trainer.environments.description import ClassSpec, EnvironmentDescription, describe_class, load_class
from rljob_trainer.environments.environment_pool import RolloutPlace
from rljob_trainer.environments.environment_process import EnvironmentProcess
from rljob_trainer.environments.failures import EnvironmentLostError, EnvironmentTimeoutError
from rljob_trainer.environments.probe import Trial
from rljob_trainer.errors import ConfigurationError, ResourceError
from rljob_trainer.rewards.scorer_environment import scorer_environment

RESET = "    def reset(self, **row): pass\n"
NUMBERS = itertools.count()
Describe = Callable[..., EnvironmentDescription]


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Describes a class `Game` with a body, without a process of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def described(body: str, arguments: dict[str, object] | None = None) -> EnvironmentDescription:
        module = f"described_game_{next(NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(body if "class" in body else f"class Game:\n{body}")
        monkeypatch.delitem(sys.modules, module, raising=False)
        spec = ClassSpec("game", f"{module}:Game", arguments or {}, f"{WHERE}[0]")
        return describe_class(load_class(spec), spec)

    return described


def test_public_methods_are_tools_except_the_special_ones(describe: Describe) -> None:
    tools = "".join(
        f'    {how}def {name}(self):\n        """Does."""\n' for how, name in [("", "step"), ("async ", "go")]
    )
    found = describe(
        "    reusable = True\n    @property\n    def shown(self): raise AssertionError\n    def _private(self): pass\n"
        "    def respond(self, message): pass\n    def get_reward(self): pass\n    def close(self): raise OSError\n"
        f"    async def reset(self, *, seed=None): pass\n{tools}"
    )
    assert found.tool_names == ("go", "step")
    assert EnvironmentDescription.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_close_with_arguments_is_a_tool(describe: Describe) -> None:
    close = '    def close(self, door: str):\n        """Closes.\n        Args:\n            door: One.\n        """\n'
    found = describe(RESET + close)
    assert (found.tool_names, found.has_reward) == (("close",), False)


DECORATED = """
import enum, functools

class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"

class Game:
    client = dict
    def reset(self, **row): pass

    @functools.cached_property
    def shown(self): raise AssertionError

    @functools.lru_cache
    def search(self, colour: Colour) -> str:
        \"\"\"Searches.

        Args:
            colour: One.
        \"\"\"

    @classmethod
    def add(cls): "Adds."

    @staticmethod
    def multiply(): "Multiplies."
"""


def test_methods_with_decorators_are_tools(describe: Describe) -> None:
    found = describe(DECORATED)
    assert found.tool_names == ("add", "multiply", "search")
    assert '"colour": {"type": "string", "description": "One.", "enum": ["red", "blue"]}' in json.dumps(found.tools)


ARGUMENT = '(self, a: {}):\n        """Does.\n        Args:\n            a: One.\n        """\n'


@pytest.mark.parametrize(
    ("body", "field", "texts"),
    [
        ("    pass\n", "path", ["has no method `reset`"]),
        ("    reset = 3\n", "path", ["Game.reset is a int", "make it a method"]),
        ("    def reset(self, **row):\n        yield 1\n", "path", ["reset is a generator", "use `return`"]),
        (RESET + "    def respond(self): pass\n", "path", ["respond(self)", "write `def respond(self, message)`"]),
        (RESET + "    def get_reward(self, x): pass\n", "path", ["get_reward(self, x)", "`def get_reward(self)`"]),
        (
            RESET + "    def step(self): pass\n",
            "path",
            ["is a public method", "no docstring", "name the method _"],
        ),
        (RESET + '    def step(self, x):\n        """Does."""\n', "path", ["Game.step", "x", "type hint"]),
        (RESET + '    def step(self, x: int):\n        """Does."""\n', "path", ["no description for the argument 'x'"]),
        (
            f"import functools as f\nclass Game:\n{RESET}    @f.singledispatchmethod\n"
            f"    def step{ARGUMENT.format('int')}",
            "path",
            ["Game.step is a public method", "cannot be called with named arguments"],
        ),
        (
            f"from http import HTTPStatus\nclass Game:\n{RESET}    def step{ARGUMENT.format('HTTPStatus')}",
            "path",
            ["Game.step", "a is an enum of values that are not strings; use Literal"],
        ),
        (RESET + "    def __init__(self): raise OSError('disk')\n", "path", ["the constructor of", "OSError: disk"]),
        (RESET + "    def __init__(self): raise SystemExit(3)\n", "path", ["the constructor of", "SystemExit: 3"]),
        (RESET + "    def __init__(self, size): pass\n", "arguments", ["(size)", "{}", "missing a required argument"]),
        ("# no class\ndef Game(): pass\n", "path", ["Game is a function; name a class"]),
        ("# no class\nimport missing_package_of_a_game\n", "path", ["importing", "missing_package_of_a_game"]),
    ],
)
def test_a_class_that_cannot_be_used_is_one_clear_error(
    describe: Describe, body: str, field: str, texts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        describe(body)
    assert str(raised.value).startswith(f"{WHERE}[0].{field}: ")
    assert [text for text in texts if text not in str(raised.value)] == []


def test_the_constructor_gets_the_arguments(describe: Describe) -> None:
    assert describe(f"{RESET}    def __init__(self, size): self.size = size + 1\n", {"size": 3}).tools == ()
    with pytest.raises(ConfigurationError, match=r"classes\[0\]\.arguments: .*unexpected keyword argument 'sise'"):
        describe(f"{RESET}    def __init__(self, size=1): pass\n", {"sise": 3})


PROBED = """
import os, signal
print("printed")
if "WHEN" == "import":
    os._exit(0)

class Game:
    def __init__(self):
        if "WHEN" == "constructor":
            os._exit(4)

    def reset(self, what, **row):
        if what == "exit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "connect":
            raise ConnectionRefusedError(111, "no server")
        return {}[what]
"""
GAME = rf"(?s)^{re.escape(WHERE)}\[0\] \(games:Game\): "


@pytest.mark.parametrize(
    ("when", "row", "kind", "text"),
    [
        ("", {"what": "raises"}, ConfigurationError, r"reset raised KeyError: 'raises'.*games\.py"),
        ("", {}, ConfigurationError, r"reset of games:Game needs 'what' .* no dataset; add a dataset .* default value"),
        ("", {"other": 1}, ConfigurationError, r"reset .* needs 'what' .* only the columns 'other'; add "),
        (
            "",
            {"what": "exit"},
            ConfigurationError,
            r"the environment's constructor or reset ended .*\(exit code 3\).*environment-probe\.log\nprinted",
        ),
        ("constructor", {}, ConfigurationError, r"the environment's constructor or close ended .*\(exit code 4\)"),
        ("import", {}, ConfigurationError, r"importing the environment's classes ended .*\(exit code 0\)"),
        ("", {"what": "kill"}, ResourceError, r"the environment's constructor or reset .*SIGKILL.*out of memory"),
        ("", {"what": "connect"}, ResourceError, r"reset raised .* no server.*check that it runs"),
    ],
)
def test_a_trial_that_fails_is_one_clear_error(
    tmp_path: Path, when: str, row: dict[str, object], kind: type[Exception], text: str
) -> None:
    write_module(tmp_path, PROBED.replace("WHEN", when))
    with pytest.raises(kind, match=GAME + text):
        probe(tmp_path, *class_specs("Game"), trials=(Trial("Game", row, 0),))


def test_a_process_loads_within_its_limit(tmp_path: Path) -> None:
    write_module(tmp_path, "import time\ntime.sleep(600)\n")

    async def load() -> None:
        process = EnvironmentProcess(
            class_specs("Faulty"),
            log_file=tmp_path / "environment.log",
            variables=scorer_environment(os.environ, [], [tmp_path]),
            timeout_seconds=60,
            start_timeout_seconds=0.5,
        )
        with pytest.raises(EnvironmentTimeoutError, match="importing the environment's classes"):
            await process.wait_until_loaded()
        with pytest.raises(EnvironmentLostError):
            await RolloutPlace(process, 0).reward()

    run(load())
