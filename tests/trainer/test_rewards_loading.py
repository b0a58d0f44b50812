"""Which scorer a job gets, and the errors when it cannot be loaded. Scorers are loaded in this process here."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pydantic
import pytest

from rljob_api.v1alpha1.dataset import Dataset, DatasetType, FileDataset, ReasoningGymDataset
from rljob_api.v1alpha1.reward import FormatReward, FunctionReward, OverlongPenalty, Reward, RewardType
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.rewards.base import RewardRequest, Scored
from rljob_trainer.rewards.format import FormatScorer
from rljob_trainer.rewards.function import FunctionScorer
from rljob_trainer.rewards.loading import scorer_spec
from rljob_trainer.rewards.math_answer import MathAnswerScorer
from rljob_trainer.rewards.overlong import overlong_scores
from rljob_trainer.rewards.reasoning_gym import ReasoningGymScorer
from rljob_trainer.user_functions import find_named, refuse_hiding_modules

WHERE = "spec.training.rewards[2].function.path (reward style)"
FILE_DATASET = Dataset(type=DatasetType.FILE, file=FileDataset(path="x.jsonl"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of this test."""
    name = f"rewards_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def exact(prompt, response, answer, row):\n"
        "    return response == answer and row['weight'] * len(prompt)\n"
        "def loose(response, **rest):\n    return len(response)\n"
        "def two(response, answer):\n    return 1\n"
        "async def later(prompt, response, answer, row):\n    return 1\n"
        "NUMBER = 3\n"
        "import functools, itertools\n"
        "class Judge:\n"
        "    def __init__(self, prompt, response, answer, row):\n        pass\n"
        "class Callable:\n"
        "    def __call__(self, prompt, response, answer, row):\n        return 2\n"
        "class Awaited:\n"
        "    async def __call__(self, prompt, response, answer, row):\n        return 2\n"
        "judge, awaited = Callable(), Awaited()\n"
        "preset = functools.partial(loose, prompt='p')\n"
        "preset_later = functools.partial(later, prompt='p')\n"
        "def piecewise(prompt, response, answer, row):\n    yield 1\n"
        "async def streamed(prompt, response, answer, row):\n    yield 1\n"
        "def of_chat(prompt, response, answer, row, messages):\n"
        "    assert type(messages) is list\n    return len(messages)\n"
        "largest, chained = max, itertools.chain\n"
        "def positional(prompt, response, answer, row, /):\n    return 1\n"
    )
    (tmp_path / f"broken_{name}.py").write_text("limit = 1 / 0\n")
    (tmp_path / f"needy_{name}.py").write_text("import library_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_gets_its_arguments_by_name(module: str) -> None:
    request = RewardRequest("ab", "x", "x", {"weight": 5})
    assert FunctionScorer(f"{module}:exact", WHERE).load()(request) == 10
    assert FunctionScorer(f"{module}:loose", WHERE).load()(request) == 1
    assert FunctionScorer(f"{module}:judge", WHERE).load()(request) == 2
    assert FunctionScorer(f"{module}:preset", WHERE).load()(request) == 1
    assert FunctionScorer(f"{module}:of_chat", WHERE).load()(request) == 0
    conversation = replace(request, messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    assert FunctionScorer(f"{module}:of_chat", WHERE).load()(conversation) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:score", r"no module 'no_such_module' \(looking for no_such_module:score\); add its folder"),
        ("{module}.inner:score", r"no module '{module}.inner'|is not a package"),
        ("{module}:exakt", r"has no 'exakt'; did you mean exact\?"),
        ("{module}:NUMBER", r"{module}:NUMBER is a int; name a plain function"),
        ("{module}:piecewise", r"{module}:piecewise is a generator \(it has `yield`\); name a plain function"),
        ("{module}:streamed", r"{module}:streamed is an async generator; name a plain function"),
        ("{module}:largest", r"{module}:largest has no signature that Python can read \(no signature .*; name a plain"),
        ("{module}:chained", r"{module}:chained has no signature that Python can read \(no signature .*; name a plain"),
        ("{module}:Judge", r"{module}:Judge is a class; name a plain function"),
        ("{module}:positional", r"{module}:positional\(.*, /\) cannot be called as \(prompt=.*; give it these four"),
        ("builtins:max", r"module of Python's standard library, 'builtins'"),
        ("numbers:score", r"'numbers' \(seen: 'numbers:score'\); rename .* to my_numbers"),
        ("{module}:two", r"{module}:two\(response, answer\) cannot be called as \(prompt=\.\.\., .*'prompt'.* four"),
        ("broken_{module}:f", r"(?s)importing broken_{module}:f failed.*1 / 0.*ZeroDivisionError"),
        ("needy_{module}:f", r"(?s)importing needy_{module}:f failed.*No module named 'library_that_is_not_installed'"),
    ],
)
def test_an_unusable_function_is_rejected(module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("{module}", module)) as caught:
        FunctionScorer(path.replace("{module}", module), WHERE).load()
    assert str(caught.value).startswith(f"{WHERE}: ")


