"""Profiles of single steps of this process. `TorchProfile` writes files for https://ui.perfetto.dev or
chrome://tracing. A file shows the operations of all threads under the names of `spans.SPANS`, and on GPUs every
kernel. `NsysProfile` is the alternative (`training.profile.type: Nsys`).
"""

from __future__ import annotations

import gzip
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from rljob_api.v1alpha1.training import ProfilerType
from rljob_trainer.observability.nsys_profiles import NsysProfile
from rljob_trainer.observability.spans import SPANS, SpanRecorder

PROFILES_FOLDER_NAME = "profiles"
"""Name of the folder in the run folder."""


class StepProfile(Protocol):
    """Profiles one step at a time, in all threads of the process. Call all methods from the same thread."""

    suffix: str
    """The end of the names of its files."""

    @property
    def is_running(self) -> bool:
        """Whether `begin` was called, and afterwards neither `end` nor `discard`."""

    def begin(self, path: Path) -> None:
        """Starts the profile, which `end` writes to `path`."""

    def end(self) -> None:
        """Stops the profile and writes it. The file is written atomically."""

    def discard(self) -> None:
        """Stops the profile without writing it."""


def profile_file(run_folder: Path, step: int, rank: int, suffix: str) -> Path:
    """Returns the path of the profile of a step (from 1) on a rank of the actor."""
    return run_folder / PROFILES_FOLDER_NAME / f"step-{step:06d}-rank-{rank}{suffix}"


def suffix_of(profiler: ProfilerType) -> str:
    """Returns the end of the names of a profiler's files."""
    return NsysProfile.suffix if profiler is ProfilerType.NSYS else TorchProfile.suffix


def step_profile(nsys_session: str | None) -> StepProfile:
    """Returns the profiler of this process. `nsys_session`: the name of its session, if it was started under nsys."""
    if nsys_session is None:
        return TorchProfile()
    has_nvtx: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return NsysProfile(nsys_session, torch.cuda.nvtx.range if has_nvtx else nullcontext)


class TorchProfile:
    """A `StepProfile` by torch.profiler. The methods raise what torch raises."""

    suffix = ".json.gz"

    def __init__(self, spans: SpanRecorder = SPANS) -> None:
        self._spans = spans
        self._running: profile | None = None
        self._path = Path()

    @property
    def is_running(self) -> bool:
        """Whether `begin` was called, and afterwards neither `end` nor `discard`."""
        return self._running is not None

    def begin(self, path: Path) -> None:
        """Starts the profile, which `end` writes to `path`."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        # Responses are generated in a thread of their own. Without this option only the calling thread is profiled.
        settings = _ExperimentalConfig(profile_all_threads=True)
        started = profile(activities=activities, experimental_config=settings)
        started.start()
        self._running, self._path = started, path
        self._spans.annotate = record_function

    def end(self) -> None:
        """Stops the profile and writes it. The file is written atomically. Also raises OSError."""
        stopped, path = self._stopped(), self._path
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
