"""`rljob explain` for jobs that have run out of memory, on GPUs and in their pods, and for one that may."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from rljob_api.constants import ENGINE_LACKS_MEMORY, KILLED_FOR_HOST_MEMORY, MOMENTS_LACK_MEMORY
from rljob_cli.cluster.explain import explanation
from rljob_cli.cluster.stored_job import stored_job
from rljob_testing.cli import job_statuses
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
H100 = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
GIB = 2**30


def explained(
    reason: str,
    message: str,
    model: Mapping[str, object],
    pool: Mapping[str, object],
    outcome: str = "Failed",
    more: Mapping[str, object] | None = None,
    algorithm: str | None = None,
) -> list[str]:
    """The lines about memory that `explain` prints for a finished job."""
    wanted = YAML(typ="safe", pure=True).load(SMALL_JOB)["spec"]
    wanted["pools"] = [{"name": "main", "nodes": 1, "gpusPerNode": 4, **pool}]
    wanted["training"]["model"] = {"source": "Qwen/Qwen3-4B", **model}
    wanted["training"]["rollout"] = {**wanted["training"].get("rollout", {}), "gpuMemoryUtilization": 0.9}
    wanted |= more or {}
    if algorithm is not None:
        wanted["training"]["algorithm"] = {"type": algorithm}
    valid = job_statuses.condition(
        "SpecValid", "True", "MemoryTooSmall", CREATED, "by an estimate the memory is too small"
    )
    status = {
        "phase": outcome,
        "conditions": [valid],
        "attempts": [{"number": 1, "cluster": "small-1", "started": CREATED, "ended": CREATED, "outcome": outcome}],
        "result": {"outcome": outcome, "reason": reason, "message": message, "at": CREATED},
    }
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED}
    job = stored_job({"metadata": metadata, "spec": wanted, "status": status})
    lines = [line for text in explanation(job, [], [], NOW) for line in text.plain.split("\n")]
    [begin] = [number for number, line in enumerate(lines) if line.startswith("What to do")] or [2]
    return lines[begin + 1 : lines.index("What comes next:") - 1]


def test_a_full_gpu_is_explained_with_the_fields_that_free_memory() -> None:
    message = "the trainer ended with exit code 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    first, *changes = explained("ApplicationError", message, {}, {"template": H100})
    # 0.9 of 79.1 GiB beside 3.7 of parameters and 7.5 of moments of four GPUs.
    assert first == Mentions("estimate", "pool main", "most memory", "later wake-ups", "82.4 of 78.4 GiB")
    assert "enough: spec.training." in changes[0]
    assert any("offload.optimizer: true" in line or "gpuMemoryUtilization: 0.8" in line for line in changes)


@pytest.mark.parametrize("part", [ENGINE_LACKS_MEMORY, MOMENTS_LACK_MEMORY])
def test_device_memory_errors_of_the_trainer_are_explained_with_the_fields_that_free_memory(part: str) -> None:
    [first, *_] = explained("InfrastructureError", f"ResourceError: {part}; reduce it", {}, {"template": H100})
    assert first == Mentions("estimate", "pool main", "most memory")


@pytest.mark.parametrize(
    "message",
    [
        "its process exited without an error message; possible causes: out of memory (check dmesg for oom-kill)",
        "its process exited without an error message; it was not out of memory (the kernel's oom_kill counter is",
        f"{KILLED_FOR_HOST_MEMORY} (oom_kill in memory.events rose from 0 to 1)",
    ],
)
def test_a_process_that_died_on_the_host_gets_no_advice_about_device_memory(message: str) -> None:
    lines = explained("InfrastructureError", f"worker rank 0 died: {message}", {}, {"template": H100})
    assert not any("gpuMemoryUtilization" in line or "most memory" in line for line in lines), lines


def test_pools_of_unknown_gpus_are_not_named_as_the_fullest() -> None:
    critic = {"name": "critic", "nodes": 1, "gpusPerNode": 4, "template": H100}
    spec = {"pools": [{"name": "main", "nodes": 1, "gpusPerNode": 4}, critic]}
    roles = {"critic": {"pool": "critic"}}
    lines = explained("ApplicationError", "CUDA out of memory", {}, {}, more={**spec, "roles": roles}, algorithm="PPO")
    assert lines[0] == Mentions("estimate", "pool critic", "most memory")


def test_for_an_unknown_gpu_type_the_command_that_asks_for_it_is_named() -> None:
    lines = explained("ApplicationError", "CUDA out of memory", {}, {})
    assert lines == [Mentions("`rljob plan FILE --gpu KIND`", "memory", "field")]


def test_a_full_pod_is_explained_with_its_limit_and_offloaded_state() -> None:
    """Copies for checkpoints are 12 bytes of 4.02e9 numbers, moments 8, of all workers of the only node."""
    message = "pod small-1-main-worker-abc: container ray ran out of memory (OOMKilled)"
    [line] = explained(
        "OutOfMemory", message, {"offload": {"optimizer": True}}, {"resources": {"limits": {"memory": "64Gi"}}}
    )
    copies, moments, libraries = 12 * 4.0225e9 / GIB, 8 * 4.0225e9 / GIB, 4 * 1.1e9 / GIB
    total = copies + moments + libraries
    assert line == Mentions("estimate", "pod of pool main", f"{total:.1f} GiB", "64.0", f"checkpoints {copies:.1f}")
    assert line == Mentions(f"moments {moments:.1f}", f"libraries {libraries:.1f}")
    assert line == Mentions("spec.pools[0].resources.limits.memory", "spec.training.model.offload.optimizer: false")
    assert line == Mentions(f"{total - moments:.1f} GiB")


@pytest.mark.parametrize(
    ("message", "model"),
    [
        ("pod small-1-head-abc: container ray ran out of memory (OOMKilled)", {}),
        ("pod small-1-main-worker-abc: container ray was killed", {"source": "owner/unknown"}),
    ],
    ids=["the head", "an unknown model"],
)
def test_nothing_is_added_where_the_planner_has_no_estimate(message: str, model: Mapping[str, object]) -> None:
    assert explained("OutOfMemory", message, model, {}) == []


def test_earlier_warnings_of_the_operator_are_shown_unless_the_job_succeeded() -> None:
    failed = explained("ApplicationError", "KeyError: 'x'", {}, {})
    assert failed == ["  by an estimate the memory is too small"]
    assert not any("estimate" in line for line in explained("Succeeded", "done", {}, {}, outcome="Succeeded"))
