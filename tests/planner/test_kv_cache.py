"""Memory of a rollout engine, compared with a published log of vLLM and with values by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.constants import Constants
from rljob_planner.gpus import Gpu
from rljob_planner.known_models import known_model
from rljob_planner.kv_cache import engine_budget, pass_bytes, sequence_kv_bytes
from rljob_planner.timing.generation import live_context
from rljob_planner.timing.lengths import lengths_of
from rljob_planner.workload import LoraShape, RolloutLayout, RolloutWork, TokenLengths
from rljob_testing.planner import samples

CONSTANTS = Constants()
REPORTED_GIB = 79.2
"""Total memory of an 80 GB GPU."""


def llama(**changes: object) -> RolloutWork:
    made = RolloutWork(samples.LLAMA3_8B, memory_utilization=0.9, max_model_length=8192)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_cache_equals_a_published_log_of_vllm() -> None:
    """vLLM's pull request 10511: Llama 3 8B at 0.9 of 80 GB has weights of 14.96 GiB and a cache of 53.29 GiB, without
    CUDA graphs."""
    space = engine_budget(llama(compiles=False), RolloutLayout(1, 1), samples.gpu(REPORTED_GIB), CONSTANTS)
    assert space.weights / samples.GIB == pytest.approx(14.96, abs=0.01)
    assert space.activations / samples.GIB == pytest.approx(1.26, abs=0.5)
    assert space.kv_cache / samples.GIB == pytest.approx(53.29, abs=2.0)


@pytest.mark.parametrize(
    ("name", "kibibytes"),
    [
        ("Qwen/Qwen3-4B", 144),
        ("Qwen/Qwen3-32B", 256),
        ("Qwen/Qwen3-30B-A3B", 96),
        ("meta-llama/Meta-Llama-3-8B", 128),
        ("Qwen/Qwen2.5-7B", 56),
    ],
)
def test_kv_cache_bytes_per_token(name: str, kibibytes: int) -> None:
    """4 L kv bytes, by hand from the models' configurations."""
    shape = known_model(name)
    assert shape is not None
    space = engine_budget(RolloutWork(shape), RolloutLayout(8, 1), samples.gpu(), CONSTANTS)
    assert space.sequence_bytes(16) == 16 * kibibytes * 1024


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    one, eight, sixteen = (engine_budget(llama(), RolloutLayout(16, n), samples.gpu(), CONSTANTS) for n in (1, 8, 16))
    assert eight.weights == one.weights / 8
    assert eight.context == 2 * one.context
    assert eight.sequence_bytes(4096) == one.sequence_bytes(4096) / 8
    # With eight key/value heads, no head is split.
    assert sixteen.sequence_bytes(4096) == eight.sequence_bytes(4096)


def test_latent_attention_has_one_vector_for_all_heads() -> None:
    """DeepSeek-V3: 512 + 64 numbers per layer and token, on each GPU of an engine."""
    shape = known_model("deepseek-ai/DeepSeek-V3")
    assert shape is not None
    for parallel in (1, 8):
        kept = sequence_kv_bytes(RolloutWork(shape), RolloutLayout(8, parallel), 4096)
        assert kept == 2 * (512 + 64) * 61 * 4096


