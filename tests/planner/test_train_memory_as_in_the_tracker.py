"""Peaks of a train engine, compared with torch's memory tracker on fake tensors. Models have two layers and are else
complete, which shows what a layer and the root need; bench/planner.py has whole models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_testing.planner import memory_oracle

DENSE = memory_oracle.MemoryCase("Qwen/Qwen3-4B", num_shards=8, num_replicas=2, tokens_of_rank=8192, num_layers=2)
CASES = {
    "two replicas, activations kept": (DENSE, 0.01),
    "a head of its own, activations kept": (replace(DENSE, model="Qwen/Qwen3-8B", num_replicas=1), 0.01),
    "sequence ranks, activations recomputed": (
        memory_oracle.MemoryCase(
            "Qwen/Qwen2.5-7B",
            num_shards=8,
            sequence_parallel=4,
            tokens_of_rank=8192,
            recomputed_every=1,
            num_layers=2,
        ),
        0.01,
    ),
    "experts, adapters, activations kept": (
        memory_oracle.MemoryCase("Qwen/Qwen3-30B-A3B", num_shards=8, tokens_of_rank=8192, rank=16, num_layers=2),
        0.05,
    ),
    "frozen": (
        memory_oracle.MemoryCase("Qwen/Qwen3-8B", num_shards=8, tokens_of_rank=8192, is_trained=False, num_layers=2),
        0.01,
    ),
}
"""The cases with the largest difference. A wrong byte per token and layer in a dense model would be larger."""


@pytest.mark.parametrize("name", CASES)
def test_the_peak_equals_that_of_the_tracker(name: str) -> None:
    case, limit = CASES[name]
    found, peak = memory_oracle.peak_by_tracker(case.oracle()), memory_oracle.peak_by_planner(case)
    assert peak.resident == pytest.approx(found.resident, rel=1e-4)
    assert peak.whole == pytest.approx(found.whole, rel=limit)
