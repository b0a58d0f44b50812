"""A whole job through the operator's process, against a real API server: what it says, when, and what it makes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rljob_testing.job_place import JobPlace
from rljob_testing.operator_process import OperatorProcess
from rljob_testing.ray_dashboard_stand_in import succeeding

pytestmark = pytest.mark.apiserver

ORDER = ["SpecValid", "ClusterReady", "PlacementFeasible", "JobSubmitted", "Checkpointed", "Finished", "Complete"]


def test_a_job_is_brought_to_complete(place: JobPlace, operator: OperatorProcess) -> None:
    place.dashboard("sorter-1").life = succeeding(5.0)
    # The memory of its GPUs is too small by an estimate, which keeps it from nothing.
    too_large = {
        "spec.training.model.source": "Qwen/Qwen3-32B",
        "spec.pools[0].template.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    }
    place.submit("sorter", {"spec.pools[0].nodes": 2, "spec.training.batchSize": 16, **too_large})
    seen: dict[str, float] = {}
    steps: list[int] = []
    phases: list[str] = []
    deadline = time.monotonic() + 90
    while "Complete" not in seen:
        assert time.monotonic() < deadline, operator.log()
        status = place.job("sorter").get("status", {"phase": "New"})
        for condition in status.get("conditions", []):
            if condition["status"] == "True":
                seen.setdefault(condition["type"], time.monotonic())
        note(steps, status.get("progress", {}).get("step", 0))
        note(phases, status["phase"])
        time.sleep(0.1)
    place.wait_for("sorter", "ClusterReady", "Removed", "False")
    status = place.job("sorter")["status"]

    assert sorted(ORDER, key=lambda kind: seen[kind]) == sorted(seen.keys() - {"Progressing"}, key=seen.__getitem__)
    assert seen["JobSubmitted"] <= seen["Progressing"] <= seen["Complete"]
    assert steps == sorted(steps)
    assert len(steps) >= 3, "progress is told while it runs"
    assert [phase for phase in phases if phase != "Starting"] == ["New", "Provisioning", "Running", "Complete"]
    assert (status["progress"]["step"], status["progress"]["rewardMean"]) == (4, 1)
    assert status["checkpoint"]["uri"] == "pvc://checkpoints/sorter/checkpoints/step-000004"
    assert status["exportUri"] == "pvc://checkpoints/sorter/run/export"
    assert status["pools"] == [{"name": "main", "desired": 2, "ready": 0}]
    (attempt,) = status["attempts"]
    assert (attempt["number"], attempt["cluster"], attempt["outcome"]) == (1, "sorter-1", "Succeeded")
    assert attempt["submissions"] == 1
    assert told(place) >= {"MemoryTooSmall", "Creating", "Ready", "Submitted", "Saved", "Succeeded", "Removed"}
    [valid] = [each for each in status["conditions"] if each["type"] == "SpecValid"]
    assert (valid["status"], valid["reason"]) == ("True", "MemoryTooSmall")
    assert "pool main (L4) is too small" in valid["message"]
    assert not any(place.items(kind) for kind in ("rayclusters", "pods"))
    shown = {"Name": "sorter", "Phase": "Complete", "Step": 4, "Reward": 1, "Ckpt": 4, "Attempt": 1}
    assert {name: cell for name, cell in row(place, "sorter").items() if name in shown} == shown


def note(values: list[Any], value: object) -> None:
    """Adds a value that was not seen before."""
    if value not in values:
        values.append(value)


def told(place: JobPlace) -> set[str]:
    """Reasons of the events about the job."""
    events = place.items("events")
    assert all(event["regarding"]["name"] == "sorter" for event in events if event["regarding"]["kind"] == "RLJob")
    return {event["reason"] for event in events}


def row(place: JobPlace, name: str) -> dict[str, object]:
    """As `kubectl get` shows it."""
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    answer = place.http.get(f"{place.jobs}/{name}", headers=accept).raise_for_status().json()
    columns = [column["name"] for column in answer["columnDefinitions"]]
    return dict(zip(columns, answer["rows"][0]["cells"], strict=True))
