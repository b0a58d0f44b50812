"""Suggestions that make a job faster: only changes that help, fit and are valid, with the model's gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.advice.run_facts import facts_of
from rljob_planner.advice.tuning import Advice, advice_of, findings_of, together
from rljob_planner.constants import Constants
from rljob_planner.memory.job_changes import faster_jobs
from rljob_planner.memory.proposals import all_phases
from rljob_planner.plan import plan_of
from rljob_planner.plan_types import Verdict, verdict_of
from rljob_planner.timing.step import step_time
from rljob_planner.workload import ModelOffload, PlacedPool, Placement, Role, TokenLengths, TrainLayout, Workload
from rljob_testing.messages import Mentions
from rljob_testing.planner import samples

CONSTANTS = Constants()
SHORT = TokenLengths(64.0, 128, 32.0, 64)


def by_field(job: Workload, placement: Placement) -> dict[str, Advice]:
    return {each.change.field: each for each in advice_of(job, placement, CONSTANTS)}


def test_each_gain_is_that_of_the_model_with_the_change() -> None:
    job = samples.workload(samples.trained_model(offload=ModelOffload(parameters=True, optimizer=True)))
    job = replace(job, rollout=replace(job.rollout, max_sequences=16), mini_batch_size=8, lengths=SHORT)
    placement = samples.placement(samples.one_pool(job, tensor_parallel=4))
    now = step_time(job, placement, CONSTANTS).total.likely
    found = advice_of(job, placement, CONSTANTS)
    assert len(found) > 3
    for each in found:
        after = step_time(each.changed.workload, each.changed.placement, CONSTANTS).total.likely
        assert each.gain == pytest.approx(now - after)
        assert each.share >= (0.01 if each.is_free else 0.03)
        assert sum(seconds for _, seconds in each.phases) == pytest.approx(each.gain, abs=1e-6)
        assert verdict_of(all_phases(each.changed.workload, each.changed.placement, CONSTANTS)) is each.verdict
        assert each.verdict is not Verdict.TOO_LARGE


def test_free_changes_come_first_then_the_largest_gain() -> None:
    """With short rows, updates take much of a step; fewer, larger updates would be another training."""
    job = replace(
        samples.workload(samples.trained_model(offload=ModelOffload(optimizer=True))), mini_batch_size=8, lengths=SHORT
    )
    job = replace(job, rollout=replace(job.rollout, max_sequences=16))
    found = advice_of(job, samples.placement(samples.one_pool(job)), CONSTANTS)
    free = [each.is_free for each in found]
    assert free == sorted(free, reverse=True)
    assert any(free)
    assert not all(free)
    for same in (True, False):
        gains = [each.gain for each, is_free in zip(found, free, strict=True) if is_free is same]
        assert gains == sorted(gains, reverse=True)


def test_a_separate_pool_is_proposed_with_its_gpus() -> None:
    """The critic moves to its own pool, with the GPUs of one node; that is not free."""
    job = samples.workload(models={Role.ACTOR: samples.trained_model(), Role.CRITIC: samples.critic()})
    placement = samples.placement(samples.one_pool(job))
    found = by_field(job, placement)
    advice = found["spec.roles.critic.pool"]
    assert (advice.change.before, advice.change.value, advice.more_gpus) == ("pool", "critic", 8)
    assert list(advice.changed.placement.pool_of(Role.CRITIC).layouts) == [Role.CRITIC]
    assert not advice.is_free
    assert not any(each.more_gpus for each in found.values() if each is not advice)
    assert advice.change not in [each.change for each in together(job, placement, CONSTANTS)]


def own_pools(job: Workload, pool: PlacedPool) -> dict[str, TrainLayout]:
    """The layouts for which a separate pool is proposed, on GPUs with room for everything."""
    placement = samples.placement(replace(pool, gpu=samples.gpu(2000)))
    advice = [each for each in advice_of(job, placement, CONSTANTS) if each.change.field.endswith(".pool")]
    return {each.change.value: each.changed.placement.pools[-1].layouts[Role.CRITIC] for each in advice}


def test_a_separate_pool_follows_the_rules_of_the_contract() -> None:
    """Sequence parallelism is kept: the longest row needs it, and responses of an update divide by it. A layout that
    the job file sets must divide a node, and the pool's name must be unused."""
    actor = samples.trained_model(samples.LLAMA3_8B)
    job = samples.workload(actor, models={Role.ACTOR: actor, Role.CRITIC: samples.critic()})
    job = replace(job, max_tokens_per_micro_batch=1024, batch_size=512, mini_batch_size=4, group_size=1)
    pool = samples.one_pool(job, nodes=2)

    def found(critic: TrainLayout, name: str = "main") -> dict[str, TrainLayout]:
        layouts = {Role.ACTOR: TrainLayout(16, 16, 4), Role.CRITIC: critic}
        return own_pools(job, replace(pool, name=name, layouts=layouts))

    assert found(TrainLayout(16, 16, 4)) == {"critic": TrainLayout(8, 8, 4)}
    assert found(TrainLayout(16, 8, 4)) == {"critic": TrainLayout(8, 8, 4)}
    assert found(TrainLayout(16, 16, 4, has_fixed_shard_size=True)) == {}
    assert found(TrainLayout(16, 16, 16)) == {}
    assert found(TrainLayout(16, 16, 4), "critic") == {}


