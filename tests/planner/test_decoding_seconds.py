"""Time of decoding, compared with a simulation token by token and with the limits of the roofline."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from rljob_planner.constants import Constants
from rljob_planner.known_models import known_model
from rljob_planner.timing.communication import LONGEST_RESPONSE, NodeType
from rljob_planner.timing.generation import (
    DecodeSpeed,
    Requests,
    decode_speed,
    decode_time,
    generation_cost,
    makespan,
    mixed,
)
from rljob_planner.timing.lengths import Lengths
from rljob_planner.workload import RolloutLayout, RolloutWork
from rljob_testing.planner import samples

DENSE = DecodeSpeed(
    weights=4e-3,
    experts=0.0,
    num_experts=0,
    experts_per_token=0,
    kv=2e-8,
    sequence_kv=1e-6,
    sequence_compute=3e-5,
    context_compute=1e-8,
    fixed=2e-3,
    per_sequence=1e-6,
)
EXPERTS = replace(DENSE, experts=2e-2, num_experts=64, experts_per_token=4)
SHORT_PROMPTS_COMPUTE = replace(DENSE, kv=1e-6, sequence_compute=3e-4, context_compute=0.0)
"""Compute is the bound until the cache has grown."""
CONSTANTS = Constants()


def by_tokens(speed: DecodeSpeed, prompt: float, lengths: list[int], slots: int, *, refills: bool) -> tuple[float, int]:
    """Simulates one decoding step after the other."""
    waiting, live = list(lengths), list[list[float]]()
    seconds, steps = 0.0, 0
    while waiting or live:
        if refills or not live:
            while waiting and len(live) < slots:
                live.append([prompt, waiting.pop(0)])
        seconds += speed.step(len(live), sum(context for context, _ in live))
        steps += 1
        live = [[context + 1, left - 1] for context, left in live if left > 1]
    return seconds, steps


@pytest.mark.parametrize("refills", [True, False])
@pytest.mark.parametrize("speed", [DENSE, EXPERTS, SHORT_PROMPTS_COMPUTE])
@pytest.mark.parametrize("slots", [1, 3, 40])
def test_jumping_between_finishes_equals_going_token_by_token(speed: DecodeSpeed, slots: int, *, refills: bool) -> None:
    draw = random.Random(slots)
    lengths = [draw.choice([1, 2, 7, draw.randint(1, 400)]) for _ in range(40)]
    found = makespan(speed, 50.0, lengths, slots, refills=refills)
    seconds, steps = by_tokens(speed, 50.0, lengths, slots, refills=refills)
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert found.token_steps == steps


def test_memory_and_compute_bounds_occur_in_one_run() -> None:
    lengths = [300] * 20
    found = makespan(SHORT_PROMPTS_COMPUTE, 10.0, lengths, 20)
    working = found.seconds - found.in_overhead
    assert 0.1 * working < found.in_compute < 0.9 * working
    assert found.seconds == pytest.approx(by_tokens(SHORT_PROMPTS_COMPUTE, 10.0, lengths, 20, refills=True)[0])


def test_without_a_slot_limit_time_is_the_sum_over_the_survival_curve() -> None:
    lengths = Lengths(1000, location=5.0, scale=0.8)
    drawn = [max(1, round(each)) for each in lengths.spread_over(200)]
    # Running sequences at each token; each has this many tokens in the cache.
    seconds = sum(
        DENSE.step(live, live * (64 + token))
        for token in range(max(drawn))
        if (live := sum(each > token for each in drawn))
    )
    assert makespan(DENSE, 64.0, drawn, 200).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("slots", [64, 300, 4000])
def test_simulating_groups_is_close_to_simulating_each_response(slots: int) -> None:
    lengths = Lengths(4096, location=6.5, scale=0.8)
    exact = [*lengths.spread_over(2000)[:-1], lengths.longest_of(2000)]
    order = mixed(exact) if slots < 2000 else exact
    all_of_them = makespan(DENSE, 200.0, order, slots)
    found = decode_time(DENSE, 200.0, lengths, 2000, min(slots, 2000), 2000, refills=True)
    # With fewer slots than responses the result depends on when the long ones start.
    assert found.seconds == pytest.approx(all_of_them.seconds, rel=0.06 if slots < 2000 else 0.01)


def test_the_mixed_order_spreads_lengths_evenly() -> None:
    ascending = [float(each) for each in range(101)]
    found = mixed(ascending)
    assert sorted(found) == ascending
    assert 30 < found.index(100.0) < 70
    assert all(abs(sum(found[start : start + 20]) / 20 - 50) < 6 for start in (0, 40, 80))


def speed_of(work: RolloutWork, tensor_parallel: int = 1, context: float = 0.0) -> DecodeSpeed:
    return decode_speed(work, RolloutLayout(8, tensor_parallel), NodeType(samples.gpu(), 8), CONSTANTS, context)


def test_one_sequence_reads_all_weights() -> None:
    speed = speed_of(RolloutWork(samples.LLAMA3_8B))
    # All weights but the embedding; a token reads one row of it.
    read = 2 * (
        samples.LLAMA3_8B.num_parameters - samples.LLAMA3_8B.embedding_parameters - samples.LLAMA3_8B.hidden_size
    )
    by_memory = read / (3.35e12 * CONSTANTS.decode_bandwidth_efficiency)
    overhead = CONSTANTS.decode_step_seconds + CONSTANTS.decode_sequence_seconds
    assert speed.step(1, 0) == pytest.approx(by_memory + overhead)


def test_one_sequence_reads_the_weights_of_its_experts() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 48 layers, with three matrices of 2,048 x 768 numbers each."""
    shape = known_model("Qwen/Qwen3-30B-A3B")
    assert shape is not None
    speed = speed_of(RolloutWork(shape))
    reading = 3.35e12 * CONSTANTS.decode_bandwidth_efficiency
    experts = 2 * 48 * 128 * 3 * 2048 * 768 / reading
    assert speed.experts == pytest.approx(experts)
    assert speed.bounds(1, 0)[0] == pytest.approx(speed.weights + experts * 8 / 128)
    # The other weights: attention, routers, norms and the head, without the embedding.
    others = shape.num_parameters - 48 * 128 * 3 * 2048 * 768 - 2 * 151936 * 2048 + 151936 * 2048
    assert speed.weights == pytest.approx(2 * others / reading, rel=1e-4)


