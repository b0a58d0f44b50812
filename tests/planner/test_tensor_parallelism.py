"""Which tensor parallelism vLLM accepts: it divides heads, the padded vocabulary, and the widths of MLPs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.errors import PlanError
from rljob_planner.job_placement import check_layouts
from rljob_planner.memory.job_changes import smaller_jobs
from rljob_planner.model_shape import ModelShape
from rljob_planner.search.pool_options import PoolSize, rollout_layouts, sequence_parallel_sizes
from rljob_planner.workload import Role
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples

FIELD = "spec.roles.rollout.tensorParallel"
HEADS = 3 * 5 * 7 * 8
SHAPE = ModelShape("model", 8, 1024, HEADS, HEADS, 128, HEADS * 64, HEADS * 64, ties_head=True)
"""Everything divides by 1 to 8."""
EXPERTS = replace(SHAPE, num_experts=8, experts_per_token=2, shared_expert_size=HEADS)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (SHAPE, {1, 2, 3, 4, 5, 6, 7, 8}),
        # Padded to a multiple of 64: 151,936 = 64 x 2,374 and 2,374 = 2 x 1,187.
        (replace(SHAPE, vocabulary_size=151936), {1, 2, 4, 8}),
        (replace(SHAPE, vocabulary_size=151900), {1, 2, 4, 8}),
        (replace(SHAPE, vocabulary_size=64 * 3 - 1), {1, 2, 3, 4, 6, 8}),
        (replace(SHAPE, mlp_size=9728), {1, 2, 4, 8}),
        (EXPERTS, {1, 2, 3, 4, 5, 6, 7, 8}),
        (replace(EXPERTS, mlp_size=768), {1, 2, 3, 4, 6, 8}),
        (replace(EXPERTS, shared_expert_size=1024), {1, 2, 4, 8}),
        # The dense width counts where a layer has no experts.
        (replace(EXPERTS, dense_mlp_size=1024), {1, 2, 3, 4, 5, 6, 7, 8}),
        (replace(EXPERTS, dense_mlp_size=1024, num_dense_layers=1), {1, 2, 4, 8}),
    ],
)
def test_the_search_proposes_what_vllm_accepts(shape: ModelShape, sizes: set[int]) -> None:
    job = samples.workload(samples.trained_model(shape))
    nodes = [PoolSize(0, 1, gpus_per_node) for gpus_per_node in (8, 7, 6, 5)]
    assert {layout.tensor_parallel for size in nodes for layout in rollout_layouts(job, size, samples.gpu())} == sizes


def test_sequence_parallelism_divides_heads_alone() -> None:
    job = samples.workload(samples.trained_model(replace(SHAPE, vocabulary_size=151936, mlp_size=9728)))
    assert sequence_parallel_sizes(Role.ACTOR, job, PoolSize(0, 1, 6)) == [1, 2, 3, 6]


def test_a_job_with_a_size_that_vllm_refuses_is_refused_by_its_field() -> None:
    shape = replace(SHAPE, vocabulary_size=151936)
    job = samples.workload(samples.trained_model(shape))
    check_layouts(job, samples.placement(samples.one_pool(job, gpus_per_node=6, tensor_parallel=2)))
    with pytest.raises(PlanError) as refused:
        check_layouts(job, samples.placement(samples.one_pool(job, gpus_per_node=6, tensor_parallel=3)))
    assert str(refused.value) == Mentions(FIELD, "151936", "seen 3")


def test_changes_that_make_room_keep_to_what_vllm_accepts() -> None:
    shape = replace(SHAPE, vocabulary_size=151936)
    job = samples.workload(samples.trained_model(shape))
    changes = smaller_jobs(job, samples.placement(samples.one_pool(job, gpus_per_node=6)))
    values = [each.change.value for ladder in changes for each in ladder if each.change.field == FIELD]
    assert values == ["2"]


def test_the_search_splits_no_model_over_mig_devices() -> None:
    job = samples.workload(samples.trained_model(SHAPE))
    part = replace(samples.gpu(), is_mig_device=True)
    assert [layout.tensor_parallel for layout in rollout_layouts(job, PoolSize(0, 1, 8), part)] == [1]
