"""The program that checks vLLM and jobs on GPUs: a check that crashes or hangs ends alone, with its processes, and is
reported. `tests/ray/test_vllm_sleep.py` runs the checks themselves."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api.job_file import load_job_file
from rljob_testing.gpu import engine_jobs, engine_program
from rljob_testing.gpu.engine_program import Check
from rljob_testing.gpu.results import Outcome
from rljob_testing.process_tree import processes_with_variable
from rljob_testing.settings import first_in_python_path

CHECKS = """
import ctypes
import subprocess
import time


def passes(case):
    case.note("rank", case.context.rank)


def waits(case):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)


def crashes(case):
    if case.context.rank:
        waits(case)
    ctypes.string_at(0)
"""
MARK = "RLJOB_TEST_CHECKS"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The value of the variable MARK in all processes of this test's checks. They can import CHECKS."""
    folder = tmp_path / "path" / "of_this_test"
    folder.mkdir(parents=True)
    (folder / "checks.py").write_text(CHECKS)
    with first_in_python_path(folder.parent):
        monkeypatch.setenv(MARK, str(tmp_path))
        yield str(tmp_path)


def check(name: str, seconds: float = 60, num_ranks: int = 1) -> Check:
    return Check(name, f"of_this_test.checks:{name}", seconds, num_ranks, joins=False)


@pytest.mark.long
def test_a_crash_ends_all_ranks_and_is_reported(mark: str, tmp_path: Path) -> None:
    result = engine_program.run_check(check("crashes", num_ranks=2), "cpu", tmp_path, 60)
    assert result.outcome is Outcome.FAILED
    assert f"exit code {-signal.SIGSEGV}" in result.reason.splitlines()[-1]
    # Where it crashed.
    assert "in crashes" in result.reason
    assert result.seconds < 30
    assert processes_with_variable(MARK, mark) == set()


@pytest.mark.long
def test_a_check_that_hangs_ends_at_its_limit(mark: str, tmp_path: Path) -> None:
    result = engine_program.run_check(check("waits", 2 / engine_program.CPU_FACTOR), "cpu", tmp_path, 60)
    assert result.outcome is Outcome.FAILED
    assert "time limit: 2 s" in result.reason.splitlines()[-1]
    # Where it was: perhaps still loading libraries.
    assert 'File "' in result.reason
    assert processes_with_variable(MARK, mark) == set()


@pytest.mark.long
def test_the_program_reports_all_checks(
    mark: str,  # noqa: ARG001 - the checks can be imported
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine_program, "CHECKS", (check("passes", num_ranks=2),))
    files = [tmp_path / "results.json", tmp_path / "results.md"]
    options = ["--device", "cpu", "--json", str(files[0]), "--markdown", str(files[1])]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    assert engine_program.main() == 0
    [found] = json.loads(files[0].read_text())["results"]
    # The largest value of both ranks.
    assert (found["outcome"], found["notes"]) == ("passed", {"rank": 1})
    assert "| passes | passed |" in files[1].read_text()
    assert "passes" in capsys.readouterr().out


def test_the_job_of_smollm2_is_the_example_for_some_steps(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(engine_jobs.smollm2_job(20)))
    changed, example = load_job_file(tmp_path / "job.yaml").spec, load_job_file(engine_jobs.EXAMPLE).spec
    assert changed.training.steps == 20
    assert not changed.training.evaluations
    assert changed.checkpoint.every_steps > 20
    assert changed.training.rollout == example.training.rollout
    assert changed.training.model == example.training.model


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    late = engine_program.run_check(check("passes"), "cpu", tmp_path, 5)
    assert late.outcome is Outcome.LEFT_OUT
    assert "5 s" in late.reason
    many = engine_program.run_check(check("passes", num_ranks=64), "cuda", tmp_path, 60)
    assert many.outcome is Outcome.SKIPPED
    assert "64 GPUs" in many.reason
    assert list(tmp_path.iterdir()) == []
