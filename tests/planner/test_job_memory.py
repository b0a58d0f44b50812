"""Memory of a job from its spec alone: GPU types by required node labels, models by the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.constants import Constants
from rljob_planner.job_memory import known_gpus, memory_shortage, plan_from_spec, with_pod_limits
from rljob_planner.job_placement import placement_of
from rljob_planner.job_workload import workload_of
from rljob_planner.memory.proposals import find_proposals
from rljob_planner.plan import plan_of
from rljob_planner.workload import Role
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples

H100 = "NVIDIA-H100-80GB-HBM3"
SELECTOR = "spec.pools[0].template.nodeSelector"
AFFINITY = "spec.pools[0].template.affinity"
SECOND_STEP = {
    "spec.training.model.source": "Qwen/Qwen3-4B",
    "spec.training.rollout.gpuMemoryUtilization": 0.9,
    "spec.pools[0].gpusPerNode": 4,
}
"""Of 79.1 GiB: 71.2 for the engine, 3.7 for parameters, 7.5 for moments."""


def spec(edits: dict[str, object]) -> RLJobSpec:
    return RLJob.from_wire(valid_job(edits)).spec


def required(*terms: dict[str, object]) -> dict[str, object]:
    return {
        AFFINITY: {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
        }
    }


def term(*products: str, operator: str = "In") -> dict[str, object]:
    return {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": operator, "values": list(products)}]}


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, []),
        ({SELECTOR: {"nvidia.com/gpu.product": H100}}, ["H100"]),
        ({SELECTOR: {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}}, ["H100"]),
        ({SELECTOR: {"nvidia.com/gpu.product": "Some-New-One"}}, []),
        ({SELECTOR: {"disktype": "ssd"}}, []),
        (required(term("NVIDIA-L4")), ["L4"]),
        # The larger first: a plan for one type takes it, because what does not fit into it fits nowhere.
        (required(term("NVIDIA-L4", H100)), ["H100", "L4"]),
        (required(term("NVIDIA-L4"), term(H100)), ["H100", "L4"]),
        (required(term("NVIDIA-L4", "Some-New-One")), []),
        (required(term("NVIDIA-L4"), {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}), []),
        (required(term("NVIDIA-L4", operator="NotIn")), []),
        ({AFFINITY: {"nodeAffinity": {}}}, []),
    ],
)
def test_the_gpu_types_of_a_pool_are_those_of_its_required_nodes(edits: dict[str, object], expected: list[str]) -> None:
    assert [gpu.name for gpu in known_gpus(spec(edits).pools[0])] == expected


def test_a_shortage_names_pool_phase_numbers_and_changes() -> None:
    text = memory_shortage(spec(SECOND_STEP | {SELECTOR: {"nvidia.com/gpu.product": H100}}))
    assert text == Mentions("pool main (H100)", "later wake-ups", "82.4 of 78.4 GiB", "first step", "moments")
    assert "spec.training.model.offload.optimizer: true (" in text or "gpuMemoryUtilization: 0." in text


def test_combinations_of_changes_are_left_to_the_command() -> None:
    """They take ten times as long to find, and the operator blocks meanwhile."""
    edits = SECOND_STEP | {
        SELECTOR: {"nvidia.com/gpu.product": H100},
        "spec.pools[0].gpusPerNode": 1,
        "spec.training.model.gradientCheckpointing": "Never",
    }
    outlook = plan_from_spec(spec(edits))
    assert outlook is not None
    single = find_proposals(outlook.workload, outlook.placement, Constants(), with_combinations=False).fitting
    assert {len(proposal.changes) for proposal in outlook.proposals if not proposal.changes[0].is_drastic} == {2}
    assert [proposal.changes[0].field for proposal in single] == ["spec.pools[0].nodes"]
    text = memory_shortage(spec(edits))
    assert text == Mentions("spec.pools[0].nodes: 8 (76.8 GiB at most)", "rljob plan")
    assert text.count("at most)") == 1


@pytest.mark.parametrize(
    "edits",
    [
        SECOND_STEP,
        SECOND_STEP | {SELECTOR: {"nvidia.com/gpu.product": "NVIDIA-H200"}},
        SECOND_STEP | {SELECTOR: {"nvidia.com/gpu.product": H100}, "spec.training.model.source": "owner/unknown"},
        SECOND_STEP | {SELECTOR: {"nvidia.com/gpu.product": H100}, "spec.roles.rollout.tensorParallel": 3,
                       "spec.pools[0].gpusPerNode": 3, "spec.training.batchSize": 9},
    ],
    ids=["no kind", "fits", "no shape", "heads do not divide"],
)  # fmt: skip
def test_no_warning_if_the_job_fits_or_too_little_is_known(edits: dict[str, object]) -> None:
    assert memory_shortage(spec(edits)) == ""


def test_only_pools_with_a_known_gpu_type_count() -> None:
    """A 32B reference on one L4 does not fit, whatever the other roles are on."""
    edits: dict[str, object] = {
        "spec.training.model.source": "Qwen/Qwen3-32B",
        "spec.training.algorithm.kl.coefficient": 0.1,
        "spec.pools[1]": {"name": "ref", "gpusPerNode": 1},
        "spec.pools[1].template.nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "spec.roles.ref.pool": "ref",
    }
    assert memory_shortage(spec(edits)) == Mentions("pool ref (L4)", "log-probs")


@pytest.mark.parametrize(("limit", "is_enough"), [("24Gi", False), ("900Gi", True), (None, True)])
def test_a_plan_says_that_the_pods_may_use_too_little_host_memory(limit: str | None, is_enough: bool) -> None:
    edits: dict[str, object] = {} if limit is None else {"spec.pools[0].resources.limits": {"memory": limit}}
    job_spec = spec(edits)
    job = workload_of(job_spec, {Role.ACTOR: samples.LLAMA3_8B})
    plan = plan_of(job, placement_of(job_spec, {"main": samples.gpu()}), with_proposals=False)
    found = set(with_pod_limits(plan, job_spec).notes) - set(plan.notes)
    field = "spec.pools[0].resources.limits.memory"
    assert [*found] == ([] if is_enough else [Mentions(field, "24.0 GiB", "killed", "increase the limit")])
    on_cpus = replace(plan.placement.pools[0], gpu=replace(samples.gpu(), is_cpu=True))
    plan = replace(plan, placement=replace(plan.placement, pools=(on_cpus,)))
    assert with_pod_limits(plan, job_spec).notes == plan.notes
