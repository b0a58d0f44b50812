"""Sizes and limits that the planner and the trainer both name are the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rljob_planner import job_workload, kv_cache, workload
from rljob_planner.memory import train_activations
from rljob_testing.planner import samples
from rljob_trainer.controller import dynamic_sampling
from rljob_trainer.engines.rollout import select
from rljob_trainer.engines.train import token_logprobs
from rljob_trainer.weights import buckets


def test_buckets_of_a_weight_sync() -> None:
    assert kv_cache.GPU_BUCKET_BYTES == buckets.GPU_BUCKET_BYTES
    assert kv_cache.CPU_BUCKET_BYTES == buckets.CPU_BUCKET_BYTES


def test_tiles_of_logits() -> None:
    assert train_activations.GPU_TILE_BYTES == token_logprobs.GPU_TILE_BYTES
    assert train_activations.CPU_TILE_BYTES == token_logprobs.CPU_TILE_BYTES
    assert workload.WHOLE_LOGITS_BYTES == token_logprobs.WHOLE_BYTES


def test_settings_of_the_rollout_engine() -> None:
    """The engine's module is read, because to import vLLM takes seconds."""
    engine = find_spec("rljob_trainer.engines.rollout.vllm_start")
    assert engine is not None
    assert engine.origin is not None
    source = Path(engine.origin).read_text(encoding="utf-8")
    assert f"\nADAPTER_RANKS = {kv_cache.ADAPTER_RANKS}\n" in source
    assert "max_num_batched_tokens=max(8192, settings.max_model_length)" in source
    assert workload.RolloutWork(samples.QWEN3_4B, max_model_length=9000).max_batched_tokens == 9000
    assert workload.RolloutWork(samples.QWEN3_4B, max_model_length=100).max_batched_tokens == 8192
    assert job_workload.MIN_STEPS_TO_COMPILE == select.MIN_STEPS_TO_COMPILE
    assert job_workload.ROUND_MARGIN == dynamic_sampling.MARGIN