@pytest.mark.parametrize(
    ("file", "path", "named"),
    [
        ("pydantic.py", "pydantic:score", "pydantic.py"),
        ("pydantic/__init__.py", "pydantic:score", "pydantic/__init__.py"),
        ("pydantic/rewards.py", "pydantic.rewards:score", "pydantic"),
    ],
)
def test_a_file_hidden_by_an_installed_package_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, path: str, named: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("def score(prompt, response, answer, row):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        FunctionScorer(path, WHERE).load()
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: {tmp_path / named} is hidden by the installed package 'pydantic'")
    assert f"({pydantic.__file__})" in message
    assert f"(seen: {path!r}); rename" in message


def test_an_installed_package_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic" / "rows.jsonl").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_named("pydantic:create_model", WHERE) is pydantic.create_model
    assert find_named("pydantic.fields:Field", WHERE) is pydantic.Field


def test_a_file_that_hides_a_dependency_of_the_trainer_is_named_when_an_import_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "typer.py"
    file.write_text("def score(prompt, response, answer, row):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "typer", raising=False)
    with pytest.raises(ImportError) as raised:
        from typer import Typer  # noqa: F401
    monkeypatch.setitem(sys.modules, "typer", sys.modules.pop("typer"))
    with pytest.raises(ConfigurationError) as caught:
        refuse_hiding_modules(raised.value)
    assert str(caught.value).startswith(f"{file}: hides the installed package 'typer'")
    assert "rename the file" in str(caught.value)
    assert str(caught.value).endswith(f"ImportError: cannot import name 'Typer' from 'typer' ({file})")


def error_of(program: str) -> Exception:
    try:
        exec(program, {})
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


@pytest.mark.parametrize(
    ("program", "is_its_fault"),
    [
        ("import typer.main", True),
        ("from typer.colors import NO_SUCH_COLOR", True),
        ("import typer; typer.Typer", True),
        ("import typer.fails", True),
        ("try:\n    import typer.main\nexcept ImportError as error:\n    raise RuntimeError('lazy') from error", True),
        ("raise OSError(28, 'No space left on device')", False),
        ("raise MemoryError", False),
        ("raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')", False),
        ("import no_such_package", False),
        ("import json; json.no_such_name", False),
        ("raise RuntimeError('typer')", False),
    ],
)
def test_a_folder_of_packages_is_not_blamed_for_other_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, is_its_fault: bool
) -> None:
    """A folder on PYTHONPATH may hold another version of an installed package."""
    (tmp_path / "typer").mkdir()
    (tmp_path / "typer" / "__init__.py").write_text("")
    (tmp_path / "typer" / "colors.py").write_text("")
    (tmp_path / "typer" / "fails.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "typer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", importlib.import_module("typer"))
    error = error_of(program)
    if not is_its_fault:
        refuse_hiding_modules(error)
        return
    with pytest.raises(ConfigurationError, match=r"typer/__init__\.py: hides the installed package 'typer', which the"):
        refuse_hiding_modules(error)


def test_each_reward_type_gives_its_scorer() -> None:
    gym = ReasoningGymDataset(task="basic_arithmetic", config={"max_terms": 2})
    gym_dataset = Dataset(type=DatasetType.REASONING_GYM, reasoning_gym=gym)
    function = Reward(name="style", type=RewardType.FUNCTION, function=FunctionReward(path="a.b:c"))
    assert scorer_spec(function, "rewards[2]", FILE_DATASET) == FunctionScorer(
        "a.b:c", "rewards[2].function.path (reward style)"
    )
    math = Reward(type=RewardType.MATH_ANSWER)
    assert scorer_spec(math, "rewards[0]", FILE_DATASET) == MathAnswerScorer("rewards[0].type (reward score)")
    task = Reward(name="task", type=RewardType.REASONING_GYM)
    assert scorer_spec(task, "rewards[0]", gym_dataset) == ReasoningGymScorer(
        "basic_arithmetic", {"max_terms": 2}, "rewards[0].type (reward task)"
    )
    form = Reward(name="form", type=RewardType.FORMAT, format=FormatReward(pattern="a+"))
    assert scorer_spec(form, "rewards[1]", FILE_DATASET) == FormatScorer(
        "a+", "rewards[1].format.pattern (reward form)"
    )
    penalty = Reward(type=RewardType.OVERLONG, overlong=OverlongPenalty(buffer_tokens=1))
    assert scorer_spec(penalty, "rewards[1]", FILE_DATASET) is None


def test_reasoning_gym_needs_its_dataset() -> None:
    with pytest.raises(ConfigurationError, match=r"rewards\[1\]\.type \(reward score\): ReasoningGym scores only"):
        scorer_spec(Reward(type=RewardType.REASONING_GYM), "spec.training.rewards[1]", FILE_DATASET)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>two\nlines</think><answer>4</answer>", 1.0),
        ("  <think></think><answer>4</answer>\n", 1.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("Well: <think>a</think><answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_format_pattern_matches_the_whole_response(response: str, score: float) -> None:
    scorer = FormatScorer("<think>.*</think><answer>.*</answer>", WHERE).load()
    assert scorer(RewardRequest("", response, None, {})) == score


def test_a_pattern_of_another_python_version_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"\(reward style\): '\(a' .*regular expression .*missing \)"):
        FormatScorer("(a", WHERE).load()


@pytest.mark.parametrize(("num_tokens", "score"), [(0, 0.0), (70, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0)])
def test_the_overlong_penalty_grows_through_its_buffer(num_tokens: int, score: float) -> None:
    # By hand: of 100 tokens the last 20 are the buffer, in which a token costs 2 / 20.
    [found] = overlong_scores(OverlongPenalty(buffer_tokens=20, penalty_factor=2.0), [num_tokens], 100)
    assert found == pytest.approx(score, abs=1e-12)


def test_reasoning_gym_scores_by_the_task_of_the_row() -> None:
    scorer = ReasoningGymScorer("basic_arithmetic", {"min_terms": 2, "max_terms": 2}, WHERE).load()
    row = {"question": "88 + 94", "answer": "182", "metadata": {"source_dataset": "basic_arithmetic"}}
    assert scorer(RewardRequest("", "88 + 94 = 182\nand 7", "182", row)) == Scored(1.0, "182")
    assert scorer(RewardRequest("", "88 + 94 = 181", "182", row)) == Scored(0.0, "181")
    # Half of `12` is right for basic_arithmetic; spell_backward requires all of it.
    assert scorer(RewardRequest("", "12", "2", {**row, "answer": "2"})) == Scored(0.5, "12")
    other = {"question": "2", "answer": "2", "metadata": {"source_dataset": "spell_backward"}}
    assert scorer(RewardRequest("", "12", "2", other)) == Scored(0.0, "12")


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("basic_aritmetic", {}, r"reasoning-gym has no task 'basic_aritmetic'; did you mean basic_arithmetic"),
        ("zzz", {}, r"no task 'zzz'; the \d+ tasks: .*leg_counting"),
        ("leg_counting", {"legs": 3}, r"rejects the settings \{'legs': 3\}: .*'legs'; its settings are: .*max_animals"),
        ("basic_arithmetic", {"min_terms": -1}, r"rejects the settings .*: min_terms must be positive"),
    ],
)
def test_unknown_tasks_and_settings_are_rejected(task: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReasoningGymScorer(task, config, WHERE).load()
