"""Results of the programs for GPUs: outcomes, the time limit, the table for the docs."""

from __future__ import annotations

import unittest
from dataclasses import replace

from rljob_testing.gpu.results import Outcome, Result, Results, result_of


def skipped(notes: dict[str, float]) -> None:
    notes["before"] = 0.5
    raise unittest.SkipTest("needs a | b")


def failed(_: dict[str, float]) -> None:
    raise ValueError("no such number: 3")


def test_outcomes() -> None:
    results = Results("cpu", {"python": "3"})
    for name, test in (("first", lambda notes: notes.update(error=1e-7)), ("second", skipped), ("third", failed)):
        results.add(result_of(name, test))
    assert [each.outcome for each in results.results] == [Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED]
    assert results.counts() == {"passed": 1, "skipped": 1, "failed": 1, "left out": 0}
    assert results.exit_code() == 1
    assert "Traceback" in results.results[2].text()
    rows = [line.split(" | ") for line in results.markdown().splitlines() if line.startswith("| ")][2:]
    assert [row[3].removesuffix(" |") for row in rows] == [
        "error: 1e-07",
        "before: 0.5; needs a / b",
        "ValueError: no such number: 3",
    ]


def test_exit_codes() -> None:
    passed, left_out = Result("one", Outcome.PASSED), Result("two", Outcome.LEFT_OUT)
    found = {
        name: Results("cpu", {}, list(each)).exit_code()
        for name, each in {"passed": (passed, left_out), "none": (), "only left out": (left_out,)}.items()
    }
    assert found == {"passed": 0, "none": 1, "only left out": 1}


def test_a_test_that_could_end_late_is_not_started() -> None:
    results = Results("cpu", {})
    assert results.has_time(60)
    results.add(Result("long", Outcome.PASSED, 59))
    assert results.has_time(120)
    assert not replace(results, started=results.started - 62).has_time(120)
    assert not results.has_time(58)