def test_more_sequences_at_once_are_proposed_up_to_the_number_of_requests() -> None:
    """64 prompts x 8 responses on 8 engines are 64 responses each."""
    job = samples.workload()
    job = replace(job, rollout=replace(job.rollout, max_sequences=16))
    advice = by_field(job, samples.placement(samples.one_pool(job)))["spec.training.rollout.maxNumSequences"]
    assert (advice.change.before, advice.change.value) == ("16", "64")
    assert advice.phases[0][0] == "generate"


def test_checkpointing_is_turned_off_if_there_is_room() -> None:
    """16,384 tokens of Qwen3-4B keep about 100 GB without checkpointing (see test_memory_*): too much for a GPU with 80
    GiB, not for one with 288."""
    field = "spec.training.model.gradientCheckpointing"
    job = samples.workload()
    assert field not in by_field(job, samples.placement(samples.one_pool(job, samples.gpu(80))))
    advice = by_field(job, samples.placement(samples.one_pool(job, samples.gpu(288))))[field]
    assert (advice.change.before, advice.change.value) == ("Always", "Never")
    assert not advice.changed.workload.models[Role.ACTOR].checkpoints_activations
    assert dict(advice.phases)["update_actor"] > 0


def test_offload_is_turned_off_if_there_is_room() -> None:
    """In a step with few tokens the copies take a visible share."""
    job = samples.workload(samples.trained_model(offload=ModelOffload(parameters=True, gradients=True, optimizer=True)))
    job = replace(job, lengths=SHORT)
    found = by_field(job, samples.placement(samples.one_pool(job, samples.gpu(288))))
    assert "spec.training.model.offload.optimizer" in found
    kept = found["spec.training.model.offload.optimizer"].changed.workload.models[Role.ACTOR].offload
    assert kept == ModelOffload(parameters=True, gradients=True)


@pytest.mark.parametrize("in_any_case", [True, False])
def test_a_single_update_needs_no_pass_for_old_log_probabilities(in_any_case: bool) -> None:
    """Unless something else needs the pass."""
    job = replace(samples.workload(), mini_batch_size=32, needs_old_logprobs=True, lengths=SHORT)
    job = replace(job, always_needs_old_logprobs=in_any_case)
    ladders = faster_jobs(job, samples.placement(samples.one_pool(job)))
    larger = next(each for each in ladders if each[0].change.field == "spec.training.miniBatchSize")
    assert [each.change.value for each in larger] == ["64"]
    assert larger[0].workload.needs_old_logprobs is in_any_case


def test_larger_mini_batches_divide_the_batch_and_by_the_ranks() -> None:
    """12 prompts with 4 responses each on 8 ranks."""
    job = samples.workload(batch_size=12, mini_batch_size=2, group_size=4)
    ladders = faster_jobs(job, samples.placement(samples.one_pool(job)))
    larger = next(each for each in ladders if each[0].change.field == "spec.training.miniBatchSize")
    assert [each.change.value for each in larger] == ["4", "6", "12"]


