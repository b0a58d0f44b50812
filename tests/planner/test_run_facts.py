"""Measurements of a run from the lines of its metrics.jsonl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.advice.run_facts import facts_of, observed_workload, workload_for_memory
from rljob_planner.errors import PlanError
from rljob_testing.planner import samples


def line(step: int, seconds: float, **others: float) -> dict[str, float]:
    """A tenth of a second of each step belongs to no phase."""
    phases = {"timing_s/generate": seconds / 2, "timing_s/update_actor": seconds / 2 - 0.1}
    lengths = {
        "prompt_length/mean": 10.0,
        "response_length/mean": 20.0 + step,
        "response_length/max": 60.0,
        "response_length/clip_ratio": 0.0,
    }
    return {"step": float(step), "timing_s/step": seconds, **phases, **lengths, **others}


def test_phases_are_medians_without_the_first_step() -> None:
    facts = facts_of([line(1, 100.0), line(2, 4.0), line(3, 8.0), line(4, 6.0)], batch_size=8)
    assert facts.num_steps == 4
    assert [each.step for each in facts.steps] == [2, 3, 4]
    assert (facts.step.median, facts.step.low, facts.step.high) == (6.0, 4.0, 8.0)
    assert facts.phases["generate"].median == 3.0
    assert facts.phases["update_actor"].median == pytest.approx(2.9)
    assert facts.phases["other"].median == pytest.approx(0.1)
    assert facts.lengths.response_mean == pytest.approx(23.0)


def test_lines_of_a_step_are_merged_and_a_late_checkpoint_is_no_step() -> None:
    lines = [line(1, 5.0), {"step": 1.0, "timing_s/eval": 3.0}, line(2, 4.0), {"step": 2.0, "timing_s/save_wait": 0.5}]
    facts = facts_of([*lines, {"step": 3.0, "timing_s/save_wait": 9.0}], batch_size=8)
    assert facts.num_steps == 2
    assert facts.step.median == 4.0


def test_a_single_step_counts_although_it_is_the_first() -> None:
    assert facts_of([line(1, 5.0)], batch_size=8).step.median == 5.0


def test_a_run_without_a_finished_step_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^metrics.jsonl: no finished step \(seen 1 lines\)"):
        facts_of([{"step": 0.0, "eval/heldout/greedy": 0.5}], batch_size=8)
    with pytest.raises(PlanError, match=r"^metrics.jsonl: no finished step \(seen 2 lines\)"):
        facts_of([line(1, 0.0), line(2, -1.0)], batch_size=8)


def test_memory_is_the_maximum_over_steps_with_the_first_step_apart() -> None:
    name = "memory/after_wake_kv_cache_bytes_max"
    facts = facts_of([line(1, 1, **{name: 10}), line(2, 1, **{name: 30}), line(3, 1, **{name: 20})], batch_size=8)
    assert facts.memory == {"after_wake_kv_cache": 30}
    assert facts.first_memory == {"after_wake_kv_cache": 10}
    assert not facts.has_gpu
    assert facts_of([line(1, 1, **{"memory/other_bytes_max": 5})], batch_size=8).has_gpu


def test_trained_and_generated_responses_go_into_the_workload() -> None:
    more = {"actor/trained_fraction": 0.5, "dynamic_sampling/prompts": 96.0, "timing_s/reward": 0.05}
    facts = facts_of([line(1, 1), line(2, 10, **more), line(3, 10, **more)], batch_size=64)
    found = observed_workload(samples.workload(), facts)
    assert found.trained_fraction == 0.5
    assert found.generation_factor == 1.5
    assert found.reward_seconds == 0.05
    assert found.lengths.prompt_mean == 10.0
    assert found.lengths.response_mean == pytest.approx(22.5)


def test_reward_time_is_the_wait_plus_the_passes_at_the_same_time() -> None:
    """`timing_s/reward` is what remains of rewards after the passes, so the workload waits as long as the run did."""
    passes = {"timing_s/old_logprob": 2.0, "timing_s/ref": 1.5, "timing_s/values": 0.5}

    def seconds(waited: float, beside: dict[str, float], *, waits_for_scores: bool = False) -> float:
        facts = facts_of([line(at, 20.0, **{"timing_s/reward": waited}, **beside) for at in (1, 2, 3)], batch_size=64)
        job = replace(samples.workload(), waits_for_scores=waits_for_scores)
        found = observed_workload(job, facts).reward_seconds
        assert observed_workload(job, facts.steps[0]).reward_seconds == found
        return found

    assert seconds(3.0, passes) == 7.0
    assert seconds(3.0, {"timing_s/ref": 1.5}) == 4.5
    assert seconds(3.0, {}) == 3.0
    # Rewards were finished during the passes: they took at most 4 s, and the controller did not wait.
    assert seconds(0.07, passes) == 0.0
    # The passes wait for scores that decide what is trained on.
    assert seconds(3.0, passes, waits_for_scores=True) == 3.0


def test_memory_is_compared_with_the_tokens_of_the_fullest_step() -> None:
    """The second of three steps trains on most tokens: 0.8 x (10 + 22) tokens per response of the batch."""
    shares = (1.0, 0.8, 0.5)
    lines = [line(at, 1, **{"actor/trained_fraction": share}) for at, share in enumerate(shares, start=1)]
    found = workload_for_memory(samples.workload(), facts_of(lines, batch_size=64))
    assert found.lengths.longest_row in (26, 27)
    assert found.lengths.longest_row >= 0.8 * 32
    # The engine's longest row has the job's longest prompt, 1,024 tokens, or the run's longest prompt.
    assert found.rollout.max_model_length == 4096
    with_maximum = [
        {**each, "prompt_length/max": float(longest)} for each, longest in zip(lines, (12, 15, 11), strict=True)
    ]
    assert (
        workload_for_memory(samples.workload(), facts_of(with_maximum, batch_size=64)).rollout.max_model_length
        == 15 + 3072
    )
