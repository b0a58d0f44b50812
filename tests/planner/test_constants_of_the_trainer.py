"""Sizes and limits that the planner and the trainer both name are the same."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rljob_planner import job_workload, kv_cache, workload
from rljob_planner.memory import train_activations
from rljob_planner.model_config import shape_of_config
from rljob_testing.models import tiny_models
from rljob_testing.planner import samples
from rljob_trainer.controller import dynamic_sampling
from rljob_trainer.engines.rollout import select
from rljob_trainer.engines.train import kernels, token_logprobs
from rljob_trainer.weights import buckets


def test_buckets_of_a_weight_sync() -> None:
    assert kv_cache.GPU_BUCKET_BYTES == buckets.GPU_BUCKET_BYTES
    assert kv_cache.CPU_BUCKET_BYTES == buckets.CPU_BUCKET_BYTES


def test_tiles_of_logits() -> None:
    assert train_activations.GPU_TILE_BYTES == token_logprobs.GPU_TILE_BYTES
    assert train_activations.CPU_TILE_BYTES == token_logprobs.CPU_TILE_BYTES
    assert workload.WHOLE_LOGITS_BYTES == token_logprobs.WHOLE_BYTES


def source_of(module: str) -> str:
    """The text of a module of the engine, which is not imported, because to import vLLM takes seconds."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def test_settings_of_the_rollout_engine() -> None:
    source = source_of("rljob_trainer.engines.rollout.vllm_start")
    assert f"\nADAPTER_RANKS = {kv_cache.ADAPTER_RANKS}\n" in source
    assert "max_num_batched_tokens=max(8192, settings.max_model_length)" in source
    assert workload.RolloutWork(samples.QWEN3_4B, max_model_length=9000).max_batched_tokens == 9000
    assert workload.RolloutWork(samples.QWEN3_4B, max_model_length=100).max_batched_tokens == 8192
    assert job_workload.MIN_STEPS_TO_COMPILE == select.MIN_STEPS_TO_COMPILE
    assert job_workload.ROUND_MARGIN == dynamic_sampling.MARGIN
    assert job_workload.LIGER_MODEL_TYPES == kernels.LIGER_MODEL_TYPES


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3"])
def test_models_whose_experts_vllm_gets_whole(model_type: str) -> None:
    source = source_of("rljob_trainer.engines.rollout.vllm_weights")
    [line] = [line for line in source.splitlines() if line.startswith("WHOLE_EXPERTS = ")]
    names = ast.literal_eval(line.partition(" = ")[2])
    shape = shape_of_config(tiny_models.ARCHITECTURES[model_type]().to_dict(), model_type)
    assert shape.has_whole_experts == (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] in names)
