"""A job whose environment cannot work is rejected with exit code 2, its field and advice, before Ray or a device is
used."""

from __future__ import annotations

import json
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


def job(of: training_runs.Document) -> training_runs.Document:
    """A job without a dataset. `of`: its class."""
    document = training_runs.small_job(
        model={"source": "package://rljob_trainer/assets/guess_letter/model"},
        environment={"type": "Class", "classes": [of], "maxContextTokens": 48},
    )
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
    def refuse(*_: object) -> None:
        raise AssertionError("Ray was started or connected to")

    monkeypatch.setattr(run_workers, "ray_session", refuse)
    (tmp_path / "games.py").write_text(CLASSES)
    of, expected = CASES[name]
    run = run_trainer(job(of), None)
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
