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
    assert lines[0] == "first rank of each part of the pool: [0, 0]"
    assert lines[1].startswith("all guesses: {'ascending/mean': ")
    assert lines[2] == "columns that stay with the workers: ['guesses']"
    for line in lines[3:7]:
        given, found = (sorted(text.strip("[]").split(", ")) for text in line.split(" -> "))
        assert given == found
    assert lines[7].startswith("bytes through this process: ")
    assert lines[8:] == [
        "the rank that got each row, with our own mode: [0, 1, 0, 1]",
        "results of all workers: [1.0, 1.0]",
        "result of worker 0 only: [5.0, 5.0]",
        "score of sorted digits: 5.0",
        "split and joined: ('a', 'b', 'c') [2, 5, 1]",
        "sorted by score: ('c', 'a', 'b')",
        "sum of both scores: [0.5, 1.0, 2.0]",
    ]
