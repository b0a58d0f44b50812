"""Size of a worker's process on CPUs: written pages of the KV cache, and memory that an update leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_planner.advice.comparison import process_bytes, written_cache_bytes
from rljob_planner.plan_types import Part, Phase, PhaseMemory
from rljob_planner.workload import RolloutLayout, TokenLengths
from rljob_testing.planner import samples

STATE = (Part("actor parameters", 10), Part("actor moments", 20), Part("rollout weights", 5))
LIBRARIES = Part("process", 1000)


def phase(which: Phase, *parts: Part) -> PhaseMemory:
    return PhaseMemory(which, "pool", (*STATE, *parts, LIBRARIES), 1e12)


def test_every_row_writes_full_blocks_and_running_rows_one_partial_block() -> None:
    """Qwen3-4B has 36 layers with 2 x 8 x 128 numbers of 2 bytes per token. 64 prompts x 8 responses on 2 engines are
    256 rows each; a row of 130 tokens has one full block and one with two tokens."""
    job = replace(samples.workload(), lengths=TokenLengths(30.0, 64, 100.0, 200))
    block = 128 * 36 * 2 * 8 * 128 * 2
    assert written_cache_bytes(job, RolloutLayout(2, 1)) == (256 + 256) * block
    # One engine on two workers: twice the requests, half of each token's numbers.
    assert written_cache_bytes(job, RolloutLayout(2, 2)) == (512 + 256) * block / 2
    few = replace(job, rollout=replace(job.rollout, max_sequences=16))
    assert written_cache_bytes(few, RolloutLayout(2, 1)) == (256 + 16) * block
    short = replace(few, lengths=TokenLengths(30.0, 64, 97.0, 200))
    assert written_cache_bytes(short, RolloutLayout(2, 1)) == 16 * block


def test_generation_keeps_what_an_update_has_freed() -> None:
    """State 35, libraries 1000. An update adds gradients of 10 and activations of 300: 1345. The generation after it
    has these 310, the state of 35 and the cache of 900, all of it written; its activations reuse the 310."""
    update = phase(Phase.UPDATE, Part("actor gradients", 10), Part("actor activations", 300))
    generation = phase(Phase.GENERATION, Part("KV cache", 900), Part("engine activations", 50))
    assert process_bytes([update], samples.workload(), None) == 1345
    job = replace(samples.workload(), lengths=TokenLengths(30.0, 64, 90.0, 200))
    written = written_cache_bytes(job, RolloutLayout(1, 1))
    assert written > 900
    assert process_bytes([update, generation], job, RolloutLayout(1, 1)) == 1035 + 310 + 900


@pytest.mark.parametrize(
    ("is_vllm", "longest", "fullest"),
    [(True, 127, 1345 + 50 + 90), (True, 128, 1435), (False, 127, 1435)],
)
def test_pages_of_a_sleeping_cache_stay_in_later_phases(is_vllm: bool, longest: int, fullest: float) -> None:
    """State 35, libraries 1000, a cache of 90, all of it written, gradients of 10 and activations of 300. If the weight
    sync, with buckets of 50, has no cache, the generation is the fullest phase: 1435."""
    generation = phase(Phase.GENERATION, Part("KV cache", 90))
    update = phase(Phase.UPDATE, Part("actor gradients", 10), Part("actor activations", 300))
    sync = phase(Phase.SYNC, Part("buckets", 50))
    rollout = replace(samples.workload().rollout, is_vllm=is_vllm, max_model_length=longest)
    job = replace(samples.workload(), rollout=rollout)
    assert process_bytes([generation, update, sync], job, RolloutLayout(1, 1)) == fullest


@pytest.mark.parametrize("owner", ["actor gathered parameters", "actor whole gradients"])
def test_gathered_parameters_stay_in_the_allocator_too(owner: str) -> None:
    update = phase(Phase.UPDATE, Part(owner, 70))
    sync = phase(Phase.SYNC, Part("buckets", 200))
    assert process_bytes([update, sync], samples.workload(), None) == 1035 + 70 + 200
