"""What a GPU machine without Ray and vLLM can run, runs with few libraries from the source tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rljob_testing.settings import inherited_environment

REPOSITORY = Path(__file__).parents[2]
LIBRARIES = "torch,transformers,safetensors,numpy,pydantic,ruamel.yaml"
PACKAGES = (
    *("algorithms", "batch", "checkpoints", "engines.train", "models", "weights", "dispatch"),
    *("workers.actor", "workers.hybrid", "workers.reference", "workers.rollout", "engines.rollout.hf_engine"),
)


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One thread, and nothing of this environment but LIBRARIES and what they need."""
    places = ("crds/src", "trainer/src", "tests/support", "bench")
    environment = inherited_environment() | {
        "PYTHONPATH": ":".join(str(REPOSITORY / place) for place in places),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "rljob_testing.few_libraries", LIBRARIES, program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_numerics_can_be_imported_and_their_tests_run_without_pytest(tmp_path: Path) -> None:
    """All of `tests/gpu` runs on this machine's CPU under pytest; here it is the program that is tried."""
    written = tmp_path / "results.json"
    program = tmp_path / "program.py"
    program.write_text(
        "import importlib, pkgutil, sys\n"
        f"for name in {PACKAGES!r}:\n"
        "    package = importlib.import_module(f'rljob_trainer.{name}')\n"
        "    for each in pkgutil.iter_modules(getattr(package, '__path__', ())):\n"
        "        importlib.import_module(f'rljob_trainer.{name}.{each.name}')\n"
        "try:\n    import rljob_trainer.groups.ray_session\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
        "from rljob_testing.gpu_program import main\n"
        "sys.exit(main())\n"
    )
    options = ("--device", "cpu", "--only", "attention", "--json", str(written))
    result = run(tmp_path, str(program), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No module named 'ray'" in result.stdout
    found = json.loads(written.read_text())
    assert found["counts"] == {"passed": 1, "skipped": 2, "failed": 0}
    [passed] = [each for each in found["results"] if each["outcome"] == "passed"]
    assert 0 < max(passed["notes"].values()) < 1e-5
    assert "needs a GPU" in result.stdout


def test_the_benchmark_for_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    result = run(tmp_path, str(REPOSITORY / "bench/gpu_step.py"), "--device", "cpu", "--quick", "--json", str(written))
    assert result.returncode == 0, result.stdout + result.stderr
    speed, memory = json.loads(written.read_text())["measurements"]
    assert [*speed["rows"]] == ["kept", "every 2nd layer again", "all again"]
    assert all(row[0] > 0 and row[3] is None and row[4] > 0 for row in speed["rows"].values())
    assert all(row[1] is None for row in memory["rows"].values())
