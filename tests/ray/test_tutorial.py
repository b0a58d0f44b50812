"""Runs the tutorials' commands as their readers type them: real trainings with a reward and a game of one's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing import pages
from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.ray, pytest.mark.long]

TUTORIAL, OWN_ENVIRONMENT, QUICKSTART = (
    pages.REPOSITORY / "docs" / name
    for name in ("tutorial-own-reward.md", "tutorial-own-environment.md", "quickstart.md")
)
GAME = re.compile(r"^(│ a-z: +│ )\S+ +", re.MULTILINE)
"""The game in a row of a table of samples. Which letters are guessed depends on the machine's arithmetic."""


def printed(shown: pages.ShownCommand, folder: Path, exit_code: int = 0) -> str:
    """The lines that a command of the page prints in this folder."""
    environment = inherited_environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    run = subprocess.run(
        ["bash", "-c", shown.command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == exit_code, run.stdout
    return run.stdout


def test_the_tutorial_trains_and_prints_the_documented_output(tmp_path: Path) -> None:
    for name, text in pages.saved_files(TUTORIAL).items():
        (tmp_path / name).write_text(text)
    [train] = pages.shown_commands(TUTORIAL, "4. Train")
    output = printed(train, tmp_path)
    assert pages.first_line_not_printed(train, output) is None, output
    # The quickstart's training is a job of the same kind: its output has the same form, without a line about code.
    [quickstart] = pages.shown_commands(QUICKSTART, "Run it")
    renamed = tuple(line.replace("quickstart", "descending") for line in quickstart.output)
    without_note = "".join(line for line in output.splitlines(keepends=True) if not line.startswith("note: code"))
    assert pages.first_line_not_printed(replace(quickstart, output=renamed), without_note) is None, output
    [samples] = pages.shown_commands(TUTORIAL, "5. Look at samples")
    assert pages.first_line_not_printed(samples, printed(samples, tmp_path)) is None
    before, after = greedy_scores(output)
    assert after > before + 50


def greedy_scores(output: str) -> list[float]:
    """The held-out scores before and after the training, in percent."""
    [line] = [line for line in output.splitlines() if "held-out score, step 0 -> " in line]
    return [float(word.rstrip("%,")) for word in line.split() if "%" in word][:2]


def test_the_tutorial_of_a_game_trains_and_prints_the_documented_output(tmp_path: Path) -> None:
    for name, text in pages.saved_files(OWN_ENVIRONMENT).items():
        (tmp_path / name).write_text(text)
    *changes, mistake = pages.shown_commands(OWN_ENVIRONMENT, "4. A mistake")
    assert [printed(change, tmp_path) for change in changes] == ["", ""]
    output = printed(mistake, tmp_path, exit_code=2)
    assert pages.first_line_not_printed(mistake, output) is None, output
    [train] = pages.shown_commands(OWN_ENVIRONMENT, "5. Train")
    output = printed(train, tmp_path)
    without_games = replace(train, output=tuple(GAME.sub(r"\1", line) for line in train.output))
    assert pages.first_line_not_printed(without_games, GAME.sub(r"\1", output)) is None, output
    before, after = greedy_scores(output)
    assert after > before + 30
    shown_sample, shown_metrics = pages.shown_commands(OWN_ENVIRONMENT, "6. Read the games")
    sample, of_page = json.loads(printed(shown_sample, tmp_path)), json.loads(shown_sample.output[0])
    assert sample.keys() == of_page.keys()
    assert sample["messages"][0] == of_page["messages"][0]
    assert [message["role"] for message in sample["messages"][1:3]] == ["assistant", "user"]
    assert pages.first_line_not_printed(shown_metrics, printed(shown_metrics, tmp_path)) is None