def test_a_job_with_nothing_to_gain_gets_no_advice() -> None:
    """One GPU, everything at once, nothing offloaded."""
    job = replace(
        samples.workload(samples.trained_model(checkpoints_activations=False)), batch_size=1, mini_batch_size=1
    )
    placement = samples.placement(samples.one_pool(job, samples.gpu(2000), gpus_per_node=1))
    job = replace(job, models={Role.ACTOR: job.models[Role.ACTOR]})
    placement = samples.placement(
        replace(placement.pools[0], layouts={Role.ACTOR: placement.pools[0].layouts[Role.ACTOR]})
    )
    fields = [each.change.field for each in advice_of(job, placement, CONSTANTS) if each.is_free]
    assert fields == []


def test_changes_that_the_contract_rejects_are_not_proposed() -> None:
    """Gradients with several replicas cannot be offloaded, nor with deferral; TP divides a node's GPUs and the
    heads."""
    job = samples.workload(samples.trained_model(offload=ModelOffload(gradients=True)))
    pool = samples.one_pool(job)
    for ladder in faster_jobs(job, samples.placement(pool)):
        for each in ladder:
            actor = each.workload.models[Role.ACTOR]
            home = each.placement.pool_of(Role.ACTOR)
            layout, rollout = home.layouts[Role.ACTOR], home.rollout
            assert rollout is not None
            assert not (actor.offload.gradients and (layout.num_replicas > 1 or actor.defers_reduction))
            assert home.gpus_per_node % rollout.tensor_parallel == 0
            assert 32 % rollout.tensor_parallel == 0
            assert layout.num_gpus % layout.shard_size == 0
            assert each.workload.batch_size % each.workload.mini_batch_size == 0
            assert home is not pool or each.workload != job


def test_values_near_the_present_one_come_first() -> None:
    """Of two values that help alike, the nearer one is suggested."""
    job = samples.workload()
    layouts = {role: TrainLayout(8, 8, 4) for role in job.models}
    placement = samples.placement(replace(samples.one_pool(job, tensor_parallel=4), layouts=layouts))
    values = {each[0].change.field: [value.change.value for value in each] for each in faster_jobs(job, placement)}
    assert values["spec.roles.actor.shardSize"] == ["4", "2", "1"]
    assert values["spec.roles.actor.sequenceParallel"] == ["2", "1"]
    assert values["spec.roles.rollout.tensorParallel"] == ["2", "8", "1"]
    assert values["spec.training.maxTokensPerMicroBatch"][:2] == ["32768", "65536"]


def test_another_precision_is_not_free() -> None:
    """It changes what is learned."""
    job = samples.workload(samples.trained_model(compute_bytes=4))
    ladders = faster_jobs(job, samples.placement(samples.one_pool(job)))
    [half] = next(each for each in ladders if each[0].change.field == "spec.training.model.dtype")
    assert (half.change.before, half.change.value, half.changes_training) == ("Float32", "BFloat16", True)


def test_combined_changes_build_on_those_before() -> None:
    job = samples.workload(samples.trained_model(offload=ModelOffload(parameters=True, optimizer=True)))
    job = replace(job, rollout=replace(job.rollout, max_sequences=16))
    placement = samples.placement(samples.one_pool(job, tensor_parallel=4))
    found = together(job, placement, CONSTANTS)
    fields = [each.change.field for each in found]
    assert len(fields) == len(set(fields)) >= 2
    gains = sum(each.gain for each in found)
    before = step_time(job, placement, CONSTANTS).total.likely
    assert found[-1].step.likely == pytest.approx(before - gains)
    assert all(each.is_free for each in found)


def test_findings_show_what_phases_do_not() -> None:
    job = samples.workload()
    plan = plan_of(job, samples.placement(samples.one_pool(job)), CONSTANTS, with_proposals=False)
    row = {
        "timing_s/step": 10.0,
        "response_length/mean": 100.0,
        "response_length/max": 900.0,
        "actor/trained_fraction": 0.5,
        "perf/micro_batch_imbalance": 1.4,
    }
    facts = facts_of([{**row, "step": float(step)} for step in (1, 2, 3)], 64)
    found = {each.section: each.text for each in findings_of(facts, plan)}
    assert set(found) == {"balance", "responses that are not trained on"}
    assert found["responses that are not trained on"] == Mentions("50%", "actor/trained_fraction")
    assert "1.40 times" in found["balance"]
    calm = {**row, "actor/trained_fraction": 1.0, "perf/micro_batch_imbalance": 1.02}
    facts = facts_of([{**calm, "step": float(step)} for step in (1, 2, 3)], 64)
    assert findings_of(facts, plan) == ()
