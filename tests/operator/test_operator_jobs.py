"""A whole job through the operator's process, against a real API server: which statuses and events it writes, when, and
which objects it creates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rljob_testing.operator import scripts
from rljob_testing.operator.forked_operator import OperatorProcess
from rljob_testing.operator.testbed import Testbed

pytestmark = pytest.mark.apiserver

ORDER = ["SpecValid", "ClusterReady", "PlacementFeasible", "JobSubmitted", "TrainingHealthy", "Checkpointed"]
ENDS = ["Finished", "Complete"]
EXPECTED_EVENTS = {"MemoryTooSmall", "Creating", "Ready", "Submitted", "Saved", "EqualScores", "Succeeded", "Removed"}
LONGEST_SECONDS = 120.0
"""Between two changes of a job on a busy machine."""


@dataclass
class Trainer:
    """Trains the next step when the operator has recorded the previous one. From step 3 on it reports an alarm."""

    step: int = 0

    def moment(self, _: float, environment: Mapping[str, object]) -> scripts.RunMoment:
        """A time in the form of a dashboard's life."""
        alarms = [{"reason": "EqualScores", "message": f"step {self.step}", "sinceStep": 3, "step": self.step}]
        reported = {"alarms": alarms if self.step >= 3 else []}
        if self.step < 4:
            phase = "Running" if self.step else "Starting"
            return scripts.RunMoment(run_state=scripts.run_state(environment, phase, self.step, **reported))
        export = {"exportUri": "file:///rljob/storage/run/export"}
        state = scripts.run_state(environment, "Complete", 4, **export, **reported)
        return scripts.RunMoment("SUCCEEDED", "Job finished successfully.", run_state=state, exit_code=0)


def test_a_job_completes(testbed: Testbed, operator: OperatorProcess) -> None:
    trainer = Trainer()
    testbed.dashboard("sorter-1").life = trainer.moment
    # An estimate says that the memory of its GPUs is too small, which blocks nothing.
    too_large = {
        "spec.training.model.source": "Qwen/Qwen3-32B",
        "spec.pools[0].template.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    }
    since = testbed.http.get(testbed.jobs).raise_for_status().json()["metadata"]["resourceVersion"]
    testbed.submit("sorter", {"spec.pools[0].nodes": 2, "spec.training.batchSize": 16, **too_large})
    seen: dict[str, int] = {}
    """The position of each reason among the events."""
    steps: list[int] = []
    phases: list[str] = []
    for status in statuses(testbed, since, operator):
        for condition in status.get("conditions", []):
            if condition["status"] == "True":
                seen.setdefault(condition["type"], len(seen))
        append_new(steps, status.get("progress", {}).get("step", 0))
        append_new(phases, status["phase"])
        if status["phase"] in ("Starting", "Running"):
            trainer.step = min(4, steps[-1] + 1)
        if [each["reason"] for each in status.get("conditions", []) if each["type"] == "ClusterReady"] == ["Removed"]:
            break
    # Events are posted after the status that they are about.
    testbed.wait(
        lambda: event_reasons(testbed) >= EXPECTED_EVENTS, "the events; there are {}", lambda: event_reasons(testbed)
    )

    assert sorted(seen.keys() - {"Progressing"}, key=seen.__getitem__) == ORDER + ENDS
    assert seen["JobSubmitted"] <= seen["Progressing"] <= seen["Complete"]
    assert steps == [0, 1, 2, 3, 4], "progress is reported while it runs"
    assert [phase for phase in phases if phase != "Starting"] == ["New", "Provisioning", "Running", "Complete"]
    assert (status["progress"]["step"], status["progress"]["rewardMean"]) == (4, 1)
    assert status["checkpoint"]["uri"] == "pvc://checkpoints/sorter/checkpoints/step-000004"
    assert status["exportUri"] == "pvc://checkpoints/sorter/run/export"
    assert status["pools"] == [{"name": "main", "desired": 2, "ready": 0}]
    (attempt,) = status["attempts"]
    assert (attempt["number"], attempt["cluster"], attempt["outcome"]) == (1, "sorter-1", "Succeeded")
    assert attempt["submissions"] == 1
    assert status["alarms"] == ["EqualScores"]
    [health] = [each for each in status["conditions"] if each["type"] == "TrainingHealthy"]
    assert (health["status"], health["reason"]) == ("False", "EqualScores")
    assert health["message"] == "step 4 (since step 3, last in step 4)"
    assert [event["note"] for event in testbed.items("events") if event["reason"] == "EqualScores"] == [
        "step 3 (since step 3)"
    ]
    [valid] = [each for each in status["conditions"] if each["type"] == "SpecValid"]
    assert (valid["status"], valid["reason"]) == ("True", "MemoryTooSmall")
    assert "pool main (L4) is too small" in valid["message"]
    assert not any(testbed.items(kind) for kind in ("rayclusters", "pods"))
    shown = {"Name": "sorter", "Phase": "Complete", "Step": 4, "Reward": 1, "Ckpt": 4, "Attempt": 1}
    assert {name: cell for name, cell in row(testbed, "sorter").items() if name in shown} == shown


def statuses(testbed: Testbed, since: str, operator: OperatorProcess) -> Iterator[dict[str, Any]]:
    """All statuses of the only job since a version, and the next one when there is one."""
    query = {"watch": "1", "resourceVersion": since}
    try:
        with testbed.http.stream("GET", testbed.jobs, params=query, timeout=LONGEST_SECONDS) as events:
            for line in events.iter_lines():
                yield json.loads(line)["object"].get("status", {"phase": "New"})
    except httpx.ReadTimeout:
        pytest.fail(f"nothing has changed for {LONGEST_SECONDS:g} s: {operator.log()}")


def append_new(values: list[Any], value: object) -> None:
    """Adds a value that was not seen before."""
    if value not in values:
        values.append(value)


def event_reasons(testbed: Testbed) -> set[str]:
    """Reasons of the events about the job."""
    events = testbed.items("events")
    assert all(event["regarding"]["name"] == "sorter" for event in events if event["regarding"]["kind"] == "RLJob")
    return {event["reason"] for event in events}


def row(testbed: Testbed, name: str) -> dict[str, object]:
    """The row of `kubectl get`."""
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    answer = testbed.http.get(f"{testbed.jobs}/{name}", headers=accept).raise_for_status().json()
    columns = [column["name"] for column in answer["columnDefinitions"]]
    return dict(zip(columns, answer["rows"][0]["cells"], strict=True))
