"""Results of a search: which placement comes first, why others do not, and what to do if nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rljob_api.v1alpha1.job import RLJob
from rljob_api.v1alpha1.rules import violations
from rljob_planner.errors import PlanError
from rljob_planner.gpus import Cluster, NodeGroup
from rljob_planner.job_placement import placement_of, spec_with
from rljob_planner.job_workload import model_sources, workload_of
from rljob_planner.plan_types import Verdict
from rljob_planner.search.best_placement import search
from rljob_planner.search.pool_options import (
    PoolSize,
    rollout_layouts,
    sequence_parallel_sizes,
    shard_sizes,
    train_layouts,
)
from rljob_planner.workload import LoraShape, Role, RolloutLayout, RolloutWork, Schedule
from rljob_testing.jobs.valid_job import valid_job
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples

TWO_NODES: Cluster = (NodeGroup(2, 8, samples.gpu()),)
PPO = samples.workload(
    models={Role.ACTOR: samples.trained_model(), Role.REF: samples.frozen_model(), Role.CRITIC: samples.critic()}
)


def test_candidates_fit_and_are_in_order() -> None:
    """First those within a tenth of the fastest, by simplicity; then the others, by seconds."""
    result = search(PPO, (NodeGroup(4, 8, samples.gpu()),))
    fastest = min(each.seconds for each in result.candidates)
    assert len(result.candidates) == 10
    assert all(each.plan.verdict is not Verdict.TOO_LARGE for each in result.candidates)
    assert [each.is_tie for each in result.candidates] == [each.seconds <= 1.1 * fastest for each in result.candidates]
    later = [each.seconds for each in result.candidates if not each.is_tie]
    assert later == sorted(later)
    assert not any(not each.is_tie for each in result.candidates[: sum(each.is_tie for each in result.candidates)])
    assert (result.nearest_miss, result.changes) == (None, ())


def test_each_candidate_after_the_first_has_reasons() -> None:
    """With short responses the first takes turns; in PPO generation at the same time is faster, and is the first."""
    short = replace(PPO, lengths=replace(PPO.lengths, response_mean=512.0))
    for job, schedule, why in ((short, Schedule.SYNCHRONOUS, " s instead of "), (PPO, Schedule.ONE_STEP_OFF, "turns")):
        first, *others = search(job, TWO_NODES).candidates
        assert first.reasons == ()
        assert first.plan.placement.schedule is schedule
        assert all(each.reasons for each in others)
        slower = [each for each in others if not each.is_tie]
        shares = [f"{each.seconds / first.seconds - 1:.0%}" for each in slower]
        assert [each.reasons[0] for each in slower] == [Mentions(share, "longer") for share in shares]
        assert slower
        assert all(why in each.reasons[-1] for each in slower)


def test_the_best_runnable_placement_is_named_beside_a_better_one() -> None:
    """If training is on fast GPUs and generation runs on others at the same time, one step off is fastest."""
    slower = replace(samples.gpu(), name="slower", flops=300e12)
    result = search(PPO, (NodeGroup(1, 8, samples.gpu()), NodeGroup(1, 8, slower)))
    first = result.candidates[0]
    assert (first.is_supported, first.plan.placement.schedule) == (False, Schedule.ONE_STEP_OFF)
    today = result.best_supported
    assert today is not None
    assert today.is_supported
    assert today.seconds > first.seconds
    assert today.plan.placement.pool_of(Role.ACTOR).rollout is not None


def test_the_simplest_of_equally_fast_placements_is_first() -> None:
    """One step off on two pools is a little faster than one pool, which this version can run."""
    result = search(
        samples.workload(samples.trained_model(samples.LLAMA3_8B), max_tokens_per_micro_batch=4096), TWO_NODES
    )
    first, *others = result.candidates
    faster = [each for each in others if each.seconds < first.seconds]
    assert first.is_supported
    assert faster
    assert all(each.is_tie and "this version cannot run it" in each.reasons for each in faster)
    assert result.best_supported is first


def test_pools_have_names_of_the_job_or_of_their_roles() -> None:
    """The actor's pool comes first."""
    names = [pool.name for pool in search(PPO, TWO_NODES).candidates[-1].plan.placement.pools]
    assert len(names) > 1
    assert names[0].startswith("actor")
    kept = search(PPO, TWO_NODES, pool_names=("mine",)).candidates
    assert {each.plan.placement.pools[0].name for each in kept} == {"mine"}
    assert all(each.plan.placement.pools[0] is each.plan.placement.pool_of(Role.ACTOR) for each in kept)
    assert all(
        len({pool.name for pool in each.plan.placement.pools}) == len(each.plan.placement.pools) for each in kept
    )


