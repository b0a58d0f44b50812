"""Parallel test processes keep to a folder of tests, and help with others when it has no files left."""

from __future__ import annotations

from rljob_testing.folder_scheduling import next_file

RAY = ["tests/ray/test_a.py", "tests/ray/test_b.py"]
CLI = ["tests/cli/test_a.py", "tests/cli/test_b.py", "tests/cli/test_c.py"]
API = ["tests/api/test_a.py"]


def test_a_process_keeps_to_its_folder() -> None:
    assert next_file([*RAY, *CLI, *API], "tests/cli", ["tests/cli", "tests/ray"]) == CLI[0]


def test_without_files_left_it_begins_a_folder_that_no_other_process_works_on() -> None:
    assert next_file([*RAY, *CLI, *API], None, []) == RAY[0]
    assert next_file([*RAY, *CLI, *API], None, ["tests/ray"]) == CLI[0]
    assert next_file([*RAY, *CLI, *API], "tests/planner", ["tests/cli", "tests/ray"]) == API[0]


def test_without_such_a_folder_it_helps_where_most_files_are_left() -> None:
    assert next_file([*RAY, *CLI], "tests/api", ["tests/cli", "tests/ray"]) == CLI[0]
    assert next_file([*RAY, CLI[2]], "tests/api", ["tests/cli", "tests/ray"]) == RAY[0]
