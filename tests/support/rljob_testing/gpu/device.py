"""Where a test of `tests/gpu` runs: a device, this process as the only rank, a folder, and room for what is measured.

Nothing here needs pytest: those tests run without it, too (`program`).
"""

from __future__ import annotations

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
class DevicePlace:
    """What a test is given."""

    context: WorkerContext
    folder: Path
    """Of this test alone."""
    notes: dict[str, float] = field(default_factory=dict)
    """What was measured, by name."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.context.device

    def note(self, name: str, value: float) -> float:
        """The value, which is shown beside the test's result."""
        self.notes[name] = value
        return value

    def needs_gpu(self, reason: str) -> None:
        """On CPUs the test ends here as skipped."""
        if self.device.type != "cuda":
            raise unittest.SkipTest(f"needs a GPU: {reason}")


def missing_device(device_type: str) -> str | None:
    """Why nothing can run on such a device here; None where it can."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "needs a GPU: torch.cuda finds none"
    return None


@contextmanager
def joined(device_type: str, folder: Path) -> Iterator[WorkerContext]:
    """Within it this process is the only rank. `folder` must be empty. Symptom without the first line: products in 32
    bits that are right to three digits, where somebody has allowed that (torch has not by default)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with gloo_ranks.process_group_of_one(folder, device_type) as context:
        yield context
