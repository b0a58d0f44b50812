"""The profile of one step in this process by torch.profiler, as a file for https://ui.perfetto.dev or chrome://tracing.

It has every operation of the thread that calls `begin`, the names of `spans.SPANS` above them, and on GPUs every
kernel.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rljob_trainer.observability.spans import SPANS, SpanRecorder

PROFILES_FOLDER_NAME = "profiles"
"""Name of the folder in the run folder."""


def profile_file(run_folder: Path, step: int, rank: int) -> Path:
    """Returns the path of the profile of a step (from 1) on a rank of the actor."""
    return run_folder / PROFILES_FOLDER_NAME / f"step-{step:06d}-rank-{rank}.json.gz"


class StepProfile:
    """Profiles one step at a time. Call both methods from the thread that runs the step."""

    def __init__(self, spans: SpanRecorder = SPANS) -> None:
        self._spans = spans
        self._running: profile | None = None

    @property
    def is_running(self) -> bool:
        """Whether `begin` was called and `end` was not."""
        return self._running is not None

    def begin(self) -> None:
        """Starts the profile."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.start()
        self._spans.annotate = record_function

    def end(self, path: Path) -> None:
        """Stops the profile and writes it. The file is written atomically. Raises OSError."""
        assert self._running is not None, "call begin first"
        running, self._running = self._running, None
        self._spans.annotate = nullcontext
        running.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        try:
            running.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
