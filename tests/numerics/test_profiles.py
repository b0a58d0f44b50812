"""Profiles of steps on real workers."""

from __future__ import annotations

import gzip
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from rljob_api.v1alpha1.training import Profile
from rljob_testing.training import replays
from rljob_trainer.controller.controller import StepProfiles
from rljob_trainer.controller.stop_request import StepAbandonedError
from rljob_trainer.dispatch.worker import WorkerContext
from rljob_trainer.observability.profiles import PROFILES_FOLDER_NAME, StepProfile, profile_file
from rljob_trainer.observability.spans import Span, SpanRecorder


def names_of(path: Path) -> list[str]:
    """The names of the events, and a check that the file can be read."""
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def test_a_rank_profiles_the_steps_for_which_it_is_asked(
    context: WorkerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder for temporary files is not used.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    run = replays.replayed_run(replays.Replay(num_steps=3), context)
    run.step(0)
    for step, ranks in ((1, [0]), (2, [1])):
        run.actor.begin_profile(ranks)
        run.step(step)
        assert run.actor.end_profile(tmp_path, step + 1) is None
    [path] = (tmp_path / PROFILES_FOLDER_NAME).iterdir()
    assert path == profile_file(tmp_path, 2, 0)
    names = names_of(path)
    assert names.count("forward_backward") == names.count("optimizer_step") == 1
    assert any(name.startswith("aten::") for name in names)


def test_a_profile_that_cannot_be_written_does_not_end_the_run(context: WorkerContext, tmp_path: Path) -> None:
    run = replays.replayed_run(replays.Replay(num_steps=2), context)
    (tmp_path / PROFILES_FOLDER_NAME).write_text("a file")
    run.actor.begin_profile([0])
    run.step(0)
    assert run.actor.end_profile(tmp_path, 1) == "File exists"
    (tmp_path / PROFILES_FOLDER_NAME).unlink()
    run.actor.begin_profile([0])
    run.step(1)
    assert run.actor.end_profile(tmp_path, 2) is None
    assert names_of(profile_file(tmp_path, 2, 0)).count("forward_backward") == 1


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
        run.actor.begin_profile([0])
        run.step(0)
        assert run.actor.end_profile(tmp_path, 1) == "RuntimeError: no counters"
    assert not list(tmp_path.rglob("*.gz"))
    run.actor.begin_profile([1])
    assert run.actor.end_profile(tmp_path, 2) is None


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
    assert names_of(profile_file(tmp_path, 2, 0)).count("forward_backward") == 1


def test_spans_are_recorded_with_and_without_a_profile(tmp_path: Path) -> None:
    spans, path = SpanRecorder(), tmp_path / "profile.json.gz"
    profile = StepProfile(spans)
    with spans.span("before"):
        profile.begin()
    with spans.span("outer"), spans.span("inner"):
        pass
    # The call that ends a profile is a span, too.
    with spans.span("ends"):
        profile.end(path)
    assert spans.annotate is nullcontext
    with spans.span("after"):
        pass
    recorded = [each.name for each in spans.take() if isinstance(each, Span)]
    assert recorded == ["before", "inner", "outer", "ends", "after"]
    names = names_of(path)
    assert {"outer", "inner"} <= set(names)
    assert not {"before", "after"} & set(names)