def test_layers_with_a_window_keep_at_most_the_window() -> None:
    """Compared with a sum over layers."""
    shape = replace(samples.LLAMA3_8B, sliding_window=1000, num_full_attention_layers=8)
    for context in (10, 1000, 1024, 5000):
        blocks = -(-context // 16) * 16
        slow = sum(2 * 2 * 1024 * (blocks if layer % 4 == 0 else min(blocks, 1008)) for layer in range(32))
        assert sequence_kv_bytes(RolloutWork(shape), RolloutLayout(1), context) == slow


def test_sequences_at_once_follow_from_the_cache() -> None:
    space = engine_budget(llama(max_sequences=10_000), RolloutLayout(1, 1), samples.gpu(REPORTED_GIB), CONSTANTS)
    assert space.sequences_at_once(1600) == pytest.approx(space.kv_cache / (1600 * 128 * 1024))
    assert replace(space, rollout=llama(max_sequences=64)).sequences_at_once(1600) == 64
    assert space.kv_cache_shortage == 0


def test_a_cache_smaller_than_one_longest_sequence_has_a_shortage() -> None:
    space = engine_budget(
        llama(memory_utilization=0.3, max_model_length=32768), RolloutLayout(1, 1), samples.gpu(REPORTED_GIB), CONSTANTS
    )
    assert 0 < space.kv_cache < 32768 * 128 * 1024
    assert space.kv_cache_shortage == 32768 * 128 * 1024 - space.kv_cache
    assert space.sequences_at_once(1000) == 0


def test_the_largest_pass_is_that_of_tokens_or_of_sampling() -> None:
    tokens = 8192 * 2 * (4 * 14336 + 2 * 4096)
    assert pass_bytes(llama(), RolloutLayout(1, 1)) == tokens
    assert pass_bytes(llama(max_model_length=32768), RolloutLayout(1, 1)) == 4 * tokens
    assert pass_bytes(llama(max_sequences=1024), RolloutLayout(1, 1)) == 1024 * 128256 * 18
    # Four experts of 1,408, and the shared one, of each token.
    experts = known_model("Qwen/Qwen1.5-MoE-A2.7B")
    assert experts is not None
    width = 4 * (4 * 1408 + 5632) + 2 * 2048
    assert pass_bytes(RolloutWork(experts, max_sequences=16), RolloutLayout(2, 2)) == 8192 * 2 * width / 2


def test_cpus_have_the_cache_size_of_the_job() -> None:
    work = RolloutWork(samples.QWEN3_4B, weight_bytes=4, cpu_kv_cache_bytes=3 << 30)
    space = engine_budget(work, RolloutLayout(1, 1), samples.gpu(is_cpu=True), CONSTANTS, num_requests=4)
    assert space.kv_cache == 3 << 30
    assert (space.context, space.graphs) == (0, 0)
    # The tokens of 4 requests exceed the limit of a pass; there are logits for 4 sequences.
    assert space.activations == 8192 * 4 * (4 * 9728 + 2 * 2560)
    # With short rows it is the logits of the 4 sequences.
    short = replace(work, max_model_length=8)
    space = engine_budget(short, RolloutLayout(1, 1), samples.gpu(is_cpu=True), CONSTANTS, num_requests=4)
    assert space.activations == 4 * 151936 * (4 + 16)


@pytest.mark.parametrize("is_vllm", [True, False])
def test_cpus_make_a_float32_head_from_a_16_bit_one(is_vllm: bool) -> None:
    work = RolloutWork(samples.QWEN3_4B, is_vllm=is_vllm, has_float32_head=True)

    def activations(rollout: RolloutWork, gpu: Gpu, parallel: int = 1) -> float:
        return engine_budget(rollout, RolloutLayout(parallel, parallel), gpu, CONSTANTS, num_requests=4).activations

    def added(rollout: RolloutWork, gpu: Gpu, parallel: int = 1) -> float:
        without = replace(rollout, has_float32_head=False)
        return activations(rollout, gpu, parallel) - activations(without, gpu, parallel)

    on_cpu = samples.gpu(is_cpu=True)
    assert added(work, on_cpu) == 4 * 151936 * 2560
    assert added(work, on_cpu, parallel=2) == 4 * 151936 * 2560 / 2
    assert added(replace(work, weight_bytes=4), on_cpu) == added(work, samples.gpu()) == 0


def test_transformers_has_no_memory_limit() -> None:
    space = engine_budget(llama(is_vllm=False), RolloutLayout(1, 1), samples.gpu(1), CONSTANTS)
    assert (space.kv_cache_shortage, space.context, space.graphs, space.activations) == (0, 0, 0, 0)
    assert space.sequences_at_once(1000) == 256


def test_adapters_take_memory_for_the_next_larger_rank() -> None:
    lora = LoraShape(rank=20, num_parameters=20_000, num_linear_layers=1)
    space = engine_budget(llama(adapter_rank=20), RolloutLayout(1, 1), samples.gpu(), CONSTANTS, lora)
    assert space.adapters == 2 * 32_000
    halves = engine_budget(llama(adapter_rank=20), RolloutLayout(2, 2), samples.gpu(), CONSTANTS, lora)
    assert halves.adapters == 32_000
    assert engine_budget(llama(), RolloutLayout(1, 1), samples.gpu(), CONSTANTS, lora).adapters == 0


def test_running_sequences_are_mostly_long_ones() -> None:
    """At a random moment a running response has half of its length on average, and long ones run more of the time."""
    same, spread = (lengths_of(TokenLengths(50.0, 64, 200.0, 2048, response_cv=cv)) for cv in (0.0, 0.8))
    assert live_context(50.0, same) == pytest.approx(50 + 200 / 2)
    assert live_context(50.0, spread) == pytest.approx(50 + 200 / 2 * (1 + 0.8**2), rel=0.05)
