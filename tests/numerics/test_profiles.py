"""Profiles of steps on real workers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.training import Profile, ProfilerType
from rljob_testing.ray_clusters import fake_nsys
from rljob_testing.training import replays
from rljob_trainer.controller.step_records import StepProfiles
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.nsys_profiles import launch_command
from rljob_trainer.observability.profiles import PROFILES_FOLDER_NAME, TorchProfile, profile_file
from rljob_trainer.observability.spans import SPANS, Span, SpanRecorder
from rljob_trainer.settings import NSYS_SESSION_VARIABLE


def names_of(path: Path) -> list[str]:
    """The names of the events, and a check that the file can be read."""
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def torch_file(run_folder: Path, step: int) -> Path:
    """The profile of a step on rank 0."""
    return profile_file(run_folder, step, 0, ".json.gz")


def test_a_rank_profiles_the_steps_for_which_it_is_asked(
    context: WorkerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder for temporary files is not used.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    run = replays.replayed_run(replays.Replay(num_steps=3), context)
    run.step(0)
    for step, ranks in ((1, [0]), (2, [1])):
        run.actor.begin_profile(ranks, tmp_path, step + 1)
        run.step(step)
        assert run.actor.end_profile() is None
    [path] = (tmp_path / PROFILES_FOLDER_NAME).iterdir()
    assert path == torch_file(tmp_path, 2)
    names = names_of(path)
    assert names.count("forward_backward") == names.count("optimizer_step") == 1
    assert any(name.startswith("aten::") for name in names)


def test_operations_of_a_thread_are_profiled_under_their_spans(tmp_path: Path) -> None:
    """Responses are generated in a thread that may be older than the profile."""
    spans = SpanRecorder()
    profile = TorchProfile(spans)
    may_begin = threading.Event()

    def generate() -> None:
        may_begin.wait(60)
        with spans.span("generate"):
            torch.ones(2, 2) @ torch.ones(2, 2)

    thread = threading.Thread(target=generate)
    thread.start()
    profile.begin(tmp_path / "profile.json.gz")
    may_begin.set()
    thread.join()
    profile.end()
    assert {"generate", "aten::mm"} <= set(names_of(tmp_path / "profile.json.gz"))


def test_a_profile_that_cannot_be_written_does_not_end_the_run(context: WorkerContext, tmp_path: Path) -> None:
    run = replays.replayed_run(replays.Replay(num_steps=2), context)
    (tmp_path / PROFILES_FOLDER_NAME).write_text("a file")
    run.actor.begin_profile([0], tmp_path, 1)
    run.step(0)
    assert run.actor.end_profile() == "File exists"
    (tmp_path / PROFILES_FOLDER_NAME).unlink()
    run.actor.begin_profile([0], tmp_path, 2)
    run.step(1)
    assert run.actor.end_profile() is None
    assert names_of(torch_file(tmp_path, 2)).count("forward_backward") == 1


@pytest.mark.parametrize("method", ["start", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_does_not_end_the_run(
    context: WorkerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    stop = torch.profiler.profile.stop

    def failing(profile: torch.profiler.profile, *_: object) -> None:
        if method == "stop":
            stop(profile)
        raise RuntimeError("no counters")

    run = replays.replayed_run(replays.Replay(num_steps=2), context)
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, method, failing)
        run.actor.begin_profile([0], tmp_path, 1)
        run.step(0)
        assert run.actor.end_profile() == "RuntimeError: no counters"
    assert not list(tmp_path.rglob("*.gz"))
    run.actor.begin_profile([1], tmp_path, 2)
    assert run.actor.end_profile() is None


def test_the_profile_of_an_abandoned_step_ends_with_the_step(context: WorkerContext, tmp_path: Path) -> None:
    run = replays.replayed_run(replays.Replay(num_steps=2), context)
    profiles = StepProfiles(tmp_path, Profile(steps=(1, 2)), run.group)
    was_running = []

    def abandoned_step() -> None:
        was_running.append(run.actor.profile.is_running)
        raise StepAbandonedError

    with pytest.raises(StepAbandonedError), profiles.of_step(1):
        abandoned_step()
    assert was_running == [True]
    assert not run.actor.profile.is_running
    assert not list(tmp_path.iterdir())
    with profiles.of_step(2):
        run.step(1)
    assert names_of(torch_file(tmp_path, 2)).count("forward_backward") == 1


@pytest.fixture
def nsys_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The session of a fake nsys, as in a process that was started under it."""
    folder = fake_nsys.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    subprocess.run([*launch_command("mine"), sys.executable, "-c", ""], check=True)
    monkeypatch.setenv(NSYS_SESSION_VARIABLE, "mine")
    return "mine"


@pytest.mark.usefixtures("nsys_session")
def test_a_worker_under_nsys_profiles_with_it(context: WorkerContext, tmp_path: Path) -> None:
    run = replays.replayed_run(replays.Replay(num_steps=2), context)
    profiles = StepProfiles(tmp_path, Profile(steps=(1, 2), type=ProfilerType.NSYS), run.group)
    annotations = []

    def abandoned_step() -> None:
        annotations.append(SPANS.annotate)
        raise StepAbandonedError

    with profiles.of_step(1):
        run.step(0)
    with pytest.raises(StepAbandonedError), profiles.of_step(2):
        abandoned_step()
    assert annotations == [torch.cuda.nvtx.range]
    assert SPANS.annotate is nullcontext
    [path] = (tmp_path / PROFILES_FOLDER_NAME).iterdir()
    assert path.name == "step-000001-rank-0.nsys-rep"
    assert json.loads(path.read_text())["launched"][:-3] == launch_command("mine")[2:]


def test_an_nsys_that_fails_does_not_end_the_run(
    context: WorkerContext, tmp_path: Path, nsys_session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NSYS_SESSION_VARIABLE, f"not {nsys_session}")
    run = replays.replayed_run(replays.Replay(num_steps=1), context)
    run.actor.begin_profile([0], tmp_path, 1)
    assert run.actor.end_profile() == "RuntimeError: nsys start ended with exit code 1: No such session"
    monkeypatch.setenv("PATH", str(tmp_path))
    run.actor.begin_profile([0], tmp_path, 1)
    assert run.actor.end_profile() == "No such file or directory"
    assert SPANS.annotate is nullcontext


def test_spans_are_recorded_with_and_without_a_profile(tmp_path: Path) -> None:
    spans, path = SpanRecorder(), tmp_path / "profile.json.gz"
    profile = TorchProfile(spans)
    with spans.span("before"):
        profile.begin(path)
    with spans.span("outer"), spans.span("inner"):
        pass
    # The call that ends a profile is a span, too.
    with spans.span("ends"):
        profile.end()
    assert spans.annotate is nullcontext
    with spans.span("after"):
        pass
    recorded = [each.name for each in spans.take() if isinstance(each, Span)]
    assert recorded == ["before", "inner", "outer", "ends", "after"]
    names = names_of(path)
    assert {"outer", "inner"} <= set(names)
    assert not {"before", "after"} & set(names)
