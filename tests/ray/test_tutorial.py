"""Runs the tutorial's commands as its reader types them: a real training with a reward of one's own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_testing import pages
from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.ray, pytest.mark.long]

TUTORIAL, QUICKSTART = pages.REPOSITORY / "docs/tutorial-own-reward.md", pages.REPOSITORY / "docs/quickstart.md"


def printed(shown: pages.ShownCommand, folder: Path) -> str:
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
    assert run.returncode == 0, run.stdout
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
    scores = [line for line in output.splitlines() if "held-out score, step 0 -> 40" in line]
    before, after = [float(word.rstrip("%,")) for word in scores[0].split() if "%" in word][:2]
    assert after > before + 50
