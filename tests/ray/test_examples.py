"""The examples that are Python programs run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.settings import inherited_environment

pytestmark = [pytest.mark.ray, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples/worker_groups.py"


def test_the_worker_groups_example_runs() -> None:
    ended = subprocess.run([sys.executable, EXAMPLE], env=inherited_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "a part of the pool has ranks of its own: [0, 0]"
    assert lines[1].startswith("all guesses: {'ascending/mean': ")
    assert lines[2] == "stays with the workers: ['guesses']"
    for line in lines[3:7]:
        given, found = (sorted(text.strip("[]").split(", ")) for text in line.split(" -> "))
        assert given == found
    assert lines[7].startswith("through this process: ")
    assert lines[8:] == [
        "a mode of our own: [0, 1, 0, 1]",
        "every worker answers: [1.0, 1.0]",
        "worker 0 alone, with its part: [5.0, 5.0]",
        "points of what is sorted: 5.0",
        "cut and put together: ('a', 'b', 'c') [2, 5, 1]",
        "the best first: ('c', 'a', 'b')",
        "by both judges: [0.5, 1.0, 2.0]",
    ]
