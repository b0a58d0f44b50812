"""Changes that make a job fit: only those that do, the cheapest first, written as in a job file."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rljob_planner.constants import Constants
from rljob_planner.kv_cache import engine_memory
from rljob_planner.memory.job_changes import smaller_jobs
from rljob_planner.memory.phases import DRIVER_BYTES
from rljob_planner.memory.proposals import Proposals, all_phases, find_proposals, fullest_phase
from rljob_planner.plan import Plan, plan_of
from rljob_planner.plan_types import Part, Phase, PhaseMemory, Verdict, fails_from_second_step, verdict_of
from rljob_planner.workload import ModelOffload, Placement, Role, TrainLayout, Workload
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples

CONSTANTS = Constants()


def second_step() -> tuple[Workload, Placement]:
    """Its first rollout fits and its second does not: see test_memory_phases.py."""
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.85))
    return job, samples.placement(samples.one_pool(job, gpus_per_node=4))


def fields(proposals: Proposals | Plan) -> list[dict[str, str]]:
    found = proposals.fitting if isinstance(proposals, Proposals) else proposals.proposals
    return [{change.field: change.value for change in proposal.changes} for proposal in found]


def test_a_job_that_fits_gets_no_changes() -> None:
    job = samples.workload()
    assert find_proposals(job, samples.placement(samples.one_pool(job)), CONSTANTS) == Proposals()


def test_moments_that_exist_from_the_second_step_are_found_and_mentioned() -> None:
    plan = plan_of(*second_step())
    assert plan.verdict is Verdict.TOO_LARGE
    assert plan.fullest_phase.phase is Phase.LATER_WAKE
    assert fails_from_second_step(plan.all_phases)
    assert any("optimizer's moments" in note for note in plan.notes)
    # 79.3 GiB without 13.1 of shards and moments and without a tenth of reserve leave 0.725 of 80.
    assert {"spec.training.rollout.gpuMemoryUtilization": "0.7"} in fields(plan)
    assert {"spec.training.model.offload.optimizer": "true"} in fields(plan)


def test_an_engine_that_never_fits_does_not_fail_only_from_the_second_step() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.95))
    phases = all_phases(job, samples.placement(samples.one_pool(job, gpus_per_node=1)), CONSTANTS)
    assert verdict_of(phases) is Verdict.TOO_LARGE
    assert not fails_from_second_step(phases)


def test_an_update_that_never_fits_does_not_fail_only_from_the_second_step() -> None:
    job, placement = second_step()
    job = replace(job, models={**job.models, Role.ACTOR: samples.trained_model(checkpoints_activations=False)})
    plan = plan_of(job, placement)
    assert any(phase.phase is Phase.LATER_WAKE and phase.spare < 0 for phase in plan.all_phases)
    assert not fails_from_second_step(plan.all_phases)


def test_too_many_activations_get_checkpointing_or_smaller_micro_batches() -> None:
    """111.7 GB on a GPU of 80 GiB (Qwen3 4B, 16,384 tokens, 8 GPUs); 6.1 MB per token, and at least 4,096 tokens."""
    job = samples.workload(samples.trained_model(checkpoints_activations=False))
    plan = plan_of(job, samples.placement(samples.one_pool(job)))
    assert plan.fullest_phase.phase is Phase.UPDATE
    assert {"spec.training.model.gradientCheckpointing": "Always"} in fields(plan)
    assert {"spec.training.maxTokensPerMicroBatch": "8192"} in fields(plan)
    # The longest row is 4,096 tokens; the contract accepts no smaller micro-batch.
    assert all(int(each.get("spec.training.maxTokensPerMicroBatch", 4096)) >= 4096 for each in fields(plan))
    # Four ranks that share rows have room for one with a quarter each.
    shared = replace(samples.one_pool(job), layouts={role: TrainLayout(8, 8, 4) for role in job.models})
    ladders = smaller_jobs(job, samples.placement(shared))
    field = "spec.training.maxTokensPerMicroBatch"
    [values] = [[each.change.value for each in ladder] for ladder in ladders if ladder[0].change.field == field]
    assert values == ["8192", "4096", "2048", "1024"]


def test_every_proposal_has_its_own_memory() -> None:
    job, placement = second_step()
    for proposal in find_proposals(job, placement, CONSTANTS).fitting:
        phases = all_phases(proposal.workload, proposal.placement, CONSTANTS)
        assert proposal.verdict is verdict_of(phases) is not Verdict.TOO_LARGE
        assert proposal.fullest_phase == fullest_phase(phases)
        assert (proposal.workload, proposal.placement) != (job, placement)


def test_two_changes_if_one_is_not_enough() -> None:
    """Qwen3 4B on one GPU: 16 P alone are 64 GB."""
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.8))
    proposals = find_proposals(job, samples.placement(samples.one_pool(job, gpus_per_node=1)), CONSTANTS)
    gentle = [proposal for proposal in proposals.fitting if not any(change.is_drastic for change in proposal.changes)]
    assert gentle
    assert all(len(proposal.changes) == 2 for proposal in gentle)
    assert all(len({change.field for change in proposal.changes}) == 2 for proposal in gentle)


def test_a_field_that_may_go_up_or_down_is_combined_in_the_direction_that_helps() -> None:
    """On CPUs: a cache of 256 MiB is too small for one row, and an update keeps too many activations."""
    job = samples.workload(samples.trained_model(compute_bytes=4, checkpoints_activations=False))
    rollout = replace(job.rollout, weight_bytes=4, cpu_kv_cache_bytes=2**28)
    job = replace(job, rollout=rollout, models={Role.ACTOR: job.models[Role.ACTOR]})
    pool = samples.one_pool(job, samples.gpu(180, is_cpu=True), gpus_per_node=1)
    found = fields(find_proposals(job, samples.placement(pool), CONSTANTS))
    cache = {"spec.training.rollout.cpuKvCache": "2Gi"}
    assert {**cache, "spec.training.model.gradientCheckpointing": "Always"} in found
    assert {**cache, "spec.training.maxTokensPerMicroBatch": "4096"} in found


def test_every_field_that_is_enough_alone_is_proposed() -> None:
    """0.1 GiB are missing, so that many fields are."""
    job = samples.workload(samples.trained_model(checkpoints_activations=False, defers_reduction=True))
    job = replace(job, models={**job.models, Role.CRITIC: samples.critic(), Role.REWARD_MODEL: samples.frozen_model()})
    needed = max(phase.total for phase in all_phases(job, samples.placement(samples.one_pool(job)), CONSTANTS))
    gpu = replace(samples.gpu(), memory_bytes=needed + DRIVER_BYTES - 0.1 * samples.GIB)
    rollout = replace(job.rollout, memory_utilization=0.3)
    job, placement = replace(job, rollout=rollout), samples.placement(samples.one_pool(job, gpu))
    enough = {
        each.change.field
        for ladder in smaller_jobs(job, placement)
        for each in ladder
        if verdict_of(all_phases(each.workload, each.placement, CONSTANTS)) is not Verdict.TOO_LARGE
    }
    found = find_proposals(job, placement, CONSTANTS).fitting
    assert {proposal.changes[0].field for proposal in found} == enough
    assert len(enough) > 8


def test_more_changes_if_two_are_not_enough() -> None:
    """Weights of 8B (16 GB) leave no room for a cache in half of 22 GiB, and 16 bytes per parameter do not fit beside
    the activations of 16,384 tokens: more GPUs, checkpointing and a larger share are all needed."""
    job = samples.workload(
        samples.trained_model(samples.LLAMA3_8B), rollout=replace(samples.workload().rollout, shape=samples.LLAMA3_8B)
    )
    [proposal] = find_proposals(
        job, samples.placement(samples.one_pool(job, samples.gpu(22), gpus_per_node=1)), CONSTANTS
    ).fitting
    assert 2 < len(proposal.changes) <= 4
    assert len({change.field for change in proposal.changes}) == len(proposal.changes)
    phases = all_phases(proposal.workload, proposal.placement, CONSTANTS)
    assert proposal.verdict is verdict_of(phases) is not Verdict.TOO_LARGE
    # The operator asks for single changes only.
    assert (
        find_proposals(
            job,
            samples.placement(samples.one_pool(job, samples.gpu(22), gpus_per_node=1)),
            CONSTANTS,
            with_combinations=False,
        ).fitting
        == ()
    )


def test_the_nearest_miss_if_nothing_helps() -> None:
    job = samples.workload(
        samples.trained_model(replace(samples.LLAMA3_8B, num_layers=640)), batch_size=1, mini_batch_size=1, group_size=1
    )
    plan = plan_of(job, samples.placement(samples.one_pool(job, samples.gpu(16), gpus_per_node=1)))
    assert plan.proposals == ()
    assert plan.nearest_miss is not None
    assert plan.nearest_miss.fullest_phase.spare > plan.fullest_phase.spare
    assert plan.nearest_miss.verdict is Verdict.TOO_LARGE
    assert len(plan.nearest_miss.changes) <= 4


def test_a_cache_that_is_too_small_gets_a_larger_share() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.2, max_model_length=60_000))
    pool = samples.one_pool(job)
    found = fields(find_proposals(job, samples.placement(pool), CONSTANTS))
    # 8.0 + 1.8 + 5.3 + 0.6 GB without the cache, and 8.8 GB for it, are 0.29 of 85.9 GB.
    assert {"spec.training.rollout.gpuMemoryUtilization": "0.3"} in found
    assert {"spec.roles.rollout.tensorParallel": "2"} in found
    parts = samples.placement(replace(pool, gpu=replace(pool.gpu, is_mig_device=True)))
    changes = find_proposals(job, parts, CONSTANTS)
    assert not any("tensorParallel" in field for each in fields(changes) for field in each)


def test_a_job_that_hardly_fits_gets_changes() -> None:
    job = samples.workload(rollout=replace(samples.workload().rollout, memory_utilization=0.9))
    placement = samples.placement(samples.one_pool(job))
    assert verdict_of(all_phases(job, placement, CONSTANTS)) is Verdict.TIGHT
    proposals = find_proposals(job, placement, CONSTANTS)
    assert all(proposal.verdict is Verdict.FITS for proposal in proposals.fitting)
    assert {"spec.training.rollout.gpuMemoryUtilization": "0.8"} in fields(proposals)


def test_the_fullest_phase_has_the_smallest_share_of_free_memory() -> None:
    """5 of 10 GB are a larger share than 8 of 80."""
    small, large = (
        PhaseMemory(Phase.UPDATE, name, (Part("actor parameters", used),), limit)
        for name, used, limit in (("small", 5e9, 10e9), ("large", 72e9, 80e9))
    )
    assert fullest_phase((small, large)) is large


def test_a_tight_job_gets_two_changes_if_one_is_not_enough() -> None:
    """Wake-ups and updates both have less than a tenth of free memory, for different reasons."""
    job = samples.workload(
        samples.trained_model(checkpoints_activations=False),
        max_tokens_per_micro_batch=10_500,
        rollout=replace(samples.workload().rollout, memory_utilization=0.85),
    )
    placement = samples.placement(samples.one_pool(job))
    assert verdict_of(all_phases(job, placement, CONSTANTS)) is Verdict.TIGHT
    found = find_proposals(job, placement, CONSTANTS).fitting
    both = {
        "spec.training.rollout.gpuMemoryUtilization": "0.8",
        "spec.training.model.gradientCheckpointing": "Always",
    }
    assert both in [{each.field: each.value for each in proposal.changes} for proposal in found]
    assert all(proposal.verdict is Verdict.FITS for proposal in found)


def test_proposals_are_in_the_order_of_their_cost() -> None:
    plan = plan_of(*second_step())
    drastic = [any(change.is_drastic for change in proposal.changes) for proposal in plan.proposals]
    assert drastic == sorted(drastic)
    assert all(proposal.step_seconds is not None for proposal in plan.proposals)


def every_kind() -> Workload:
    job = samples.workload(
        samples.trained_model(offload=ModelOffload(), checkpoints_activations=False), needs_old_logprobs=True
    )
    models = {
        **job.models,
        Role.CRITIC: samples.critic(checkpoints_activations=False),
        Role.REWARD_MODEL: samples.frozen_model(samples.QWEN3_4B),
    }
    return replace(job, models=models)


def test_proposed_fields_exist_in_the_contract() -> None:
    job = every_kind()
    pool = samples.one_pool(job, gpus_per_node=8)
    pool = replace(pool, layouts={role: TrainLayout(8, 4) for role in pool.layouts})
    found = {ladder[0].change.field for ladder in smaller_jobs(job, samples.placement(pool))}
    assert found == {
        "spec.training.rollout.gpuMemoryUtilization",
        "spec.training.rollout.maxNumSequences",
        "spec.training.maxTokensPerMicroBatch",
        "spec.training.model.gradientCheckpointing",
        "spec.training.model.offload.optimizer",
        "spec.training.model.offload.parameters",
        "spec.training.model.offload.reference",
        "spec.training.model.lora",
        "spec.training.critic.model.gradientCheckpointing",
        "spec.training.critic.model.offload.optimizer",
        "spec.training.critic.model.offload.parameters",
        "spec.training.rewards[].rewardModel.offload",
        *(f"spec.roles.{role}.shardSize" for role in ("actor", "ref", "critic", "rewardModel")),
        *(f"spec.roles.{role}.sequenceParallel" for role in ("actor", "ref", "critic", "rewardModel")),
        "spec.roles.rollout.tensorParallel",
        "spec.pools[0].nodes",
    }
    assert all(re.fullmatch(r"[a-zA-Z]+(\[\d*\])?(\.[a-zA-Z]+(\[\d*\])?)*", field) for field in found)


def test_gradients_are_offloaded_only_with_one_replica() -> None:
    job = samples.workload()
    whole = samples.placement(samples.one_pool(job))
    halves = samples.placement(replace(samples.one_pool(job), layouts={role: TrainLayout(8, 4) for role in job.models}))
    assert [gradients_may_leave(job, each) for each in (whole, halves)] == [True, False]
    deferred = samples.workload(samples.trained_model(defers_reduction=True))
    assert not gradients_may_leave(deferred, whole)


def gradients_may_leave(job: Workload, placement: Placement) -> bool:
    field = "spec.training.model.offload.gradients"
    return any(ladder[0].change.field == field for ladder in smaller_jobs(job, placement))


@pytest.mark.parametrize(("nodes", "batch_size", "expected"), [(1, 64, ["2", "4", "8", "16"]), (1, 2, ["2"])])
def test_more_gpus_are_proposed_only_if_the_batch_divides_by_them(
    nodes: int, batch_size: int, expected: list[str]
) -> None:
    """8 responses per prompt on 8 GPUs of a node."""
    job = samples.workload(batch_size=batch_size, mini_batch_size=batch_size)
    placement = samples.placement(samples.one_pool(job, nodes=nodes))
    [more] = [each for each in smaller_jobs(job, placement) if each[0].change.field == "spec.pools[0].nodes"]
    assert [each.change.value for each in more] == expected


def test_gpu_hours_count_all_gpus_and_steps() -> None:
    job = samples.workload(num_steps=10)
    plan = plan_of(job, samples.placement(samples.one_pool(job, nodes=2)))
    assert plan.gpu_hours.likely == pytest.approx(16 * 10 * plan.step.total.likely / 3600)
    assert plan.run_seconds.high == pytest.approx(10 * plan.step.total.high)


def test_sequences_that_wait_are_mentioned() -> None:
    """32 requests of 24,576 + 8,192 / 2 tokens at a random moment, 144 KiB each: about 3.94 GiB per request."""
    lengths = replace(
        samples.workload().lengths, prompt_mean=24_576.0, prompt_max=24_576, response_mean=8192.0, response_max=8192
    )
    job = samples.workload(lengths=lengths, max_tokens_per_micro_batch=32768)
    job = replace(job, rollout=replace(job.rollout, max_model_length=32768))
    pool = samples.one_pool(job)
    plan, engine = plan_of(job, samples.placement(pool)), engine_memory(pool, job, CONSTANTS)
    assert engine is not None
    assert plan.sequences_at_once == pytest.approx(engine.budget.kv_cache / samples.GIB / 3.94, rel=0.02)
    assert any(note == Mentions("KV cache", "sequences of mean length", "gpuMemoryUtilization") for note in plan.notes)
