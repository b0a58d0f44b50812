"""The examples that are programs run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.ray, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples/worker_groups.py"


def test_workers_of_ones_own() -> None:
    ended = subprocess.run([sys.executable, EXAMPLE], env=inherited_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("all guesses: {'ascending/mean': ")
    assert lines[1] == "stays with the workers: ['guesses']"
    for line in lines[2:6]:
        given, found = (sorted(text.strip("[]").split(", ")) for text in line.split(" -> "))
        assert given == found
    assert lines[6].startswith("through this process: ")