def test_many_short_sequences_are_bound_by_compute() -> None:
    speed = speed_of(RolloutWork(samples.LLAMA3_8B))
    by_compute = 5000 * 2 * samples.LLAMA3_8B.matmul_parameters / (989e12 * CONSTANTS.decode_compute_efficiency)
    overhead = CONSTANTS.decode_step_seconds + 5000 * CONSTANTS.decode_sequence_seconds
    assert speed.step(5000, 0) == pytest.approx(by_compute + overhead)


def test_long_contexts_are_bound_by_reading_the_cache() -> None:
    speed = speed_of(RolloutWork(samples.LLAMA3_8B))
    # 2 x 2 bytes x 32 layers x 1,024 numbers: 128 KiB per token.
    more = speed.step(100, 2_000_000) - speed.step(100, 1_000_000)
    assert more == pytest.approx(1e6 * 131_072 / (3.35e12 * CONSTANTS.decode_bandwidth_efficiency))


def test_two_gpus_read_half_each_and_communicate() -> None:
    one, two = (speed_of(RolloutWork(samples.LLAMA3_8B), each) for each in (1, 2))
    assert two.weights == pytest.approx(one.weights / 2)
    assert two.kv == pytest.approx(one.kv / 2)
    assert two.fixed == pytest.approx(one.fixed + 64 * CONSTANTS.tensor_parallel_seconds)
    # More GPUs than key/value heads: each GPU has one head.
    assert speed_of(RolloutWork(samples.LLAMA3_8B), 16).kv == pytest.approx(
        speed_of(RolloutWork(samples.LLAMA3_8B), 8).kv
    )


def test_few_tokens_read_few_experts() -> None:
    speed = EXPERTS
    assert speed.bounds(1, 0)[0] - DENSE.bounds(1, 0)[0] == pytest.approx(2e-2 * 4 / 64)
    assert speed.bounds(1000, 0)[0] - DENSE.bounds(1000, 0)[0] == pytest.approx(2e-2)
    # Two tokens sometimes choose the same expert: 64 (1 - (1 - 4/64)^2) = 7.75 of them are read.
    assert speed.bounds(2, 0)[0] - DENSE.bounds(2, 0)[0] == pytest.approx(2e-2 * 7.75 / 64)


