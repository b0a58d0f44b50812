"""Runs the tests of `tests/gpu` without pytest, prints what they measured, and writes it as JSON and Markdown.

    PYTHONPATH=crds/src:cli/src:operator/src:trainer/src:tests/support python -m rljob_testing.gpu.program
        [--device cpu] [--only TEXT] [--seconds N] [--json PATH] [--markdown PATH]

It needs torch, transformers, safetensors, numpy, pydantic and ruamel.yaml; a few tests need peft or liger-kernel, and
are skipped without it. The exit code is 1 if a test fails, if none passes, or if the device is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from transformers.utils import logging

from rljob_testing.gpu.device import DEVICE_TYPES, DeviceContext, joined, missing_device
from rljob_testing.gpu.results import Outcome, Result, Results, described_device, installed_versions, result_of
from rljob_trainer.dispatch.worker import WorkerContext

FOLDER = Path(__file__).parents[3] / "gpu"
OPTIONAL_LIBRARIES = ("peft", "liger-kernel")
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "ruamel.yaml", *OPTIONAL_LIBRARIES)
LAST = "test_learning"
"""The longest test runs last, because `Results.has_time` assumes that every test takes as long as the longest one so
far."""
DEFAULT_SECONDS = 150.0
"""With the 90 seconds of bench/gpu_step.py: 4 minutes."""
Test = Callable[[DeviceContext], None]


def main() -> int:
    """Runs the tests that the command line selects; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the tests of tests/gpu without pytest.")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cuda")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only tests whose name (file: function) contains TEXT"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        metavar="N",
        help="time limit: a test that may exceed it is not started; the default is %(default)g",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write a table for the docs to this file")
    options = parser.parse_args()
    reason = missing_device(options.device)
    if reason:
        print(f"no test was run: {reason}; use --device cpu for the tests that can run on a CPU")
        return 1
    logging.disable_progress_bar()
    results = Results(described_device(options.device), installed_versions(LIBRARIES))
    results.print_head()
    with (
        tempfile.TemporaryDirectory(prefix="rljob-gpu-") as folder,
        joined(options.device, made(folder, "group")) as at,
    ):
        for name, test in named_tests():
            if options.only in name:
                results.add(outcome(name, test, at, folder, results, options.seconds))
    print(results.summary())
    results.write(options.json, options.markdown)
    return results.exit_code()


def outcome(name: str, test: Test, context: WorkerContext, folder: str, results: Results, seconds: float) -> Result:
    """Runs one test, unless it may exceed the time limit of `seconds`, and returns its result."""
    if not results.has_time(seconds):
        return Result(name, Outcome.LEFT_OUT, reason=f"may exceed --seconds {seconds:g}")
    test_folder = made(folder, str(len(results.results)))
    return result_of(name, lambda notes: test(DeviceContext(context, test_folder, notes)))


def named_tests() -> Iterator[tuple[str, Test]]:
    """Yields `<file>: <function>` and the function for each test."""
    for file in sorted(FOLDER.glob("test_*.py"), key=lambda file: (file.stem == LAST, file)):
        module = loaded(file)
        for name, each in vars(module).items():
            if name.startswith("test_") and callable(each):
                yield f"{file.stem.removeprefix('test_')}: {name.removeprefix('test_')}", each


def loaded(file: Path) -> ModuleType:
    """Imports a test file as a module."""
    spec = importlib.util.spec_from_file_location(f"gpu_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their own module in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made(folder: str, name: str) -> Path:
    """Creates a folder for one test."""
    path = Path(folder, name)
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main())
