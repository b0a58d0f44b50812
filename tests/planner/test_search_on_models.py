"""The search with the planner's models of memory and time finds what trying every mapping finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rljob_planner.constants import Constants
from rljob_planner.gpus import NodeGroup
from rljob_planner.memory.phases import phases_of
from rljob_planner.model_shape import ModelShape
from rljob_planner.placement import Schedule
from rljob_planner.search.mapping import best_mappings
from rljob_planner.search.partitions import members
from rljob_planner.search.role_choices import SYNC, UPDATES
from rljob_planner.search.set_tables import SetTables
from rljob_planner.timing.step import step_time
from rljob_planner.workload import Head, LoraShape, ModelOffload, Role, Workload
from rljob_testing.every_mapping import EveryMapping, Shape
from rljob_testing.planner_cases import critic, frozen, gpu, one_pool, trained, workload

SMALL = ModelShape("small", 8, 1024, 2, 2, 128, 4096, 32000, ties_head=True)
"""Two heads: at most two GPUs share rows or an engine."""
ONE_HEAD = replace(SMALL, num_heads=1, num_kv_heads=1, head_size=256)
OTHER = replace(gpu(), name="other", flops=312e12, bandwidth=1.5e12, link_bandwidth=30e9)


def _job(roles: Sequence[Role], shape: ModelShape = SMALL) -> Workload:
    models = {
        Role.ACTOR: trained(shape),
        Role.REF: frozen(shape),
        Role.CRITIC: critic(shape),
        Role.REWARD_MODEL: frozen(shape, head=Head.SCORE),
    }
    return workload(trained(shape), models={role: model for role, model in models.items() if role in roles})


def _found(tables: SetTables, schedule: Schedule) -> dict[Shape, float]:
    """By the search, of all groupings; their pools fit, and their seconds are those of the plan."""
    found: dict[Shape, float] = {}
    for arrangement in best_mappings(tables, schedule, 1000):
        placement = tables.placement(arrangement, schedule)
        seconds = step_time(tables.workload, placement, tables.constants).total.likely
        assert arrangement.cost == pytest.approx(seconds, rel=1e-9)
        for pool in placement.pools:
            assert all(phase.spare >= 0 for phase in phases_of(pool, tables.workload, tables.constants))
        groups = [(frozenset(tables.roles[each] for each in members(s)), o.kind) for s, o in arrangement.sets]
        found[frozenset(groups)] = arrangement.cost
    return found


@settings(max_examples=6, deadline=None, phases=[Phase.reuse, Phase.generate])  # to shrink would take minutes
@given(st.data())
def test_three_roles_on_two_kinds_as_by_trying_everything(data: st.DataObject) -> None:
    """Memory from where nothing fits to where everything does; lengths, batches, offload and adapters that change what
    is worth most."""
    third = data.draw(st.sampled_from([Role.REF, Role.CRITIC, Role.REWARD_MODEL]))
    job = _job([Role.ACTOR, third])
    adapters = LoraShape(32, 4_000_000, 56, input_sizes_per_layer=20_000, syncs_alone=True)
    kinds = [job.models[Role.ACTOR], replace(job.models[Role.ACTOR], lora=adapters)]
    kinds.append(replace(kinds[0], offload=ModelOffload(parameters=True, optimizer=True)))
    job = replace(
        job,
        models={**job.models, Role.ACTOR: data.draw(st.sampled_from(kinds))},
        batch_size=data.draw(st.sampled_from([16, 24, 64])),
        mini_batch_size=8,
        max_tokens_per_micro_batch=data.draw(st.sampled_from([2048, 16384])),
        needs_old_logprobs=data.draw(st.booleans()),
        scores_first=data.draw(st.booleans()),
        learned_fraction=data.draw(st.sampled_from([1.0, 0.5])),
        reward_seconds=data.draw(st.sampled_from([0.0, 4.0])),
        rollout=replace(job.rollout, memory_utilization=data.draw(st.sampled_from([0.4, 0.8]))),
    )
    sizes = st.floats(4.0, 12.0)
    cluster = tuple(NodeGroup(2, 2, replace(kind, memory_bytes=data.draw(sizes) * 2**30)) for kind in (gpu(), OTHER))
    schedule = data.draw(st.sampled_from(Schedule))
    by_search = _found(SetTables(job, cluster, Constants()), schedule)
    assert by_search == pytest.approx(EveryMapping(job, cluster, Constants()).fastest(schedule), rel=1e-9)


def test_all_five_roles_on_one_node_as_by_trying_everything() -> None:
    """Of one head, so that layouts are few; groupings are all there are, 52. Some do not fit."""
    job = _job(tuple(Role), ONE_HEAD)
    cluster = (NodeGroup(1, 4, gpu(6)),)
    everything = EveryMapping(job, cluster, Constants()).fastest(Schedule.SYNCHRONOUS)
    assert len(everything) > 20
    assert _found(SetTables(job, cluster, Constants()), Schedule.SYNCHRONOUS) == pytest.approx(everything, rel=1e-9)


def test_what_just_fits_on_cpus_is_found() -> None:
    """Of a model with more logits than anything else, whose tiles are smaller there than on GPUs."""
    narrow = ModelShape("narrow", 2, 64, 1, 1, 64, 64, 4000, ties_head=True)
    job, on = _job([Role.ACTOR], narrow), gpu(64, is_cpu=True)
    job = replace(job, rollout=replace(job.rollout, cpu_kv_cache_bytes=2**24))
    needed = max(phase.total for phase in phases_of(one_pool(job, on, gpus_per_node=1), job, Constants()))
    just_enough = replace(on, memory_bytes=needed + 2**20)
    assert _found(SetTables(job, (NodeGroup(1, 1, just_enough),), Constants()), Schedule.SYNCHRONOUS)


def test_a_layout_that_is_only_better_at_handing_over_weights_is_a_choice() -> None:
    """On two nodes with slow links between them: updates are longer with two copies, whose gradients are added up, and
    weights come faster within a node. Another pool's updates may be longer still, and then only that counts."""
    cluster = (NodeGroup(2, 2, gpu(10)),)
    job = _job([Role.ACTOR])
    tables = SetTables(replace(job, rollout=replace(job.rollout, memory_utilization=0.8)), cluster, Constants())
    (choices,) = tables.role_choices.of([Role.ACTOR, Role.ROLLOUT], tables.sizes[-1])
    layouts = {choice.layouts[0][1].shard_size: choice.seconds for choice in reversed(choices)}
    assert set(layouts) == {2, 4}
    assert layouts[2][SYNC] < layouts[4][SYNC]
    assert layouts[2][UPDATES] > layouts[4][UPDATES]