def test_sliding_windows_limit_what_a_layer_reads() -> None:
    half = replace(samples.LLAMA3_8B, sliding_window=128, num_full_attention_layers=16)
    whole, windowed = speed_of(RolloutWork(samples.LLAMA3_8B)), speed_of(RolloutWork(half), context=1000.0)
    assert windowed.kv == pytest.approx(whole.kv / 2)
    assert windowed.sequence_kv == pytest.approx(whole.kv / 2 * 128)


def cost(work: RolloutWork, count: int, lengths: Lengths, at_once: float = 256, speed: float = 1.0) -> float:
    card = samples.gpu()
    card = replace(card, flops=speed * card.flops, bandwidth=speed * card.bandwidth)
    requests = Requests(count, 8, 200.0, lengths)
    return generation_cost(work, requests, RolloutLayout(8), NodeType(card, 8), at_once, CONSTANTS).seconds


def test_more_work_never_takes_less_time() -> None:
    work, lengths = RolloutWork(samples.QWEN3_4B), Lengths(4096, location=6.5, scale=0.8)
    base = cost(work, 2048, lengths)
    assert cost(work, 2048, lengths, speed=2.0) < base
    assert cost(work, 4096, lengths) > base
    assert cost(work, 2048, lengths, at_once=64) > base
    assert cost(work, 2048, Lengths(8192, location=7.0, scale=0.8)) > base


def test_prompts_are_read_once_with_prefix_caching() -> None:
    lengths = Lengths(10, math.log(10))
    by_vllm, by_other = (RolloutWork(samples.QWEN3_4B, is_vllm=each, max_sequences=64) for each in (True, False))
    speed = makespan(speed_of(by_vllm), 200.0, [10] * 64, 64).seconds
    layers = 2 * samples.QWEN3_4B.layer_matmul_parameters * 200 / 0.35
    attention = 2 * 36 * 4096 * 200 * 200 / CONSTANTS.attention_efficiency
    # 512 responses to 64 prompts on 8 engines.
    assert cost(by_vllm, 512, lengths) == pytest.approx(speed + 8 * (layers + attention) / 989e12)
    head = 2 * samples.QWEN3_4B.embedding_parameters * 200 / 0.35
    assert cost(by_other, 512, lengths) == pytest.approx(speed + 64 * (layers + head + attention) / 989e12)


def test_a_conversation_is_computed_once_by_vllm_and_again_in_each_turn_by_transformers() -> None:
    lengths = Lengths(10, math.log(10))

    def seconds(num_turns: float, *, is_vllm: bool) -> float:
        work = RolloutWork(samples.QWEN3_4B, is_vllm=is_vllm, max_sequences=64)
        requests = Requests(512, 8, 200.0, lengths, num_turns)
        return generation_cost(work, requests, RolloutLayout(8), NodeType(samples.gpu(), 8), 256, CONSTANTS).seconds

    def pass_seconds(tokens: int, *, is_vllm: bool) -> float:
        shape = samples.QWEN3_4B
        weights = shape.layer_matmul_parameters + (0 if is_vllm else shape.embedding_parameters)
        attention = 2 * 36 * 4096 * tokens**2 / CONSTANTS.attention_efficiency
        return (2 * weights * tokens / 0.35 + attention) / 989e12

    # 64 responses on each engine, to 8 prompts: messages are not shared within a group.
    more = seconds(3, is_vllm=True) - seconds(1, is_vllm=True)
    assert more == pytest.approx((64 - 8) * pass_seconds(200, is_vllm=True))
    # Three turns: the conversation is computed when it is a third, two thirds and all of its length.
    more = seconds(3, is_vllm=False) - seconds(1, is_vllm=False)
    assert more == pytest.approx(64 * (pass_seconds(200, is_vllm=False) + pass_seconds(10, is_vllm=False)))


def test_without_refills_a_batch_waits_for_its_longest_response() -> None:
    work = RolloutWork(samples.QWEN3_4B, max_sequences=16)
    lengths = Lengths(4096, location=6.0, scale=0.8)
    batches = cost(replace(work, is_vllm=False), 512, lengths)
    assert batches > 1.3 * cost(work, 512, lengths)


def test_the_longest_response_is_named_as_the_bound() -> None:
    lengths = Lengths(30_000, math.log(200), 1.6)
    requests = Requests(256, 8, 200.0, lengths)
    quick = replace(CONSTANTS, decode_step_seconds=1e-3)
    found = generation_cost(
        RolloutWork(samples.LLAMA3_8B), requests, RolloutLayout(8), NodeType(samples.gpu(), 8), 256, quick
    )
    assert found.bound_by == LONGEST_RESPONSE