def test_runnable_placements_follow_the_rules_of_the_contract() -> None:
    """Batches and layouts divide, an engine stays within a node: 24 responses on nodes of 8 GPUs."""
    job = replace(PPO, batch_size=6, mini_batch_size=6, group_size=4)
    best = search(job, (NodeGroup(4, 8, samples.gpu()),)).best_supported
    assert best is not None
    for pool in best.plan.placement.pools:
        for role, layout in pool.layouts.items():
            assert layout.num_gpus % layout.shard_size == layout.num_gpus % layout.sequence_parallel == 0
            assert role is Role.REF or 24 % layout.num_data_ranks == 0
        assert pool.rollout is None or pool.gpus_per_node % pool.rollout.tensor_parallel == 0


def test_a_reference_that_is_the_actor_has_its_pool_and_layout() -> None:
    lora = LoraShape(16, 20_000_000, 252, syncs_alone=True)
    reference = samples.frozen_model(is_actor_without_adapters=True)
    job = samples.workload(
        samples.trained_model(lora=lora), models={Role.ACTOR: samples.trained_model(lora=lora), Role.REF: reference}
    )
    for candidate in search(job, TWO_NODES).candidates:
        layouts = candidate.plan.placement.pool_of(Role.ACTOR).layouts
        assert layouts[Role.REF] == layouts[Role.ACTOR]


def test_gpus_that_do_not_help_are_not_used() -> None:
    """Eight responses, one per engine: more engines than responses are no faster."""
    job = samples.workload(batch_size=1, mini_batch_size=1, models={Role.ACTOR: samples.trained_model()})
    best = search(
        replace(job, rollout=RolloutWork(samples.QWEN3_4B, max_model_length=4096)), (NodeGroup(16, 8, samples.gpu()),)
    )
    assert best.candidates[0].plan.placement.num_gpus < 128


def test_an_equally_fast_placement_on_half_of_the_gpus_is_preferred() -> None:
    """With eight responses, more GPUs save less than a tenth of a step. Hundreds of responses need all GPUs."""
    small = samples.workload(
        batch_size=8, group_size=1, mini_batch_size=8, models={Role.ACTOR: samples.trained_model()}
    )
    assert search(small, TWO_NODES).candidates[0].plan.placement.num_gpus <= 8
    assert search(PPO, TWO_NODES).candidates[0].plan.placement.num_gpus == 16


def test_if_nothing_fits_the_nearest_miss_has_its_shortage_and_changes() -> None:
    job = samples.workload(
        samples.trained_model(samples.LLAMA3_8B),
        models={Role.ACTOR: samples.trained_model(samples.LLAMA3_8B), Role.CRITIC: samples.critic(samples.LLAMA3_8B)},
    )
    result = search(job, (NodeGroup(1, 2, samples.gpu()),))
    assert (result.candidates, result.best_supported, result.changes) == ((), None, ())
    assert result.nearest_miss is not None
    assert result.nearest_miss.verdict is Verdict.TOO_LARGE
    lacks = max(-phase.spare for phase in result.nearest_miss.all_phases) / 2**30
    assert result.advice[0] == Mentions("Nothing fits", f"{lacks:.1f} GiB too much")
    assert any(
        change.field == "spec.pools[0].nodes" for each in result.nearest_miss.proposals for change in each.changes
    )


