"""The search finds what trying everything finds: every grouping of roles, number of nodes, GPU type and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rljob_planner.constants import Constants
from rljob_planner.gpus import Cluster, NodeGroup
from rljob_planner.memory.phases import phases_of
from rljob_planner.model_shape import ModelShape, TensorSize
from rljob_planner.search.arrangements import groupings
from rljob_planner.search.best_placement import best_by_grouping
from rljob_planner.search.pool_options import SearchSpace, node_counts
from rljob_planner.search.ranking import placement
from rljob_planner.timing.step import step_time
from rljob_planner.workload import (
    Head,
    LoraShape,
    ModelOffload,
    PlacedPool,
    Placement,
    Role,
    RolloutLayout,
    Schedule,
    TrainLayout,
    Workload,
)
from rljob_testing.planner import samples

TWO_HEADS = ModelShape("two heads", 8, 1024, 2, 2, 128, 4096, 32000, ties_head=True)
"""At most two GPUs share rows or one engine."""
ONE_HEAD = replace(TWO_HEADS, num_heads=1, num_kv_heads=1, head_size=256)
OTHER = replace(samples.gpu(), name="other", flops=312e12, bandwidth=1.5e12, link_bandwidth=30e9)
CONSTANTS = Constants()
Shape = frozenset[tuple[frozenset[Role], int]]
"""Roles that share a pool, and the index of its node group."""


def _job(roles: Sequence[Role], shape: ModelShape) -> Workload:
    models = {
        Role.ACTOR: samples.trained_model(shape),
        Role.REF: samples.frozen_model(shape),
        Role.CRITIC: samples.critic(shape),
        Role.REWARD_MODEL: samples.frozen_model(shape, head=Head.SCORE),
    }
    return samples.workload(
        samples.trained_model(shape), models={role: model for role, model in models.items() if role in roles}
    )


def _by_trying_everything(job: Workload, cluster: Cluster, schedule: Schedule) -> dict[Shape, float]:
    """Seconds of the fastest step for each grouping on node types. Uses the models of time and memory for whole
    placements and pools, without stages, sums or bounds."""
    best: dict[Shape, float] = {}
    pools_of = {roles: list(_pools(job, cluster, roles)) for each in _partitions(job.roles) for roles in each}
    for grouping in _partitions(job.roles):
        if schedule is Schedule.ONE_STEP_OFF and (Role.ROLLOUT,) not in grouping:
            continue
        for chosen in product(*(pools_of[roles] for roles in grouping)):
            used = [sum(pool.nodes for kind, pool in chosen if kind == each) for each in range(len(cluster))]
            if all(mine <= group.nodes for mine, group in zip(used, cluster, strict=True)):
                where = Placement(tuple(pool for _, pool in chosen), schedule)
                shape = frozenset((frozenset(pool.roles), kind) for kind, pool in chosen)
                best[shape] = min(step_time(job, where, CONSTANTS).total.likely, best.get(shape, inf))
    return best


def _partitions(roles: Sequence[Role]) -> list[tuple[tuple[Role, ...], ...]]:
    """All groupings, from label assignments."""
    found = set()
    for labels in product(range(len(roles)), repeat=len(roles)):
        groups = [tuple(r for r, own in zip(roles, labels, strict=True) if own == label) for label in set(labels)]
        found.add(tuple(sorted(groups)))
    return sorted(found)


def _pools(job: Workload, cluster: Cluster, roles: Sequence[Role]) -> Iterator[tuple[int, PlacedPool]]:
    """All pools with these roles whose memory fits, with 1, 2, 3, 4, 6 and 8 nodes."""
    for kind, group in enumerate(cluster):
        for nodes in (each for each in (1, 2, 3, 4, 6, 8) if each <= group.nodes):
            layouts = [list(_layouts(job, role, nodes, group.gpus_per_node)) for role in roles]
            for chosen in product(*layouts):
                given = dict(zip(roles, chosen, strict=True))
                train = {role: each for role, each in given.items() if isinstance(each, TrainLayout)}
                rollout = next((each for each in given.values() if isinstance(each, RolloutLayout)), None)
                pool = PlacedPool("-".join(roles), nodes, group.gpus_per_node, group.gpu, train, rollout)
                if all(phase.spare >= 0 for phase in phases_of(pool, job, CONSTANTS)):
                    yield kind, pool


def _layouts(job: Workload, role: Role, nodes: int, per_node: int) -> Iterator[TrainLayout | RolloutLayout]:
    num_gpus = nodes * per_node
    shape = job.rollout.shape if role is Role.ROLLOUT else job.models[role].shape
    for parallel in (1, 2, 4, 8):
        if per_node % parallel or shape.num_heads % parallel or shape.num_kv_heads % parallel:
            continue
        if role is Role.ROLLOUT:
            yield RolloutLayout(num_gpus, parallel)
            continue
        rows = [job.batch_size * job.group_size] if role is Role.ACTOR else []
        rows += [job.mini_batch_size * job.group_size] if role in (Role.ACTOR, Role.CRITIC) else []
        holds_row = job.max_tokens_per_micro_batch * parallel >= job.lengths.longest_row
        if holds_row and not any(count * parallel % num_gpus for count in rows):
            for shards in range(1, num_gpus + 1):
                if per_node % shards == 0 or (shards % per_node == 0 and num_gpus % shards == 0):
                    yield TrainLayout(num_gpus, shards, parallel)


def _by_search(job: Workload, cluster: Cluster, schedule: Schedule) -> dict[Shape, float]:
    """For all groupings; checks that pools fit and that seconds are those of the plan."""
    found: dict[Shape, float] = {}
    asked = SearchSpace(job, cluster, CONSTANTS)
    for arrangement, *_ in best_by_grouping(asked, schedule, 1000):
        where = placement(asked, arrangement)
        assert arrangement.cost == pytest.approx(step_time(job, where, CONSTANTS).total.likely, rel=1e-9)
        for pool in where.pools:
            assert all(phase.spare >= 0 for phase in phases_of(pool, job, CONSTANTS))
        found[frozenset((frozenset(each.roles), each.size.kind) for each in arrangement.options)] = arrangement.cost
    return found


@pytest.mark.parametrize("schedule", Schedule)
def test_the_search_equals_trying_everything_for_three_roles_on_64_gpus(schedule: Schedule) -> None:
    job = _job([Role.ACTOR, Role.CRITIC], ONE_HEAD)
    job = replace(job, batch_size=96, mini_batch_size=48)
    cluster = (NodeGroup(8, 8, samples.gpu(8)),)
    everything = _by_trying_everything(job, cluster, schedule)
    assert len(everything) == (5 if schedule is Schedule.SYNCHRONOUS else 2)
    assert _by_search(job, cluster, schedule) == pytest.approx(everything, rel=1e-9)


def test_the_search_equals_trying_everything_for_five_roles_on_two_gpu_types() -> None:
    """Some of the groupings do not fit."""
    job = _job(tuple(Role), ONE_HEAD)
    cluster = (NodeGroup(2, 2, samples.gpu(8)), NodeGroup(1, 1, replace(OTHER, memory_bytes=8 * 2**30)))
    everything = _by_trying_everything(job, cluster, Schedule.SYNCHRONOUS)
    assert len(everything) > 10
    assert _by_search(job, cluster, Schedule.SYNCHRONOUS) == pytest.approx(everything, rel=1e-9)


@settings(max_examples=6, deadline=None, phases=[Phase.reuse, Phase.generate])  # to shrink would take minutes
@given(st.data())
def test_the_search_equals_trying_everything_for_three_roles_in_any_job(data: st.DataObject) -> None:
    """Memory from values where nothing fits to values where everything fits; lengths, batches, offload and adapters
    that change which placement is best."""
    third = data.draw(st.sampled_from([Role.REF, Role.CRITIC, Role.REWARD_MODEL]))
    job = _job([Role.ACTOR, third], TWO_HEADS)
    matrices = TensorSize(32, 20_000, TWO_HEADS.num_layers), TensorSize(93_000, 32)
    adapters = LoraShape(32, 4_000_000, 56, matrices, syncs_alone=True)
    kinds = [job.models[Role.ACTOR], replace(job.models[Role.ACTOR], lora=adapters)]
    kinds.append(replace(kinds[0], offload=ModelOffload(parameters=True, optimizer=True)))
    job = replace(
        job,
        models={**job.models, Role.ACTOR: data.draw(st.sampled_from(kinds))},
        batch_size=data.draw(st.sampled_from([16, 24, 64])),
        mini_batch_size=8,
        max_tokens_per_micro_batch=data.draw(st.sampled_from([2048, 16384])),
        needs_old_logprobs=data.draw(st.booleans()),
        waits_for_scores=data.draw(st.booleans()),
        trained_fraction=data.draw(st.sampled_from([1.0, 0.5])),
        reward_seconds=data.draw(st.sampled_from([0.0, 4.0])),
        rollout=replace(job.rollout, memory_utilization=data.draw(st.sampled_from([0.4, 0.8]))),
    )
    sizes = st.floats(4.0, 12.0)
    cluster = tuple(
        NodeGroup(2, 2, replace(kind, memory_bytes=data.draw(sizes) * 2**30)) for kind in (samples.gpu(), OTHER)
    )
    schedule = data.draw(st.sampled_from(Schedule))
    everything = _by_trying_everything(job, cluster, schedule)
    assert _by_search(job, cluster, schedule) == pytest.approx(everything, rel=1e-9)


def test_a_placement_that_just_fits_on_cpus_is_found() -> None:
    """The model mostly has logits, and their tiles are smaller on CPUs than on GPUs."""
    job, on = (
        _job([Role.ACTOR], ModelShape("narrow", 2, 64, 1, 1, 64, 64, 4000, ties_head=True)),
        samples.gpu(64, is_cpu=True),
    )
    job = replace(job, rollout=replace(job.rollout, cpu_kv_cache_bytes=2**24))
    needed = max(phase.total for phase in phases_of(samples.one_pool(job, on, gpus_per_node=1), job, CONSTANTS))
    just_enough = replace(on, memory_bytes=needed + 2**20)
    assert _by_search(job, (NodeGroup(1, 1, just_enough),), Schedule.SYNCHRONOUS)


def test_groupings_and_numbers_of_nodes() -> None:
    """Every way to group five roles, once; numbers of nodes that often divide batches, and all of the nodes."""
    assert sorted(tuple(sorted(each)) for each in groupings(list(Role))) == _partitions(list(Role))
    assert len(list(groupings(list(Role)))) == 52
    assert node_counts(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert (node_counts(5), node_counts(1), node_counts(0)) == ([1, 2, 3, 4, 5], [1], [])
