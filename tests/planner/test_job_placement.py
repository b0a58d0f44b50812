"""The placement of a job's roles, and the job with another placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.rules import violations
from rljob_api.v1alpha1.spec import RLJobSpec
from rljob_planner.errors import PlanError
from rljob_planner.gpus import gpu_named
from rljob_planner.job_placement import check_layouts, placement_of, spec_with
from rljob_planner.job_workload import workload_of
from rljob_planner.known_models import known_model
from rljob_planner.workload import PlacedPool, Placement, Role, RolloutLayout, Schedule, TrainLayout
from rljob_testing.jobs.valid_job import valid_job

Edits = dict[str, object]

H100 = gpu_named("H100")
KL: Edits = {"spec.training.algorithm": {"kl": {"coefficient": 0.001}}}
TWO_POOLS: Edits = {
    "spec.pools": [{"name": "main", "nodes": 2, "gpusPerNode": 4}, {"name": "aside", "nodes": 1, "gpusPerNode": 2}],
    "spec.roles": {"actor": {"shardSize": 4}, "rollout": {"tensorParallel": 2}, "ref": {"pool": "aside"}},
    **KL,
}


def spec_of(edits: Mapping[str, object]) -> RLJobSpec:
    return RLJob.from_wire(valid_job(edits)).spec


def placed(spec: RLJobSpec) -> Placement:
    return placement_of(spec, {pool.name: H100 for pool in spec.pools})


def test_the_default_layout_is_one_copy_on_all_gpus() -> None:
    [pool] = placed(spec_of(KL)).pools
    assert pool.roles == (Role.ACTOR, Role.ROLLOUT, Role.REF)
    assert pool.layouts[Role.ACTOR] == pool.layouts[Role.REF] == TrainLayout(2, 2, 1)
    assert pool.rollout == RolloutLayout(2, 1)


def test_roles_are_on_the_pools_of_the_job() -> None:
    main, aside = placed(spec_of(TWO_POOLS)).pools
    assert main.roles == (Role.ACTOR, Role.ROLLOUT)
    assert main.layouts == {Role.ACTOR: TrainLayout(8, 4, 1)}
    assert main.rollout == RolloutLayout(8, 2)
    assert (aside.roles, aside.layouts) == ((Role.REF,), {Role.REF: TrainLayout(2, 2, 1)})


def test_a_reference_that_is_the_actor_has_its_layout() -> None:
    edits = KL | {
        "spec.training.model.lora": {"rank": 4},
        "spec.roles.actor": {"shardSize": 1, "sequenceParallel": 2},
    }
    [pool] = placed(spec_of(edits)).pools
    assert pool.layouts[Role.REF] == pool.layouts[Role.ACTOR] == TrainLayout(2, 1, 2)


def test_absent_roles_are_on_no_pool() -> None:
    assert placed(spec_of({})).pools[0].roles == (Role.ACTOR, Role.ROLLOUT)


def test_a_pool_without_a_gpu_type_is_named() -> None:
    with pytest.raises(PlanError, match=r"^spec.pools aside: unknown GPU type"):
        placement_of(spec_of(TWO_POOLS), {"main": H100})


def test_layouts_that_do_not_divide_are_rejected() -> None:
    spec = spec_of({})
    roles = spec.roles
    uneven = spec.model_copy(
        update={"roles": roles.model_copy(update={"actor": roles.actor.model_copy(update={"shard_size": 3})})}
    )
    with pytest.raises(PlanError, match=r"^spec.roles.actor.shardSize: must divide .* 2 \(seen 3\)"):
        placed(uneven)


def test_attention_heads_must_divide() -> None:
    shape = known_model("HuggingFaceTB/SmolLM2-135M")  # nine heads, three of keys and values
    assert shape is not None
    spec = spec_of({"spec.roles.rollout.tensorParallel": 2})
    with pytest.raises(PlanError, match=r"^spec.roles.rollout.tensorParallel: must .* 9 .*\(seen 2\)"):
        check_layouts(workload_of(spec, {Role.ACTOR: shape}), placed(spec))
    spec = spec_of({"spec.roles.actor.sequenceParallel": 2})
    with pytest.raises(PlanError, match=r"^spec.roles.actor.sequenceParallel: must divide the 9 attention heads"):
        check_layouts(workload_of(spec, {Role.ACTOR: shape}), placed(spec))
    other = known_model("Qwen/Qwen3-0.6B")
    assert other is not None
    check_layouts(workload_of(spec, {Role.ACTOR: other}), placed(spec))


def test_checkpointing_every_nth_layer_needs_n_layers() -> None:
    shape = known_model("Qwen/Qwen3-0.6B")
    assert shape is not None
    edits: Edits = {"spec.training.model": {"source": "a/b", "gradientCheckpointing": "Always"}}
    spec = spec_of(edits | {"spec.training.model.gradientCheckpointingEveryNthLayer": 29})
    with pytest.raises(PlanError, match=r"EveryNthLayer: the model has 28 layers \(seen: 29\)"):
        workload_of(spec, {Role.ACTOR: shape})


@pytest.mark.parametrize(
    "edits",
    [
        {},
        KL,
        TWO_POOLS,
        {"spec.roles.actor.sequenceParallel": 2},
        {"spec.roles.actor": {"pool": "main", "sequenceParallel": 1}},
    ],
)
def test_writing_a_jobs_own_placement_changes_nothing(edits: dict[str, object]) -> None:
    spec = spec_of(edits)
    again = spec_with(spec, placed(spec))
    assert placed(again) == placed(spec)
    assert again.pools == spec.pools
    assert again.roles == spec.roles


def test_another_placement_is_written_without_defaults() -> None:
    spec = spec_of(
        KL
        | {
            "spec.pools": [{"name": "main", "gpusPerNode": 2, "resources": {"requests": {"cpu": "8"}}}],
            "spec.roles.actor": {"shardSize": 1, "deferGradientReduction": True},
        }
    )
    main = PlacedPool("main", 2, 4, H100, {Role.ACTOR: TrainLayout(8, 8, 2)}, RolloutLayout(8, 1))
    aside = PlacedPool("aside", 1, 2, H100, {Role.REF: TrainLayout(2, 1, 1)})
    found = spec_with(spec, Placement((main, aside)))
    assert not violations(found)
    assert placed(found) == Placement((main, aside))
    assert [pool.name for pool in found.pools] == ["main", "aside"]
    assert found.pools[0].resources.requests == {"cpu": "8"}
    assert (found.roles.actor.pool, found.roles.actor.shard_size, found.roles.actor.sequence_parallel) == (
        None,
        None,
        2,
    )
    assert found.roles.actor.defer_gradient_reduction
    assert (found.roles.ref.pool, found.roles.ref.shard_size) == ("aside", 1)
    assert found.training == spec.training


def test_a_placement_that_cannot_run_is_not_written() -> None:
    spec = spec_of({})
    apart = Placement(
        (
            PlacedPool("a", 1, 2, H100, {Role.ACTOR: TrainLayout(2, 2)}),
            PlacedPool("b", 1, 2, H100, {}, RolloutLayout(2, 1)),
        )
    )
    with pytest.raises(PlanError, match=r"this version cannot run"):
        spec_with(spec, apart)
    with pytest.raises(PlanError, match=r"this version cannot run"):
        spec_with(spec, replace(placed(spec), schedule=Schedule.ONE_STEP_OFF))


def test_pools_select_nodes_of_their_gpu_type() -> None:
    selector = {"disk": "fast", "nvidia.com/gpu.product": "old"}
    spec = spec_of({**TWO_POOLS, "spec.pools[0].template.nodeSelector": selector})
    label = ("nvidia.com/gpu.product", "NVIDIA-H100")
    main, aside = spec_with(spec, placed(spec), {"H100": label, "L4": ("nvidia.com/gpu.product", "NVIDIA-L4")}).pools
    assert main.template.node_selector == {"disk": "fast", label[0]: label[1]}
    assert aside.template.node_selector == {label[0]: label[1]}
    assert spec_with(spec, placed(spec), {"L4": label}) == spec


def test_labels_of_other_types_and_resources_of_other_vendors_are_replaced() -> None:
    """No node has both labels, and a node with AMD GPUs has no nvidia.com/gpu."""
    selector = {"disk": "fast", "cloud.google.com/gke-accelerator": "nvidia-l4", "amd.com/gpu.product-name": "old"}
    spec = spec_of(
        {
            **TWO_POOLS,
            "spec.pools[0].template.nodeSelector": selector,
            "spec.pools[0].gpuResource": "amd.com/gpu",
            "spec.pools[1].gpuResource": "nvidia.com/gpu.shared",
        }
    )
    label = ("nvidia.com/gpu.product", "NVIDIA-H100")
    main, aside = spec_with(spec, placed(spec), {"H100": label}).pools
    assert main.template.node_selector == {"disk": "fast", label[0]: label[1]}
    assert (main.gpu_resource, aside.gpu_resource) == ("nvidia.com/gpu", "nvidia.com/gpu.shared")
    label = ("amd.com/gpu.product-name", "MI300X")
    main, aside = spec_with(spec, placed(spec), {"H100": label}).pools
    assert main.template.node_selector == {"disk": "fast", label[0]: label[1]}
    assert {main.gpu_resource, aside.gpu_resource} == {"amd.com/gpu"}
