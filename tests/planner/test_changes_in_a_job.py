"""Changes that the planner proposes are written into the job: it is valid and equals the job that was planned."""

from __future__ import annotations

import json

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_planner.job_memory import known_shapes
from rljob_planner.job_placement import check_layouts, placement_of
from rljob_planner.job_workload import workload_of
from rljob_planner.memory.job_changes import Change, faster_jobs, smaller_jobs
from rljob_planner.workload import Placement, Workload
from rljob_testing.jobs.valid_job import Wire, edited, valid_job
from rljob_testing.planner import samples

EIGHT: dict[str, object] = {
    "spec.training.model.source": "Qwen/Qwen3-4B",
    "spec.pools[0].gpusPerNode": 8,
    "spec.training.batchSize": 64,
    "spec.training.maxTokensPerMicroBatch": 2048,
}
REFERENCE: dict[str, object] = {"spec.training.algorithm.kl.coefficient": 0.1}
REWARD_MODEL = {"type": "RewardModel", "rewardModel": {"source": "Qwen/Qwen3-8B"}}
CASES: dict[str, dict[str, object]] = {
    "grpo": EIGHT,
    "reference": EIGHT | REFERENCE,
    "replicas": EIGHT | REFERENCE | {"spec.roles.actor.shardSize": 4, "spec.roles.ref.shardSize": 2},
    "deferred": EIGHT | {"spec.roles.actor.deferGradientReduction": True},
    "every other layer": EIGHT
    | {
        "spec.training.model.gradientCheckpointing": "Always",
        "spec.training.model.gradientCheckpointingEveryNthLayer": 2,
    },
    "critic and reward model": EIGHT
    | REFERENCE
    | {
        "spec.training.algorithm.type": "PPO",
        "spec.training.rewards": [{"type": "MathAnswer", "name": "answer"}, REWARD_MODEL],
        "spec.training.miniBatchSize": 16,
    },
    "reference elsewhere": EIGHT
    | REFERENCE
    | {"spec.pools[1]": {"name": "other", "gpusPerNode": 2}, "spec.roles.ref.pool": "other"},
    "sequence parallel": EIGHT | {"spec.roles.actor.sequenceParallel": 2},
    "sequence parallel, for rows that one rank cannot hold": EIGHT
    | REFERENCE
    | {
        "spec.training.algorithm": {"type": "PPO", "kl": {"coefficient": 0.1}},
        "spec.training.maxTokensPerMicroBatch": 4096,
        "spec.training.rollout.maxNewTokens": 12000,
        "spec.roles.actor.sequenceParallel": 4,
        "spec.roles.critic.sequenceParallel": 4,
        "spec.roles.ref.sequenceParallel": 4,
    },
    "held by all GPUs, as the file says": EIGHT | REFERENCE | {"spec.roles.actor.shardSize": 8},
    "held by all GPUs, whose gradients leave": EIGHT
    | {"spec.roles.actor.shardSize": 8, "spec.training.model.offload.gradients": True},
    "heads that divide, of which those of keys and values do not": EIGHT
    | {
        "spec.training.model.source": "Qwen/Qwen2.5-1.5B",
        "spec.pools[0].gpusPerNode": 12,
        "spec.training.batchSize": 96,
    },
    "reference that is the actor": EIGHT
    | REFERENCE
    | {"spec.training.model.lora.rank": 8, "spec.roles.actor.shardSize": 4, "spec.roles.actor.sequenceParallel": 2},
    "reference with a layout of its own": EIGHT | REFERENCE | {"spec.roles.ref.sequenceParallel": 1},
    "several updates": EIGHT
    | {"spec.pools[0].gpusPerNode": 6, "spec.training.batchSize": 36, "spec.training.miniBatchSize": 9},
    "evaluations": EIGHT
    | {"spec.training.evaluations": [{"everySteps": 5, "dataset": {"type": "File", "file": {"path": "e.jsonl"}}}]},
    "transformers": EIGHT | {"spec.training.rollout.engine": "HuggingFace"},
    "offloaded": EIGHT
    | REFERENCE
    | {"spec.training.model.offload": {"optimizer": True, "parameters": True, "gradients": True, "reference": True}},
}
CASES_ON_CPUS = ("grpo", "transformers")


def read(job: Wire, *, is_cpu: bool) -> tuple[Workload, Placement]:
    spec = RLJob.from_wire(job).spec
    shapes = known_shapes(spec)
    assert shapes is not None
    placement = placement_of(spec, {pool.name: samples.gpu(is_cpu=is_cpu) for pool in spec.pools})
    workload = workload_of(spec, shapes, is_cpu=is_cpu)
    check_layouts(workload, placement)
    return workload, placement


def written(job: Wire, change: Change) -> Wire:
    value: object
    try:
        value = json.loads(change.value)
    except ValueError:
        value = {"rank": 16} if change.field.endswith(".lora") else change.value
    return edited(job, {change.field.replace("rewards[]", "rewards[1]"): value})


@pytest.mark.parametrize(
    ("case", "is_cpu"), [(name, False) for name in CASES] + [(name, True) for name in CASES_ON_CPUS]
)
def test_every_change_can_be_written_and_is_the_planned_job(case: str, is_cpu: bool) -> None:
    job = valid_job(CASES[case])
    workload, placement = read(job, is_cpu=is_cpu)
    smaller = [changed for ladder in smaller_jobs(workload, placement) for changed in ladder]
    faster = [changed for ladder in faster_jobs(workload, placement) for changed in ladder]
    for changed in (*smaller, *faster):
        found_workload, found_placement = read(written(job, changed.change), is_cpu=is_cpu)
        assert found_workload == changed.workload, changed.change
        assert found_placement == changed.placement, changed.change
    assert len({changed.change.field for changed in smaller}) >= 5
