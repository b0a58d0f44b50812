"""What a test of `tests/gpu` receives: a device, a process group (one rank in `program`, one or two in
`engine_program`), a folder, and a mapping for measurements.

Nothing here imports pytest, because these tests also run without it (`program`).
"""

from __future__ import annotations

import importlib.util
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rljob_testing.training import gloo_ranks
from rljob_trainer.dispatch.worker import WorkerContext

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class DeviceContext:
    """A test case: its device, its folder, and the values that it measured."""

    context: WorkerContext
    folder: Path
    """A folder for this test only."""
    notes: dict[str, float] = field(default_factory=dict)
    """Measured values by name."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.context.device

    def note(self, name: str, value: float) -> float:
        """Records a measured value, which is printed beside the test's result, and returns it."""
        self.notes[name] = value
        return value

    def needs_gpu(self, reason: str) -> None:
        """Skips the rest of the test on CPUs."""
        if self.device.type != "cuda":
            raise unittest.SkipTest(f"needs a GPU: {reason}")

    def needs_library(self, module: str, distribution: str) -> None:
        """Skips the rest of the test if this library, which most tests do not need, is not installed."""
        if importlib.util.find_spec(module) is None:
            raise unittest.SkipTest(f"needs {distribution}")


def missing_device(device_type: str) -> str | None:
    """The reason why this machine has no such device; None if it has one."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "needs a GPU: torch.cuda finds none"
    return None


@contextmanager
def joined(device_type: str, folder: Path) -> Iterator[WorkerContext]:
    """Makes this process the only rank of a process group within the context. `folder` must be empty.

    TF32 is off by default in torch, but a library or a variable may have turned it on. The first line turns it off.
    Symptom without it: float32 products are right to three digits only.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    with gloo_ranks.process_group_of_one(folder, device_type) as context:
        yield context
