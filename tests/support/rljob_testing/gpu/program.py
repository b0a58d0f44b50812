"""Runs the tests of `tests/gpu` without pytest, prints what they measured, and writes it as JSON.

    PYTHONPATH=crds/src:trainer/src:tests/support python -m rljob_testing.gpu.program [--device cpu] [--only TEXT]
                                                                                      [--json PATH]

It needs torch, transformers, safetensors, numpy, pydantic and ruamel.yaml. The exit code is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from rljob_testing.gpu.device import DEVICE_TYPES, DeviceContext, joined, missing_device
from rljob_trainer.dispatch.worker import WorkerContext

FOLDER = Path(__file__).parents[3] / "gpu"
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "pydantic", "ruamel.yaml")
Test = Callable[[DeviceContext], None]


@dataclass(frozen=True)
class Result:
    """The result of one test: `passed`, `skipped` or `failed`."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""
    """Why the test was skipped, or how it failed."""
    notes: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """One line for the report."""
        lines = [f"{self.outcome:8}{self.seconds:7.2f} s  {self.name}"]
        lines += [f"{'':19}{name}: {value:.3g}" for name, value in self.notes.items()]
        lines += [f"{'':19}{line}" for line in self.reason.splitlines()]
        return "\n".join(lines)


def main() -> int:
    """Runs the tests that the command line selects; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the tests of tests/gpu without pytest.")
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cuda")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only tests whose name (file: function) contains TEXT"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    options = parser.parse_args()
    reason = missing_device(options.device)
    if reason:
        print(f"no test was run: {reason}; use --device cpu for the tests that can run on a CPU")
        return 1
    print(f"{described_device(options.device)}; {', '.join(f'{name} {each}' for name, each in versions().items())}")
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="rljob-gpu-") as folder,
        joined(options.device, made(folder, "group")) as at,
    ):
        for name, test in named_tests():
            if options.only in name:
                results.append(outcome(name, test, at, made(folder, str(len(results)))))
                print(results[-1].text(), flush=True)
    counts = {each: sum(result.outcome == each for result in results) for each in ("passed", "skipped", "failed")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if options.json:
        document = {
            "device": described_device(options.device),
            "versions": versions(),
            "counts": counts,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if counts["failed"] or not counts["passed"] else 0


def described_device(device_type: str) -> str:
    """Name of the device and, for a GPU, its memory."""
    if device_type == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in LIBRARIES}


def named_tests() -> Iterator[tuple[str, Test]]:
    """Yields `<file>: <function>` and the function for each test."""
    for file in sorted(FOLDER.glob("test_*.py")):
        module = loaded(file)
        for name, each in vars(module).items():
            if name.startswith("test_") and callable(each):
                yield f"{file.stem.removeprefix('test_')}: {name.removeprefix('test_')}", each


def outcome(name: str, test: Test, context: WorkerContext, folder: Path) -> Result:
    """Runs one test and returns its result."""
    place = DeviceContext(context, folder)
    started = time.perf_counter()
    found, reason = "passed", ""
    try:
        test(place)
        if place.device.type == "cuda":
            # Errors of a kernel are reported only when the device is synchronized.
            torch.cuda.synchronize()
    except unittest.SkipTest as error:
        found, reason = "skipped", str(error)
    except Exception:
        found, reason = "failed", traceback.format_exc()
    return Result(name, found, time.perf_counter() - started, reason, place.notes)


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
