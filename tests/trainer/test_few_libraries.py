"""The code that a GPU machine without Ray and vLLM can run works with few libraries from the source tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_testing.settings import inherited_environment

REPOSITORY = Path(__file__).parents[2]
LIBRARIES = "torch,transformers,safetensors,numpy,pydantic,ruamel.yaml"
PACKAGES = (
    *("algorithms", "batch", "checkpoints", "engines.train", "models", "weights", "dispatch"),
    *("workers.actor", "workers.hybrid", "workers.reference", "workers.rollout", "engines.rollout.hf_engine"),
)


PROGRAM = f"""
import importlib, pkgutil, runpy, sys
for name in {PACKAGES!r}:
    package = importlib.import_module(f'rljob_trainer.{{name}}')
    for each in pkgutil.iter_modules(getattr(package, '__path__', ())):
        if each.name.startswith('bucket_'):
            continue  # Buckets need obstore.
        importlib.import_module(f'rljob_trainer.{{name}}.{{each.name}}')
try:
    import rljob_trainer.groups.ray_session
except ModuleNotFoundError as error:
    print(error)
from rljob_testing.gpu.program import main
sys.argv[1:] = ['--device', 'cpu', '--only', 'attention', '--json', 'tests.json', '--markdown', 'tests.md']
assert main() == 0
sys.argv[1:] = ['--device', 'cpu', '--only', 'lora', '--json', 'lora.json']
assert main() == 1
sys.argv[1:] = ['--device', 'cpu', '--seconds', '0', '--json', 'late.json']
assert main() == 1
sys.argv[1:] = ['--device', 'cpu', '--quick', '--json', 'benchmark.json', '--markdown', 'benchmark.md']
runpy.run_path({str(REPOSITORY / "bench/gpu_step.py")!r}, run_name='__main__')
sys.argv[1:] = ['--device', 'cpu', '--quick', '--seconds', '0', '--json', 'late_benchmark.json']
runpy.run_path({str(REPOSITORY / "bench/gpu_step.py")!r}, run_name='__main__')
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where PROGRAM has run: one thread, and an environment of only LIBRARIES and their dependencies."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "program.py").write_text(PROGRAM)
    places = ("crds/src", "cli/src", "operator/src", "trainer/src", "tests/support", "bench")
    environment = inherited_environment() | {
        "PYTHONPATH": ":".join(str(REPOSITORY / folder) for folder in places),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "rljob_testing.gpu.few_libraries", LIBRARIES, "program.py"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder / "output.txt").write_text(ended.stdout)
    return folder


def test_the_numerics_can_be_imported_and_their_tests_run_without_pytest(folder: Path) -> None:
    """pytest runs all of `tests/gpu` on this machine's CPU; this test is about the program without pytest."""
    output = (folder / "output.txt").read_text()
    assert "No module named 'ray'" in output
    found = json.loads((folder / "tests.json").read_text())
    assert found["counts"] == {"passed": 1, "skipped": 2, "failed": 0, "left out": 0}
    [passed] = [each for each in found["results"] if each["outcome"] == "passed"]
    assert 0 < max(passed["notes"].values()) < 1e-5
    assert "needs a GPU" in output
    table = [line for line in (folder / "tests.md").read_text().splitlines() if line.startswith("| attention")]
    assert len(table) == 3
    assert sum("needs a GPU: " in line for line in table) == 2


def test_tests_of_adapters_need_peft(folder: Path) -> None:
    results = json.loads((folder / "lora.json").read_text())["results"]
    assert [(each["outcome"], each["reason"]) for each in results] == [("skipped", "needs peft")] * 2


def test_no_test_starts_late(folder: Path) -> None:
    found = json.loads((folder / "late.json").read_text())
    names = {each["name"] for each in found["results"]}
    for file in ("attention", "hybrid", "kernels", "learning", "lora", "offload", "train_engine"):
        assert any(name.startswith(f"{file}: ") for name in names)
    assert found["results"][-1]["name"].startswith("learning: ")
    assert found["counts"] == {"passed": 0, "skipped": 0, "failed": 0, "left out": len(names)}
    assert all("--seconds 0" in each["reason"] for each in found["results"])
    late = json.loads((folder / "late_benchmark.json").read_text())
    assert late["measurements"] == []
    assert [note for note in late["notes"] if "--seconds 0" in note] == late["notes"][-3:]


def test_the_benchmark_for_gpus_runs_on_a_cpu(folder: Path) -> None:
    speed, memory = json.loads((folder / "benchmark.json").read_text())["measurements"]
    assert [*speed["rows"]] == ["kept", "every 2nd layer again", "all again"]
    assert all(row[0] > 0 and row[3] is None and row[4] > 0 for row in speed["rows"].values())
    planned = [row[1] for row in memory["rows"].values()]
    assert 0 < planned[2] < planned[1] < planned[0]
    text = (folder / "benchmark.md").read_text()
    assert all(f"| {name} |" in text for name in speed["rows"])
