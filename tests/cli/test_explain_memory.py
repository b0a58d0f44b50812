"""`rljob explain` for jobs that have run out of memory, on GPUs and in their pods, and for one that may."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from ruamel.yaml import YAML

from rljob.stored_job import stored_job
from rljob_api.constants import ErrorCause
from rljob_cli.cluster.explain import explanation
from rljob_testing.cli import job_statuses
from rljob_testing.cli.rljob_command import SMALL_JOB
from rljob_testing.messages import Mentions

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
CREATED = "2026-01-31T12:00:00Z"
H100 = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
GIB = 2**30


def explained(
    reason: str,
    cause: str | None,
    model: Mapping[str, object],
    pool: Mapping[str, object],
    outcome: str = "Failed",
    more: Mapping[str, object] | None = None,
    algorithm: str | None = None,
    pod: str | None = None,
) -> list[str]:
    """Of a job that has ended with this cause, in this pod; the lines about its memory."""
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
    attempt = {"number": 1, "cluster": "small-1", "started": CREATED, "ended": CREATED, "outcome": outcome}
    known = {"reason": reason, "failureCause": cause, "failedPod": pod}
    status = {
        "phase": outcome,
        "conditions": [valid],
        "attempts": [attempt | {name: value for name, value in known.items() if value is not None}],
        "result": {"outcome": outcome, "reason": reason, "message": "any words", "at": CREATED},
    }
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED}
    job = stored_job({"metadata": metadata, "spec": wanted, "status": status})
    lines = [line for text in explanation(job, [], [], NOW) for line in text.plain.split("\n")]
    [begin] = [number for number, line in enumerate(lines) if line.startswith("What to do")] or [2]
    heading = "Results:" if outcome == "Succeeded" else "What comes next:"
    return lines[begin + 1 : lines.index(heading) - 1]


def test_a_full_gpu_is_explained_with_the_fields_that_free_memory() -> None:
    first, *changes = explained("ApplicationError", ErrorCause.DEVICE_MEMORY, {}, {"template": H100})
    # 0.9 of 79.1 GiB beside 3.7 of parameters and 7.5 of moments of four GPUs.
    assert first == Mentions("pool main uses the most memory", "later wake-ups", "82.4 of 78.4 GiB")
    assert changes[0].startswith("  this would be enough: spec.training.")
    assert any("offload.optimizer: true" in line or "gpuMemoryUtilization: 0.8" in line for line in changes)


@pytest.mark.parametrize("cause", [None, ErrorCause.HOST_MEMORY, "DiskSpaceOfANewerTrainer"])
def test_other_causes_and_unknown_ones_get_no_advice_about_device_memory(cause: str | None) -> None:
    lines = explained("InfrastructureError", cause, {}, {"template": H100})
    assert not any("gpuMemoryUtilization" in line or "uses the most memory" in line for line in lines), lines


@pytest.mark.parametrize("cause", [ErrorCause.HOST_MEMORY, ErrorCause.DEVICE_MEMORY])
def test_a_job_with_a_spec_of_another_version_is_explained_without_an_estimate(cause: str) -> None:
    lines = explained("OutOfMemory", cause, {}, {}, more={"pools": "of a newer version"})
    assert not any("uses the most memory" in line or "pool main" in line for line in lines), lines


def test_a_cause_of_an_earlier_attempt_is_not_that_of_the_job() -> None:
    metadata = {"name": "small", "namespace": "team-a", "creationTimestamp": CREATED}
    attempt = {"number": 1, "cluster": "small-1", "started": CREATED, "ended": CREATED, "outcome": "Failed"}
    attempt |= {"reason": "ApplicationError", "failureCause": ErrorCause.DEVICE_MEMORY.value}
    result = {"outcome": "Failed", "reason": "StoppedByUser", "message": "", "at": CREATED}
    spec = YAML(typ="safe", pure=True).load(SMALL_JOB)["spec"]
    job = stored_job({"metadata": metadata, "spec": spec, "status": {"attempts": [attempt], "result": result}})
    assert not any("memory" in text.plain for text in explanation(job, [], [], NOW))


def test_pools_of_unknown_gpus_are_not_named_as_the_fullest() -> None:
    critic = {"name": "critic", "nodes": 1, "gpusPerNode": 4, "template": H100}
    spec = {"pools": [{"name": "main", "nodes": 1, "gpusPerNode": 4}, critic]}
    roles = {"critic": {"pool": "critic"}}
    lines = explained(
        "ApplicationError", ErrorCause.DEVICE_MEMORY, {}, {}, more={**spec, "roles": roles}, algorithm="PPO"
    )
    assert lines[0] == Mentions("estimate", "pool critic uses the most memory"), lines


def test_for_an_unknown_gpu_type_the_command_that_asks_for_it_is_named() -> None:
    lines = explained("ApplicationError", ErrorCause.DEVICE_MEMORY, {}, {})
    assert lines == ["  `rljob plan FILE --gpu TYPE` shows what uses memory and which field to change"]


def test_a_full_pod_is_explained_with_its_limit_and_offloaded_state() -> None:
    """Copies for checkpoints are 12 bytes of 4.02e9 numbers, moments 8, of all workers of the only node: buffers of
    four shards of each of 36 layers with two of 2560 x 4096 and 2560 x 1024 numbers, three of 2560 x 9728, and norms;
    one of the embedding."""
    [line] = explained(
        "OutOfMemory",
        ErrorCause.HOST_MEMORY,
        {"offload": {"optimizer": True}},
        {"resources": {"limits": {"memory": "64Gi"}}},
        pod="small-1-main-worker-abc",
    )
    mib, kib = 2**20, 2**10
    layer = 2 * 16 * mib + 2 * 4 * mib + 3 * 32 * mib + 2 * 128 + 2 * 4 * kib
    buffers = 4 * (36 * layer + 512 * mib + 4 * kib)
    copies, moments, libraries, graphs = 3 * buffers / GIB, 2 * buffers / GIB, 4 * 1.1e9 / GIB, 4 * 0.6
    total = copies + moments + libraries + graphs
    assert line == Mentions(
        f"a pod of pool main needs at least {total:.1f} GiB",
        "64.0 GiB",
        f"actor copies for checkpoints {copies:.1f}, actor moments {moments:.1f}, libraries {libraries:.1f}, sleeping",
        "increase spec.pools[0].resources.limits.memory",
        f"spec.training.model.offload.optimizer: false (then {total - moments:.1f} GiB)",
    )


@pytest.mark.parametrize(
    ("pod", "pools"),
    [
        ("my-main-1-critic-worker-abc", ["critic"]),
        ("small-1-old-critic-worker-abc", ["old-critic"]),
        (None, ["main", "critic", "old-critic"]),
    ],
    ids=["a job with a pool's name", "a pool whose name ends like another's", "an unknown pod"],
)
def test_only_the_pool_of_the_full_pod_is_explained(pod: str | None, pools: list[str]) -> None:
    names = ("main", "critic", "old-critic")
    more = {
        "pools": [{"name": name, "nodes": 1, "gpusPerNode": 4} for name in names],
        "roles": {"critic": {"pool": "critic"}, "ref": {"pool": "old-critic"}},
    }
    lines = explained("OutOfMemory", ErrorCause.HOST_MEMORY, {}, {}, more=more, algorithm="PPO", pod=pod)
    assert [line.partition(" needs ")[0] for line in lines] == [
        f"  by estimate, a pod of pool {name}" for name in pools
    ]


@pytest.mark.parametrize(
    ("pod", "model"),
    [
        ("small-1-head-abc", {}),
        ("small-1-main-worker-abc", {"source": "owner/unknown"}),
    ],
    ids=["the head", "an unknown model"],
)
def test_nothing_is_added_where_the_planner_has_no_estimate(pod: str, model: Mapping[str, object]) -> None:
    assert explained("OutOfMemory", ErrorCause.HOST_MEMORY, model, {}, pod=pod) == []


def test_earlier_warnings_of_the_operator_are_shown_unless_the_job_succeeded() -> None:
    failed = explained("ApplicationError", None, {}, {})
    assert failed == ["  by an estimate the memory is too small"]
    assert not any("estimate" in line for line in explained("Succeeded", None, {}, {}, outcome="Succeeded"))
