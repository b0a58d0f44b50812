"""The profile of one step in this process by torch.profiler, as a file for https://ui.perfetto.dev or chrome://tracing.

It has every operation of the thread that calls `begin`, the names of `spans.SPANS` above them, and on GPUs every
kernel.
"""

from __future__ import annotations

import gzip
import shutil
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
    """Profiles one step at a time. Call all methods from the thread that runs the step. They raise what torch
    raises."""

    def __init__(self, spans: SpanRecorder = SPANS) -> None:
        self._spans = spans
        self._running: profile | None = None

    @property
    def is_running(self) -> bool:
        """Whether `begin` was called, and afterwards neither `end` nor `discard`."""
        return self._running is not None

    def begin(self) -> None:
        """Starts the profile."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        started.start()
        self._running = started
        self._spans.annotate = record_function

    def end(self, path: Path) -> None:
        """Stops the profile and writes it. The file is written atomically. Also raises OSError."""
        stopped = self._stopped()
        path.parent.mkdir(parents=True, exist_ok=True)
        events, unfinished = (path.with_name(f"unfinished-{name}") for name in (path.stem, path.name))
        try:
            # Compressed here, because torch would write the events into the folder for temporary files, and a container
            # often has little space there.
            stopped.export_chrome_trace(str(events))
            with events.open("rb") as written, gzip.open(unfinished, "wb") as compressed:
                shutil.copyfileobj(written, compressed)
            unfinished.replace(path)
        finally:
            for each in (events, unfinished):
                each.unlink(missing_ok=True)

    def discard(self) -> None:
        """Stops the profile without writing it."""
        self._stopped()

    def _stopped(self) -> profile:
        assert self._running is not None, "call begin first"
        running, self._running = self._running, None
        self._spans.annotate = nullcontext
        running.stop()
        return running
