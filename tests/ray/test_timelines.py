"""Timelines of real steps, and the names under which Ray shows running calls."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import pytest
import ray

from rljob_testing.messages import Mentions
from rljob_testing.ray_clusters import echo_workers, fake_nsys
from rljob_testing.training import training_runs
from rljob_trainer.groups import nsys
from rljob_trainer.groups.calls import Pending
from rljob_trainer.groups.worker_group import spawn
from rljob_trainer.observability.profiles import PROFILES_FOLDER_NAME
from rljob_trainer.observability.timeline import TIMELINES_FOLDER_NAME
from rljob_trainer.pod.wait_for_worker_exit import worker_processes

pytestmark = [pytest.mark.ray]


def test_selected_steps_and_the_newest_get_a_timeline(run_trainer: training_runs.RunTrainer, cluster: str) -> None:
    job = training_runs.small_job(num_workers=2, steps=3, timelineSteps=[2], algorithm={"kl": {"coefficient": 0.1}})
    run = run_trainer(job, cluster)
    assert run.exit_code == 0, run.terminal
    newest, path = sorted((run.files.folder / TIMELINES_FOLDER_NAME).iterdir())
    assert (newest.name, path.name) == ("newest.json", "step-000002.json")
    assert str(path) in run.terminal
    # The last step's, whatever the first steps took.
    found = json.loads(newest.read_text())
    assert found["step"] == 3
    newest_names = {(event["pid"], event["name"]) for event in found["traceEvents"]}
    assert newest_names >= {(0, "rollout"), (1, "actor.update_policy"), (2, "actor.update_policy")}
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    address = ray_address(rows[1])
    assert rows == {0: "controller", 1: f"main, rank 0, {address}", 2: f"main, rank 1, {address}"}
    spans = [event for event in events if event["ph"] == "X"]
    names = {pid: [event["name"] for event in spans if event["pid"] == pid] for pid in rows}
    assert names[0] == ["rollout", "reward", "ref", "reward", "update_actor"]
    for pid in (1, 2):
        # The responses may be taken in several calls.
        assert list(dict.fromkeys(name for name in names[pid] if "." in name)) == [
            "hybrid.begin_rollout",
            "hybrid.submit",
            "hybrid.take",
            "reward.start_scoring",
            "ref.compute_ref_logprobs",
            "reward.completed_ids",
            "reward.finish_scoring",
            "actor.update_policy",
        ]
        assert {"weight_sync", "generate", "forward_backward", "optimizer_step", "read arguments"} <= set(names[pid])
    waits = [event for event in spans if event["cat"] == "idle"]
    updates = {event["pid"]: event for event in spans if event["name"] == "actor.update_policy"}
    for wait in waits:
        update = updates[wait["pid"]]
        # To a microsecond, because times are rounded.
        is_before, is_after = wait["ts"] + wait["dur"] < update["ts"] + 1, wait["ts"] > update["ts"] + update["dur"] - 1
        assert is_before or is_after
    assert "idle: scores" in {event["name"] for event in waits}
    # Phases belong to one step, and a worker's spans lie within the phase that they are part of.
    by_name = {event["name"]: event for event in spans if event["pid"] in (0, 1)}
    for phase, work in (("rollout", "hybrid.take"), ("update_actor", "actor.update_policy")):
        outer, inner = by_name[phase], by_name[work]
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    seconds = run.files.series("timing_s/rollout")[1]
    assert by_name["rollout"]["dur"] / 1e6 == pytest.approx(seconds, rel=0.01, abs=0.005)


def test_the_selected_ranks_profile_the_selected_steps(run_trainer: training_runs.RunTrainer, cluster: str) -> None:
    job = training_runs.small_job(num_workers=2, steps=3, profile={"steps": [2], "ranks": [1, 5]})
    run = run_trainer(job, cluster)
    assert run.exit_code == 0, run.terminal
    [path] = (run.files.folder / PROFILES_FOLDER_NAME).iterdir()
    assert path.name == "step-000002-rank-1.json.gz"
    assert str(path) in run.terminal
    assert Mentions("spec.training.profile.ranks", "2 workers", "5") == run.terminal
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    # Of one step: the calls of all roles, their parts, and operations.
    calls = [event["name"] for event in events if event.get("cat") == "user_annotation" and "." in event["name"]]
    assert [name for name in calls if name == "actor.update_policy"] == ["actor.update_policy"]
    assert {"hybrid.take", "forward_backward", "optimizer_step", "aten::mm"} <= names


def test_nsys_profiles_the_selected_ranks(
    run_trainer: training_runs.RunTrainer, cluster: str, nsys_folder: Path
) -> None:
    profile: training_runs.Document = {"type": "Nsys", "steps": [1, 2], "ranks": [1, 5]}
    run = run_trainer(training_runs.small_job(num_workers=2, steps=2, profile=profile), cluster)
    assert run.exit_code == 0, run.terminal
    files = sorted((run.files.folder / PROFILES_FOLDER_NAME).iterdir())
    assert [path.name for path in files] == ["step-000001-rank-1.nsys-rep", "step-000002-rank-1.nsys-rep"]
    for path in files:
        assert str(path) in run.terminal
        report = json.loads(path.read_text())
        assert {"--trace=cuda,nvtx", sys.executable} <= set(report["launched"])
        assert "--sample=none" in report["started"]
    # Rank 0 was not started under nsys.
    [session] = fake_nsys.sessions(nsys_folder)
    assert session.startswith("rljob-")


def test_nsys_must_be_installed_on_the_nodes(
    run_trainer: training_runs.RunTrainer, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys, "NSYS", "nsys-that-is-not-installed")
    run = run_trainer(training_runs.small_job(profile={"type": "Nsys", "steps": [1]}), cluster)
    assert run.exit_code == 2
    node = f"node {cluster.partition(':')[0]}"
    assert Mentions("spec.training.profile.type", "PATH", node, "Nsys", "Torch") == run.terminal
    assert run.files.training_steps() == []


def ray_address(row: str) -> str:
    """The last part of a row's name."""
    return row.rpartition(", ")[2]


@pytest.mark.usefixtures("ray_driver")
def test_ray_shows_calls_by_role_and_method(tmp_path: Path) -> None:
    with echo_workers.echo_processes(1) as processes:
        group = spawn(processes)["first"]
        [(_, _, process, _)] = echo_workers.describe_ranks(group)
        end = tmp_path / "end"
        pending = echo_workers.call(
            group, "add_when_file_exists", echo_workers.mixed_batch(2).only(["number"]), str(end)
        )
        assert isinstance(pending, Pending)
        title, deadline = b"ray::RayWorker.first.add_when_file_exists", time.monotonic() + 120
        while not (Path("/proc") / str(process) / "cmdline").read_bytes().startswith(title):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # The stop hook of a pod must recognise a worker in any state.
        assert process in worker_processes(Path("/proc"))
        end.touch()
        pending.result()
        while "task::RayWorker.first.add_when_file_exists" not in (seen := {event["cat"] for event in ray.timeline()}):
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)
