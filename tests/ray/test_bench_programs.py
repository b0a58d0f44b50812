"""The programs of `bench/` run and report what they measure. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.settings import inherited_environment

REPOSITORY = Path(__file__).parents[2]
BENCH = REPOSITORY / "bench"
PROGRAMS = {
    "checkpoints": 2,
    "dispatch": 6,
    "sequence_balancing": 3,
    "worker_start": 1,
}
"""Programs, and the number of tables that each prints with --quick."""
WITHOUT_VERL = ("checkpoints",)
LONG_PROGRAMS = (
    "algorithms",
    "arrangements",
    "bucket_checkpoints",
    "environments",
    "planner",
    "rollout_overlap",
    "scale",
    "token_logprobs",
    "trackers",
    "training_step",
    "weight_sync",
)
"""Programs that take minutes even with --quick: here they only start; `make bench` runs them."""
ON_DEVICES = ("gpu_step",)
"""tests/trainer/test_few_libraries.py runs them."""

HELP_OF_ALL = """
import runpy
import sys

paths = sys.argv[1:]
sys.path[0] = paths[0].rpartition("/")[0]
for path in paths:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
"""

pytestmark = [pytest.mark.ray]


def environment() -> dict[str, str]:
    """The environment variables that `make bench` sets."""
    return {**inherited_environment(), "PYTHONPATH": str(REPOSITORY / "tests" / "support")}


def test_every_bench_program_is_covered() -> None:
    assert {path.stem for path in BENCH.glob("*.py")} == {*PROGRAMS, *LONG_PROGRAMS, *ON_DEVICES}


@pytest.mark.long
def test_long_bench_programs_start() -> None:
    """Imports all of them in one process, which loads their libraries once."""
    paths = [str(BENCH / f"{program}.py") for program in LONG_PROGRAMS]
    command = [sys.executable, "-c", HELP_OF_ALL, *paths]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    for program in LONG_PROGRAMS:
        assert f"usage: {program}.py " in finished.stdout
    assert finished.stdout.count("[--quick]") == len(LONG_PROGRAMS)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_bench_program_measures_ours_and_the_floor(program: str, cluster: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--quick", "--without-peer", "--json", str(result), "--ray", cluster]
    finished = subprocess.run(
        [sys.executable, str(BENCH / f"{program}.py"), *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert ("verl is not measured: --without-peer" in finished.stdout) == (program not in WITHOUT_VERL)
    document = json.loads(result.read_text())
    assert len(document["measurements"]) == PROGRAMS[program]
    for measurement in document["measurements"]:
        assert any(
            name.endswith("RLJob") or "RLJob" in name for name in (*measurement["rows"], *measurement["columns"])
        )
        assert all(value is None or value >= 0 for values in measurement["rows"].values() for value in values)
        assert measurement["bars"]
