"""A job whose environment cannot work is rejected with exit code 2, its field and advice, before Ray or a device is
used."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from rljob_testing.messages import Mentions
from rljob_testing.training import training_runs
from rljob_trainer.controller import run_workers

pytestmark = [pytest.mark.ray]

CLASSES = '''
import os


class NoReset:
    pass


class NoHints:
    def reset(self):
        return "a"

    def open(self, door):
        """Opens a door.

        Args:
            door: The door.
        """

    def get_reward(self):
        return 1


class Talk:
    """Returns what the job says."""

    def __init__(self, says="a-z:"):
        self.says = says

    def reset(self):
        return self.says

    def get_reward(self):
        return 1


class Dies(Talk):
    def reset(self):
        os._exit(7)


class OfRow(Talk):
    def reset(self, letter):
        return letter


class Tool(Talk):
    def look(self) -> str:
        """Looks."""


class Answers(Talk):
    def respond(self, message):
        return self.says


async def run(session, row):
    return 1
'''
CLASS = "spec.training.environment.classes[0]"
CASES: dict[str, tuple[training_runs.Document, Mentions]] = {
    "no reset": ({"path": "games:NoReset"}, Mentions(f"{CLASS}.path", "no method `reset`", "def reset(self, **row)")),
    "a tool without type hints": (
        {"path": "games:NoHints"},
        Mentions(f"{CLASS}.path", "games:NoHints.open", "type hint"),
    ),
    "a wrong argument": (
        {"path": "games:Talk", "arguments": {"say": "a"}},
        Mentions(f"{CLASS}.arguments", "unexpected keyword argument 'say'"),
    ),
    "a missing package": ({"path": "no_games:Game"}, Mentions(f"{CLASS}.path", "no module 'no_games'")),
    "a prompt that is too long": (
        {"path": "games:Talk", "arguments": {"says": "a" * 48}},
        Mentions("spec.training.environment.maxContextTokens", "48", "increase it"),
    ),
    "no prompt": (
        {"path": "games:Talk", "arguments": {"says": None}},
        Mentions(CLASS, "games:Talk", "`reset` returned None", "return a string"),
    ),
    "tools that nothing finds in a turn": (
        {"path": "games:Tool"},
        Mentions("spec.training.environment", "has tools", "response template", "toolParser"),
    ),
    "a process that ends": (
        {"path": "games:Dies"},
        Mentions(CLASS, "games:Dies", "constructor or reset", "exit code 7"),
    ),
    "a column that is missing": ({"path": "games:OfRow"}, Mentions(CLASS, "games:OfRow", "'letter'", "default value")),
}


MODEL = "package://rljob_trainer/assets/guess_letter/model"
TEMPLATE = (
    "{% for message in messages %}{% if message.role != 'assistant' or loop.index0 >= messages | length - 2 %}"
    "{{ message.content }}<eos>{% endif %}{% endfor %}"
)
"""Leaves out all turns but the last one."""


def job(of: training_runs.Document) -> training_runs.Document:
    """A job without a dataset. `of`: its class."""
    return job_with({"type": "Class", "classes": [of]}, MODEL)


def job_with(environment: training_runs.Document, model: str) -> training_runs.Document:
    """A job without a dataset."""
    document = training_runs.small_job(model={"source": model}, environment={**environment, "maxContextTokens": 48})
    spec = document["spec"]
    assert isinstance(spec, dict)
    training = spec["training"]
    assert isinstance(training, dict)
    del training["dataset"], training["rewards"]
    return document


@pytest.mark.parametrize("name", CASES)
def test_an_environment_that_cannot_work_is_rejected_before_ray_starts(
    name: str, tmp_path: Path, run_trainer: training_runs.RunTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "games.py").write_text(CLASSES)
    of, expected = CASES[name]
    check_rejected(job(of), expected, run_trainer, monkeypatch)


@pytest.mark.parametrize(
    "environment",
    [
        {"type": "Session", "session": {"path": "games:run"}},
        {"type": "Class", "classes": [{"path": "games:Answers"}]},
    ],
    ids=["an agent", "a class"],
)
def test_a_template_that_rewrites_turns_is_rejected_if_the_job_says_so(
    environment: training_runs.Document,
    tmp_path: Path,
    run_trainer: training_runs.RunTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "games.py").write_text(CLASSES)
    shutil.copytree(str(files("rljob_trainer") / "assets" / "guess_letter" / "model"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    expected = Mentions("spec.training.environment.onRewrite: Fail", "rewrites earlier turns", "set Keep or NewRow")
    check_rejected(job_with({**environment, "onRewrite": "Fail"}, "./model"), expected, run_trainer, monkeypatch)


def check_rejected(
    document: training_runs.Document,
    expected: Mentions,
    run_trainer: training_runs.RunTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job ends with exit code 2 and this message, before Ray is used."""

    def refuse(*_: object) -> None:
        raise AssertionError("Ray was started or connected to")

    monkeypatch.setattr(run_workers, "ray_session", refuse)
    run = run_trainer(document, None)
    assert run.exit_code == 2, run.terminal
    assert "Traceback" not in run.terminal
    error = run.files.state().error
    assert error is not None
    assert (run.terminal, error.message) == (expected, expected)


def test_a_row_without_a_column_that_reset_needs_ends_the_run_with_its_name(
    tmp_path: Path, run_trainer: training_runs.RunTrainer, cluster: str
) -> None:
    (tmp_path / "games.py").write_text(CLASSES)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ({"letter": "a"}, {"latter": "b"}))))
    dataset: training_runs.Document = {"type": "File", "file": {"path": "rows.jsonl"}, "maxPromptTokens": 8}
    document = job({"path": "games:OfRow"})
    run = run_trainer(training_runs.merged(document, {"spec": {"training": {"dataset": dataset}}}), cluster)
    assert run.exit_code == 1, run.terminal
    assert run.terminal == Mentions("reset of games:OfRow", "'letter'", "only the columns 'latter'", "default value")
