"""Seconds of a step: its phases, which of them run at the same time, and the direction of ranges and changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_planner.constants import Constants
from rljob_planner.plan_types import Seconds, StepTime
from rljob_planner.timing.communication import NodeType, sync_cost
from rljob_planner.timing.step import OTHER, step_time
from rljob_planner.workload import (
    Head,
    LoraShape,
    ModelOffload,
    PlacedPool,
    Placement,
    Role,
    RolloutLayout,
    RolloutWork,
    Schedule,
    TokenLengths,
    TrainLayout,
    Workload,
)
from rljob_testing.planner import samples

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
EXACT = Constants(spread=0.0)


def ppo(**changes: object) -> Workload:
    """All roles."""
    job = samples.workload(needs_old_logprobs=True, **changes)
    scores = samples.frozen_model(head=Head.SCORE)
    return replace(job, models={**job.models, Role.CRITIC: samples.critic(), Role.REWARD_MODEL: scores})


def pool(name: str, roles: tuple[Role, ...], num_gpus: int = 8, *, generates: bool = False) -> PlacedPool:
    layouts = {role: TrainLayout(num_gpus, num_gpus) for role in roles}
    return PlacedPool(name, 1, num_gpus, samples.gpu(), layouts, RolloutLayout(num_gpus) if generates else None)


def likely(found: StepTime) -> dict[str, float]:
    return {phase.name: phase.seconds.likely for phase in found.phases}


def waited(found: StepTime) -> dict[str, float]:
    return {phase.name: phase.waited.likely for phase in found.phases}


def test_phases_have_the_names_of_their_metrics() -> None:
    job = replace(ppo(), reward_seconds=1.0)
    phases = {phase.name for phase in step_time(job, samples.placement(samples.one_pool(job))).phases}
    listed = set(re.findall(r"`timing_s/(\w+)`", METRICS.read_text()))
    assert phases - {OTHER} <= listed
    assert phases == {
        "weight_sync",
        "generate",
        "old_logprob",
        "ref",
        "values",
        "reward",
        "update_critic",
        "update_actor",
        OTHER,
    }


def test_a_job_with_less_has_fewer_phases() -> None:
    job = replace(samples.workload(), models={Role.ACTOR: samples.trained_model()})
    assert set(likely(step_time(job, samples.placement(samples.one_pool(job))))) == {
        "weight_sync",
        "generate",
        "update_actor",
        OTHER,
    }


def test_on_one_pool_phases_add_up() -> None:
    job = ppo()
    found = step_time(job, samples.placement(samples.one_pool(job)), EXACT)
    assert found.total.likely == pytest.approx(sum(likely(found).values()))
    # The reward model is called first, so the first of the passes waits for it, too.
    assert waited(found)["old_logprob"] == pytest.approx(likely(found)["reward"] + likely(found)["old_logprob"])
    assert waited(found)["reward"] == 0.0


def test_pools_run_at_the_same_time_within_a_stage() -> None:
    job = ppo()
    actor = pool("a", (Role.ACTOR,), generates=True)
    others = pool("b", (Role.REF, Role.CRITIC)), pool("c", (Role.REWARD_MODEL,), 2)
    found = step_time(job, Placement((actor, *others)), EXACT)
    own, waits = likely(found), waited(found)
    before = own["weight_sync"] + own["generate"]
    passes = max(own["old_logprob"], own["ref"] + own["values"], own["reward"])
    updates = max(own["update_actor"], own["update_critic"])
    assert found.total.likely == pytest.approx(before + passes + updates + own[OTHER])
    # Reference and critic run one after the other; the values come last of the three.
    assert own["old_logprob"] == pytest.approx(own["ref"])
    assert waits["ref"] == pytest.approx(0.0)
    assert waits["values"] == pytest.approx(own["ref"] + own["values"] - own["old_logprob"])
    assert waits["reward"] == pytest.approx(own["reward"] - own["ref"] - own["values"])
    assert waits["update_critic"] == pytest.approx(own["update_critic"])
    assert waits["update_actor"] == pytest.approx(max(0.0, own["update_actor"] - own["update_critic"]))
    assert sum(waits.values()) == pytest.approx(found.total.likely)


def test_reward_functions_run_at_the_same_time_as_the_passes() -> None:
    job = samples.workload(reward_seconds=0.1)
    found = step_time(job, samples.placement(samples.one_pool(job)), EXACT)
    assert waited(found)["reward"] == 0.0
    slow = replace(job, reward_seconds=100.0)
    found = step_time(slow, samples.placement(samples.one_pool(job)), EXACT)
    assert waited(found)["reward"] == pytest.approx(100.0 - likely(found)["ref"])


def test_passes_wait_for_scores_that_decide_what_is_trained_on() -> None:
    job = samples.workload(reward_seconds=5.0, waits_for_scores=True, trained_fraction=0.5)
    found = step_time(job, samples.placement(samples.one_pool(job)), EXACT)
    whole = step_time(replace(job, trained_fraction=1.0), samples.placement(samples.one_pool(job)), EXACT)
    assert waited(found)["reward"] == 5.0
    assert likely(found)["ref"] == pytest.approx(likely(whole)["ref"] / 2, rel=0.01)
    assert likely(found)["update_actor"] == pytest.approx(likely(whole)["update_actor"] / 2, rel=0.01)
    assert likely(found)["generate"] == likely(whole)["generate"]


def test_filtering_truncated_responses_needs_no_score() -> None:
    """The rollout reports which responses are truncated (trainer, controller/step_rows.py)."""
    job = samples.workload(reward_seconds=0.01, trained_fraction=0.5)
    assert waited(step_time(job, samples.placement(samples.one_pool(job)), EXACT))["reward"] == 0.0


def test_rounds_of_dynamic_sampling_multiply_generation() -> None:
    job = samples.workload()
    twice = step_time(replace(job, generation_factor=2.0), samples.placement(samples.one_pool(job)), EXACT)
    assert likely(twice)["generate"] == pytest.approx(
        2 * likely(step_time(job, samples.placement(samples.one_pool(job)), EXACT))["generate"]
    )
    # All responses are scored, also those that others replace.
    scored = ppo()
    once, twice = (
        step_time(each, samples.placement(samples.one_pool(scored)), EXACT)
        for each in (scored, replace(scored, generation_factor=2.0))
    )
    assert likely(twice)["reward"] == pytest.approx(2 * likely(once)["reward"], rel=0.01)
    assert likely(twice)["ref"] == likely(once)["ref"]


def test_each_prompt_has_one_greedy_response_more_in_the_same_call() -> None:
    """They are neither another round nor scores that the passes wait for."""
    job = ppo()
    one_more = replace(job, group_size=job.group_size + 1)
    greedy, plain, larger = (
        step_time(each, samples.placement(samples.one_pool(job)), EXACT)
        for each in (replace(job, has_greedy_responses=True), job, one_more)
    )
    assert likely(greedy)["generate"] == pytest.approx(likely(larger)["generate"])
    assert likely(plain)["generate"] < likely(greedy)["generate"] < 1.2 * likely(plain)["generate"]
    assert likely(greedy)["reward"] == pytest.approx(likely(larger)["reward"])
    assert likely(greedy)["update_actor"] == likely(plain)["update_actor"]
    assert waited(greedy)["reward"] == 0.0


def test_one_step_off_takes_the_longer_of_generation_and_training() -> None:
    job = samples.workload()
    rollout = PlacedPool("r", 1, 8, samples.gpu(), {}, RolloutLayout(8))
    train = pool("t", (Role.ACTOR, Role.REF))
    off, together = (
        step_time(job, Placement((train, rollout), each), EXACT)
        for each in (Schedule.ONE_STEP_OFF, Schedule.SYNCHRONOUS)
    )
    own = likely(off)
    rest = own["ref"] + own["update_actor"]
    assert off.total.likely == pytest.approx(max(own["generate"], rest) + own["weight_sync"] + own[OTHER])
    assert together.total.likely == pytest.approx(sum(own.values()))


def test_a_reference_that_is_the_actor_runs_on_its_pool() -> None:
    lora = LoraShape(8, 10_000_000, 7)
    job = samples.workload(samples.trained_model(lora=lora))
    job = replace(job, models={**job.models, Role.REF: samples.frozen_model(is_actor_without_adapters=True)})
    found = step_time(job, Placement((pool("a", (Role.ACTOR,), generates=True),)), EXACT)
    assert next(phase.pool for phase in found.phases if phase.name == "ref") == "a"


def test_a_role_without_a_pool_is_an_error() -> None:
    job = ppo()
    without = Placement((pool("a", (Role.ACTOR, Role.REF, Role.CRITIC), generates=True),))
    with pytest.raises(KeyError, match="rewardModel"):
        step_time(job, without, EXACT)


def test_updates_follow_the_number_of_epochs_and_mini_batches() -> None:
    job = samples.workload(num_epochs_per_batch=2)
    once = likely(step_time(samples.workload(), samples.placement(samples.one_pool(job)), EXACT))["update_actor"]
    assert likely(step_time(job, samples.placement(samples.one_pool(job)), EXACT))["update_actor"] == pytest.approx(
        2 * once
    )
    parts = likely(step_time(samples.workload(mini_batch_size=16), samples.placement(samples.one_pool(job)), EXACT))[
        "update_actor"
    ]
    assert once < parts < 1.2 * once


def test_a_pass_over_whole_mini_batches_is_part_of_the_update() -> None:
    job = samples.workload(needs_old_logprobs=True)
    plain, whole = (
        likely(step_time(each, samples.placement(samples.one_pool(job)), EXACT))
        for each in (job, replace(job, needs_mini_batch_pass=True))
    )
    assert whole["update_actor"] - plain["update_actor"] == pytest.approx(plain["old_logprob"], rel=0.01)


@pytest.mark.parametrize("make", [samples.workload, ppo])
def test_ranges_contain_the_likely_value(make) -> None:  # type: ignore[no-untyped-def]
    job = make()
    found = step_time(job, samples.placement(samples.one_pool(job)))
    assert found.total.low < found.total.likely < found.total.high
    for phase in found.phases:
        assert phase.seconds.low <= phase.seconds.likely <= phase.seconds.high
        assert phase.seconds.likely > 0
        assert phase.formula
        assert phase.assumption
    assert found.bound_by.startswith("mostly generate: ")


def test_guessed_lengths_make_ranges_wider() -> None:
    lengths = TokenLengths(256.0, 1024, 1024.0, 3072)
    guessed = replace(lengths, response_mean_low=512.0, response_mean_high=3072.0, assumption="nobody said")
    known, unknown = (
        step_time(samples.workload(lengths=each), samples.placement(samples.one_pool(samples.workload())))
        for each in (lengths, guessed)
    )
    assert known.total.likely == unknown.total.likely
    assert unknown.total.low < known.total.low
    assert unknown.total.high > known.total.high
    assert any(phase.assumption.startswith("nobody said") for phase in unknown.phases)


def test_small_matrix_products_have_a_wider_range() -> None:
    job = samples.workload()
    few = samples.workload(max_tokens_per_micro_batch=2048)
    plain, small = (step_time(each, samples.placement(samples.one_pool(job))).phases for each in (job, few))
    assert [(one.name, one.seconds.high / one.seconds.likely) for one in plain if one.name == "ref"] == [
        ("ref", pytest.approx(1.3))
    ]
    updates = next(each for each in small if each.name == "update_actor")
    assert updates.seconds.high == pytest.approx(2.6 * updates.seconds.likely)
    assert "2 times as long" in updates.assumption
    # A profile of the machine covers such products, too.
    measured = step_time(few, samples.placement(samples.one_pool(job)), replace(Constants(), source="runs/x")).phases
    assert "2 times" not in next(each for each in measured if each.name == "update_actor").assumption


@pytest.mark.parametrize("factor", [1.5, 4.0])
def test_a_faster_gpu_is_never_slower(factor: float) -> None:
    job = ppo()
    slow = samples.gpu()
    fields = ("flops", "bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth")
    for field in fields:
        fast = replace(slow, **{field: factor * getattr(slow, field)})
        before, after = (
            step_time(job, samples.placement(samples.one_pool(job, each, nodes=2)), EXACT) for each in (slow, fast)
        )
        assert after.total.likely <= before.total.likely


def test_more_nodes_are_never_slower_here() -> None:
    job = ppo()
    totals = [
        step_time(job, samples.placement(samples.one_pool(job, nodes=nodes)), EXACT).total.likely for nodes in (1, 2, 4)
    ]
    assert totals == sorted(totals, reverse=True)


def sync(actor_changes: dict[str, object] | None = None, *, is_shared: bool = True, **changes: object) -> float:
    work = replace(RolloutWork(samples.QWEN3_4B), **changes)  # type: ignore[arg-type]
    actor, layout = samples.trained_model(**(actor_changes or {})), TrainLayout(8, 8) if is_shared else None
    return sync_cost(actor, layout, work, RolloutLayout(8), NodeType(samples.gpu(), 8), EXACT).seconds


def test_a_weight_sync_moves_all_weights_to_every_gpu() -> None:
    parameters = samples.QWEN3_4B.num_parameters
    gathered = 2 * parameters * 7 / 8 / (450e9 * EXACT.link_efficiency)
    # 36 layers with four attention matrices, three MLP matrices and four norms; embedding, head, last norm.
    copied = 8 * parameters / 3.35e12 + (36 * 11 + 3) * EXACT.sync_tensor_seconds
    assert sync() == pytest.approx(gathered + copied)
    # Every fourth step: a quarter, but the weights that sleep in host memory are copied in each step.
    host = 2 * 2 * parameters / 25e9
    assert sync(sync_every_steps=4) == pytest.approx((gathered + copied) / 4 + host)
    shards = 2 * 4 * parameters / 8 / 25e9
    assert sync({"offload": ModelOffload(parameters=True)}) == pytest.approx(gathered + copied + shards)
    assert sync(is_shared=False) == pytest.approx(2 * parameters / EXACT.separate_sync_bandwidth)


def test_a_weight_sync_may_move_only_adapters() -> None:
    lora = LoraShape(8, 10_000_000, 7, syncs_alone=True)
    free = sync() - 399 * EXACT.sync_tensor_seconds
    assert sync({"lora": lora}) == pytest.approx(
        free * 10_000_000 / samples.QWEN3_4B.num_parameters + 14 * EXACT.sync_tensor_seconds
    )


def test_a_weight_sync_loads_experts_one_by_one_or_whole() -> None:
    experts = replace(samples.QWEN3_4B, num_experts=128, experts_per_token=8, mlp_size=768)
    seconds = sync({"shape": experts}), sync({"shape": experts}, is_vllm=False)
    assert seconds[0] - seconds[1] == pytest.approx(36 * (3 * 128 - 2) * EXACT.sync_tensor_seconds)
    assert sync({"shape": replace(experts, has_whole_experts=True)}) == pytest.approx(seconds[1])


def test_other_seconds_are_a_phase() -> None:
    job = samples.workload()
    found = step_time(job, samples.placement(samples.one_pool(job)), replace(EXACT, step_seconds=7.0))
    assert likely(found)[OTHER] == 7.0
    none = step_time(job, samples.placement(samples.one_pool(job)), replace(EXACT, step_seconds=0.0))
    assert OTHER not in likely(none)
    assert found.total.likely - none.total.likely == pytest.approx(7.0)


def test_seconds_add_and_scale() -> None:
    assert Seconds(1, 2, 3) + Seconds(1, 1, 1) == Seconds(2, 3, 4)
    assert Seconds(1, 2, 3).times(2) == Seconds(2, 4, 6)