def test_if_nothing_fits_a_sufficient_number_of_nodes_is_named() -> None:
    """It fits on the named number, and on no smaller one."""
    job = samples.workload(
        samples.trained_model(samples.LLAMA3_8B),
        models={Role.ACTOR: samples.trained_model(samples.LLAMA3_8B), Role.CRITIC: samples.critic(samples.LLAMA3_8B)},
    )
    found = re.fullmatch(
        r".* would fit on (\d+)x2xtest: .*\bon (\d+) test\.", search(job, (NodeGroup(1, 2, samples.gpu()),)).advice[1]
    )
    assert found is not None
    nodes = int(found[1])
    assert nodes in (2, 4, 8, 16)
    assert search(job, (NodeGroup(nodes, 2, samples.gpu()),)).nearest_miss is None
    assert search(job, (NodeGroup(nodes // 2, 2, samples.gpu()),)).nearest_miss is not None
    tiny = search(job, (NodeGroup(1, 2, samples.gpu(1)),)).advice[1]
    assert tiny == Mentions("Nothing fits on 16x2xtest", "more GPUs")


def test_if_nothing_fits_a_changed_job_is_searched() -> None:
    """Without gradient checkpointing. With fewer tokens per micro-batch, or with checkpointing, there is a
    placement."""
    job = samples.workload(
        samples.trained_model(samples.LLAMA3_8B, checkpoints_activations=False), max_tokens_per_micro_batch=32768
    )
    found = search(job, (NodeGroup(1, 8, samples.gpu()),))
    assert found.nearest_miss is not None
    assert found.changes
    assert not any(each.field.startswith("spec.pools") for each in found.changes)
    assert found.best_supported is not None
    assert found.candidates == search(found.best_supported.plan.workload, (NodeGroup(1, 8, samples.gpu()),)).candidates


def test_a_cluster_without_gpus_is_rejected() -> None:
    for cluster in ((), (NodeGroup(0, 8, samples.gpu()),)):
        with pytest.raises(PlanError, match="has no GPUs"):
            search(PPO, cluster)


def test_a_role_without_any_layout_is_rejected() -> None:
    """The longest row has 4,096 tokens, and eight GPUs have room for 800."""
    with pytest.raises(PlanError, match=r"spec\.roles\.actor: .*maxTokensPerMicroBatch"):
        search(replace(PPO, max_tokens_per_micro_batch=100), TWO_NODES)


def test_responses_that_divide_on_no_pool_are_named_as_the_cause() -> None:
    """15 responses on 8 GPUs, with a model whose 9 heads divide by 3 only."""
    model = replace(samples.QWEN3_4B, num_heads=9, num_kv_heads=3)
    job = samples.workload(samples.trained_model(model), batch_size=3, mini_batch_size=3, group_size=5)
    with pytest.raises(PlanError) as refused:
        search(job, (NodeGroup(1, 8, samples.gpu()),))
    assert "batchSize 3, miniBatchSize 3, groupSize 5, pools of 8 GPUs); change batchSize, miniBatchSize" in str(
        refused.value
    )
    assert "maxTokensPerMicroBatch" not in str(refused.value)


def test_the_nearest_miss_can_be_run() -> None:
    """With a pool for the rollout alone, the actor's would lack less, but this version cannot run that."""
    model = replace(samples.LLAMA3_8B, num_layers=160)
    job = samples.workload(samples.trained_model(model), models={Role.ACTOR: samples.trained_model(model)})
    missed = search(job, (NodeGroup(1, 8, samples.gpu(40)), NodeGroup(1, 4, samples.gpu(40)))).nearest_miss
    assert missed is not None
    assert missed.placement.is_supported


def test_nodes_that_save_less_than_a_hundredth_of_a_step_stay_free() -> None:
    """Two responses per GPU or three: a third node makes only the short update faster. One node has too little
    memory."""
    job = samples.workload(batch_size=6, mini_batch_size=6, models={Role.ACTOR: samples.trained_model()})
    job = replace(job, max_tokens_per_micro_batch=4096)
    best = search(job, (NodeGroup(3, 8, samples.gpu(14)),)).best_supported
    assert best is not None
    assert best.plan.placement.num_gpus == 16


def test_of_equal_shortages_the_layout_without_another_shortage_is_nearer() -> None:
    """Updates with rows of 200,000 tokens lack most memory, on any number of GPUs per engine; eight GPUs have room for
    the KV cache of one longest sequence."""
    model = replace(samples.LLAMA3_8B, num_layers=64, hidden_size=5120, num_heads=64, mlp_size=25600)
    job = samples.workload(samples.trained_model(model), max_tokens_per_micro_batch=200_000)
    job = replace(job, lengths=replace(job.lengths, response_max=198_976), models={Role.ACTOR: job.models[Role.ACTOR]})
    job = replace(job, rollout=replace(job.rollout, max_model_length=200_000))
    missed = search(job, TWO_NODES).nearest_miss
    assert missed is not None
    assert not any(phase.kv_cache_shortage for phase in missed.all_phases)
    assert missed.placement.pools[0].rollout == RolloutLayout(16, 8)


def test_copies_span_a_part_of_a_node_or_whole_nodes() -> None:
    assert shard_sizes(PoolSize(0, 1, 4)) == [1, 2, 4]
    assert shard_sizes(PoolSize(0, 6, 8)) == [1, 2, 4, 8, 16, 24, 48]


def test_sequence_parallelism_divides_heads_and_has_room_for_the_longest_row() -> None:
    """32 query heads and 8 key/value heads; the longest row has 4,096 tokens, and 512 responses are distributed."""
    job = replace(PPO, max_tokens_per_micro_batch=2048)
    found = {layout.sequence_parallel for layout in train_layouts(Role.ACTOR, job, PoolSize(0, 1, 8))}
    assert found == {2, 4, 8}
    assert not list(train_layouts(Role.ACTOR, replace(job, batch_size=1, group_size=1), PoolSize(0, 2, 8)))


def test_on_nodes_of_any_size_the_divisors_of_a_node_are_tried() -> None:
    """A model with 12 heads of each kind on nodes with 6 GPUs; tensor and sequence parallelism are at most 8."""
    shape = replace(samples.QWEN3_4B, num_heads=12, num_kv_heads=12, mlp_size=9600, vocabulary_size=12 * 12800)
    job = samples.workload(samples.trained_model(shape))
    for per_node, expected in ((3, {1, 3}), (6, {1, 2, 3, 6}), (12, {1, 2, 3, 4, 6})):
        size = PoolSize(0, 1, per_node)
        assert {layout.tensor_parallel for layout in rollout_layouts(job, size, samples.gpu())} == expected
        assert set(sequence_parallel_sizes(Role.ACTOR, job, size)) == expected


PPO_FIELDS: dict[str, object] = {
    "spec.training.algorithm": {"type": "PPO", "kl": {"coefficient": 0.01}},
    "spec.training.rewards": [{"type": "RewardModel", "rewardModel": {"source": "owner/judge"}}],
}
LORA_FIELDS: dict[str, object] = {
    "spec.training.algorithm": {"kl": {"coefficient": 0.01}},
    "spec.training.model": {"source": "owner/model", "lora": {"rank": 8}},
}
OWN_REFERENCE_FIELDS = LORA_FIELDS | {"spec.roles.ref.shardSize": 1}
GRADIENTS_FIELDS: dict[str, object] = {"spec.training.model.offload.gradients": True}


@pytest.mark.parametrize(
    "fields",
    [PPO_FIELDS, LORA_FIELDS, OWN_REFERENCE_FIELDS, GRADIENTS_FIELDS],
    ids=["PPO", "LoRA", "LoRA with a reference of its own", "offloaded gradients"],
)
@pytest.mark.parametrize(("batch", "mini_batch", "group", "per_node"), [(12, 6, 5, 6), (6, 3, 14, 4)])
def test_every_runnable_plan_makes_a_valid_job(
    fields: dict[str, object], batch: int, mini_batch: int, group: int, per_node: int
) -> None:
    sizes: dict[str, object] = {
        "spec.training.batchSize": batch,
        "spec.training.miniBatchSize": mini_batch,
        "spec.training.rollout.groupSize": group,
        "spec.pools": [{"name": "main", "nodes": 1, "gpusPerNode": 1}],
    }
    spec = RLJob.from_wire(valid_job(fields | sizes)).spec
    job = workload_of(spec, dict.fromkeys(model_sources(spec), samples.QWEN3_4B))
    cluster = (NodeGroup(3, per_node, samples.gpu()), NodeGroup(1, 4, samples.gpu(48)))
    found = search(job, cluster, num_wanted=30, pool_names=["main"]).candidates
    today = [each.plan.placement for each in found if each.is_supported]
    assert today
    for placement in today:
        planned = spec_with(spec, placement)
        assert not violations(planned)
        assert placement_of(planned, {pool.name: pool.gpu for pool in placement.pools}) == placement
        assert workload_of(planned, dict.fromkeys(model_sources(planned), samples.QWEN3_4B)) == job
